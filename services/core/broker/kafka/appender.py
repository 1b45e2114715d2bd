"""The `Appender` of Kafka: acks=all, idempotent, uncompressed, without linger. It never retries.

An append is one record batch, or a few where the topic accepts only smaller ones. A batch in doubt is sent again under its old
sequence number, and Kafka stores it once: for each producer id and partition Kafka keeps the numbers of the last five batches,
also over a change of the leader, and answers a repeat with the offset of the first attempt.

No other batch gets that number: Kafka would take it for the repeat, answer success, and store nothing. Nor does the batch get
another number: Kafka may have it under the first. A refused repeat says nothing about the earlier attempt: most checks (min ISR,
size, rights, leadership) come before the check for repeats, and a leader that does not know the number may have been replaced
without knowing it. So a batch in doubt stays in doubt until a repeat succeeds or the producer gives it up. Then its outcome
stays unknown, and other records are sent under a new producer id.

A caller may never give a batch up, and a refusal of its number, its size or a record may never end. So after `LONGEST_DOUBT_S`
such a refusal ends the old number: the records are sent as new ones under a new producer id, and may be stored twice.

Kafka forgets the numbers `producer.id.expiration.ms` after the time of the newest record: docs/adr/0003.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import is_

from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.structs import TopicPartition

from services.core.broker.contract import Appended
from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    OutcomeUnknown,
    RecordTooLarge,
    Unavailable,
    UnknownTopic,
)
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import (
    BAD_RECORD,
    DUPLICATE_SEQUENCE,
    PRODUCER_STATE_LOST,
    TOO_LARGE,
    classify_produce,
    raise_for,
)
from services.core.broker.kafka.node_sender import NodeSender, PendingBatch
from services.core.broker.kafka.record_batch import MAX_RECORD_BYTES, Identity, Packed, pack
from services.core.broker.kafka.topic_settings import TopicLimits
from services.core.broker.record import Record, content_bytes

LONGEST_DOUBT_S = 60.0
"""Longer than one call of the producer (`AppendPolicy`): only a caller that sends the same records in a new call lasts longer."""
_LASTING = PRODUCER_STATE_LOST | TOO_LARGE | BAD_RECORD
"""Codes that each repeat may get for ever."""
_WRAP = 0x7FFFFFFF


@dataclass(slots=True)
class SequenceState:
    """One partition's numbering under one identity. `next`: the number of the batch in doubt, or of the next new one.

    doubtful: the records of the batch in doubt. doubted_at: when they came into doubt, in seconds of the event loop. given_up:
    nothing more is sent under this identity, because Kafka refuses its numbers or a batch in doubt was given up.
    """

    identity: Identity
    next: int = 0
    doubtful: Sequence[Record] = ()
    doubted_at: float = 0.0
    given_up: bool = False

    @property
    def is_free(self) -> bool:
        """Whether a new batch may take the next number."""
        return not self.doubtful and not self.given_up

    def repeated_from(self, records: Sequence[Record]) -> int | None:
        """The index of the doubtful record with which `records` begin, if all doubtful ones from there on follow; else None.

        Compared by identity: a retry passes the same objects. It leaves out the first ones when their deadline has passed.
        """
        for index, doubtful in enumerate(self.doubtful):
            if records and doubtful is records[0]:
                rest = self.doubtful[index:]
                return index if len(records) >= len(rest) and all(map(is_, rest, records)) else None
        return None

    def in_doubt(self, records: Sequence[Record]) -> int:
        """The number of `records`, from their first, that are in the batch in doubt."""
        index = self.repeated_from(records)
        return 0 if index is None else len(self.doubtful) - index

    def doubt(self, records: Sequence[Record]) -> None:
        """The batch of the next number was sent, and its outcome is unknown."""
        self.doubtful, self.doubted_at = records, asyncio.get_running_loop().time()

    def give_up_doubt(self) -> None:
        """Send the batch in doubt no more under its number."""
        self.doubtful, self.given_up = (), True

    def stored(self, count: int) -> None:
        """The broker has stored the batch of the next number, with `count` records."""
        self.next = (self.next + count) & _WRAP
        self.doubtful = ()


class Progress:
    """The outcome of one append's records so far, in order.

    `done` records are settled. The first `in_doubt` of the others may be stored: they were sent, in this append or an earlier
    one, and Kafka's answer is unknown.
    """

    def __init__(self, records: Sequence[Record], in_doubt: int = 0) -> None:
        self.records, self.in_doubt = records, in_doubt
        self.done = 0
        self._first = self._last = -1
        self._is_known = True
        self._failed: list[tuple[int, Exception]] = []

    def next_records(self, count: int) -> Sequence[Record]:
        if count == len(self.records):
            return self.records
        return self.records[self.done : self.done + count]

    def store(self, stop: int, offset: int) -> None:
        """All records before index `stop` are durable, the next unsettled one at `offset` (-1: not known)."""
        if offset >= 0:
            self._first = offset if self._first < 0 else self._first
            self._last = offset + stop - self.done - 1
        else:
            self._is_known = False
        self.in_doubt = max(0, self.in_doubt - (stop - self.done))
        self.done = stop

    def refuse(self, index: int, error: BrokerError) -> None:
        """The next record alone is not stored."""
        self._failed.append((index, error))
        self.done = index + 1

    def fail(self, error: BrokerError) -> None:
        """The append ends. The outcome of records in doubt is unknown, whatever the error; the others were not tried."""
        is_unknown = isinstance(error, OutcomeUnknown)
        unknown = error if is_unknown else OutcomeUnknown(f"sent before, without an answer; now: {error}")
        known = Unavailable(f"not tried: {error}") if is_unknown else error
        sent = self.done + self.in_doubt
        self._failed += [(index, unknown) for index in range(self.done, sent)]
        self._failed += [(index, known) for index in range(sent, len(self.records))]
        self.done = len(self.records)

    def time_out(self, text: str) -> None:
        """As `fail`: OutcomeUnknown when records are in doubt, else Unavailable."""
        self.fail(OutcomeUnknown(text) if self.in_doubt else Unavailable(text))

    def appended(self) -> Appended:
        """The answer. Raises the error when all records failed with the same kind of it."""
        failed = self._failed
        if len(failed) == len(self.records) and failed and len({type(error) for _, error in failed}) == 1:
            raise failed[0][1]
        first, last = (self._first, self._last) if self._is_known else (-1, -1)
        return Appended(first, last, tuple(failed))


_LIMIT_AGE = 60.0
_IGNORED_TIMEOUT_MS = 60_000  # only transactions use it


@dataclass(slots=True)
class _Target:
    """One partition: its numbering, and the lock by which its appends follow each other."""

    topic: str
    partition: int
    sequence: SequenceState | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return f"{self.topic}[{self.partition}]"


class _BadRecord(Exception):
    """The broker refused a batch because of one record, without naming it."""

    def __init__(self, error: BrokerError) -> None:
        super().__init__(str(error))
        self.error = error


class KafkaAppender:
    def __init__(self, cluster: Cluster, limits: TopicLimits, others: Collection[str] = ()) -> None:
        """others: the topics of others, whose records get no header of ours."""
        self._cluster, self._limits, self._others = cluster, limits, frozenset(others)
        self._targets: dict[tuple[str, int], _Target] = {}
        self._senders: dict[int, NodeSender] = {}
        self._identity: Identity | None = None
        self._identifying = asyncio.Lock()
        self._tracking = asyncio.Lock()
        self._closed = False

    async def partition_count(self, topic: str) -> int:
        """As in the contract; at most `Timing.metadata` seconds old."""
        client = await self._cluster.client()
        if partitions := client.cluster.partitions_for_topic(topic):
            return len(partitions)
        async with self._tracking:  # first come, first served: callers keep their order
            if not client.cluster.partitions_for_topic(topic) and not await self._cluster.track(topic):
                raise UnknownTopic(f"Kafka has no topic {topic!r}. Try: declare it under `streams:` in the pipe file")
            return len(client.cluster.partitions_for_topic(topic) or ())

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract. Appends to one partition wait for each other; those to several partitions share requests.

        A batch that an earlier append left in doubt is repeated unchanged; until that succeeds its outcome is unknown.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        target = self._targets.get((topic, partition))
        progress = Progress(records, target.sequence.in_doubt(records) if target and target.sequence else 0)
        try:
            if self._closed:
                raise BrokerClosed("the Kafka connection was closed")
            async with asyncio.timeout_at(deadline):
                limit = (await self._limits.find(topic)).max_batch_bytes
                target = self._targets.get((topic, partition))
                if target is None:
                    target = self._targets[topic, partition] = _Target(topic, partition)
                async with target.lock:
                    await self._repeat(target, progress, deadline)
                    await self._append_all(target, limit, progress, deadline)
        except TimeoutError:
            progress.time_out(f"append to {topic}[{partition}]: no answer from Kafka within {timeout:g} s")
        except BrokerError as error:
            progress.fail(error)
        return progress.appended()

    async def _repeat(self, target: _Target, progress: Progress, deadline: float) -> None:
        """Send the batch in doubt again, whole and unchanged, if these records are from it."""
        state = target.sequence
        begin = state.repeated_from(progress.records) if state is not None else None
        if state is None or begin is None:
            return
        batch = state.doubtful
        packed = self._pack(target, batch, MAX_RECORD_BYTES, state)
        offset = await self._send(target, state, packed, batch, progress, deadline)
        progress.store(len(batch) - begin, offset if offset < 0 else offset + begin)

    async def _append_all(self, target: _Target, limit: int, progress: Progress, deadline: float) -> None:
        """Send batch after batch, in order. A batch that is refused because of a record is halved until that record is alone."""
        total = len(progress.records)
        spans = [(progress.done, total)] if progress.done < total else []
        while spans:
            start, end = spans.pop()
            state = await self._sequence(target)
            wanted = progress.records[start:end]
            packed = self._pack(target, wanted, min(limit, MAX_RECORD_BYTES), state)
            stop = start + packed.count
            if stop < end:
                spans.append((stop, end))
            if packed.count == 1 and _too_large(packed, wanted[0], limit, target.name):
                limit = (
                    await self._limits.find(target.topic, max_age=_LIMIT_AGE)
                ).max_batch_bytes  # it may have been raised
                if too_large := _too_large(packed, wanted[0], limit, target.name):
                    progress.refuse(start, too_large)
                    continue
            try:
                batch = progress.next_records(packed.count)
                progress.store(stop, await self._send(target, state, packed, batch, progress, deadline))
            except _BadRecord as bad:
                if packed.count == 1:
                    progress.refuse(start, bad.error)
                else:
                    middle = (start + stop) // 2
                    spans += [(middle, stop), (start, middle)]

    def _pack(self, target: _Target, records: Sequence[Record], limit: int, state: SequenceState) -> Packed:
        return pack(records, limit, state.identity, state.next, timed=target.topic not in self._others)

    async def _sequence(self, target: _Target) -> SequenceState:
        """The numbering for a new batch; under a new identity when the last batch is still in doubt."""
        if target.sequence is None or not target.sequence.is_free:
            target.sequence = SequenceState(await self._identify(other_than=target.sequence))
        return target.sequence

    async def _identify(self, other_than: SequenceState | None) -> Identity:
        """The identity that partitions share; a new one when this partition can no longer use it."""
        async with self._identifying:
            if self._identity is None or (other_than is not None and self._identity == other_than.identity):
                answer = await self._cluster.ask_any(InitProducerIdRequest(None, _IGNORED_TIMEOUT_MS))
                raise_for(
                    answer.error_code, "get a producer id", "IdempotentWrite on the cluster (or Write on any topic)"
                )
                self._identity = Identity(answer.producer_id, answer.producer_epoch)
            return self._identity

    async def _send(
        self,
        target: _Target,
        state: SequenceState,
        packed: Packed,
        batch: Sequence[Record],
        progress: Progress,
        deadline: float,
    ) -> int:
        """Send one batch to the partition's leader. Gives its base offset (-1 when the broker only knows that it is stored)."""
        sender = self._sender(await self._leader(target))
        pending = PendingBatch(target.topic, target.partition, packed.data)
        sender.add(pending, deadline - asyncio.get_running_loop().time())
        was_in_doubt = bool(state.doubtful)
        try:
            code, offset = await pending.answer
        except Unavailable:
            raise  # it has not left
        except BaseException:
            if pending.sent and not was_in_doubt:
                state.doubt(batch)
                progress.in_doubt = len(batch)
            raise
        if code == 0 or (code == DUPLICATE_SEQUENCE and was_in_doubt):
            state.stored(len(batch))
            return -1 if code else offset
        error = classify_produce(code, target.name)
        if was_in_doubt:
            if code in _LASTING and asyncio.get_running_loop().time() - state.doubted_at > LONGEST_DOUBT_S:
                state.give_up_doubt()
            raise OutcomeUnknown(f"{error}, when the batch was sent again. The first attempt may have stored it")
        if code in PRODUCER_STATE_LOST:
            state.given_up = True
        elif isinstance(error, OutcomeUnknown):
            state.doubt(batch)
            progress.in_doubt = len(batch)
        raise self._refusal(target, error, code)

    def _refusal(self, target: _Target, error: BrokerError, code: int) -> Exception:
        """The error to raise for a batch that was refused at its first attempt."""
        if code in TOO_LARGE:
            self._limits.forget(target.topic)
            return Unavailable(f"{error}: the topic's limit became smaller")
        return _BadRecord(error) if code in BAD_RECORD else error

    async def _leader(self, target: _Target) -> int:
        """The node that leads the partition. Raises UnknownTopic, or Unavailable while there is none."""
        client = await self._cluster.client()
        leader: int | None = client.cluster.leader_for_partition(TopicPartition(target.topic, target.partition))
        if leader is None:
            count = await self.partition_count(target.topic)
            if target.partition >= count:
                raise Unavailable(f"{target.name}: the topic has {count} partitions")
            leader = client.cluster.leader_for_partition(TopicPartition(target.topic, target.partition))
        if leader is None or leader < 0:
            client.force_metadata_update()
            raise Unavailable(f"{target.name} has no leader now")
        return leader

    def _sender(self, node: int) -> NodeSender:
        sender = self._senders.get(node)
        if sender is None:
            sender = self._senders[node] = NodeSender(self._cluster, node)
        return sender

    async def close(self) -> None:
        """Accept nothing new, and wait for requests under way, at most the request time-out."""
        self._closed = True
        running = [sender.task for sender in self._senders.values() if sender.task is not None]
        if running:
            await asyncio.wait(running, timeout=self._cluster.timing.request + 1)


def _too_large(packed: Packed, record: Record, limit: int, where: str) -> RecordTooLarge | None:
    size = len(packed.data)
    if size > limit:
        return RecordTooLarge(f"{where}: a record takes {size} bytes; the topic's max.message.bytes is {limit}")
    if size > MAX_RECORD_BYTES and (content := content_bytes(record)) > MAX_RECORD_BYTES:
        return RecordTooLarge(f"{where}: a record of {content} bytes; the limit is {MAX_RECORD_BYTES}")
    return None
