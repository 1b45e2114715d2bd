"""Several observers of one fleet: one speaks, the others stand by.

The speaker is the member of a consumer group that owns the only partition of `penstock.control`. Every broker has groups, and
decides which members are dead. The group reads and commits nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange
from services.core.broker.record import TopicPartition
from services.core.pipe_file.topic_names import CONTROL
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Turns

log = structlog.get_logger()

GROUP = "penstock.observer"
POLL_WAIT_S = 0.5
RETRY_S = 5.0
_POLLS = 10
_JOIN_LIMIT_S = 600.0
"""Of a join or a leave. Each request of it has a time-out, but there may be many."""
_LOCK = TopicPartition(CONTROL, 0)


class SpeakerLock:
    """step_down: called when another observer may speak soon, or speaks already; it ends within a few seconds.

    `is_held` is false as soon as this process knows that it lost the partition. A process that was frozen may learn it a few
    seconds later than the others.
    """

    def __init__(self, broker: Broker, step_down: Callable[[], Awaitable[None]]) -> None:
        self._broker, self._step_down = broker, step_down
        self.is_held = self._is_leaving = False
        self.turns = Turns("the group of the observers", _JOIN_LIMIT_S)
        self.decided = asyncio.Event()
        """Set when this process first knows whether it speaks, or could not find out."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Take part until `stopping`. Raises no BrokerError: it joins again."""
        while not stopping.is_set():
            self.turns.next()
            try:
                await self._take_part(stopping)
            except BrokerError as error:
                log.warning("speaker_unknown", error=str(error), hint="this observer raises no alarms. It joins again")
            await self._lose()
            self.decided.set()
            await wait_for_stop(stopping, RETRY_S)

    async def _take_part(self, stopping: asyncio.Event) -> None:
        async with self._broker.consumer(GROUP, [CONTROL], start="earliest", on_revoke=self._on_revoke) as member:
            polls = 0
            while not stopping.is_set():
                member.pause(member.assignment())
                if _LOCK not in member.assignment():
                    await self._lose()
                elif not (self.is_held or self._is_leaving):
                    self.is_held = True
                    metrics.OBSERVER_SPEAKS.set(1)
                    log.info("speaks")
                polls += 1
                self.turns.next()
                if not self.decided.is_set() and (self.is_held or polls > _POLLS):
                    self.decided.set()
                    if not self.is_held:
                        log.info("stands_by", hint="another observer of this fleet raises the alarms")
                with suppress(OffsetOutOfRange, DataDamaged):  # nothing is read
                    await member.poll(max_records=1, max_wait=POLL_WAIT_S)

    async def _on_revoke(self, _sources: frozenset[TopicPartition]) -> None:
        self._is_leaving = True  # the partition is still assigned until this has ended
        try:
            await self._lose()
        finally:
            self._is_leaving = False

    async def _lose(self) -> None:
        if self.is_held:
            self.is_held = False
            metrics.OBSERVER_SPEAKS.set(0)
            log.info("stands_by", hint="another observer of this fleet raises the alarms, or this one ends")
            await self._step_down()
