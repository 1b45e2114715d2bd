"""Handles the waiting events of a destination that the pipe file no longer has, as the file says (`Removed`).

The removed destination's group continues to read `<pipe>.retry` and `<pipe>.parked`. Each event is written to another
destination's retry topic, to the dead letters or, when dropped, into the audit, and then committed. After a crash in between it
is written again. Events that the global retrier still holds come to `<pipe>.retry` when they are due.
"""

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from services.core import metrics
from services.core.audit import DROP, ActedUpon, write_entries
from services.core.backoff import Backoff
from services.core.broker.contract import Broker, PartitionRange
from services.core.broker.errors import BrokerError, DataDamaged, RecordTooLarge
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.reading import read_topic
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.consuming import GroupMember, Membership
from services.core.pipe_file.pipes import LANE_PATTERN, Removed
from services.core.pipe_file.topic_names import dead_letter_topic, delivery_group, lane_name, parked_topic, retry_topic
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Step
from services.core.undelivered.retry_state import FAILURES, unwrap, wrap
from services.core.undelivered.waiting import lane_of
from services.expel.dedup import RetryTopicFilter
from services.expel.delivery import Unreadable
from services.expel.metrics import LaneLedger
from services.expel.side_topics import DeadLetterWriter, shorten
from services.expel.webhook.body import render_damaged

log = structlog.get_logger()

REASON = "destination_removed"
_POLL_RECORDS = 500
_COMMIT_INTERVAL_S = 1.0
_BASE_WAIT, _MAX_WAIT = 0.25, 10.0
_FIND_LANES_S = 5.0


class RemovedLane:
    """The lane of one removed destination in one process; several processes share its topics. lane: `pipe/destination`."""

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
        """Until `stopping`; then finish polled records within `drain` seconds. Broker failures are waited out."""
        await self._member.run(stopping, drain)

    def steps(self) -> Iterator[Step]:
        """For the `ProgressWatch`."""
        return (step._replace(what=f"removed {self.name}: {step.what}") for step in self._member.steps())

    async def _find_topics(self) -> list[str]:
        present = await self._broker.admin.present(self._topics)
        return [topic for topic in self._topics if topic in present]


class RemovedPipe:
    """The lanes of one removed pipe in one process. Their names are in the records of the retry and parked topics.

    known: the lanes that have a `RemovedLane` already.
    """

    def __init__(self, broker: Broker, producer: Producer, pipe: str, choice: Removed, known: Collection[str]) -> None:
        self.name = pipe
        self._broker, self._producer, self._choice = broker, producer, choice
        self._lanes = set(known)
        self._running: list[RemovedLane] = []
        self._read: dict[TopicPartition, int] = {}

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """As `RemovedLane.run`."""
        is_failing = False
        async with asyncio.TaskGroup() as running:
            while not stopping.is_set():
                try:
                    for lane in await self._find_lanes():
                        one = RemovedLane(self._broker, self._producer, lane, self._choice)
                        self._running.append(one)
                        running.create_task(one.run(stopping, drain), name=f"removed {lane}")
                    is_failing = False
                except BrokerError as error:
                    if not is_failing:
                        log.warning(
                            "removed_unreadable", pipe=self.name, error=str(error), hint="the topics are read again"
                        )
                    is_failing = True
                await wait_for_stop(stopping, _FIND_LANES_S)

    def steps(self) -> Iterator[Step]:
        """For the `ProgressWatch`."""
        return (step for lane in self._running for step in lane.steps())

    async def _find_lanes(self) -> list[str]:
        """The lanes that no earlier call returned. Reads the new records of the topics."""
        found = set[str]()
        for topic in await self._broker.admin.present((retry_topic(self.name), parked_topic(self.name))):
            for partition, stored in (await self._broker.reader.describe(topic)).items():
                source = TopicPartition(topic, partition)
                unread = PartitionRange(max(stored.start, self._read.get(source, stored.start)), stored.end)
                with suppress(DataDamaged):  # the lanes report it
                    async for batch in read_topic(self._broker.reader, topic, partition, unread):
                        found.update(map(lane_of, batch.records))
                self._read[source] = stored.end
        mine = sorted(lane for lane in found - self._lanes if re.fullmatch(LANE_PATTERN, lane))
        new = [lane for lane in mine if lane.startswith(f"{self.name}/")]
        self._lanes.update(new)
        return new


