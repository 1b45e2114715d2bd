"""One member of a group: renews its leases, acquires its share, drains before it releases. Independent of polling."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Protocol

import structlog

from services.core import metrics
from services.core.broker.contract import OnRevoke, Start, start_in
from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import (
    OLDEST,
    HeldLease,
    Lease,
    LeaseExpiry,
    LeaseTable,
    StartPosition,
    by_stream,
    new_rows,
    old_rows,
    plan_leases,
)
from services.core.broker.kinesis.prefetch import Backlog, PollActivity, ReadBudget
from services.core.broker.lease_member import LeaseMember
from services.core.broker.record import TopicPartition

log = structlog.get_logger()

_LEAVE_SECONDS = 5.0


class MemberBackend(Protocol):
    """What a membership needs of AWS; tests simulate it."""

    @property
    def table(self) -> LeaseTable: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def budget(self) -> ReadBudget: ...

    def clock(self) -> float:
        """Seconds, never set back, running during a suspend."""

    def now_ms(self) -> int:
        """The service's wall clock, or a little less. Arrival times are by it."""

    async def next_second(self, topic: str) -> int:
        """A time (ms) between the arrival of records stored before this call and of records stored after it.

        Raises UnknownTopic, Unavailable.
        """

    async def describe(self, topic: str) -> Stream:
        """The stream now. Raises UnknownTopic, Unavailable."""

    async def read(self, held: HeldLease, stream: Stream) -> None:
        """Read the shard into `held.backlog` until it ends or this is cancelled. Wakes poll."""

    def wake(self) -> None:
        """Poll should check again."""


