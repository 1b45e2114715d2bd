"""The demo itself: a fleet in a temporary folder, a receiver and a client in this process, and an exact count at the end."""

import asyncio
import base64
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from services.core.signature import PREFIX, SigningKey
from services.fleet.console import note
from services.fleet.demo.display import Display
from services.fleet.demo.flights import EXAMPLES, STREAM, Flight, as_source, load_flights
from services.fleet.demo.summary import DemoResult, make_result
from services.fleet.demo.tracker import Tracker
from services.fleet.ports import free_port
from services.fleet.problem import CommandFailed
from services.fleet.receiver import Receiver, serve_receiver
from services.fleet.scrape import Sample, scrape
from services.fleet.sender import SendingFailed, SendSummary, Target, send_events
from services.fleet.settings import UpSettings
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.supervisor import Fleet
from services.fleet.up import fleet_of, say

RATE = 1000.0
"""Events a second: a burst of all at once would only show how long a queue is, not how late an event is."""
BATCH = 50
FIRST = 200
NO_PROGRESS_S = 60.0
LOOK_EVERY_S = 0.5
DUPLICATES_FOR_S = 1.0
RECEIVER_IN_EXAMPLE = "http://127.0.0.1:9000"


class _Imperfect(Exception):
    """The demo ran to its end, and its result is not good."""

    def __init__(self, result: DemoResult) -> None:
        super().__init__(result)
        self.result = result


async def run_demo(broker: str) -> DemoResult:
    """Run it. Raises CommandFailed, with status 130 when stopped by a signal. Leaves nothing behind but the logs of a failure."""
    try:
        return await _run(broker)
    except _Imperfect as error:
        return error.result


async def _run(broker: str) -> DemoResult:
    with stop_on_signals(lambda _insists: note("stopping")) as stop, _scratch_folder() as folder:
        key = await asyncio.to_thread(_write_pipe_secret, folder)
        demo = asyncio.ensure_future(_run_in(folder, broker, key, stop))
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


async def _run_in(folder: Path, broker: str, key: SigningKey, stop: Stop) -> DemoResult:
    tracker = Tracker({})
    async with serve_receiver(Receiver((key,), tell=tracker.take), "127.0.0.1", 0) as port:
        await asyncio.to_thread(_write_pipe_file, folder, port)
        settings = UpSettings.model_validate(
            {
                "broker": broker,
                "pipes": folder / "pipes.yaml",
                "data": folder / "data",
                "listen": f"127.0.0.1:{free_port()}",
                "allow_networks": "127.0.0.0/8",
                "drain": "10s",
            }
        )
        async with fleet_of(settings, None, stop, say, lambda text: note(text, "dim")) as fleet:
            note("real flights of January 2013, their times shifted so that the newest is now", "dim")
            return await _feed(fleet, settings, tracker)


async def _feed(fleet: Fleet, settings: UpSettings, tracker: Tracker) -> DemoResult:
    """The first events alone until they have arrived, as Spark compiles its query for its first batch; then the rest, paced."""
    target = Target(f"http://{settings.listen}", STREAM, batch=BATCH, rate=RATE)
    sent = SendSummary()
    begun = time.monotonic()
    flights = await asyncio.to_thread(load_flights, time.time())
    with Display(len(flights)) as display:
        note(f"the first {FIRST} events wait for Spark to compile its query, the rest follow at {RATE:.0f}/s", "dim")
        await _carry(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST)))
        flights = await asyncio.to_thread(load_flights, time.time() + (len(flights) - FIRST) / RATE)
        if not tracker.lost:
            await _carry(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST, None)))
        seconds = time.monotonic() - begun
        await asyncio.sleep(DUPLICATES_FOR_S)
        sample = await _look(fleet)
        display.show(_counts(sent, sample, tracker), "")
    return make_result(settings.broker, len(flights), sent.accepted, tracker, sample, seconds)


async def _carry(
    fleet: Fleet, target: Target, sent: SendSummary, tracker: Tracker, display: Display, flights: dict[str, Flight]
) -> None:
    """Send these events and wait until they have arrived, or nothing has moved for NO_PROGRESS_S seconds."""
    tracker.flights.update(flights)
    async with asyncio.TaskGroup() as group:
        group.create_task(_send(target, sent, flights))
        moved, before = time.monotonic(), -1
        while tracker.lost and time.monotonic() - moved < NO_PROGRESS_S:
            counts = _counts(sent, await _look(fleet), tracker)
            display.show(counts, _lag_so_far(tracker))
            if (total := sum(counts.values())) != before:
                moved, before = time.monotonic(), total
            await asyncio.sleep(LOOK_EVERY_S)


async def _send(target: Target, sent: SendSummary, flights: dict[str, Flight]) -> None:
    try:
        await send_events(as_source(flights), target, sent)
    except SendingFailed as error:
        raise CommandFailed(f"sending: {error}") from error


async def _look(fleet: Fleet) -> Sample:
    return await scrape([process.management for process in fleet.processes])


def _counts(sent: SendSummary, sample: Sample, tracker: Tracker) -> dict[str, int]:
    transformed = int(sample.total("penstock_transform_events_written_total"))
    return {"accepted": sent.accepted, "transformed": transformed, "delivered": len(tracker.delivered)}


def _lag_so_far(tracker: Tracker) -> str:
    recent = sorted(tracker.lags_ms[-1000:])
    return f"E2E lag P50 {recent[len(recent) // 2]} ms" if recent else ""


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Removed at the end, except when the demo fails by itself: then its logs are wanted."""
    if not (EXAMPLES / "pipes.yaml").is_file():
        raise CommandFailed("the examples are not here", "make demo, in a clone of the repository", status=2)
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    keep = False
    try:
        yield folder
    except (_Imperfect, CommandFailed) as error:
        keep = isinstance(error, _Imperfect) or error.status != 130
        raise
    finally:
        if keep:
            note(f"the logs are in {folder}/data/logs", "yellow")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _write_pipe_secret(folder: Path) -> SigningKey:
    text = PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
    path = folder / "webhook.secret"
    path.touch(mode=0o600)
    path.write_text(text)
    return SigningKey.parse(text)


def _write_pipe_file(folder: Path, port: int) -> None:
    """The example's pipe file, with the port that this demo's receiver got."""
    text = (EXAMPLES / "pipes.yaml").read_text(encoding="utf-8")
    assert RECEIVER_IN_EXAMPLE in text
    (folder / "pipes.yaml").write_text(text.replace(RECEIVER_IN_EXAMPLE, f"http://127.0.0.1:{port}"), encoding="utf-8")


def forget_settings(environ: MutableMapping[str, str]) -> None:
    """Take the operator's own PENSTOCK_ settings out of what the demo's services inherit."""
    kept = {"PENSTOCK_JARS", "PENSTOCK_JAVA"}
    for name in [name for name in environ if name.startswith("PENSTOCK_") and name not in kept]:
        del environ[name]