class RemovedProcessor:
    """`consuming.Processor`: writes one batch after the other."""

    def __init__(self, producer: Producer, pipe: str, destination: str, choice: Removed) -> None:
        self._producer, self._choice = producer, choice
        self._pipe, self._destination, self._lane = pipe, destination, lane_name(pipe, destination)
        self._dead_letters = DeadLetterWriter(pipe, destination)
        self._filters = {
            topic: RetryTopicFilter(pipe, destination) for topic in (retry_topic(pipe), parked_topic(pipe))
        }
        self._queue: deque[Batch] = deque()
        self._tries = 0
        """Writes that ended, well or not."""
        self._is_writing = False
        self._changed = asyncio.Event()
        self.tracker, self.ledger = OffsetTracker(), LaneLedger()  # these events were reported when they began to wait

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
        """The next owner repeats the current write."""

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

    def steps(self) -> Iterator[Step]:
        if self._is_writing:
            yield Step("a write has not ended", self._tries)

    async def _work(self, membership: Membership) -> None:
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            batch = self._queue[0]
            self._is_writing = True
            try:
                await self._write(batch)
            finally:
                self._is_writing = False
            self._tries += 1
            if self._queue and self._queue[0] is batch:  # it was not revoked since
                self.tracker.settle(batch.source, batch.offsets)
                await membership.commit()
            if self._queue and self._queue[0] is batch:
                self._queue.popleft()
            self._changed.set()

    async def _write(self, batch: Batch) -> None:
        """Returns when every event of this destination is durable in the topic of the choice."""
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
        records = [_readdress(record, pipe, destination, now) for _, record in mine]
        too_large = await self._append(retry_topic(pipe), records)
        self._count("delivered_elsewhere", len(mine) - len(too_large))
        detail = "the record is larger than the broker accepts"
        await self._write_dead_letters(
            batch, [Unreadable(*mine[index], "too_large", detail) for index in too_large], now
        )

    async def _write_dead_letters(self, batch: Batch, bad: Sequence[Unreadable], now: int) -> None:
        letters = waiting = self._dead_letters.from_unreadable(batch.source, bad, now)
        while waiting:
            too_large = await self._append(dead_letter_topic(self._pipe), [letter.record for letter in waiting])
            for index, letter in enumerate(waiting):
                if index not in too_large:
                    metrics.EXPEL_DEAD.labels(self._pipe, self._destination, letter.reason).inc(letter.events)
            waiting = [shorten(waiting[index]) for index in too_large]
        self._count("buried", sum(letter.reason == REASON for letter in letters))

    async def _append(self, topic: str, records: Sequence[Record]) -> list[int]:
        """Append records by key, repeated until all are durable. Returns the indexes of those that are too large."""
        too_large: list[int] = []
        left = list(range(len(records)))
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while left:
            failed = await send_by_key(self._producer, topic, [records[index] for index in left])
            errors = {left[at]: error for at, error in failed.items()}
            left = [index for index, error in errors.items() if not isinstance(error, RecordTooLarge)]
            too_large += errors.keys() - set(left)
            if left:
                await self._wait(retry, topic, errors[left[0]])
        return sorted(too_large)

    async def _drop(self, positions: Sequence[ActedUpon]) -> None:
        """Write the events' positions to the audit before they are skipped."""
        choice = {"destination": self._lane, "because": self._choice.drop or ""}
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while True:
            try:
                await write_entries(self._producer, DROP, f"expel@{socket.gethostname()}", choice, positions)
            except BrokerError as error:
                await self._wait(retry, "the audit", error)
            else:
                break
        self._count("dropped", len(positions))
        log.warning("events_dropped", lane=self._lane, events=len(positions), reason=self._choice.drop)

    async def _wait(self, retry: Backoff, topic: str, error: Exception) -> None:
        """Wait before the next try. Raises an error that is not the broker's."""
        if not isinstance(error, BrokerError):
            raise error
        self._tries += 1
        if retry.fail():
            log.warning(
                "removed_unwritten", lane=self._lane, topic=topic, error=str(error), hint="the write is repeated"
            )
        await retry.wait()

    def _count(self, action: str, events: int) -> None:
        metrics.EXPEL_REMOVED.labels(self._pipe, self._destination, action).inc(events)


def _readdress(record: Record, pipe: str, destination: str, now: int) -> Record:
    original, state = unwrap(record)
    return wrap(original, replace(state, pipe=pipe, destination=destination), now, record.header(FAILURES))
