"""What every backend promises. The words, once:

- A **topic** has numbered **partitions**; a partition is a sequence of **records** with increasing int **offsets**
  (not contiguous everywhere: a Kinesis sequence number is one).
- **Durable**: survives the loss of every process and of the machine's power (fsync), on Kafka of all but the last
  in-sync replica (acks=all). `append` answers only then.
- A **group** shares a topic's partitions among its **members**; each partition has one owner at a time. Every group
  gets every record. **Committed offset**: the last *processed* offset of a group in a partition (not "next to read").
- **Position**: where a member's next `poll` continues; it starts behind the committed offset, else at `Start`.
- **Lag**: records behind the end, and the age of the oldest unprocessed record in milliseconds.

Who retries: drivers never do; `Producer` does for sends, services do for what they read. There is no nack: a record
that cannot be handled is written elsewhere and *then* committed. All methods raise `errors.BrokerError` kinds only,
beside CancelledError and programming errors. Every wait ends: drivers bound their I/O by `timeout` (seconds).
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.resharding import Resharding

Start = Literal["earliest", "latest"] | datetime
"""Where a group without a committed offset begins. A date (aware): the first record whose timestamp is not older.
Remembered from the group's first join; partitions that are added later are read from their beginning, and so are always
the topics that are kept for a group (`start_in`)."""

_KEPT_FOR_A_GROUP = (".retry", ".parked")


def start_in(topic: str, start: Start) -> Start:
    """Where a group that is to begin at `start` begins in this topic: what was written for a group in particular (retries,
    parked events, all of `penstock.…`) is read from the earliest on, or it would be skipped by whom it waits for."""
    is_kept = topic.endswith(_KEPT_FOR_A_GROUP) or topic.startswith("penstock.")
    return "earliest" if is_kept else start


OnRevoke = Callable[[frozenset[TopicPartition]], Awaitable[None]]
"""Awaited when partitions are about to leave this member (rebalance, close), *before* another may own them: finish
what is in flight and commit. Bounded by the backend (its rebalance time-out). It may commit, and must not poll.
When partitions were lost without a chance to drain (frozen, cut off), it is called afterwards; commits then raise NotOwner.
A pause ends with it: it does not survive a revoke, not even of a partition that comes back."""


@dataclass(frozen=True, slots=True)
class Features:
    """How backends truly differ; contract tests read it. Never a skipped promise."""

    contiguous_offsets: bool
    """Whether offsets count records, in 64 bits, and what is written to a partition is read as that one. Elsewhere (Kinesis)
    it is read as one or several shards; offsets are ordered along them.
    """
    compaction: bool
    retention_by_event_time: bool
    """Whether a topic's retention counts from the record's timestamp (Kafka) or from when it was stored (the log)."""
    max_record_bytes: int
    """Key + value + headers of one record; larger ones are refused with RecordTooLarge."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a batch went: durable now.

    first, last: offsets of its first and last stored record. failed: (index in the batch, error) of those that were
    not stored, ascending; the others were stored in the batch's order. seconds_per_byte: the pace at which the broker's rate
    limits let more follow, 0 where it has none.
    """

    first: int
    last: int
    failed: tuple[tuple[int, Exception], ...] = ()
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Lag:
    """records: not processed yet. millis: age of the oldest of them by its record timestamp, 0 when there is none.

    stored: when the oldest of them was stored, ms; None where the broker does not tell, or there is none.
    """

    records: int
    millis: int
    stored: int | None = None


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create. Retention None means keep for ever; bytes count per partition.

    compact: keep the newest record of each key at least. shards: of Kinesis, to begin with, at most as many as partitions and
    as many when None; elsewhere it says nothing.
    """

    name: str
    partitions: int = 4
    retention_ms: int | None = None
    retention_bytes: int | None = None
    compact: bool = False
    shards: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """What a partition holds now: offsets `start <= offset < end`. Empty when start == end."""

    start: int
    end: int


class Driver(Protocol):
    """The writing half of a backend: one durable append per call, no retry, no batching of its own."""

    async def partition_count(self, topic: str) -> int:
        """How many partitions the topic has; cached for seconds at most. Raises UnknownTopic."""

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """Store the records in order, durably, and say where.

        At most `MAX_APPEND_BYTES` by `estimate_size`, unless it is a single record. Appends to different partitions may
        run concurrently; the producer has at most one per partition under way. `timeout` in seconds; when it runs out after
        the request left: OutcomeUnknown. When every record failed for the same reason, that reason is raised.
        Cancelling does not undo: the outcome is unknown.
        """


