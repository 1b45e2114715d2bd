"""What the model of a broker holds durably: topics with their lives, and groups with their commits. Nothing here waits.

A topic that is deleted and made again has another life. Every append is on record for the oracle, also of lives that are over.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.broker.contract import MAX_POLL_BYTES, Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import DataDamaged, GroupHasMembers, OffsetOutOfRange, TopicExists, UnknownTopic
from services.core.broker.record import Batch, Record, TopicPartition, estimate_size


class Stored(NamedTuple):
    """One append, as the oracle sees it."""

    topic: str
    life: int
    partition: int
    offsets: tuple[int, ...]
    records: tuple[Record, ...]


@dataclass
class Partition:
    """Records by offset. start: of the oldest that is kept; end: behind the newest."""

    offsets: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    start: int = 0
    end: int = 0
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """First and last offsets that cannot be read, until they are repaired: then they are passed over."""

    def index(self, offset: int) -> int:
        """Of the first record that is not before `offset`."""
        return bisect_left(self.offsets, offset)


@dataclass
class Topic:
    """One life of one topic."""

    spec: TopicSpec
    life: int
    partitions: list[Partition]


@dataclass
class Group:
    """What is known of a group whatever its members do: commits, and where it began, by topic and partition."""

    committed: dict[TopicPartition, int] = field(default_factory=dict)
    began: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per topic from where a partition without a commit is read; a partition that is not here: from its beginning."""


