"""Finds work that makes no progress although it must end soon by itself: a lane that hangs, or a loop that turns no more.
`/healthz` then asks for a new process.

A processor names its present steps. The same step at many looks in a row is stuck. Looks are counted, not seconds: a process
that was stopped, or a machine that was suspended, has missed looks and is not stuck.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

import structlog

from services.core.broker.contract import PartitionRange, Reader, Start
from services.core.broker.record import Batch
from services.core.process.lifecycle import wait_for_stop

log = structlog.get_logger()

CHECK_EVERY_S = 5.0
LIMIT_S = 180.0
"""Longer than any step that the broker or the network can delay: each of those has a time-out of its own, below a minute."""


Answer = TypeVar("Answer")


class Step(NamedTuple):
    """Something that ends soon by itself, whatever the broker or a receiver does, unless there is a fault in this process.

    what: for a person; one step of that name at a time. token: differs for the next step. limit: seconds.
    """

    what: str
    token: object
    limit: float = LIMIT_S


class Turns:
    """Of a loop that runs until the stop and waits for nothing without a time limit. Call `next` in each turn, and before and
    after whatever may take long. what: for a person."""

    def __init__(self, what: str, limit: float = LIMIT_S) -> None:
        self._what, self._limit, self._count = what, limit, 0

    def next(self) -> None:
        self._count += 1

    def step(self) -> Step:
        """For the `ProgressWatch`."""
        return Step(self._what, self._count, self._limit)


class WatchedReader:
    """A Reader for one loop that reads again and again: the end of each request, also with an error, is a turn of `turns`."""

    def __init__(self, reader: Reader, turns: Turns) -> None:
        self._reader, self.turns = reader, turns

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        return await self._turn(self._reader.describe(topic))

    async def next_at_least(self, topic: str) -> dict[int, int]:
        return await self._turn(self._reader.next_at_least(topic))

    async def fence(self, topic: str) -> dict[int, int]:
        return await self._turn(self._reader.fence(topic))

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        return await self._turn(self._reader.offsets_at(topic, start))

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        return await self._turn(self._reader.read(topic, partition, offset, max_records=max_records))

    async def _turn(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            return await request
        finally:
            self.turns.next()


class _Checked(NamedTuple):
    step: Step
    unchanged: int


class ProgressWatch:
    """The watch of one service. find: the present steps; called for each check, so it must be cheap. Not thread-safe."""

    def __init__(self, find: Callable[[], Iterable[Step]] = tuple) -> None:
        self.find = find
        self._last: dict[str, _Checked] = {}
        self._logged: set[str] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Check every CHECK_EVERY_S seconds until `stopping`."""
        while not stopping.is_set():
            self.check()
            await wait_for_stop(stopping, CHECK_EVERY_S)

    def check(self) -> None:
        """Compare the present steps with those of the last check. Logs each that becomes stuck, once."""
        now: dict[str, _Checked] = {}
        for step in self.find():
            before = self._last.get(step.what)
            is_same = before is not None and before.step.token == step.token
            now[step.what] = _Checked(step, before.unchanged + 1 if before is not None and is_same else 0)
        self._last = now
        stuck = {one.step.what for one in now.values() if _is_stuck(one)}
        for what in stuck - self._logged:
            log.error(
                "no_progress",
                what=what,
                hint="/healthz is 503 until there is progress. penstock up or the platform starts this process again. Nothing is "
                "lost",
            )
        self._logged = stuck

    def why_not_alive(self) -> str | None:
        """What is stuck, for a person; None: nothing."""
        stuck = next((one for one in self._last.values() if _is_stuck(one)), None)
        return None if stuck is None else f"{stuck.step.what} (for {stuck.unchanged * CHECK_EVERY_S:.0f} s)"


def _is_stuck(one: _Checked) -> bool:
    return one.unchanged * CHECK_EVERY_S >= one.step.limit
