"""Writes events that were not delivered to side topics: the retry topic, the pipe's dead letters, its parked topic.

An event is settled when its record there is durable. A write is repeated until it succeeds; until then the event is neither
dropped nor settled.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from services.core import metrics
from services.core.backoff import Backoff
from services.core.broker.errors import RecordTooLarge
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Record, TopicPartition, estimate_size
from services.core.http.failure import Failure
from services.core.ledger.report import Outcome, Span, due_span, since_span
from services.core.pipe_file.topic_names import RETRY_IN, dead_letter_topic, parked_topic
from services.core.undelivered import dead_letter
from services.core.undelivered.failed_attempts import PARTIAL, pack_attempts, parse_attempts
from services.core.undelivered.retry_state import BREAKER_OPEN, FAILURES, RetryState, state_of, wrap
from services.expel.delivery import Delivery, Unreadable
from services.expel.metrics import NODE, LaneMetrics
from services.expel.retry_policy import WINDOW_OVER, RetrySchedule

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.25, 10.0
_BATCH = 500


class SideRecord(NamedTuple):
    """A record for a side topic, and the event that is settled once the record is durable.

    weight: bytes that the event counts in its lane. events: how many events the record stands for; several for a damaged
    batch. attempted: the event was in a request, and later events of its key wait for it. disowned: the event's partition was
    revoked since, so the record settles nothing. due: when the event comes back, if it does.
    """

    record: Record
    original: Record
    source: TopicPartition
    offset: int
    weight: float
    reason: str
    attempted: bool
    events: int = 1
    disowned: bool = False
    due: Span | None = None


class SideTopicWriter:
    """One lane's writer during one membership. Its methods do not wait. `stored` is called with the durable records."""

    def __init__(
        self,
        producer: Producer,
        pipe: str,
        destination: str,
        version: str,
        schedule: RetrySchedule,
        lane_metrics: LaneMetrics,
        stored: Callable[[Sequence[SideRecord]], None],
    ) -> None:
        self._metrics, self._stored = lane_metrics, stored
        self._dead_letters = DeadLetterWriter(pipe, destination, version)
        self._retries = RetryWriter(pipe, destination, schedule)
        self._dead = Outbox(producer, dead_letter_topic(pipe), self._settle_dead, shorten)
        self._retry_in = Outbox(producer, RETRY_IN, self._settle_retries, self._write_too_large)
        self._parked = Outbox(producer, parked_topic(pipe), self._settle_parked, self._write_too_large)
        self._all = (self._dead, self._retry_in, self._parked)
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        """The number of records that are not durable yet."""
        return sum(map(len, self._all))

    @property
    def tries(self) -> int:
        """The number of appends that ended, well or not."""
        return sum(outbox.tries for outbox in self._all)

    def open(self, group: asyncio.TaskGroup) -> None:
        """From now on tasks run in this group."""
        self._group = group

    def write_retries(self, delivery: Delivery, failures: Mapping[int, Failure]) -> None:
        """Write these events (by index) to the retry topic, or to the dead letters when their window is over."""
        records, over = self._retries.make(delivery, failures, self._metrics.now_ms())
        self._add(self._retry_in, records)
        self.write_dead_letters(delivery, over)

    def write_parked(self, delivery: Delivery, reason: str) -> None:
        """Write all events to the parked topic. reason: of the pause."""
        self._add(self._parked, self._retries.make_parked(delivery, reason, self._metrics.now_ms()))

    def write_dead_letters(self, delivery: Delivery, failures: Mapping[int, Failure]) -> None:
        """Write these events (by index) to the dead letters."""
        self._add(self._dead, self._dead_letters.from_failures(delivery, failures, self._metrics.now_ms()))

    def write_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable]) -> float:
        """Write these records to the dead letters. Returns their weight in the lane."""
        records = self._dead_letters.from_unreadable(source, unreadable, self._metrics.now_ms())
        self._add(self._dead, records)
        return sum(record.weight for record in records)

    def holds(self, sources: frozenset[TopicPartition]) -> bool:
        """Whether events of these partitions are not durable yet."""
        return any(outbox.holds(sources) for outbox in self._all)

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """Events of these partitions are still written, but settle nothing."""
        for outbox in self._all:
            outbox.disown(sources)

    def stop(self) -> None:
        """Write no more. What is not stored is not settled."""
        for outbox in self._all:
            outbox.stop()

    def _add(self, outbox: "Outbox", records: Sequence[SideRecord]) -> None:
        assert self._group is not None
        outbox.add(records, self._group)

    def _write_too_large(self, record: SideRecord) -> None:
        """The record with its retry state is too large: write a dead letter instead."""
        detail = "the record with its retry state is larger than the broker accepts"
        dead = self._dead_letters.from_side_record(record, "too_large", detail, self._metrics.now_ms())
        self._add(self._dead, [dead])

    def _settle_dead(self, records: Sequence[SideRecord]) -> None:
        self._report("dead", records)
        for record in records:
            self._metrics.count(metrics.EXPEL_DEAD, record.events, record.reason)
        self._stored(records)

    def _settle_parked(self, records: Sequence[SideRecord]) -> None:
        for record in records:
            self._metrics.count(metrics.EXPEL_PARKED, 1, record.reason)
        self._report("parked", records)
        self._stored(records)

    def _report(self, outcome: Outcome, records: Sequence[SideRecord]) -> None:
        """From now on, but not before they are due: another process, with another clock, wrote that time."""
        now, since = self._metrics.now_ms(), dict[Span, list[Record]]()
        for record in records:
            state = state_of(record.original)
            since.setdefault(since_span(now, state.due if state is not None else 0), []).append(record.original)
        for span, originals in since.items():
            self._metrics.ledger.add(outcome, originals, span)

    def _settle_retries(self, records: Sequence[SideRecord]) -> None:
        by_due: dict[Span | None, list[Record]] = {}
        for record in records:
            self._metrics.count(metrics.EXPEL_HANDED_OVER, 1, record.reason)
            by_due.setdefault(record.due, []).append(record.original)
        for due, originals in by_due.items():
            self._metrics.ledger.add("retrying", originals, due)
        self._stored(records)


