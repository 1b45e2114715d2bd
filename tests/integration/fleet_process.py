"""`penstock up` and its companions as a person runs them: real processes, in a folder of their own, on free ports."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from services.core.security.signing import SigningKey
from services.fleet.folder import FleetState, read_state
from services.fleet.receiver import Received, Receiver, serve_receiver
from tests.support.pacing import Pace
from tests.support.ports import free_port

DEADLINE = 900.0
"""Seconds; a quiet machine needs a sixth of them."""
DRAIN = "300s"
"""A service that needs long to end, because the machine is busy, ends in good order all the same."""
_PATIENT_SEND = (
    "import services.fleet.sending.sender as s; s.GIVE_UP_AFTER_S = 900.0; from services.fleet.cli import main; main()"
)
"""`penstock` that sends for as long as a fleet needs to come back."""
REPOSITORY = Path(__file__).parents[2]
SECRET = "whsec_" + "a2V5" * 8


class Desk:
    """One person's folder: `pipes.yaml`, the signing secret, a receiver's port, ingest's port."""

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        """programs: the folder of an installed `penstock`, which runs instead of the clone's."""
        self.folder, self._programs = folder, programs
        self.command = [sys.executable, "-m", "services.fleet"] if programs is None else [str(programs / "penstock")]
        self.hook_port, self.ingest_port = free_port(), free_port()
        self.ids: set[str] = set()
        self.receiver = Receiver((SigningKey.parse(SECRET),), on_request=self._note)
        secret = folder / "webhook.secret"
        secret.touch(mode=0o600)
        secret.write_text(SECRET)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def _note(self, received: Received) -> None:
        self.ids.update(event["id"] for event in received.new)

    def write_pipes(self, transform: str = "", *, name: str = "d", more: str = "", former: str = "null") -> None:
        """One pipe from `events` to the receiver, the destination `name`. more: of the webhook, with a comma in front.

        former: the former name of the destination.
        """
        (self.folder / "pipes.yaml").write_text(
            "streams:\n  events: {id: id, key: key, columns: 'id STRING, key STRING, n INT'}\n"
            f"pipes:\n  p:\n    sources: [events]\n{transform}    destinations:\n"
            f"      - name: {name}\n        renamed_from: {former}\n"
            f"        webhook: {{url: 'http://127.0.0.1:{self.hook_port}/', "
            f"secret: {{file: webhook.secret}}{more}}}\n"
        )

    def write_events(self, count: int) -> Path:
        path = self.folder / "events.ndjson"
        lines = [json.dumps({"id": f"e{n}", "key": f"k{n % 7}", "n": n}) for n in range(count)]
        path.write_text("\n".join(lines))
        return path

    def receive(self) -> Any:
        """A context in which the receiver listens."""
        return serve_receiver(self.receiver, "127.0.0.1", self.hook_port)

    async def penstock(self, *arguments: str | Path) -> "Command":
        """Start a verb in the folder."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_UP")}
        environ["COLUMNS"] = "200"
        if self._programs is None:
            environ["PYTHONPATH"] = str(REPOSITORY)
        else:
            environ.pop("PYTHONPATH", None)
        is_sent = arguments[0] == "send" and self._programs is None
        process = await asyncio.create_subprocess_exec(
            *([sys.executable, "-c", _PATIENT_SEND] if is_sent else self.command),
            *map(str, arguments),
            cwd=self.folder,
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return Command(process)

    async def run(self, *arguments: str | Path) -> "Command":
        """A verb until it ends; killed, with what it started, when that takes too long."""
        command = await self.penstock(*arguments)
        try:
            await command.finish()
        finally:
            await command.kill()
        return command

    @asynccontextmanager
    async def up(self, *arguments: str) -> AsyncIterator["Command"]:
        """The fleet, ready; killed at the end if it still runs."""
        command = await self.penstock(
            *("up", "--listen", f"127.0.0.1:{self.ingest_port}", "--allow-networks", "127.0.0.0/8"),
            *("--ready-within", f"{DEADLINE:.0f}s", "--drain", DRAIN, *arguments),
        )
        try:
            await command.until_said("Penstock runs")
            yield command
        except BaseException:
            print(f"penstock up had said:\n{command.out}{command.err}")
            raise
        finally:
            await command.kill()

    async def send(self, file: Path, *arguments: str, stream: str = "events") -> "Command":
        return await self.run("send", stream, file, "--url", f"http://127.0.0.1:{self.ingest_port}", *arguments)

    async def state(self) -> FleetState:
        state = await asyncio.to_thread(read_state, self.data)
        assert state is not None
        return state


class Command:
    """A running verb. `out`, `err`: what it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out = self.err = ""
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(process.stdout, "out")),
            asyncio.create_task(self._read(process.stderr, "err")),
        ]

    async def _read(self, stream: asyncio.StreamReader, name: str) -> None:
        while chunk := await stream.read(65536):
            setattr(self, name, getattr(self, name) + chunk.decode())

    async def finish(self) -> int:
        """Until it ends; its exit status."""
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*self._readers)
            return await self.process.wait()

    async def until_said(self, text: str) -> None:
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while text not in self.err + self.out:
                if self.process.returncode is not None:
                    await self.finish()
                    raise AssertionError(f"ended with {self.process.returncode}: {self.out}{self.err}")
                await pace.rest()

    async def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        status = await self.finish()
        if status:
            print(f"ended with {status}:\n{self.out}{self.err}")
        return status

    async def kill(self) -> None:
        """With everything that it started. Nothing when it has ended."""
        if self.process.returncode is None:
            for pid in living(family(self.process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await self.finish()


async def until(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    try:
        async with asyncio.timeout(deadline):
            pace = Pace()
            while not condition():
                await pace.rest()
    except TimeoutError:
        raise AssertionError(f"still not after {deadline} s: {what}") from None


def living(pids: Sequence[int | None]) -> list[int]:
    """Those of these processes that still run."""
    found = []
    for pid in pids:
        try:
            if pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def family(pid: int) -> list[int]:
    """The process and everything it started."""
    parent = psutil.Process(pid)
    return [pid, *(child.pid for child in parent.children(recursive=True))]