MAX_APPEND_BYTES = 900_000
"""Below Kafka's default message.max.bytes (1,048,588) with room for framing."""


MAX_POLL_BYTES = 2_500_000
"""What one poll takes of one partition: a megabyte, and the append with which that is reached."""


class Consumer(Protocol):
    """One member of a group. Not safe for concurrent polls; commit, pause and resume may be called while a poll waits."""

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """The next batches, at most `max_records` in all, in offset order per partition; [] after `max_wait` seconds.

        Of each partition at most `MAX_POLL_BYTES`, as stored (others may send compressed records to Kafka).
        Advances the position of what it returns. Cancelling loses nothing: what was not returned comes again.
        Keeps membership alive by itself, also while nobody polls for long (pause outlives any poll interval).
        Raises OffsetOutOfRange (PositionLost is one), DataDamaged, Unavailable; the caller may poll again. A gap or damage is
        raised at every poll while its partition is not paused; the other partitions go on. Damage that is known to end at a
        readable record may come as a `Batch` with `damage` instead: keep it elsewhere, and it is passed over like any other.
        """

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """Make the last processed offset of each partition durable for the group.

        Raises NotOwner naming the partitions that were refused (revoked or lost meanwhile, an offset below where this
        ownership began, or one that it has not polled); the others are committed.
        """

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Stop returning records of these partitions; membership and position stay. Unowned ones are ignored."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Undo pause."""

    def assignment(self) -> frozenset[TopicPartition]:
        """What this member owns now."""

    async def lag(self) -> dict[TopicPartition, Lag]:
        """Lag of each owned partition, counted from the committed offset (from the start position without one)."""


class Admin(Protocol):
    """Administration; operators and the fleet use it, no hot path does."""

    async def create_topic(self, spec: TopicSpec) -> None:
        """Create it. Raises TopicExists."""

    async def delete_topic(self, topic: str) -> None:
        """Delete it with its records and the groups' offsets in it. Raises UnknownTopic."""

    async def topics(self) -> dict[str, int]:
        """Partition count by topic name, without the backend's own internal topics."""

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """Grow to this total. Keys may map elsewhere afterwards. Raises UnknownTopic, ValueError when not growing."""

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """Stored range per partition. Raises UnknownTopic."""

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """Per partition that takes records an offset that no record stored later is below. Raises UnknownTopic.

        Its end, or not far below it where that takes long to find: a second or two, however much is stored.
        """

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """Per partition the offset at which a read from `start` begins (the end when nothing is that new)."""

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's last processed offset per partition; partitions without one are absent."""

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """Move a group that has no members (time travel, skipping a gap). Raises Unavailable while it has some."""

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """Let group `to` begin in this topic where `group` is, in every partition that `group` has begun, processed or not, and
        `to` has not. Whether there was one; cut off, it goes on when it is called again.

        Partitions that `group` has not begun yet are read by both from their beginning. Raises UnknownTopic, and Unavailable
        while `to` has members that have not begun.
        """

    async def check_durability(self, topics: Collection[str]) -> None:
        """Raises UnsafeTopic when the settings of one of these let acknowledged records be lost, or no append succeed.

        Topics that do not exist are passed over: `create_topic` makes safe ones.
        """

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """The group's lag per partition, also while nobody is a member."""

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """The records at `offset` and behind it, as `poll` would return them, without a group; None at the end.

        At least one and at most `max_records` and `MAX_POLL_BYTES`. Raises UnknownTopic (also for a partition that the topic
        has not), OffsetOutOfRange, DataDamaged, Unavailable; damage may come as a `Batch` with `damage`, as in `poll`.
        """


class Broker(Protocol):
    """An open connection to one backend; made by `connect.open_broker`, which closes it."""

    @property
    def features(self) -> Features: ...

    @property
    def admin(self) -> Admin: ...

    @property
    def resharding(self) -> Resharding | None:
        """None where partitions are all there is."""

    @property
    def driver(self) -> Driver: ...

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager[Consumer]:
        """Join the group; leaving the context drains (on_revoke), leaves and closes. Raises UnknownTopic on entering."""

    async def probe(self, topic: str, *, timeout: float) -> None:
        """Raises unless the broker could store a record in `topic` now (leaders known, log writable); stores nothing."""