class Outbox:
    """The records that one lane writes to one side topic. The lane bounds their number: it polls nothing while it is full.

    `stored` is called with durable records. `too_large` gets a record that the broker does not accept. It returns a record to
    store instead, or None when the event is written to another topic. The task belongs to `group` and ends when idle.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        stored: Callable[[Sequence[SideRecord]], None],
        too_large: Callable[[SideRecord], SideRecord | None],
    ) -> None:
        self._producer, self._topic, self._stored, self._too_large = producer, topic, stored, too_large
        self._waiting: list[SideRecord] = []
        self.tries = 0
        """The number of appends that ended, well or not."""
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, records: Sequence[SideRecord], group: asyncio.TaskGroup) -> None:
        self._waiting += records
        if self._task is None and self._waiting:
            self._task = group.create_task(self._run(), name=f"outbox {self._topic}")

    def holds(self, sources: frozenset[TopicPartition]) -> bool:
        """Whether records for events of these partitions are not stored yet."""
        return any(record.source in sources for record in self._waiting)

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """Records for events of these partitions are still written, but settle nothing."""
        self._waiting = [
            record._replace(disowned=True) if record.source in sources else record for record in self._waiting
        ]

    def stop(self) -> None:
        """Write no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        try:
            while self._waiting:
                batch = self._waiting[:_BATCH]
                failed = await send_by_key(self._producer, self._topic, [record.record for record in batch])
                self.tries += 1
                self._settle(len(batch), failed)
                if not failed:
                    if retry.failures:
                        log.info("outbox_written_again", topic=self._topic)
                    retry.reset()
                    continue
                error = next(iter(failed.values()))
                if retry.fail() and not isinstance(error, RecordTooLarge):
                    log.error(
                        "outbox_unavailable",
                        topic=self._topic,
                        waiting=len(self._waiting),
                        error=str(error),
                        hint="nothing is lost: these events stay uncommitted. Try: check the broker and the topic",
                    )
                await retry.wait()
        finally:
            self._task = None

    def _settle(self, count: int, failed: dict[int, Exception]) -> None:
        """Settle the stored ones of the first `count` records. The others stay in front."""
        batch = self._waiting[:count]
        again = [
            self._too_large(record) if isinstance(failed[index], RecordTooLarge) else record
            for index, record in enumerate(batch)
            if index in failed
        ]
        self._waiting[:count] = [record for record in again if record is not None]
        stored = [record for index, record in enumerate(batch) if index not in failed]
        if stored:
            self._stored(stored)


