"""The sending half: `Driver.append` as one Kafka record batch (or a few, where a topic wants them smaller)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from services.core.broker.kafka.faults import (
    BAD_RECORD,
    DUPLICATE_SEQUENCE,
    PRODUCER_STATE_LOST,
    TOO_LARGE,
    classify_produce,
    raise_for,
)
from services.core.broker.kafka.limits import TopicLimits
from services.core.broker.kafka.node_lane import NodeLane, Parcel
from services.core.broker.kafka.packing import MAX_RECORD_BYTES, Identity, Packed, content_bytes, pack
from services.core.broker.kafka.progress import Progress
from services.core.broker.kafka.sequence import SequenceState
from services.core.broker.record import Record

_LIMIT_AGE = 60.0
_IGNORED_TIMEOUT_MS = 60_000  # only transactions use it


@dataclass(slots=True)
class _Line:
    """One partition: its numbering, and the lock that keeps its appends in a row."""

    topic: str
    partition: int
    sequence: SequenceState | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return f"{self.topic}[{self.partition}]"


class _BadRecord(Exception):
    """The broker refused a batch for one of its records without saying which."""

    def __init__(self, error: BrokerError) -> None:
        super().__init__(str(error))
        self.error = error


class KafkaDriver:
    """Acks=all, idempotent (see `sequence`), uncompressed, nothing waits for company. Never retries."""

    def __init__(self, cluster: Cluster, limits: TopicLimits) -> None:
        self._cluster, self._limits = cluster, limits
        self._lines: dict[tuple[str, int], _Line] = {}
        self._lanes: dict[int, NodeLane] = {}
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
        """As in the contract. Appends to one partition wait for each other, those of several travel together.

        A batch that an earlier append left in doubt is repeated unchanged; until that succeeds its outcome is unknown.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        line = self._lines.get((topic, partition))
        progress = Progress(records, line.sequence.in_doubt(records) if line and line.sequence else 0)
        try:
            if self._closed:
                raise BrokerClosed("the Kafka connection was closed")
            async with asyncio.timeout_at(deadline):
                limit = (await self._limits.of(topic)).max_batch_bytes
                line = self._lines.get((topic, partition))
                if line is None:
                    line = self._lines[topic, partition] = _Line(topic, partition)
                async with line.lock:
                    await self._repeat(line, progress, deadline)
                    await self._append_all(line, limit, progress, deadline)
        except TimeoutError:
            progress.time_out(f"append to {topic}[{partition}]: no answer from Kafka within {timeout:g} s")
        except BrokerError as error:
            progress.fail(error)
        return progress.appended()

    async def _repeat(self, line: _Line, progress: Progress, deadline: float) -> None:
        """Settle the batch in doubt if these records are of it: it goes out once more, whole and unchanged."""
        state = line.sequence
        begin = state.repeated_from(progress.records) if state is not None else None
        if state is None or begin is None:
            return
        batch = state.doubtful
        packed = pack(batch, MAX_RECORD_BYTES, state.identity, state.next)
        offset = await self._send(line, state, packed, batch, progress, deadline)
        progress.store(len(batch) - begin, offset if offset < 0 else offset + begin)

    async def _append_all(self, line: _Line, limit: int, progress: Progress, deadline: float) -> None:
        """Batch after batch, in order. One that is refused for a record in it is halved until that record is alone."""
        total = len(progress.records)
        spans = [(progress.done, total)] if progress.done < total else []
        while spans:
            start, end = spans.pop()
            state = await self._sequence(line)
            wanted = progress.records[start:end]
            packed = pack(wanted, min(limit, MAX_RECORD_BYTES), state.identity, state.next)
            stop = start + packed.count
            if stop < end:
                spans.append((stop, end))
            if packed.count == 1 and _too_large(packed, wanted[0], limit, line.name):
                limit = (
                    await self._limits.of(line.topic, max_age=_LIMIT_AGE)
                ).max_batch_bytes  # it may have been raised
                if too_large := _too_large(packed, wanted[0], limit, line.name):
                    progress.refuse(start, too_large)
                    continue
            try:
                batch = progress.take(packed.count)
                progress.store(stop, await self._send(line, state, packed, batch, progress, deadline))
            except _BadRecord as bad:
                if packed.count == 1:
                    progress.refuse(start, bad.error)
                else:
                    middle = (start + stop) // 2
                    spans += [(middle, stop), (start, middle)]

    async def _sequence(self, line: _Line) -> SequenceState:
        """The numbering for a new batch; under a new identity when the fate of the last one stayed unknown."""
        if line.sequence is None or not line.sequence.is_free:
            line.sequence = SequenceState(await self._identify(other_than=line.sequence))
        return line.sequence

    async def _identify(self, other_than: SequenceState | None) -> Identity:
        """The identity that partitions share, made anew when this partition used it up."""
        async with self._identifying:
            if self._identity is None or (other_than is not None and self._identity == other_than.identity):
                answer = await self._cluster.ask_any(InitProducerIdRequest(None, _IGNORED_TIMEOUT_MS))
                raise_for(answer.error_code, "get a producer id")
                self._identity = Identity(answer.producer_id, answer.producer_epoch)
            return self._identity

    async def _send(
        self,
        line: _Line,
        state: SequenceState,
        packed: Packed,
        batch: Sequence[Record],
        progress: Progress,
        deadline: float,
    ) -> int:
        """One batch to its leader; its base offset (-1 when the broker only knows that it has it)."""
        lane = self._lane(await self._leader(line))
        parcel = Parcel(line.topic, line.partition, packed.data)
        lane.add(parcel, deadline - asyncio.get_running_loop().time())
        was_in_doubt = bool(state.doubtful)
        try:
            code, offset = await parcel.answer
        except Unavailable:
            raise  # it has not left
        except BaseException:
            if parcel.sent and not was_in_doubt:
                state.doubtful, progress.in_doubt = batch, len(batch)
            raise
        if code == 0 or (code == DUPLICATE_SEQUENCE and was_in_doubt):
            state.stored(len(batch))
            return -1 if code else offset
        error = classify_produce(code, line.name)
        if isinstance(error, OutcomeUnknown) and not was_in_doubt:
            state.doubtful, progress.in_doubt = batch, len(batch)
        if code in PRODUCER_STATE_LOST or code == DUPLICATE_SEQUENCE:
            state.give_up()
        if was_in_doubt:
            raise OutcomeUnknown(f"{error}, when asked again for a batch that it may have stored")
        raise self._refusal(line, error, code)

    def _refusal(self, line: _Line, error: BrokerError, code: int) -> Exception:
        """What to do about a batch that was refused at its first attempt."""
        if code in TOO_LARGE:
            self._limits.forget(line.topic)
            return Unavailable(f"{error}: its limit became smaller")
        return _BadRecord(error) if code in BAD_RECORD else error

    async def _leader(self, line: _Line) -> int:
        """The node that leads the partition. Raises UnknownTopic, or Unavailable while there is none."""
        client = await self._cluster.client()
        leader: int | None = client.cluster.leader_for_partition(TopicPartition(line.topic, line.partition))
        if leader is None:
            count = await self.partition_count(line.topic)
            if line.partition >= count:
                raise Unavailable(f"{line.name}: the topic has {count} partitions")
            leader = client.cluster.leader_for_partition(TopicPartition(line.topic, line.partition))
        if leader is None or leader < 0:
            client.force_metadata_update()
            raise Unavailable(f"{line.name} has no leader now")
        return leader

    def _lane(self, node: int) -> NodeLane:
        lane = self._lanes.get(node)
        if lane is None:
            lane = self._lanes[node] = NodeLane(self._cluster, node)
        return lane

    async def close(self) -> None:
        """Take nothing new and wait for what is under way; bounded by the request time-out."""
        self._closed = True
        running = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if running:
            await asyncio.wait(running, timeout=self._cluster.timing.request + 1)


def _too_large(packed: Packed, record: Record, limit: int, where: str) -> RecordTooLarge | None:
    size = len(packed.data)
    if size > limit:
        return RecordTooLarge(f"{where}: a record takes {size} bytes; the topic's max.message.bytes is {limit}")
    if size > MAX_RECORD_BYTES and (content := content_bytes(record)) > MAX_RECORD_BYTES:
        return RecordTooLarge(f"{where}: a record of {content} bytes; at most {MAX_RECORD_BYTES} are taken")
    return None
