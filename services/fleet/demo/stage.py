"""The parts of both demos: a temporary folder, a signing secret, a fleet, a progress display, the observer's loss table."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from services.core.aws_emulator import AwsEmulator, EmulatorNotReady, use_credentials
from services.core.lag import LagHistogram
from services.core.process.scrape import Sample, scrape
from services.core.security.signing import SigningKey, make_secret
from services.core.temporary import TemporaryFolder
from services.fleet.console import ERR, print_note
from services.fleet.demo.flights import STREAM, Flight
from services.fleet.observer_client import Observer, get_json, loss_table
from services.fleet.problem import CommandFailed
from services.fleet.sending.event_source import SourceEvent
from services.fleet.sending.sender import SendingFailed, SendSummary, Target, send_events
from services.fleet.status.reading import quantiles
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.up.ports import free_port
from services.fleet.up.run import fleet_of
from services.fleet.up.settings import UpSettings
from services.fleet.up.supervisor import Fleet

POLL_EVERY_S = 0.5
PLAIN_EVERY_S = 2.0
STANDING_EVERY_S = 15.0
"""How often counts are printed that have not changed."""
LOSS_WITHIN_S = 300.0
DUPLICATES_FOR_S = 1.0
"""Seconds after the last delivery in which duplicates may still arrive."""

DemoResult = dict[str, Any]
"""The result of a demo, as --json prints it. `ok`: whether nothing is lost, altered or added. `ledger`: a Loss."""

Loss = dict[str, Any]
"""The observer's loss table of the same events, with `accepted` and `missing` over all its minutes; {} without an answer."""


@dataclass(frozen=True, slots=True)
class Stage:
    """broker: `log`, `kafka` or `kinesis`. address: the `--broker` of the fleet. key: signs the deliveries.

    `webhook.secret` in the folder holds the key.
    """

    folder: Path
    broker: str
    address: str
    key: SigningKey
    stop: Stop

    @asynccontextmanager
    async def fleet(self, pipes: str) -> AsyncIterator[Fleet]:
        """Run this pipe file on free ports: the fleet is ready at the beginning, and drained at the end."""
        path = self.folder / "pipes.yaml"
        await asyncio.to_thread(path.write_text, pipes, encoding="utf-8")
        settings = UpSettings.model_validate(
            {
                "broker": self.address,
                "pipes": path,
                "data": self.folder / "data",
                "listen": f"127.0.0.1:{free_port()}",
                "allow_networks": "127.0.0.0/8",
                "drain": "10s",
            }
        )
        async with fleet_of(settings, None, self.stop) as fleet:
            print_note(f"lag and loss, live: http://{fleet.plan.observer}/", "bold")
            yield fleet


async def perform(broker: str, run: Callable[[Stage], Awaitable[DemoResult]]) -> DemoResult:
    """Run a demo. Raises CommandFailed, with status 130 when a signal stops it. Leaves no files but the logs of a failure."""
    temporary = await asyncio.to_thread(TemporaryFolder, "demo")
    folder = temporary.folder
    has_failed = True
    try:
        with stop_on_signals(lambda _insists: print_note("stopping")) as stop:
            result = await stop.interrupt(_run(broker, run, folder, stop), "stopped; nothing is left running")
    except CommandFailed as error:
        has_failed = error.status != 130
        raise
    else:
        has_failed = not result["ok"]
        return result
    finally:
        if has_failed and (folder / "data" / "logs").is_dir():
            print_note(f"the logs are in {folder}/data/logs", "yellow")
            temporary.keep()
        else:
            temporary.remove()


async def _run(broker: str, run: Callable[[Stage], Awaitable[DemoResult]], folder: Path, stop: Stop) -> DemoResult:
    key = await asyncio.to_thread(_write_secret, folder / "webhook.secret")
    async with _address_of(broker, folder) as address:
        return await run(Stage(folder, broker, address, key, stop))


def _write_secret(path: Path) -> SigningKey:
    secret = make_secret()
    path.touch(mode=0o600)
    path.write_text(secret)
    return SigningKey.parse(secret)


@asynccontextmanager
async def _address_of(broker: str, folder: Path) -> AsyncIterator[str]:
    """Kinesis: start an emulator and yield its URL. Others: `broker`, which the fleet starts itself."""
    if broker != "kinesis":
        yield broker
        return
    print_note("starting the Kinesis emulator", "dim")
    use_credentials()
    try:
        emulator = await asyncio.to_thread(AwsEmulator, folder / "aws")
        await asyncio.to_thread(emulator.start)
    except EmulatorNotReady as error:
        raise CommandFailed(str(error)) from error
    try:
        yield emulator.url
    finally:
        await asyncio.to_thread(emulator.stop)


