"""The executors of a transform on a cluster as a group that the autoscaler resizes: by their CPU, and by the lag of the pipes.

Spark's own dynamic allocation counts waiting tasks. A stream gives every executor a task in each batch, so it would never shrink.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

import structlog
from pyspark.sql import SparkSession

from services.core.group_control import Figures, GroupState, Instance, SizeRefused
from spark.cluster.master import Executors, MasterKind
from spark.java import JAVA_ERRORS, Executor, leave_executor, list_executors, live_executors, order_executors

T = TypeVar("T")
GROUP = "executors"
ANSWER_S = 10.0
POLL_EVERY_S = 15.0
"""Between two checks whether executors are missing. They are ordered again, which changes nothing if they were not forgotten."""
_STARTING, _SILENT = "Spark is starting", f"Spark has not answered within {ANSWER_S:.0f} s"
log = structlog.get_logger()


class ExecutorGroup:
    """As `core.group_control.Groups`. Used on the event loop; Java is asked in threads. Callers wait for ANSWER_S at most.

    A thread cannot be stopped. So a change goes on and is recorded although its caller waits no longer, and until its end there
    is no other.
    """

    names = (GROUP,)

    def __init__(self, kind: MasterKind, executors: Executors) -> None:
        """A standalone master starts as many as there may be, the others the least."""
        self._limits = executors
        self._size = executors.most if kind is MasterKind.STANDALONE else executors.least
        self._session: SparkSession | None = None
        self._leaving = set[str]()
        self._busy: dict[str, tuple[float, float]] = {}
        """Of each executor: when it was described, and the seconds of CPU that it had then."""
        self._stands_by = False
        self._polled_at = time.monotonic()
        self._change: asyncio.Task[None] | None = None
        self.on_leave: Callable[[str], None] = lambda _name: None
        """Called before an executor is ordered to leave: it may be gone before Spark has answered."""

    def open(self, session: SparkSession) -> None:
        """From now on there are executors."""
        self._session = session

    def close(self) -> None:
        """Before the session stops."""
        self._session = None

    async def set_standby(self, stands_by: bool) -> None:
        """A driver that stands by gives its executors back, and the one that works may have them. When it takes over, it orders
        as many as before. Raises SizeRefused.

        Call this regularly: after its own restart a master, or YARN's application master, has forgotten what was ordered. It
        gives executors to a driver that stands by, or too few to the one that works.
        """
        if stands_by:
            await self._run(self._give_back())
        elif self._stands_by:
            await self._run(self._take_over())
        elif self._session is not None and time.monotonic() - self._polled_at > POLL_EVERY_S:
            await self._run(self._order_missing())

    async def _give_back(self) -> None:
        staying = [one for one in await self._ask(list_executors) if one.name not in self._leaving]
        if staying or not self._stands_by:
            await self._order(0)
            self._stands_by = True
        for one in staying:
            await self._leave(one.name, is_replaced=False)

    async def _take_over(self) -> None:
        await self._order(self._size)
        self._stands_by = False

    async def _order_missing(self) -> None:
        self._polled_at = time.monotonic()
        if len(await self._ask(live_executors)) < self._size:
            await self._order(self._size)

    def _check_works(self) -> None:
        if self._stands_by:
            raise SizeRefused("this driver stands by, and another one has the executors", again=True)

    async def describe(self, group: str) -> GroupState:
        """The executors that registered and were not lost, by Spark's numbers. Raises SizeRefused when Java does not answer."""
        if self._session is None:
            return GroupState(self._size, ())
        self._check_works()
        try:
            async with asyncio.timeout(ANSWER_S):
                found, now = await self._ask(list_executors), time.time()
        except TimeoutError as error:
            raise SizeRefused(_SILENT, again=True) from error
        self._leaving &= {one.name for one in found}
        self._busy = {one.name: (now, self._spread(one, now)) for one in found}
        return GroupState(self._size, tuple(self._instance(one, now) for one in found))

    def _spread(self, one: Executor, now: float) -> float:
        """Its seconds of CPU. A task counts when it ends, perhaps after minutes: so never more than its cores have used since."""
        at, busy = self._busy.get(one.name, (one.began, 0.0))
        return min(one.busy, busy + max(0.0, now - at) * self._limits.cores)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str]) -> None:
        """Executors that leave finish their tasks. The one with the least to do leaves first, or one that has failed."""
        if not self._limits.least <= size <= self._limits.most:
            raise SizeRefused(
                f"the group may have from {self._limits.least} to {self._limits.most} executors", again=False
            )
        if seen != self._size:
            raise SizeRefused(f"{self._size} executors are ordered, not {seen}", again=True)
        if size < seen - 1:
            raise SizeRefused("the group may shrink by one executor at a time", again=False)
        self._check_works()
        await self._run(self._resize(size, failed))

    async def _resize(self, size: int, failed: Collection[str]) -> None:
        if size < self._size:
            await self._shrink(failed)
        else:
            await self._order(size)
        self._size = size

    async def replace(self, group: str, name: str) -> None:
        """Spark starts another one, because as many as before are ordered."""
        self._check_works()
        await self._run(self._replace(name))

    async def _replace(self, name: str) -> None:
        if name not in {one.name for one in await self._staying()}:
            raise SizeRefused(f"there is no executor {name}, or it leaves already", again=True)
        await self._leave(name, is_replaced=True)

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        """Raises SizeRefused while another change is under way, and when this one is not done within ANSWER_S."""
        if self._change is not None and not self._change.done():
            change.close()
            raise SizeRefused("another change is under way: Spark has not answered yet", again=True)
        task = self._change = asyncio.create_task(change)
        try:
            done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        finally:
            if not task.done():
                task.add_done_callback(_note_late_end)
        if not done:
            raise SizeRefused(_SILENT, again=True)
        task.result()

    async def _shrink(self, failed: Collection[str]) -> None:
        staying = await self._staying()
        if len(staying) < self._size:  # the one that is missing was never started, or is lost
            await self._order(self._size - 1)
            return
        chosen = min(staying, key=lambda one: (one.name not in failed, one.tasks, -int(one.name)))
        await self._order(self._size)  # Spark counts down from the last order, and from 0 without one
        await self._leave(chosen.name, is_replaced=False)

    async def _staying(self) -> list[Executor]:
        """Raises SizeRefused while another one leaves."""
        found = await self._ask(list_executors)
        if leaving := self._leaving & {one.name for one in found}:
            raise SizeRefused(f"executor {min(leaving)} is leaving already", again=True)
        return found

    async def _leave(self, name: str, *, is_replaced: bool) -> None:
        self.on_leave(name)
        if not await self._ask(lambda session: leave_executor(session, name, is_replaced=is_replaced)):
            raise SizeRefused(f"Spark does not know executor {name} any more", again=True)
        self._leaving.add(name)

    async def _order(self, size: int) -> None:
        if not await self._ask(lambda session: order_executors(session, size)):
            raise SizeRefused("the master did not take the order", again=True)

    async def _ask(self, question: Callable[[SparkSession], T]) -> T:
        """Waits for as long as Java needs. Raises SizeRefused when it fails."""
        session = self._session
        if session is None:
            raise SizeRefused(_STARTING, again=True)
        try:
            return await asyncio.to_thread(question, session)
        except (OSError, *JAVA_ERRORS) as error:
            raise SizeRefused(f"Spark does not answer: {type(error).__name__}", again=True) from error

    def _instance(self, one: Executor, now: float) -> Instance:
        return Instance(
            one.name, None, one.name in self._leaving, Figures(max(0.0, now - one.began), self._busy[one.name][1])
        )


def _note_late_end(change: asyncio.Task[None]) -> None:
    if not change.cancelled() and (error := change.exception()) is not None:
        log.warning("late_change_of_executors_failed", error=str(error))
