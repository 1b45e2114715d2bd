"""The environment of each demo: a temporary folder, a signing secret, a fleet, a progress display, and the stop on Ctrl-C."""

import asyncio
import base64
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from services.core.aws_emulator import AwsEmulator, EmulatorNotReady, use_credentials
from services.core.scrape import Sample, scrape
from services.core.signing import PREFIX, SigningKey
from services.fleet.console import ERR, print_note
from services.fleet.demo.flights import EXAMPLES, STREAM, Flight, as_source
from services.fleet.observer_client import Observer, get_json, loss_table
from services.fleet.ports import free_port
from services.fleet.problem import CommandFailed
from services.fleet.sender import SendingFailed, SendSummary, Target, send_events
from services.fleet.settings import UpSettings
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.supervisor import Fleet
from services.fleet.up import fleet_of, notify

PLAIN_EVERY_S = 2.0


class Display:
    """The progress of `total` events, with a row per step. A context manager; not thread-safe."""

    def __init__(self, total: int, rows: Sequence[str]) -> None:
        self._total = total
        self._counts = dict.fromkeys(rows, 0)
        self._more = dict.fromkeys(rows, "")
        self._said = 0.0
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"), console=ERR, disable=not ERR.is_terminal,
        )  # fmt: skip
        self._rows = {name: self._bars.add_task(name, total=total, more="") for name in rows}

    def show(self, counts: Mapping[str, int], more: Mapping[str, str]) -> None:
        """Show the counts by row. more: text (rich markup) after some of them."""
        self._counts |= counts
        self._more |= more
        if not ERR.is_terminal:
            if time.monotonic() - self._said >= PLAIN_EVERY_S:
                self._refresh()
            return
        for name, count in self._counts.items():
            self._bars.update(self._rows[name], completed=count, more=self._more[name])

    def _refresh(self) -> None:
        self._said = time.monotonic()
        parts = [f"{name} {count}/{self._total} {self._more[name]}".rstrip() for name, count in self._counts.items()]
        print_note(Text.from_markup(", ".join(parts)).plain, "dim")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()
        if not ERR.is_terminal:
            self._refresh()


PATIENCE_S = 60.0
ASK_EVERY_S = 0.5

_OPEN = (
    "A minute is final two and a half minutes after its end, because late events may still arrive. "
    "The demo does not wait for that; a fleet that keeps running (penstock up) does."
)

Loss = dict[str, Any]
"""The observer's answer, with `accepted` and `missing` over all its minutes; empty when it did not answer."""


def print_address(fleet: Fleet) -> None:
    """Print the address of the observer's page."""
    print_note(f"lag and loss, live: http://{fleet.plan.observer}/", "bold")


async def read_loss(fleet: Fleet, pipe: str, accepted: int) -> Loss:
    """The loss table, as soon as it has all `accepted` events and none is missing; the current one when that takes too long.

    Each service reports within about a second the events that it settled. The minutes are not final so soon.
    """
    deadline = time.monotonic() + PATIENCE_S
    found: Loss = {}
    while time.monotonic() < deadline:
        try:
            found = await get_json(Observer(fleet.plan.observer), f"/v1/pipes/{pipe}/loss", {})
        except CommandFailed as error:
            print_note(f"{error.what}", "yellow")
            return found
        for count in ("accepted", "missing"):
            found[count] = sum(row[count] for row in found["minutes"])
        if found["accepted"] >= accepted and not found["missing"]:
            break
        await asyncio.sleep(ASK_EVERY_S)
    return found


def render_loss(loss: Loss) -> RenderableType:
    """Shown after the demo's own result."""
    if not loss.get("minutes"):
        return Text("the observer has no minute of this pipe", style="yellow")
    words = f"the observer's loss table: {loss['missing']:,} of {loss['accepted']:,} events are missing"
    table = Text(), Text(words, style="bold red" if loss["missing"] else "bold green"), loss_table(loss)
    return Group(*table) if all(row["final"] for row in loss["minutes"]) else Group(*table, Text(_OPEN, style="dim"))


class Outcome(Protocol):
    """The result of a demo."""

    @property
    def good(self) -> bool:
        """Whether nothing is lost, altered or added."""


Result = TypeVar("Result", bound=Outcome)


