"""The contract of a broker: what every backend promises, and its terms.

- A **topic** has numbered **partitions**; a partition is a sequence of **records** with increasing int **offsets**
  (not contiguous everywhere: a Kinesis sequence number is one).
- **Durable**: survives the loss of every process and of the machine's power (fsync), on Kafka of all but the last
  in-sync replica (acks=all). `append` answers only after that.
- A **group** shares a topic's partitions among its **members**; each partition has one owner at a time. Every group
  gets every record. **Committed offset**: the last *processed* offset of a group in a partition (not "next to read").
- **Position**: the offset at which a member's next `poll` continues. It starts behind the committed offset, else at `Start`.
- **Lag**: records behind the end, and how long the oldest unprocessed record has waited, in milliseconds.

Who retries: backends never do. `Producer` repeats appends; services repeat reads and commits. There is no nack: a record
that cannot be handled is written to another topic and *then* committed. All methods raise only `errors.BrokerError` kinds,
CancelledError and programming errors. Every wait ends: backends bound their I/O by `timeout` (seconds).

A new broker is a package beside `log`, `kafka` and `kinesis` that implements `Broker`: `Appender`, `Consumer`, `Reader`, `Admin`.
Register its URL in `connect.open_broker`. Write a harness like `tests/contract/harness_log.py` and add it to the fixtures in
`tests/contract/conftest.py`: the contract suite then runs against it. Transforms need a `SparkBroker` in `spark/brokers/`,
which `open_spark_broker` opens. `pyproject.toml` has its packages, and the rule that only it imports them. Where brokers differ,
code asks for the kind of a URL. This command finds these places, above all in `connect.py`, `spark/settings.py`,
`services/core/pipe_file/references.py`, `services/autoscaler/app.py`, `services/fleet/migrate/movable.py`, the doctor:

    git grep -nE '"(log|kafka|kinesis)(:[^"]*)?"|is_kinesis' -- services spark
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.resharding import Resharding

Start = Literal["earliest", "latest"] | datetime
"""Where a group without a committed offset begins. A date (aware): the first record whose timestamp is not older. On Kafka: the
first that was stored then or later, except in topics of `Admin.kept_by_event_time`. So it may begin earlier there, with events
that are older than the date, but it skips no event that is younger, unless its client's clock was ahead.

It is stored at the group's first join. Partitions that are added later are read from their beginning; so are the topics
that are kept for a group (`start_in`)."""

_KEPT_FOR_A_GROUP = (".retry", ".parked")


def start_in(topic: str, start: Start) -> Start:
    """The start of a group in this topic, when `start` is asked for. Topics that are written for one group (retries, parked
    events, all of `penstock.…`) are read from the earliest record on: else the group would skip events that wait for it."""
    is_kept = topic.endswith(_KEPT_FOR_A_GROUP) or topic.startswith("penstock.")
    return "earliest" if is_kept else start


OnRevoke = Callable[[frozenset[TopicPartition]], Awaitable[None]]
"""Awaited when partitions are about to leave this member (rebalance, close), *before* another may own them: finish
records in flight and commit. The backend limits its time (the rebalance time-out). It may commit, and must not poll.
When partitions were lost without a chance to drain (frozen, cut off), it is called afterwards; commits then raise NotOwner.
It ends a pause, even for a partition that comes back."""


@dataclass(frozen=True, slots=True)
class Features:
    """The differences between backends. Contract tests read them. No promise of the contract depends on them."""

    contiguous_offsets: bool
    """Whether offsets count records, in 64 bits, and a partition is read as the partition that it was written to. On Kinesis
    a partition is read as one or several shards, and offsets increase along them.
    """
    dates_by_storing: bool
    """Whether a date as `Start` is compared with when records were stored (Kafka) or with their timestamps (log, Kinesis)."""
    max_record_bytes: int
    """Key + value + headers of one record. Larger ones raise RecordTooLarge."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The offsets of a batch that is durable now.

    first, last: offsets of its first and last stored record, -1 when one of them is not known. failed: (index in the batch,
    error) of the records that were not stored, ascending; the others were stored in the batch's order. seconds_per_byte: the
    pace that the broker's rate limits allow, 0 when there are none.
    """

    first: int
    last: int
    failed: tuple[tuple[int, Exception], ...] = ()
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Lag:
    """records: not processed yet. millis: how long the oldest of them has waited, 0 when there is none.

    stored: when the oldest of them was stored, ms, by the broker's clock; None when there is none, or in a topic that keeps only
    the writer's time. There `millis` counts from that time.
    """

    records: int
    millis: int
    stored: int | None = None


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create. Retention None: keep for ever. Bytes count per partition.

    compact: keep at least the newest record of each key for ever. A record that a newer one of its key has replaced may go when
    it is older than the retention, and a **tombstone** (a record without value, for which no older one of its key is left) when
    it has been one for that long. Records need a key: Kafka refuses others. shards: the first number of shards on Kinesis, at
    most one per partition, which is also the default. Other brokers ignore it.
    """

    name: str
    partitions: int = 4
    retention_ms: int | None = None
    retention_bytes: int | None = None
    compact: bool = False
    shards: int | None = None

    @property
    def first_shards(self) -> int:
        """The number of shards with which Kinesis creates it."""
        return self.shards or self.partitions


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """The offsets that a partition holds now: `start <= offset < end`. Empty when start == end."""

    start: int
    end: int