class Store:
    """One broker's disks. wall_ms: the broker's clock. gaps: whether offsets have gaps. dates_by_storing: as in `Features`."""

    def __init__(self, wall_ms: Callable[[], int], *, gaps: bool, dates_by_storing: bool) -> None:
        self.wall_ms, self.gaps, self.dates_by_storing = wall_ms, gaps, dates_by_storing
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.appends: list[Stored] = []
        self._lives = 0
        self.on_append: list[Callable[[TopicPartition], None]] = []
        self.on_delete: list[Callable[[str], None]] = []
        self.on_create: list[Callable[[str], None]] = []

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic."""
        found = self.topics.get(name)
        if found is None:
            raise UnknownTopic(f"{name} does not exist")
        return found

    def partition(self, name: str, number: int) -> Partition:
        """Raises UnknownTopic."""
        partitions = self.topic(name).partitions
        if not 0 <= number < len(partitions):
            raise UnknownTopic(f"{name}[{number}] does not exist")
        return partitions[number]

    def create(self, spec: TopicSpec) -> None:
        """Raises TopicExists."""
        if spec.name in self.topics:
            raise TopicExists(spec.name)
        self._lives += 1
        self.topics[spec.name] = Topic(spec, self._lives, [Partition() for _ in range(spec.partitions)])
        for told in self.on_create:
            told(spec.name)

    def delete(self, name: str) -> None:
        """With the commits of all groups in it. Raises UnknownTopic."""
        self.topic(name)
        del self.topics[name]
        for group in self.groups.values():
            group.began[name] = {}  # one that is made anew is read from its beginning
            for source in [source for source in group.committed if source.topic == name]:
                del group.committed[source]
        for told in self.on_delete:
            told(name)

    def add_partitions(self, name: str, count: int) -> None:
        """Raises UnknownTopic."""
        topic = self.topic(name)
        topic.partitions += [Partition() for _ in range(count - len(topic.partitions))]
        for told in self.on_create:
            told(name)

    def append(
        self, name: str, number: int, records: Sequence[Record], offsets: Sequence[int] | None = None
    ) -> tuple[int, int]:
        """Where they lie: (first, last). offsets: where the broker puts them; None: behind the newest. Raises UnknownTopic."""
        partition = self.partition(name, number)
        if offsets is None:
            offsets = range(partition.end, partition.end + len(records))
        assert offsets[0] >= partition.end, f"{name}[{number}]: {offsets[0]} is before {partition.end}"
        partition.offsets += offsets
        partition.records += records
        partition.times += [self.wall_ms()] * len(records)
        partition.end = offsets[-1] + 1
        self.appends.append(Stored(name, self.topics[name].life, number, tuple(offsets), tuple(records)))
        for told in self.on_append:
            told(TopicPartition(name, number))
        return offsets[0], offsets[-1]

    def read(self, name: str, number: int, offset: int, most: int) -> Batch | None:
        """As `Admin.read`."""
        partition = self.partition(name, number)
        if not partition.start <= offset <= partition.end:
            raise OffsetOutOfRange(name, number, offset, partition.start, partition.end, contiguous=not self.gaps)
        first = partition.index(offset)
        last = size = first
        end = len(partition.offsets)
        if partition.damaged and first < end:
            if hit := next((one for one in partition.damaged if one[0] <= partition.offsets[first] <= one[1]), None):
                raise DataDamaged(name, ((number, *hit),), "checksum mismatch")
            end = min([end, *(partition.index(one[0]) for one in partition.damaged if one[0] >= offset)])
        while last < end and last - first < most:
            size += estimate_size((partition.records[last],))
            if last > first and size > MAX_POLL_BYTES:
                break
            last += 1
        if first == last:
            return None
        return Batch(name, number, tuple(partition.offsets[first:last]), tuple(partition.records[first:last]))

    def ranges(self, name: str) -> dict[int, PartitionRange]:
        """As `Admin.describe`."""
        return {number: PartitionRange(one.start, one.end) for number, one in enumerate(self.topic(name).partitions)}

    def offsets_at(self, name: str, start: Start) -> dict[int, int]:
        """As `Admin.offsets_at`."""
        by_storing = self.dates_by_storing
        return {
            number: _begin(one, start, by_storing=by_storing) for number, one in enumerate(self.topic(name).partitions)
        }

    def begin(self, group: str, topics: Collection[str], start: Start) -> None:
        """A member joins with this start: remembered for the topics that the group does not know yet."""
        known = self.groups.setdefault(group, Group())
        for name in topics:
            if name in self.topics and name not in known.began:
                known.began[name] = self.offsets_at(name, start)

    def position(self, group: str, source: TopicPartition) -> int:
        """Where the group reads on. Raises UnknownTopic."""
        known = self.groups.setdefault(group, Group())
        return _position(known, source, self.partition(*source))

    def begin_at(self, group: str, source: TopicPartition) -> int:
        """As `position`, for a member that begins to read there: without a commit it is on record from now on."""
        position = self.position(group, source)
        self.groups[group].began.setdefault(source.topic, {}).setdefault(source.partition, position)
        return position

    def commit(self, group: str, marks: Mapping[TopicPartition, int]) -> None:
        """For the group, whoever says it."""
        self.groups.setdefault(group, Group()).committed.update(marks)

    def lag(self, group: str, source: TopicPartition) -> Lag:
        """As `Admin.group_lag`, of one partition. Raises UnknownTopic."""
        partition, known = self.partition(*source), self.groups.get(group)
        if known is None:
            known = self.groups[group] = Group()
        first = partition.index(max(partition.start, _position(known, source, partition)))
        count = len(partition.offsets) - first
        if not count:
            return Lag(0, 0)
        age = self.wall_ms() - partition.records[first].timestamp
        return Lag(count, max(0, age), partition.times[first])

    def forget_group(self, group: str) -> None:
        """As `penstock log repair` of a damaged groups.db: what is lost is begun at the earliest."""
        known = self.groups.setdefault(group, Group())
        for name in {*known.began, *(source.topic for source in known.committed)}:
            known.began[name] = {}
        known.committed.clear()

    def expire(self, name: str, number: int, before: int) -> None:
        """Retention passes these offsets."""
        partition = self.partition(name, number)
        first = partition.index(before)
        partition.start = max(partition.start, min(before, partition.end))
        del partition.offsets[:first], partition.records[:first], partition.times[:first]

    def damage(self, name: str, number: int, first: int, last: int) -> None:
        """These offsets cannot be read any more."""
        self.partition(name, number).damaged.append((first, last))

    def repair(self) -> None:
        """As `penstock log repair`: what cannot be read is taken out, and readers pass over it."""
        for topic in self.topics.values():
            for partition in topic.partitions:
                for first, last in partition.damaged:
                    lost = slice(partition.index(first), partition.index(last + 1))
                    del partition.offsets[lost], partition.records[lost], partition.times[lost]
                partition.damaged = []

    def has_begun(self, group: str, name: str) -> bool:
        """As `Admin.has_begun`."""
        self.topic(name)
        known = self.groups.get(group)
        return known is not None and (name in known.began or any(source.topic == name for source in known.committed))

    def rewind(self, group: str, name: str, marks: Mapping[int, int], *, has_members: bool) -> None:
        """As `Admin.set_committed`."""
        if has_members:
            raise GroupHasMembers(f"{group} has members")
        self.topic(name)
        self.commit(group, {TopicPartition(name, number): offset for number, offset in marks.items()})

    def copy_positions(self, group: str, to: str, name: str, *, has_members: bool) -> bool:
        """As `Admin.copy_positions`."""
        self.topic(name)
        theirs, own = (self.groups.setdefault(each, Group()) for each in (group, to))
        marks = {s: m for s, m in theirs.committed.items() if s.topic == name and s not in own.committed}
        is_new = name in theirs.began and name not in own.began
        if not (is_new or (marks and name not in own.began)):
            return False
        if has_members:
            raise GroupHasMembers(f"{to} has members")
        own.committed.update(marks)
        if is_new:
            own.began[name] = dict(theirs.began[name])
        return True


def _position(known: Group, source: TopicPartition, partition: Partition) -> int:
    committed = known.committed.get(source)
    if committed is not None:
        return committed + 1
    return known.began.get(source.topic, {}).get(source.partition, partition.start)


def _begin(partition: Partition, start: Start, *, by_storing: bool) -> int:
    if start == "earliest":
        return partition.start
    if start == "latest":
        return partition.end
    since = start.timestamp() * 1000
    times = partition.times if by_storing else [record.timestamp for record in partition.records]
    found = (offset for offset, time in zip(partition.offsets, times, strict=True) if time >= since)
    return next(found, partition.end)
