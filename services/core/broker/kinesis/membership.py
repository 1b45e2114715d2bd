"""One member of a group: keeps its leases alive, takes its share, drains before it lets go. Independent of who polls when."""

import asyncio
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from services.core import metrics
from services.core.broker.contract import OnRevoke, Start, start_in
from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.kinesis.backlog import Backlog
from services.core.broker.kinesis.held import Held
from services.core.broker.kinesis.lease_table import LeaseTable
from services.core.broker.kinesis.leases import OLDEST, Begin, Lease, Watch, by_stream, new_rows, old_rows, plan
from services.core.broker.kinesis.read_budget import Polls, ReadBudget
from services.core.broker.kinesis.shards import Shard
from services.core.broker.kinesis.timing import Timing
from services.core.broker.record import TopicPartition
from services.core.broker.trouble import Trouble, end_tasks

log = structlog.get_logger()

_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as it is now. name: of this life of it; one that is deleted and made again has another. made_ms: when it was."""

    name: str
    shards: tuple[Shard, ...]
    retention_ms: int
    made_ms: int = 0


class Side(Protocol):
    """What a membership needs of the world; in tests a simulated one."""

    @property
    def table(self) -> LeaseTable: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def budget(self) -> ReadBudget: ...

    def clock(self) -> float:
        """Seconds, never set back, going on during a suspend."""

    def now_ms(self) -> int:
        """The service's wall clock, or a little less: records have their times of arrival by it."""

    async def next_second(self, topic: str) -> int:
        """A time of arrival (ms): what was stored before this call has an earlier one, what is stored after it none earlier.

        Raises UnknownTopic, Unavailable.
        """

    async def look(self, topic: str) -> Stream:
        """The stream as it is now. Raises UnknownTopic, Unavailable."""

    async def read(self, held: Held, stream: Stream) -> None:
        """Read the shard into `held.backlog` until it ends or this is cancelled; wakes whoever polls."""

    def wake(self) -> None:
        """Something happened that poll should look at."""