class Appender(Protocol):
    """The writing half of a backend: one durable append per call, no retry, no batching of its own."""

    async def partition_count(self, topic: str) -> int:
        """How many partitions the topic has; cached for seconds at most. Raises UnknownTopic."""

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """Store the records in order, durably. Gives their offsets.

        They have at most `MAX_APPEND_BYTES` by `estimate_size`, unless there is only one record. Appends to different
        partitions may run concurrently; the producer has at most one per partition under way. `timeout` in seconds; when it
        runs out after the request left: OutcomeUnknown. When every record failed for the same reason, that reason is raised.
        Cancelling does not undo an append: the outcome is unknown.
        """


MAX_APPEND_BYTES = 900_000
"""Below Kafka's default message.max.bytes (1,048,588) with room for framing."""


MAX_POLL_BYTES = 2_500_000
"""The most bytes of one partition that one `poll` or `read` returns. The log and Kinesis end a batch with the append that reaches
a megabyte; Kafka gets this limit."""


class Consumer(Protocol):
    """One member of a group. Not safe for concurrent polls; commit, pause and resume may be called while a poll waits."""

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """The next batches, at most `max_records` in all, in offset order per partition; [] after `max_wait` seconds.

        Each partition gives at most `MAX_POLL_BYTES`, as stored (others may send compressed records to Kafka).
        The position advances by the returned records. Cancelling loses nothing: records that were not returned come again.
        The membership stays alive by itself, also without polls.
        Raises OffsetOutOfRange (also PositionLost), DataDamaged, Unavailable; the caller may poll again. A gap or damage is
        raised at every poll while its partition is not paused; the other partitions go on. Damage that is known to end at a
        readable record may come as a `Batch` with `damage` instead: store it in another topic, then commit it like any other.
        """

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """Make the last processed offset of each partition durable for the group.

        Raises NotOwner with the refused partitions; the others are committed. Refused are partitions that were revoked or
        lost meanwhile, and offsets before the start of this ownership or not yet polled in it.
        """

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """Return no records of these partitions until `resume`; membership and position stay. Unowned ones are ignored."""

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """Undo pause."""

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this member owns now."""

    async def lag(self) -> dict[TopicPartition, Lag]:
        """Lag of each owned partition, counted from the committed offset (from the start position without one).

        Where a topic may move to another broker, `lag` and `poll` raise HomeChanged when it does.
        """


class Reader(Protocol):
    """Reading a topic without a group: to follow it, or to find something in it."""

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """The stored range of each partition. Raises UnknownTopic."""

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """For each partition that can be written to, a lower bound of the next record's offset.

        On the log and on Kafka it is the end. On Kinesis it may be an offset before the end, because the end can take long to
        find. Takes two seconds at most. Raises UnknownTopic.
        """

    async def fence(self, topic: str) -> dict[int, int]:
        """For each partition that can be written to, an offset: every record that was acknowledged before this call is below it,
        and can be read now; every later one has it or a higher one.

        On Kinesis it is a write: an entry without records, which readers pass over. Raises UnknownTopic.
        """

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """The offset of each partition at which a read from `start` begins. It is the end when all records are older."""

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """The records from `offset` on, in order, as `poll` returns them; None at the end.

        Gives at least one record, at most `max_records`, and at most `MAX_POLL_BYTES`. Raises UnknownTopic (also for an unknown
        partition), OffsetOutOfRange, DataDamaged, Unavailable. A `Batch` with `damage` may report damage instead, as in `poll`.
        """


class Admin(Protocol):
    """Administration of topics and groups; operators and the fleet use it, no hot path does."""

    async def create_topic(self, spec: TopicSpec) -> None:
        """Create the topic. Raises TopicExists."""

    async def create_own_topics(self) -> None:
        """Create the internal topics of the backend that are missing. So services need no right to create topics."""

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        """Delete the topic with its records and the groups' offsets in it. Raises UnknownTopic.

        incarnation: the only one that may be deleted. If another topic has the name by now, raises UnknownTopic. The log and
        Kafka compare and delete in one step. Kinesis has no such request: it is compared at most seconds before.
        """

    async def topics(self) -> dict[str, int]:
        """The partition count by topic name, without the backend's internal topics."""

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        """Those of these topics that exist and that our user may see. Asks only the brokers that they live on.

        Each broker is asked for its full list: Kafka's authorizer logs a question about a hidden topic as a denied access.
        Raises Unavailable when one of them does not answer.
        """

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """Grow to this total. Keys may map elsewhere afterwards. Raises UnknownTopic, ValueError when not growing."""

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """The group's last processed offset per partition; partitions without one are absent."""

    async def has_begun(self, group: str, topic: str) -> bool:
        """Whether the group has begun to read any partition, also when it has processed nothing. Raises UnknownTopic."""

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        """The next offset of the group per partition: behind the committed one, else where the group began.

        Partitions that the group has not begun are absent.
        """

    async def members(self, group: str) -> list[str]:
        """The broker's names for the living members of the group. On Kinesis it takes up to the lease time."""

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """Move a group that has no members (time travel, skipping a gap). Raises GroupHasMembers while it has some.

        A member that joins at the same time reads from the new position, or this raises GroupHasMembers. On Kinesis some shards
        may have been moved then; repeat it.
        """

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """Let group `to` begin in this topic at the position of `group`, in every partition that `group` has begun, processed or
        not, and `to` has not. Gives whether there was one. An interrupted call goes on when it is repeated.

        Both read the partitions that `group` has not begun from their beginning. Raises UnknownTopic, and
        GroupHasMembers while `to` has members that have not begun.
        """

    @property
    def why_not_compact(self) -> str | None:
        """Why this broker has no compacted topics, for a person; None: it has."""

    async def incarnation(self, topic: str) -> str:
        """Differs when a topic is deleted and created again under the same name. Raises UnknownTopic."""

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        """Those of these topics that are compacted. Topics that do not exist are skipped."""

    async def check_durability(self, topics: Collection[str]) -> None:
        """Raises UnsafeTopic when a topic's settings allow acknowledged records to be lost, or let no append succeed.

        Topics that do not exist are skipped: `create_topic` makes safe ones.
        """

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        """Those of these topics whose retention counts from the records' timestamps, so a client with a wrong clock shortens it.

        In all others it counts from storing. Only on Kafka, and none that `create_topic` makes: `message.timestamp.type` of a
        topic of Penstock 0.1, or of others, may be CreateTime. Topics that do not exist are skipped.
        """

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        """Let the retention of these topics count from storing; what is stored keeps its times. Raises NotAllowed.

        What Penstock 0.1 writes there afterwards loses its event time.
        """

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """The group's lag per partition, also without members."""


class Broker(Protocol):
    """An open connection to one backend; made by `connect.open_broker`, which closes it."""

    @property
    def features(self) -> Features: ...

    def is_contiguous(self, topic: str) -> bool:
        """`Features.contiguous_offsets` of the broker that has this topic now."""

    @property
    def admin(self) -> Admin: ...

    @property
    def reader(self) -> Reader: ...

    @property
    def resharding(self) -> Resharding | None:
        """None when the broker has nothing below partitions."""

    @property
    def appender(self) -> Appender: ...

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager[Consumer]:
        """Join the group. Leaving the context drains (on_revoke), leaves and closes. Entering raises UnknownTopic."""

    async def probe(self, topic: str, *, timeout: float) -> None:
        """Raises unless the broker could store a record in `topic` now (leaders known, log writable). Stores nothing."""