@dataclass(frozen=True, slots=True)
class RetryWriter:
    """Makes the records of one destination for the retry topic and the parked topic: the event and the state of its attempts.

    A parked event keeps its state, and continues with it after the replay. `due` is 0 for an event that was never in the retry
    topic. So a crash between write and commit makes duplicates that `RetryTopicFilter` finds.
    """

    pipe: str
    destination: str
    schedule: RetrySchedule

    def make(
        self, delivery: Delivery, failures: Mapping[int, Failure], now_ms: int
    ) -> tuple[list[SideRecord], dict[int, Failure]]:
        """Records for the retry topic, and the events (by index) whose window is over, with the reason."""
        positions = delivery.positions()
        records: list[SideRecord] = []
        over: dict[int, Failure] = {}
        for index, failure in failures.items():
            source, offset, _ = positions[index]
            event = delivery.records[index]
            state = self._add_attempts(delivery, event, source, offset)
            wait = self.schedule.next_wait(state.rounds, failure)
            last = _last_failure(delivery, state) if failure.reason == BREAKER_OPEN else ""
            if wait is None:
                over[index] = Failure(WINDOW_OVER, _describe_end(failure, last), recoverable=False)
                continue
            due = now_ms + int(1000 * wait)
            state = replace(
                state,
                rounds=state.rounds + 1,
                first_failure=state.first_failure or now_ms,
                due=due,
                reason=failure.reason,
                detail=f"{failure.detail}{_LAST_FAILURE}{last}" if last else failure.detail,
            )
            record = _wrap(delivery, event, state, source, offset, failure.reason, now_ms)
            records.append(record._replace(due=due_span(due, due - now_ms)))
        return records, over

    def make_parked(self, delivery: Delivery, reason: str, now_ms: int) -> list[SideRecord]:
        """Records for the parked topic. reason: of the pause."""
        records = []
        for (source, offset, _), event in zip(delivery.positions(), delivery.records, strict=True):
            state = self._add_attempts(delivery, event, source, offset, "paused", reason)
            records.append(_wrap(delivery, event, state, source, offset, reason, now_ms))
        return records

    def _add_attempts(
        self,
        delivery: Delivery,
        event: Record,
        source: TopicPartition,
        offset: int,
        reason: str = "",
        detail: str = "",
    ) -> RetryState:
        """The event's state with the delivery's attempts; a new state for an event without one."""
        place = f"{source.topic}:{source.partition}:{offset}"
        earlier = state_of(event) or RetryState("", "", 0, 0, 0, 0, reason, detail, place, 0)
        return replace(
            earlier,
            pipe=self.pipe,
            destination=self.destination,
            attempts=earlier.attempts + delivery.attempts,
            first_failure=earlier.first_failure or delivery.first_failure,
            time=event.timestamp,
        )


_LAST_FAILURE = "; last failure: "


def _last_failure(delivery: Delivery, state: RetryState) -> str:
    """Of an event whose round ends untried: reason and detail of its last attempt, as far as they are known. "" without any."""
    if state.reason == BREAKER_OPEN:
        known = state.detail.partition(_LAST_FAILURE)[2]
    else:
        known = f"{state.reason}: {state.detail}" if state.reason else ""
    if delivery.failures and known.partition(":")[0] != (newest := delivery.failures[-1].reason):
        return newest
    return known


def _describe_end(failure: Failure, last: str) -> str:
    """The detail of a dead letter whose window is over. last: see `_last_failure`; empty for a round that was tried."""
    if not last:
        return f"{failure.reason}: {failure.detail}"
    return f"{last}; the last round was not tried, because the circuit breaker was open"