class Membership:
    """`held` is what may be polled and committed. polls: whether it is."""

    def __init__(self, side: Side, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke) -> None:
        self._side, self._group, self._topics = side, group, tuple(sorted(set(topics)))
        self._start, self._on_revoke = start, on_revoke
        self.member = uuid.uuid4().hex
        self.held: dict[TopicPartition, Held] = {}
        self.polls = Polls()
        self._streams: dict[str, Stream] = {}
        self._looked: dict[str, int] = {}
        """When each stream was asked for as it is in `_streams`, ms."""
        self._watch = Watch(side.timing.lease)
        self._synced = -side.timing.sync
        self._trouble = Trouble(group)
        self._leaving = False
        self._lost: frozenset[TopicPartition] = frozenset()
        """Gone without a drain, and on_revoke does not know yet."""
        self._draining: frozenset[TopicPartition] = frozenset()
        self._drain: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._beaten = side.clock()

    async def join(self) -> None:
        """Become a member, take what is free, stay one until `leave`. Raises UnknownTopic, Unavailable."""
        await self.beat()
        self._beats = asyncio.create_task(self._run(), name=f"kinesis-group-{self._group}")

    async def leave(self) -> None:
        """Drain everything, keeping the leases alive; then stop and free it."""
        self._leaving = True
        try:
            if self._drain is not None:
                await self._drain
            leaving, self._lost = frozenset(self.held) | self._lost, frozenset()
            if leaving:
                await self._revoke(leaving)
        finally:
            await end_tasks(self._drain, self._beats)
            for held in self.held.values():
                await held.stop_reading()
            with suppress(BrokerError, TimeoutError):  # what is not freed is free after the lease time
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.gather(*(held.write(self._let_go) for held in self.held.values()))
            for held in self.held.values():
                held.close()
            self.held.clear()
        self._trouble.raise_fatal()

    def take_failure(self) -> BaseException | None:
        """What poll should raise, see `Trouble`."""
        return self._trouble.take(is_alive=self._side.clock() < self._beaten + self._side.timing.lease)

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract, one write per shard."""
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

    async def _run(self) -> None:
        """Beat until cancelled. What fails is kept for poll to raise, and tried again."""
        while True:
            await asyncio.sleep(self._side.timing.beat)
            try:
                await self.beat()
            except BrokerError as error:
                self._trouble.note(error)
            except Exception as error:
                self._end(error)
                return

    async def beat(self) -> None:
        """Look at all leases; renew, take, ask, hand over. One at a time."""
        side = self._side
        if side.clock() - self._synced >= side.timing.sync:
            await self._look()
            for topic in self._topics:
                self._tell_held(topic)
        rows = await side.table.rows()
        if self._synced_is_due:
            rows = await self._sync_rows(rows)
        now = side.clock()
        names = {stream.name: topic for topic, stream in self._streams.items()}
        ours = {TopicPartition(names[row.stream], row.shard): row for row in rows.values() if row.stream in names}
        free = self._watch.look(ours.values(), now)
        asked = self._note_changes(ours)
        await self._renew(now)
        self._start_drain(asked | {source for source, held in self.held.items() if held.backlog.is_finished})
        for source, row in ours.items():
            if row.owner == self.member == row.holder:
                await self._begin(source, row)
        if not self._leaving:
            await self._claim(ours, free)
        self._beaten = now
        side.wake()  # a lease that had run out may be ours still: what is read of it can be returned again

    @property
    def _synced_is_due(self) -> bool:
        return self._side.clock() - self._synced >= self._side.timing.sync

    async def _look(self) -> None:
        for topic in self._topics:
            try:
                looked = self._side.now_ms()
                self._streams[topic] = await self._side.look(topic)
                self._looked[topic] = looked
            except BrokerError as error:
                if self._beats is None:
                    raise
                self._trouble.note(error)  # the others go on

    def _tell_held(self, topic: str) -> None:
        """What the last look at the stream says to those who hold its shards."""
        if (stream := self._streams.get(topic)) is None:
            return
        still_open = {shard.number for shard in stream.shards if shard.is_open}
        for source, held in self.held.items():
            if source.topic == topic and held.row.stream == stream.name:
                held.retention = stream.retention_ms
                if source.partition in still_open:
                    held.open_ms = self._looked[topic]

    async def _sync_rows(self, rows: dict[str, Lease]) -> dict[str, Lease]:
        """Rows for shards that may be read from here on, none for those that aged out; read again when there are any."""
        changed = False
        for topic, stream in self._streams.items():
            known = by_stream(rows, stream.name)
            begin, begun_ms = (OLDEST, 0) if known else await self._begin_group(topic, stream, rows)
            for row in new_rows(stream.name, stream.shards, known, begin, self._looked[topic], begun_ms):
                await self._side.table.add(row)
                changed = True
            changed |= await self._remove(old_rows(stream.shards, known))
        self._synced = self._side.clock()
        return await self._side.table.rows() if changed else rows

    async def _begin_group(self, topic: str, stream: Stream, rows: Mapping[str, Lease]) -> tuple[Begin, int]:
        """Where the group begins with a stream of which it has no rows, and since when (ms) it misses nothing in it.

        As it was told to; but with all of a stream that was made anew: what came before anybody noticed is for the group, too.
        """
        family = stream.name.rpartition(":")[0]
        before = [row for row in rows.values() if row.stream.rpartition(":")[0] == family]
        if before:
            self._tell_made_anew(topic, before)
            return OLDEST, stream.made_ms or self._side.now_ms()
        start = start_in(topic, self._start)
        if isinstance(start, datetime):
            return Begin("date", max(0, round(start.timestamp() * 1000))), self._side.now_ms()
        if start == "earliest":
            return OLDEST, self._side.now_ms()
        end = await self._side.next_second(topic)
        return Begin("arrival", end), end

    def _tell_made_anew(self, topic: str, before: Collection[Lease]) -> None:
        last = [row for row in before if row.stream == max(row.stream for row in before)]
        metrics.BROKER_MADE_ANEW.labels(self._group, topic).inc()
        log.warning(
            "stream_made_anew",
            group=self._group,
            stream=topic,
            shards_not_done=sorted(row.shard for row in last if not row.is_done),
            settled_ms=min((row.settled for row in last if not row.is_done), default=None),
            hint="what the group had not processed of the deleted stream, at most what arrived since settled_ms, went with it; "
            "the new one is read from its beginning",
        )

    async def _remove(self, rows: Collection[Lease]) -> bool:
        """Whether any was removed. Nothing waits for it: without the right to, the table grows."""
        for row in rows:
            try:
                await self._side.table.remove(row)
            except BrokerError as error:
                hint = "Try: dynamodb:DeleteItem among this service's rights"
                log.warning("lease_row_not_removed", group=self._group, lease=row.key, error=str(error), hint=hint)
                return False
        return bool(rows)

    def _note_changes(self, ours: Mapping[TopicPartition, Lease]) -> set[TopicPartition]:
        """Notice what is gone; gives what others ask for."""
        asked = set()
        for source, held in list(self.held.items()):
            row = ours.get(source)
            if source in self._draining:
                continue  # whoever drains it writes it last
            if row is None or row.key != held.row.key or row.holder != self.member:
                self._lose(held)
            elif row.owner != self.member:
                asked.add(source)
        return asked

    def _lose(self, held: Held) -> None:
        held.until = 0.0
        if self.held.pop(held.source, None) is not None:
            self._lost |= {held.source}
        held.close()

    async def _renew(self, now: float) -> None:
        due = [held for held in self.held.values() if now - held.renewed >= self._side.timing.lease / 3]
        for held, answer in zip(
            due, await asyncio.gather(*(held.renew() for held in due), return_exceptions=True), strict=True
        ):
            if isinstance(answer, BrokerError):
                self._trouble.note(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif not answer and held.source not in self._draining:
                self._lose(held)

    async def _claim(self, ours: Mapping[TopicPartition, Lease], free: frozenset[str]) -> None:
        claims = plan(ours.values(), free, self.member)
        sources = {row.key: source for source, row in ours.items()}
        for row in claims.take:
            await self._begin(sources[row.key], row)
        for row in claims.ask:
            await self._side.table.replace(row, row.asked_by(self.member))

    async def _begin(self, source: TopicPartition, row: Lease) -> None:
        """Take it, or begin with what is ours already. Not before on_revoke has finished with an earlier ownership."""
        if source in self.held or source in self._lost or source in self._draining or row.is_done or self._leaving:
            return
        side = self._side
        sent, new = side.clock(), row.taken_by(self.member)
        if not await side.table.replace(row, new):
            return
        row = new._replace(counter=row.counter + 1)
        stream, lease = self._streams[source.topic], side.timing.lease
        held = Held(
            Backlog(source, side.budget, self.polls),
            self.member,
            row,
            sent + lease,
            side.table,
            side.clock,
            lease,
            stream.retention_ms,
        )
        self.held[source] = held
        self._tell_held(source.topic)
        held.reading = asyncio.create_task(self._read(held, stream), name=f"kinesis-shard-{source.partition}")

    async def _read(self, held: Held, stream: Stream) -> None:
        try:
            await self._side.read(held, stream)
        except Exception as error:
            self._end(error)

    def _start_drain(self, leaving: set[TopicPartition]) -> None:
        """Tell on_revoke of what is lost, drain what leaves. One at a time; what comes meanwhile waits."""
        if self._drain is not None and not self._drain.done():
            return
        leaving = {source for source in leaving if source in self.held} if not self._leaving else set()
        if self._lost or leaving:
            self._draining, self._lost = self._lost | leaving, frozenset()
            self._drain = asyncio.create_task(self._give_up(frozenset(leaving)), name="kinesis-drain")

    async def _give_up(self, leaving: frozenset[TopicPartition]) -> None:
        try:
            await self._revoke(self._draining)
            for source in leaving:
                await self._release(source)
        except BrokerError as error:  # a later beat finds it as it is in the table
            self._trouble.note(error)
        finally:
            self._draining = frozenset()

    async def _release(self, source: TopicPartition) -> None:
        held = self.held[source]
        await held.stop_reading()
        finished = held.backlog.is_finished
        try:
            await held.write(self._finish if finished else self._let_go)
        finally:
            held.until = 0.0
            held.close()
            self.held.pop(source, None)
        if finished:
            self._synced = -self._side.timing.sync  # its children may begin

    def _let_go(self, row: Lease) -> Lease:
        return row.left_by(self.member)

    def _finish(self, row: Lease) -> Lease:
        return row._replace(owner=None, draining=None, is_done=True)

    async def _revoke(self, sources: frozenset[TopicPartition]) -> None:
        for source in sources:
            if source in self.held:
                self.held[source].revoking = True
        await self._trouble.revoke(self._on_revoke, sources, self._side.timing.drain)
        self._side.wake()  # what on_revoke raised is for poll

    def _end(self, error: Exception) -> None:
        self._trouble.end(error)
        self._side.wake()
