"""Starts, watches, restarts and stops one service process.

The process dies with the supervisor in every case (see `core.jvm.child`). It has its own session: Ctrl-C in a terminal
reaches only the supervisor, which stops the services in order.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.core.backoff import Backoff
from services.core.jvm.child import bind_to_parent
from services.core.metrics import FLEET_RESTARTS
from services.core.process.lifecycle import wait_for_stop
from services.fleet.problem import CommandFailed
from services.fleet.up.output import Notify, Output
from services.fleet.up.ports import free_port

BASE_WAIT_S, MAX_WAIT_S = 0.1, 30.0
HEALTHY_AFTER_S = 60.0
"""A process that ran for so long counts as healthy: its next restart follows quickly."""
BAD_CONFIGURATION = 2


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The command of one process. arguments: follow `python -m <module>`, without --management: each start gets a new port."""

    name: str
    service: str
    module: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


class ServiceProcess:
    """One process of the fleet, over all its runs. `pid` and `management` are those of the current run."""

    def __init__(
        self, spec: ServiceSpec, logs: Path, notify: Notify, changed: Callable[[], None], starting: Callable[[], bool]
    ) -> None:
        """starting: whether the fleet is still starting; bad configuration then ends the fleet."""
        self.spec, self._starting = spec, starting
        self.log = logs / f"{spec.name}.log"
        self.restarts = 0
        self.management = ""
        self.last_output: list[str] = []
        self._notify, self._changed = notify, changed
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.replacing = False
        """It was asked to end and to start again, and has not ended yet."""
        self.alive_at = 0.0
        """When it last said that it is alive; monotonic seconds."""
        self._hung = ""

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def leaving(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether it was asked to end, for whatever reason, and has not ended yet."""
        return self.leaving or self.replacing or bool(self._hung)

    async def keep_running(self) -> None:
        """Run it until `stop`. Restarts it when it dies, after the wait of a Backoff of at most 30 s.

        Bad configuration raises CommandFailed while the fleet starts, because a person waits for it. Later the process is
        restarted as after any other failure: bad configuration of one service must not end the others.
        """
        backoff = Backoff(BASE_WAIT_S, MAX_WAIT_S)
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                status = await self._run_once()
                end = self._describe_end(status)
            except OSError as error:  # no memory, process or descriptor is left: the other services continue
                status, end = 1, f"{self.spec.name} could not be started: {error.strerror}."
            if self._stopping.is_set():
                return
            level, remedy = "error", "correct the mistakes that are listed above"
            lasted = time.monotonic() - begun
            if self._hung:
                # Not its whole run: a process that hangs soon after each start is started again ever more slowly.
                lasted = self.alive_at - begun
                end = f"{self.spec.name} hung and was ended: {self._hung}. Its log: {self.log}"
                self._hung = ""
            elif status == BAD_CONFIGURATION:
                if self._starting():
                    raise CommandFailed(end, remedy, status=2)
                level = "critical"
                end += f"\n  Its configuration is wrong; the rest of the fleet continues. Try: {remedy}."
            if self.replacing:
                self._notify("warning", f"{self.spec.name} was ended, because it did not work. It is started again.")
                self.replacing = False
                backoff.reset()
                continue
            if lasted > HEALTHY_AFTER_S:
                backoff.reset()
            backoff.fail()
            wait = backoff.delay()
            self.restarts += 1
            FLEET_RESTARTS.labels(self.spec.service).inc()
            self._notify(level, f"{end} Started again in {wait:.1f} s.")
            await wait_for_stop(self._stopping, wait)

    async def _run_once(self) -> int:
        output = Output(self.spec.name, self.log, self._notify)
        try:
            starting = asyncio.ensure_future(self._start(output.writer))
            try:
                process = self._process = await asyncio.shield(starting)
            except asyncio.CancelledError:  # a process that is being started must end, too
                with contextlib.suppress(OSError):
                    await self._end(await starting)
                raise
        finally:
            os.close(output.writer)
        self._changed()
        if self._stopping.is_set():  # stopped while it was being started
            process.terminate()
        try:
            status = await process.wait()
        finally:
            await self._end(process)
            self._changed()
        self.last_output = await asyncio.to_thread(output.last_lines, 1.0)
        return status

    async def _start(self, output: int) -> asyncio.subprocess.Process:
        # When another process uses the port meanwhile, the next start gets another one.
        self.management = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", self.spec.module, *self.spec.arguments, "--management", self.management]
        return await asyncio.create_subprocess_exec(
            *bind_to_parent(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **self.spec.environ},
            start_new_session=True,
        )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._kill_session(process)
        await process.wait()

    def _describe_end(self, status: int) -> str:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = "".join(f"\n    {line}" for line in self.last_output) if status >= 0 else ""
        return f"{self.spec.name} {how}. Its log: {self.log}{lines}"

    def leave(self) -> None:
        """Send SIGTERM, once: a second SIGTERM would end the service at once. It is not restarted."""
        if self.leaving:
            return
        self._stopping.set()
        self._terminate()

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None and not (self.replacing or self._hung):
            self._process.terminate()

    async def stop(self, limit: float, hurry: asyncio.Event) -> bool:
        """`leave`, then SIGKILL after `limit` seconds or as soon as `hurry` is set. Returns whether it drained in time."""
        self.leave()
        return await self._wait_or_kill(limit, hurry)

    def begin_replacement(self) -> None:
        """As `leave`, but `keep_running` starts it again. Between two runs there is nothing to do."""
        if self.pid is not None:
            self._terminate()
            self.replacing = True

    async def end_hung(self, reason: str, limit: float, hurry: asyncio.Event) -> None:
        """It makes no progress: end it, within `limit` seconds; `keep_running` starts it again. 0: it can end nothing itself."""
        if self.pid is not None and not self.is_ending:
            self._terminate()
            self._hung = reason
            await self._wait_or_kill(limit, hurry)

    async def finish_replacement(self, limit: float, hurry: asyncio.Event) -> None:
        """SIGKILL after `limit` seconds, or as soon as `hurry` is set, unless it has ended."""
        if self.replacing:
            await self._wait_or_kill(limit, hurry)

    async def _wait_or_kill(self, limit: float, hurry: asyncio.Event) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return True
        ended, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait({ended, hurried}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            # -SIGTERM: the process had not begun its work, because a process first of all sets its handler of SIGTERM
            drained = ended.done() and process.returncode in (0, -signal.SIGTERM)
        finally:
            ended.cancel()
            hurried.cancel()
            await self._end(process)
        return drained

    def _kill_session(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it still runs, and the processes that it started (Spark's Java)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
