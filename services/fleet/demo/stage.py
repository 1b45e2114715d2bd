"""What every demo stands on: a folder that is removed at the end, a signing secret, a fleet, a Ctrl-C that leaves nothing."""

import asyncio
import base64
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from services.core.aws_emulator import AwsEmulator, EmulatorNotReady, use_credentials
from services.core.scrape import Sample, scrape
from services.core.signature import PREFIX, SigningKey
from services.fleet.console import note
from services.fleet.demo.flights import EXAMPLES, STREAM, Flight, as_source
from services.fleet.ports import free_port
from services.fleet.problem import CommandFailed
from services.fleet.sender import SendingFailed, SendSummary, Target, send_events
from services.fleet.settings import UpSettings
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.supervisor import Fleet
from services.fleet.up import fleet_of, say


class Outcome(Protocol):
    """A demo's result."""

    @property
    def good(self) -> bool:
        """Nothing lost, nothing altered, nothing invented."""


Result = TypeVar("Result", bound=Outcome)


class _Imperfect(Exception):
    """The demo ran to its end, and its result is not good."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result


@dataclass(frozen=True, slots=True)
class Stage:
    """broker: `log`, `kafka` or `kinesis`; address: what the fleet is told instead. key: what deliveries are signed with; it
    stands in `webhook.secret` in the folder.
    """

    folder: Path
    broker: str
    address: str
    key: SigningKey
    stop: Stop

    async def write_pipes(self, text: str) -> UpSettings:
        """The pipe file, and the settings of a fleet that runs it on a free port."""
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
        """The fleet, ready; drained at the end."""
        return fleet_of(settings, None, self.stop, say, lambda text: note(text, "dim"))


async def perform(broker: str, play: Callable[[Stage], Awaitable[Result]]) -> Result:
    """Run it. Raises CommandFailed, with status 130 when stopped by a signal. Leaves nothing behind but the logs of a failure."""
    try:
        return await _perform(broker, play)
    except _Imperfect as error:
        result: Result = error.result
        return result


async def _perform(broker: str, play: Callable[[Stage], Awaitable[Result]]) -> Result:
    with stop_on_signals(lambda _insists: note("stopping")) as stop, _scratch_folder() as folder:
        key = await asyncio.to_thread(_write_pipe_secret, folder)
        demo = asyncio.ensure_future(_play(play, folder, broker, key, stop))
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


async def _play(
    play: Callable[[Stage], Awaitable[Result]], folder: Path, broker: str, key: SigningKey, stop: Stop
) -> Result:
    async with _address_of(broker, folder) as address:
        return await play(Stage(folder, broker, address, key, stop))


@asynccontextmanager
async def _address_of(broker: str, folder: Path) -> AsyncIterator[str]:
    """For Kinesis the URL of an emulator, which lives as long as the demo; the others are the fleet's own business."""
    if broker != "kinesis":
        yield broker
        return
    note("starting the Kinesis emulator", "dim")
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


def aim_at(settings: UpSettings, *, batch: int, rate: float) -> Target:
    """The demo's stream at this fleet's ingest."""
    return Target(f"http://{settings.listen}", STREAM, batch=batch, rate=rate)


async def send_flights(target: Target, sent: SendSummary, flights: dict[str, Flight]) -> None:
    """Send them all; `sent` is up to date at any moment. Raises CommandFailed."""
    try:
        await send_events(as_source(flights), target, sent)
    except SendingFailed as error:
        raise CommandFailed(f"sending: {error}") from error


async def look(fleet: Fleet) -> Sample:
    """What the services say now."""
    return await scrape([process.management for process in fleet.processes])


def forget_settings(environ: MutableMapping[str, str]) -> None:
    """Take the operator's own PENSTOCK_ settings out of what the demo's services inherit."""
    kept = {"PENSTOCK_JARS", "PENSTOCK_JAVA"}
    for name in [name for name in environ if name.startswith("PENSTOCK_") and name not in kept]:
        del environ[name]