class PhaseNotes:
    """Says what a phase of the demo waits for, with its counts, each time that PLAIN_EVERY_S have passed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._said_at = time.monotonic()

    def say(self, done: int, total: int) -> None:
        """done of total events: so far."""
        now = time.monotonic()
        if now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            print_note(f"{self._what}: {done:,} of {total:,} events, for {now - self._begun:.0f} s", "dim")


async def send_flights(fleet: Fleet, sent: SendSummary, flights: dict[str, Flight], batch: int, rate: float) -> None:
    """Send all events to the fleet's ingest; `sent` is always up to date. Raises CommandFailed."""
    events = (SourceEvent(number, flight.payload, "") for number, flight in enumerate(flights.values(), start=1))
    target = Target(f"http://{fleet.plan.listen}", STREAM, batch=batch, rate=rate)
    try:
        await send_events(events, target, sent)
    except SendingFailed as error:
        raise CommandFailed(f"sending: {error}") from error


async def poll_until(
    done: Callable[[], bool], poll: Callable[[], Awaitable[int]], limit: float, *, renew: bool = False
) -> None:
    """Call `poll` again and again until `done`, for at most `limit` seconds.

    renew: the limit counts from the last change of the number that `poll` returns.
    """
    end, before = time.monotonic() + limit, -1
    while not done() and (left := end - time.monotonic()) > 0:
        total = await poll()
        if renew and total != before:
            end, before = time.monotonic() + limit, total
        await asyncio.sleep(min(left, POLL_EVERY_S))


async def scrape_fleet(fleet: Fleet) -> Sample:
    """The current metrics of the services."""
    return await scrape([process.management for process in fleet.processes])


def quantiles_of(lags_ms: Sequence[int]) -> dict[str, float]:
    """P50, P95 and P99 of these lags."""
    histogram = LagHistogram()
    histogram.observe(lags_ms)
    return quantiles(histogram)


class Display:
    """The progress of `total` events, with a row per step. A context manager; not thread-safe."""

    def __init__(self, total: int, rows: Sequence[str]) -> None:
        self._total = total
        self._counts = dict.fromkeys(rows, 0)
        self._more = dict.fromkeys(rows, "")
        self._printed_at, self._printed = 0.0, dict[str, int]()
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"), console=ERR, disable=not ERR.is_terminal,
        )  # fmt: skip
        self._rows = {name: self._bars.add_task(name, total=total, more="") for name in rows}

    def show(self, counts: Mapping[str, int], more: Mapping[str, str]) -> None:
        """Show the counts by row. more: text (rich markup) after some of them."""
        self._counts |= counts
        self._more |= more
        for name, count in self._counts.items():
            self._bars.update(self._rows[name], completed=count, more=self._more[name])
        every = PLAIN_EVERY_S if self._counts != self._printed else STANDING_EVERY_S
        if time.monotonic() - self._printed_at >= every:
            self._print_plain()

    def _print_plain(self) -> None:
        """One line, where no bars can be drawn."""
        if ERR.is_terminal:
            return
        self._printed_at, self._printed = time.monotonic(), dict(self._counts)
        parts = [f"{name} {count}/{self._total} {self._more[name]}".rstrip() for name, count in self._counts.items()]
        print_note(Text.from_markup(", ".join(parts)).plain, "dim")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()
        self._print_plain()


async def read_loss(fleet: Fleet, pipe: str, accepted: int) -> Loss:
    """The loss table, as soon as it has all `accepted` events and none is missing; the current one when that takes too long.

    Each service reports within about a second the events that it settled, a transform in real-time mode within 15 s. The minutes
    are not final so soon.
    """
    deadline = time.monotonic() + LOSS_WITHIN_S
    waiting = PhaseNotes("waiting for the observer's table, in which services report what they did")
    found: Loss = {}
    while time.monotonic() < deadline:
        try:
            found = await get_json(Observer(fleet.plan.observer), f"/v1/pipes/{pipe}/loss", {})
        except CommandFailed as error:
            print_note(error.what, "yellow")
            return found
        for count in ("accepted", "missing"):
            found[count] = sum(row[count] for row in found["minutes"])
        if found["accepted"] >= accepted and not found["missing"]:
            break
        waiting.say(found["accepted"] - found["missing"], accepted)
        await asyncio.sleep(POLL_EVERY_S)
    return found


_OPEN = (
    "A minute is final two and a half minutes after its end, because late events may still arrive. "
    "The demo does not wait for that; a fleet that keeps running (penstock up) does."
)


def render_loss(loss: Loss) -> RenderableType:
    """Shown after the demo's own result."""
    if not loss.get("minutes"):
        return Text("the observer has no minute of this pipe", style="yellow")
    lost = sum(row["lost"] for row in loss["minutes"])
    words = f"the observer's loss table: {lost:,} of {loss['accepted']:,} events are missing"
    words += f", {loss['missing'] - lost:,} open" if loss["missing"] > lost else ""
    style = "bold red" if lost else "bold yellow" if loss["missing"] else "bold green"
    table = Text(), Text(words, style=style), loss_table(loss)
    return Group(*table) if all(row["final"] for row in loss["minutes"]) else Group(*table, Text(_OPEN, style="dim"))


def remove_settings(environ: MutableMapping[str, str]) -> None:
    """Remove the operator's own PENSTOCK_ settings from the environment of the demo's services."""
    kept = {"PENSTOCK_JARS", "PENSTOCK_JAVA"}
    for name in [name for name in environ if name.startswith("PENSTOCK_") and name not in kept]:
        del environ[name]