class KinesisMembership(LeaseMember[HeldLease]):
    """polls: whether the consumer polls."""

    def __init__(
        self, backend: MemberBackend, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke
    ) -> None:
        super().__init__(group, topics, start, on_revoke, backend.timing.drain)
        self._backend = backend
        self.polls = PollActivity()
        self._streams: dict[str, Stream] = {}
        self._described_ms: dict[str, int] = {}
        """When each of `_streams` was requested, ms."""
        self._expiry = LeaseExpiry(backend.timing.lease)
        self._synced = -backend.timing.sync
        self._heartbeat_at = backend.clock()

    @property
    def is_alive(self) -> bool:
        return self._backend.clock() < self._heartbeat_at + self._backend.timing.lease

    def _wake(self) -> None:
        self._backend.wake()

    async def _wait(self) -> None:
        await asyncio.sleep(self._backend.timing.heartbeat)

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        held = {source: self.held[source] for source in processed if source in self.held}
        refused = {TopicPartition(*source) for source in processed if source not in held}
        refused |= {source for source, one in held.items() if processed[source] < one.begun}
        todo = [source for source in held if source not in refused]
        answers = await asyncio.gather(
            *(held[source].commit(processed[source]) for source in todo), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        refused |= {source for source, answer in zip(todo, answers, strict=True) if not answer}
        if refused:
            raise NotOwner(frozenset(refused))

    async def heartbeat(self) -> None:
        """Read all leases, then renew, acquire, request and release."""
        backend = self._backend
        if backend.clock() - self._synced >= backend.timing.sync:
            await self._describe_streams()
            for topic in self._topics:
                self._update_held(topic)
        rows = await backend.table.rows()
        if self._is_sync_due:
            rows = await self._sync_rows(rows)
        now = backend.clock()
        names = {stream.name: topic for topic, stream in self._streams.items()}
        ours = {TopicPartition(names[row.stream], row.shard): row for row in rows.values() if row.stream in names}
        free = self._expiry.find_free(ours.values(), now)
        requested = self._find_requested(ours)
        await self._renew(now)
        self._start_drain(requested | {source for source, held in self.held.items() if held.backlog.is_finished})
        for source, row in ours.items():
            if row.owner == self.member == row.holder:
                await self._acquire(source, row)
        if not self._leaving:
            await self._balance(ours, free)
        self._heartbeat_at = now
        backend.wake()  # an expired lease may still be ours: then its records can be returned again

    @property
    def _is_sync_due(self) -> bool:
        return self._backend.clock() - self._synced >= self._backend.timing.sync

    async def _describe_streams(self) -> None:
        for topic in self._topics:
            try:
                asked_ms = self._backend.now_ms()
                self._streams[topic] = await self._backend.describe(topic)
                self._described_ms[topic] = asked_ms
            except BrokerError as error:
                if self._heartbeats is None:
                    raise
                self._background.record(error)  # the other streams go on

    def _update_held(self, topic: str) -> None:
        """Copy the stream's retention and open shards to its held leases."""
        if (stream := self._streams.get(topic)) is None:
            return
        still_open = {shard.number for shard in stream.shards if shard.is_open}
        for source, held in self.held.items():
            if source.topic == topic and held.row.stream == stream.name:
                held.retention = stream.retention_ms
                if source.partition in still_open:
                    held.open_ms = self._described_ms[topic]

    async def _sync_rows(self, rows: dict[str, Lease]) -> dict[str, Lease]:
        """Add rows for shards to be read from now on, remove rows of shards that aged out. Reads the rows again after
        a change."""
        changed = False
        for topic, stream in self._streams.items():
            known = by_stream(rows, stream.name)
            start, begun_ms = (OLDEST, 0) if known else await self._begin_group(topic, stream, rows)
            for row in new_rows(stream.name, stream.shards, known, start, self._described_ms[topic], begun_ms):
                await self._backend.table.add(row)
                changed = True
            changed |= await self._remove(old_rows(stream.shards, known))
        self._synced = self._backend.clock()
        return await self._backend.table.rows() if changed else rows

    async def _begin_group(self, topic: str, stream: Stream, rows: Mapping[str, Lease]) -> tuple[StartPosition, int]:
        """Where a group starts in a stream without rows, and from when (ms) it misses nothing.

        It starts as requested; in a stream that was created again it starts at the beginning, since records that came
        before anybody noticed are for the group too.
        """
        family = stream.name.rpartition(":")[0]
        before = [row for row in rows.values() if row.stream.rpartition(":")[0] == family]
        if before:
            self._report_recreated(topic, before)
            return OLDEST, stream.made_ms or self._backend.now_ms()
        start = start_in(topic, self._start)
        if isinstance(start, datetime):
            return StartPosition("date", max(0, round(start.timestamp() * 1000))), self._backend.now_ms()
        if start == "earliest":
            return OLDEST, self._backend.now_ms()
        end = await self._backend.next_second(topic)
        return StartPosition("arrival", end), end

    def _report_recreated(self, topic: str, before: Collection[Lease]) -> None:
        last = [row for row in before if row.stream == max(row.stream for row in before)]
        metrics.BROKER_MADE_ANEW.labels(self.group, topic).inc()
        log.warning(
            "stream_made_anew",
            group=self.group,
            stream=topic,
            shards_not_done=sorted(row.shard for row in last if not row.is_done),
            settled_ms=min((row.settled for row in last if not row.is_done), default=None),
            hint="the stream was deleted and created again. Of the old stream, at most the records that arrived since settled_ms "
            "are lost. The new stream is read from its beginning",
        )

    async def _remove(self, rows: Collection[Lease]) -> bool:
        """Whether any was removed. Without the right to remove rows the table only grows."""
        for row in rows:
            try:
                await self._backend.table.remove(row)
            except BrokerError as error:
                hint = "Try: dynamodb:DeleteItem among this service's rights"
                log.warning("lease_row_not_removed", group=self.group, lease=row.key, error=str(error), hint=hint)
                return False
        return bool(rows)

    def _find_requested(self, ours: Mapping[TopicPartition, Lease]) -> set[TopicPartition]:
        """Find lost leases. Returns those that others request."""
        requested = set()
        for source, held in list(self.held.items()):
            row = ours.get(source)
            if source in self._draining:
                continue  # its drain writes it last
            if row is None or row.key != held.row.key or row.holder != self.member:
                self._lose(held)
            elif row.owner != self.member:
                requested.add(source)
        return requested

    def _lose(self, held: HeldLease) -> None:
        held.until = 0.0
        if self.held.pop(held.source, None) is not None:
            self._lost |= {held.source}
        held.close()

    async def _renew(self, now: float) -> None:
        due = [held for held in self.held.values() if now - held.renewed >= self._backend.timing.lease / 3]
        for held, answer in zip(
            due, await asyncio.gather(*(held.renew() for held in due), return_exceptions=True), strict=True
        ):
            if isinstance(answer, BrokerError):
                self._background.record(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif not answer and held.source not in self._draining:
                self._lose(held)

    async def _balance(self, ours: Mapping[TopicPartition, Lease], free: frozenset[str]) -> None:
        planned = plan_leases(ours.values(), free, self.member)
        sources = {row.key: source for source, row in ours.items()}
        for row in planned.acquire:
            await self._acquire(sources[row.key], row)
        for row in planned.request:
            await self._backend.table.replace(row, row.requested_by(self.member))

    async def _acquire(self, source: TopicPartition, row: Lease) -> None:
        """Acquire a lease, or continue with one of ours. Not before on_revoke has finished with an earlier ownership."""
        if source in self.held or source in self._lost or source in self._draining or row.is_done or self._leaving:
            return
        backend = self._backend
        sent, new = backend.clock(), row.acquired_by(self.member)
        if not await backend.table.replace(row, new):
            return
        row = new._replace(counter=row.counter + 1)
        stream, lease = self._streams[source.topic], backend.timing.lease
        held = HeldLease(
            Backlog(source, backend.budget, self.polls),
            self.member,
            row,
            sent + lease,
            backend.table,
            backend.clock,
            lease,
            stream.retention_ms,
        )
        self.held[source] = held
        self._update_held(source.topic)
        held.reading = asyncio.create_task(self._read(held, stream), name=f"kinesis-shard-{source.partition}")

    async def _read(self, held: HeldLease, stream: Stream) -> None:
        try:
            await self._backend.read(held, stream)
        except Exception as error:
            self._fail(error)

    async def _release(self, sources: frozenset[TopicPartition]) -> None:
        for source in sources:
            held = self.held[source]
            await held.stop_reading()
            held.is_placed = False  # while the table is written, the shard is in no assignment any more
            finished = held.backlog.is_finished
            try:
                await held.write(_finish_row if finished else self._release_row)
            finally:
                held.until = 0.0
                held.close()
                self.held.pop(source, None)
            if finished:
                self._synced = -self._backend.timing.sync  # its children may start

    async def _release_all(self) -> None:
        for held in self.held.values():
            await held.stop_reading()
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await asyncio.gather(*(held.write(self._release_row) for held in self.held.values()))
        for held in self.held.values():
            held.close()
        self.held.clear()

    def _release_row(self, row: Lease) -> Lease:
        return row.released_by(self.member)


def _finish_row(row: Lease) -> Lease:
    return row._replace(owner=None, draining=None, is_done=True)
