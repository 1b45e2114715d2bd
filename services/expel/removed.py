"""What becomes of the waiting events of a destination that the pipe file no longer has, as the file says (`Removed`).

The removed destination's group goes on reading `<pipe>.retry` and `<pipe>.parked`. Each event is written to another destination's
retry topic, to the dead letters or, when dropped, into the audit, and then committed. A crash in between writes it again. The
events that the global retrier still holds come to `<pipe>.retry` when they are due.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from services.core import metrics
from services.core.audit import DROP, ActedUpon, write_entries
from services.core.backoff import Backoff
from services.core.broker.contract import Broker, Lag
from services.core.broker.errors import BrokerError, RecordTooLarge
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.consuming import GroupMember, Membership
from services.core.pipes import Removed, dead_letter_topic, delivery_group, parked_topic, retry_topic
from services.core.retry_state import unwrap, wrap
from services.expel.dedup import RetryTopicFilter
from services.expel.delivery import Unreadable
from services.expel.side_topics import DeadLetterWriter, SideRecord, shorten
from services.expel.webhook.body import render_damaged

log = structlog.get_logger()

REASON = "destination_removed"
_POLL_RECORDS = 500
_COMMIT_INTERVAL_S = 1.0
_BASE_WAIT, _MAX_WAIT = 0.25, 10.0


class RemovedLane:
    """One removed destination's, in one process; several share its topics. lane: `pipe/destination`."""

    def __init__(self, broker: Broker, producer: Producer, lane: str, choice: Removed) -> None:
        self.name = lane
        self._broker, self._producer, self._choice = broker, producer, choice
        pipe, _, destination = lane.partition("/")
        self._topics = (retry_topic(pipe), parked_topic(pipe))
        group = delivery_group(pipe, destination)
        self._member = GroupMember(
            broker,
            group,
            lambda: RemovedProcessor(producer, pipe, destination, choice),
            self._find_topics,
            commit_interval=_COMMIT_INTERVAL_S,
        )

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then finishes what was polled, within `drain` seconds. Broker failures are waited out."""
        await self._member.run(stopping, drain)

    async def _find_topics(self) -> list[str]:
        existing = await self._broker.admin.topics()
        return [topic for topic in self._topics if topic in existing]


class RemovedProcessor:
    """`consuming.Processor`: writes batch after batch, each as a whole."""

    def __init__(self, producer: Producer, pipe: str, destination: str, choice: Removed) -> None:
        self._producer, self._choice = producer, choice
        self._pipe, self._destination, self._lane = pipe, destination, f"{pipe}/{destination}"
        self._dead_letters = DeadLetterWriter(pipe, destination)
        self._filters = {
            topic: RetryTopicFilter(pipe, destination) for topic in (retry_topic(pipe), parked_topic(pipe))
        }
        self._queue: deque[Batch] = deque()
        self._changed = asyncio.Event()
        self.tracker, self.ledger = OffsetTracker(), NoLedger()

    def open(self, membership: Membership, _tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        return [self._work(membership)]

    async def wait_for_room(self) -> int:
        while self._queue:
            self._changed.clear()
            await self._changed.wait()
        return _POLL_RECORDS

    def reads(self, _topic: str) -> bool:
        return True

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """Nothing is prepared."""

    def accept(self, batch: Batch) -> None:
        self._queue.append(batch)
        self._changed.set()

    async def drain_partitions(self, partitions: frozenset[TopicPartition], limit: float) -> None:
        """The next owner writes what is being written of these again."""

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        self._queue = deque(batch for batch in self._queue if batch.source not in partitions)

    async def drain(self, limit: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self.wait_for_room()
        return not self._queue

    def stop(self) -> None:
        """The worker ends with the membership."""

    def committed(self) -> None:
        """The worker commits each batch itself."""

    def update_metrics(self) -> None:
        """Its metrics are counters."""

    async def _work(self, membership: Membership) -> None:
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            batch = self._queue[0]
            await self._write(batch)
            if self._queue and self._queue[0] is batch:  # it was not revoked meanwhile
                self.tracker.settle(batch.source, batch.offsets)
                await membership.commit()
            if self._queue and self._queue[0] is batch:
                self._queue.popleft()
            self._changed.set()

    async def _write(self, batch: Batch) -> None:
        """Returns when every event of this destination is durable where the choice sends it."""
        now = time.time_ns() // 1_000_000
        if batch.damage is not None:
            await self._write_dead_letters(batch, render_damaged(batch, batch.damage).unreadable, now)
            return
        found = self._filters[batch.topic].sort(batch)
        mine = [
            (offset, record) for part in found.mine for offset, record in zip(part.offsets, part.records, strict=True)
        ]
        await self._write_dead_letters(batch, found.unreadable, now)
        if not mine:
            return
        if self._choice.deliver_to is not None:
            await self._deliver(batch, mine, self._choice.deliver_to, now)
        elif self._choice.bury is not None:
            bad = [Unreadable(offset, record, REASON, self._choice.bury) for offset, record in mine]
            await self._write_dead_letters(batch, bad, now)
        else:
            await self._drop([ActedUpon(*batch.source, offset) for offset, _ in mine])

    async def _deliver(self, batch: Batch, mine: Sequence[tuple[int, Record]], lane: str, now: int) -> None:
        """To the retry topic of the other destination, with the state of their attempts."""
        pipe, _, destination = lane.partition("/")
        topic, waiting = retry_topic(pipe), list(mine)
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while waiting:
            records = [_readdress(record, pipe, destination, now) for _, record in waiting]
            failed = await send_by_key(self._producer, topic, records)
            self._count("delivered_elsewhere", len(waiting) - len(failed))
            bad = [
                Unreadable(*waiting[index], "too_large", "the record is larger than the broker takes")
                for index, error in failed.items()
                if isinstance(error, RecordTooLarge)
            ]
            await self._write_dead_letters(batch, bad, now)
            again = {index: error for index, error in failed.items() if not isinstance(error, RecordTooLarge)}
            waiting = [waiting[index] for index in again]
            if waiting:
                await self._wait(retry, topic, next(iter(again.values())))

    async def _write_dead_letters(self, batch: Batch, bad: Sequence[Unreadable], now: int) -> None:
        records: Sequence[SideRecord] = self._dead_letters.from_unreadable(batch.source, bad, now)
        topic, waiting = dead_letter_topic(self._pipe), records
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while waiting:
            failed = await send_by_key(self._producer, topic, [record.record for record in waiting])
            for index, record in enumerate(waiting):
                if index not in failed:
                    metrics.EXPEL_DEAD.labels(self._pipe, self._destination, record.reason).inc(record.events)
            waiting = [
                shorten(waiting[index]) if isinstance(error, RecordTooLarge) else waiting[index]
                for index, error in failed.items()
            ]
            if waiting:
                await self._wait(retry, topic, next(iter(failed.values())))
        self._count("buried", sum(record.reason == REASON for record in records))

    async def _drop(self, positions: Sequence[ActedUpon]) -> None:
        """The audit has the events' positions before they are skipped."""
        said = {"destination": self._lane, "because": self._choice.drop or ""}
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while True:
            try:
                await write_entries(self._producer, DROP, f"expel@{socket.gethostname()}", said, positions)
            except BrokerError as error:
                await self._wait(retry, "the audit", error)
            else:
                break
        self._count("dropped", len(positions))
        log.warning("events_dropped", lane=self._lane, events=len(positions), reason=self._choice.drop)

    async def _wait(self, retry: Backoff, topic: str, error: Exception) -> None:
        """Before the next try. Raises what is not a broker's error."""
        if not isinstance(error, BrokerError):
            raise error
        if retry.fail():
            log.warning("removed_unwritten", lane=self._lane, topic=topic, error=str(error), hint="it is tried again")
        await retry.wait()

    def _count(self, action: str, events: int) -> None:
        metrics.EXPEL_REMOVED.labels(self._pipe, self._destination, action).inc(events)


class NoLedger:
    """These events were reported as retrying, parked or dead; nothing more is reported of them."""

    async def measure_ends(self) -> None:
        """Nothing is measured."""

    async def set_lags(self, own: Mapping[TopicPartition, Lag]) -> None:
        """Nothing is measured."""

    async def report(self) -> None:
        """Nothing is reported."""


def _readdress(record: Record, pipe: str, destination: str, now: int) -> Record:
    original, state = unwrap(record)
    return wrap(original, replace(state, pipe=pipe, destination=destination), now)