def _wrap(
    delivery: Delivery,
    event: Record,
    state: RetryState,
    source: TopicPartition,
    offset: int,
    reason: str,
    now_ms: int,
) -> SideRecord:
    weight, disowned = delivery.weight / len(delivery), source in delivery.disowned
    record = wrap(event, state, now_ms, _failures(delivery, event, reason))
    return SideRecord(record, event, source, offset, weight, reason, True, disowned=disowned)


def _failures(delivery: Delivery, event: Record, reason: str) -> bytes:
    """All failed attempts that are known of one event, packed. reason: of its last failure."""
    own = list(delivery.failures)
    if own and own[-1].reason == PARTIAL and reason not in (WINDOW_OVER, BREAKER_OPEN):
        own[-1] = own[-1].of(own[-1].at_ms, reason)
    return pack_attempts([*parse_attempts(event.header(FAILURES)), *own])


@dataclass(frozen=True, slots=True)
class DeadLetterWriter:
    """Makes the dead letters of one destination. version: of its pipe's definition."""

    pipe: str
    destination: str
    version: str = ""

    def from_failures(self, delivery: Delivery, failures: Mapping[int, Failure], now_ms: int) -> list[SideRecord]:
        """Of events (by index) that were not delivered after the delivery's attempts."""
        positions = delivery.positions()
        weight = delivery.weight / len(delivery)
        records = []
        for index, failure in failures.items():
            source, offset, _ = positions[index]
            bad = Unreadable(offset, delivery.records[index], failure.reason, failure.detail)
            attempts = _failures(delivery, bad.record, failure.reason)
            record = self._make(source, bad, delivery.attempts, delivery.first_failure, weight, now_ms, attempts)
            records.append(record._replace(disowned=source in delivery.disowned))
        return records

    def from_side_record(self, record: SideRecord, reason: str, detail: str, now_ms: int) -> SideRecord:
        """In place of a record for another side topic."""
        event = record.original
        wrapped = Record(event.key, event.value, event.timestamp, record.record.headers)
        dead = self._make(
            record.source,
            Unreadable(record.offset, wrapped, reason, detail),
            0,
            0,
            record.weight,
            now_ms,
            record.record.header(FAILURES),
        )
        return dead._replace(original=event, attempted=record.attempted, disowned=record.disowned)

    def from_unreadable(
        self, source: TopicPartition, unreadable: Sequence[Unreadable], now_ms: int
    ) -> list[SideRecord]:
        """Of records that were never attempted."""
        return [self._make(source, bad, 0, now_ms, estimate_size((bad.record,)), now_ms) for bad in unreadable]

    def _make(
        self,
        source: TopicPartition,
        bad: Unreadable,
        attempts: int,
        first_failure: int,
        weight: float,
        now_ms: int,
        failures: bytes | None = None,
    ) -> SideRecord:
        earlier = state_of(bad.record)
        original, offset = (source, bad.offset) if earlier is None else earlier.position()
        record = dead_letter.make_dead_letter(
            bad.record,
            reason=bad.reason,
            detail=bad.detail,
            node=NODE,
            pipe=self.pipe,
            version=self.version,
            destination=self.destination,
            attempts=attempts if earlier is None else attempts + earlier.attempts,
            first_failure=(0 if earlier is None else earlier.first_failure) or first_failure,
            source=original,
            offset=offset,
            now_ms=now_ms,
            failures=failures,
        )
        return SideRecord(record, bad.record, source, bad.offset, weight, bad.reason, attempts > 0, bad.events)


def shorten(record: SideRecord) -> SideRecord:
    """The dead letter without its value; the second time also without the event's headers. Its own name the stored record."""
    has_value = record.record.value is not None
    headers = tuple(header for header in record.record.headers if has_value or header[0].startswith(dead_letter.PREFIX))
    log.error(
        "dead_letter_without_value", source=record.source, offset=record.offset, reason="larger than the broker accepts"
    )
    key = record.record.key if has_value else None
    return record._replace(record=Record(key, None, record.record.timestamp, headers))