class _Imperfect(Exception):
    """The demo ended with a result that is not good."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True)
class Stage:
    """broker: `log`, `kafka` or `kinesis`. address: the `--broker` of the fleet. key: signs the deliveries; it is stored in
    `webhook.secret` in the folder.
    """

    folder: Path
    broker: str
    address: str
    key: SigningKey
    stop: Stop

    async def write_pipes(self, text: str) -> UpSettings:
        """Write the pipe file. Returns settings of a fleet that runs it on a free port."""
        path = self.folder / "pipes.yaml"
        await asyncio.to_thread(path.write_text, text, encoding="utf-8")
        return UpSettings.model_validate(
            {
                "broker": self.address,
                "pipes": path,
                "data": self.folder / "data",
                "listen": f"127.0.0.1:{free_port()}",
                "allow_networks": "127.0.0.0/8",
                "drain": "10s",
            }
        )

    def fleet(self, settings: UpSettings) -> AbstractAsyncContextManager[Fleet]:
        """Run the fleet: ready at the beginning, drained at the end."""
        return fleet_of(settings, None, self.stop, notify, lambda text: print_note(text, "dim"))


async def perform(broker: str, run: Callable[[Stage], Awaitable[Result]]) -> Result:
    """Run a demo. Raises CommandFailed, with status 130 when stopped by a signal. Leaves no files but the logs of a failure."""
    try:
        return await _perform(broker, run)
    except _Imperfect as error:
        result: Result = error.result
        return result


async def _perform(broker: str, run: Callable[[Stage], Awaitable[Result]]) -> Result:
    with stop_on_signals(lambda _insists: print_note("stopping")) as stop, _scratch_folder() as folder:
        key = await asyncio.to_thread(_write_pipe_secret, folder)
        demo = asyncio.ensure_future(_run_at_address(run, folder, broker, key, stop))
        asked = asyncio.ensure_future(stop.asked.wait())
        await asyncio.wait({demo, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if stop.asked.is_set():
            demo.cancel()
        await asyncio.wait({demo})
        if demo.cancelled() or stop.asked.is_set():
            if not demo.cancelled():
                demo.exception()
            raise CommandFailed("stopped; nothing is left running", status=130)
        if not (result := demo.result()).good:
            raise _Imperfect(result)
        return result


async def _run_at_address(
    run: Callable[[Stage], Awaitable[Result]], folder: Path, broker: str, key: SigningKey, stop: Stop
) -> Result:
    async with _address_of(broker, folder) as address:
        return await run(Stage(folder, broker, address, key, stop))


@asynccontextmanager
async def _address_of(broker: str, folder: Path) -> AsyncIterator[str]:
    """Kinesis: start an emulator for the time of the demo and yield its URL. Others: `broker`, which the fleet starts itself."""
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


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder. Removed at the end, except when the demo fails by itself: then its logs are needed."""
    if not (EXAMPLES / "pipes.yaml").is_file():
        raise CommandFailed("the examples folder is missing", "make demo, in a clone of the repository", status=2)
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    keep = False
    try:
        yield folder
    except (_Imperfect, CommandFailed) as error:
        keep = isinstance(error, _Imperfect) or error.status != 130
        raise
    finally:
        if keep:
            print_note(f"the logs are in {folder}/data/logs", "yellow")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _write_pipe_secret(folder: Path) -> SigningKey:
    text = PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
    path = folder / "webhook.secret"
    path.touch(mode=0o600)
    path.write_text(text)
    return SigningKey.parse(text)


def target_of(settings: UpSettings, *, batch: int, rate: float) -> Target:
    """The demo's stream at this fleet's ingest."""
    return Target(f"http://{settings.listen}", STREAM, batch=batch, rate=rate)


async def send_flights(target: Target, sent: SendSummary, flights: dict[str, Flight]) -> None:
    """Send all events; `sent` is always up to date. Raises CommandFailed."""
    try:
        await send_events(as_source(flights), target, sent)
    except SendingFailed as error:
        raise CommandFailed(f"sending: {error}") from error


async def scrape_fleet(fleet: Fleet) -> Sample:
    """The current metrics of the services."""
    return await scrape([process.management for process in fleet.processes])


def remove_settings(environ: MutableMapping[str, str]) -> None:
    """Remove the operator's own PENSTOCK_ settings from the environment of the demo's services."""
    kept = {"PENSTOCK_JARS", "PENSTOCK_JAVA"}
    for name in [name for name in environ if name.startswith("PENSTOCK_") and name not in kept]:
        del environ[name]
