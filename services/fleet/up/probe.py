"""Asks the processes of a fleet on one machine whether they are alive, as Kubernetes does elsewhere, and ends those that hang.

`ServiceProcess` then starts them again, after the same waits as after any other end.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import aiohttp

from services.fleet.up.process import ServiceProcess

EVERY_S, ANSWER_S = 10.0, 5.0
LEAST_FAILURES, BOUND_S = 5, 60.0
"""A process is ended after at least so many failures in a row, over at least so many seconds. So one that was stopped for less is
kept; and so is one that answers again when the supervisor itself, or the whole machine, was suspended."""
FIRST_ANSWER_S = 300.0
"""So long a run may take until its first answer."""


@dataclass(slots=True)
class _Run:
    """One run of a process, as the probes saw it. failing_since, reason: of the failures in a row."""

    pid: int
    seen_at: float
    was_alive: bool = False
    failures: int = 0
    failing_since: float = 0.0
    reason: str = ""


class Probes:
    """processes: those to ask; called for each round. end: called once with one that hangs, why, and whether it still answers."""

    def __init__(
        self,
        processes: Callable[[], Sequence[ServiceProcess]],
        end: Callable[[ServiceProcess, str, bool], None],
    ) -> None:
        self._processes, self._end = processes, end
        self.runs: dict[str, _Run] = {}
        """By the name of the process."""

    async def run(self) -> NoReturn:
        """A round every EVERY_S seconds, until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                await asyncio.sleep(EVERY_S)
                asked = [one for one in self._processes() if one.pid is not None and not one.is_ending]
                self.runs = {one.spec.name: self.runs[one.spec.name] for one in asked if one.spec.name in self.runs}
                await asyncio.gather(*(self._ask(session, one) for one in asked))

    async def _ask(self, session: aiohttp.ClientSession, process: ServiceProcess) -> None:
        pid, now = process.pid, time.monotonic()
        if pid is None:
            return
        reason, answers = await _probe(session, process.management)
        if process.pid != pid or process.is_ending:
            return
        run = self.runs.get(process.spec.name)
        if run is None or run.pid != pid:
            run = self.runs[process.spec.name] = _Run(pid, now)
        if reason is None:
            run.was_alive, run.failures = True, 0
            process.alive_at = now
            return
        if not run.failures:
            run.failing_since = now
        run.failures, run.reason = run.failures + 1, reason
        lasts = now - run.failing_since
        is_starting = not (run.was_alive or answers) and now - run.seen_at < FIRST_ANSWER_S
        if run.failures >= LEAST_FAILURES and lasts >= BOUND_S and not is_starting:
            self._end(process, f"{reason} (for {lasts:.0f} s)", answers)


async def _probe(session: aiohttp.ClientSession, management: str) -> tuple[str | None, bool]:
    """(why the process is not alive, or None; whether it answered)."""
    try:
        async with session.get(f"http://{management}/healthz", allow_redirects=False) as answer:
            text = (await answer.content.read(300)).decode(errors="replace").strip()
    except TimeoutError:
        return f"/healthz gives no answer within {ANSWER_S:g} s", False
    except (aiohttp.ClientError, OSError):
        return "nobody answers at /healthz", False
    return (None if answer.status == 200 else text or f"/healthz answers {answer.status}"), True
