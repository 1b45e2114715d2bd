"""Events that wait for another attempt or for a resume, counted by lane.

A **lane** is `pipe/destination`. Its waiting events are with the global retrier (`penstock.retry-in` and the delay topics,
behind the retrier's committed offsets), in `<pipe>.retry` or in `<pipe>.parked` (behind the offsets of the lane's own group).
Nobody reads the events of a lane that the pipe file no longer has: retention would remove them.

The retry and parked topics are read once. A `Bookmark` in `penstock.control` records how far they were read, and the lanes with
events there. Without it, or when a topic was created again, everything is read again. Only the bookmark has the lanes of earlier
pipe files: the unread events of such a lane in its streams count until an operator decides about them.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from services.core.audit import digest_of
from services.core.broker.contract import Admin, Broker, PartitionRange, Reader
from services.core.broker.errors import DataDamaged, GroupHasMembers, NewerFormat, OffsetOutOfRange, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.reading import read_topic
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import carry_pauses
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import (
    CONTROL,
    DELAYS_S,
    RETRIER_GROUP,
    RETRY_IN,
    dead_letter_topic,
    delay_topic,
    delivery_group,
    delivery_topics,
    lane_name,
    parked_topic,
    removed_lanes,
    retry_topic,
)
from services.core.undelivered.retry_state import PREFIX
from services.core.version import VERSION, newer_format

_KEY = b"waiting"
_VERSION = 1
"""Of the bookmark."""
_TAKEN_OVER = b"taken over"
"""A lane has taken over its position. Lanes do so at the same time: with whole bookmarks one would undo another's."""
_INTERNAL = "penstock."
_SIDE_TOPICS = (retry_topic(""), parked_topic(""), dead_letter_topic(""))
_PIPE, _DESTINATION = PREFIX + "pipe", PREFIX + "destination"


@dataclass(frozen=True, slots=True)
class Bookmark:
    """read: the offset behind the last read record of each partition. last: offset and digest of that record.

    lanes: those with events there, and those that were claimed. left: lanes and pipes about whose unread events an operator has
    decided, with the lane that continues in their place, or "".
    """

    read: Mapping[TopicPartition, int] = field(default_factory=dict)
    lanes: frozenset[str] = frozenset()
    left: Mapping[str, str] = field(default_factory=dict)
    last: Mapping[TopicPartition, tuple[int, str]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Offsets as text: on Kinesis they have 56 digits."""
        read = {f"{topic}:{partition}": str(offset) for (topic, partition), offset in sorted(self.read.items())}
        last = {f"{topic}:{part}": [str(at), digest] for (topic, part), (at, digest) in sorted(self.last.items())}
        left = dict(sorted(self.left.items()))
        head = {"version": _VERSION, "penstock": VERSION}
        return json.dumps({**head, "read": read, "lanes": sorted(self.lanes), "left": left, "last": last}).encode()

    @classmethod
    def decode(cls, value: bytes) -> "Bookmark":
        """From the bytes of `encode`. Raises ValueError, KeyError, AttributeError, TypeError, NewerFormat."""
        found = json.loads(value)
        if found.get("version", _VERSION) > _VERSION:
            subject = f"the record of waiting events in {CONTROL}"
            raise NewerFormat(newer_format(subject, found["version"], _VERSION, found.get("penstock")))
        read = {_parse_partition(name): int(offset) for name, offset in found["read"].items()}
        last = {_parse_partition(name): (int(at), str(digest)) for name, (at, digest) in found.get("last", {}).items()}
        left = {str(lane): str(heir) for lane, heir in found.get("left", {}).items()}
        return cls(read, frozenset(map(str, found["lanes"])), left, last)

    def after_takeover(self, value: bytes) -> "Bookmark":
        """With what one lane has recorded. Raises ValueError, KeyError, AttributeError, TypeError."""
        found = json.loads(value)
        lane, former = str(found["lane"]), list(map(str, found["former"]))
        left = {old: heir for old, heir in self.left.items() if old != lane}
        return replace(self, left=left | dict.fromkeys(former, lane))


def _parse_partition(name: str) -> TopicPartition:
    topic, _, partition = name.rpartition(":")
    return TopicPartition(topic, int(partition))


@dataclass(frozen=True, slots=True)
class WaitingEvents:
    """unclaimed: the number of events by lane and topic, for lanes that nobody claims. undelivered: the number of unread events
    of such lanes, by lane and stream. unread: partitions that could not be read to their end, with the reason."""

    unclaimed: Mapping[str, Mapping[str, int]]
    undelivered: Mapping[str, Mapping[str, int]]
    unread: Mapping[TopicPartition, str]
    bookmark: Bookmark


async def find_waiting(broker: Broker, claimed: Collection[str], bookmark: Bookmark) -> WaitingEvents:
    """Count the waiting events; a fleet may run meanwhile. claimed: the lanes of the pipe file.

    Reads all events that wait with the retrier, and those that were written to the other topics since the bookmark. Raises
    BrokerError kinds, except for damage.
    """
    search = _Search(broker, claimed, bookmark)
    topics = await broker.admin.topics()
    await search.count_at_retrier(topics)
    await search.find_lanes(topics)
    await search.count_undelivered(topics)
    await search.count_unclaimed(topics)
    return search.found()


class _Search:
    def __init__(self, broker: Broker, claimed: Collection[str], bookmark: Bookmark) -> None:
        self._broker, self._claimed = broker, frozenset(claimed)
        self._read, self._lanes = dict(bookmark.read), set(bookmark.lanes) | self._claimed
        self._last = dict(bookmark.last)
        present = self._claimed | {lane.partition("/")[0] for lane in self._claimed}
        self._left = {name: heir for name, heir in bookmark.left.items() if name not in present}
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._undelivered: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._unread: dict[TopicPartition, str] = {}

    async def count_at_retrier(self, topics: Collection[str]) -> None:
        """Count in the direction in which events move, from longer to shorter delays, so that no moved event is missed."""
        for topic in (RETRY_IN, *map(delay_topic, reversed(DELAYS_S))):
            if topic not in topics:
                continue
            settled = await self._broker.admin.committed(RETRIER_GROUP, topic)
            for partition, stored in (await self._broker.reader.describe(topic)).items():
                source = TopicPartition(topic, partition)
                start = max(stored.start, settled.get(partition, stored.start - 1) + 1)
                found = await self._count(source, PartitionRange(start, stored.end))
                for lane, count in found.items():
                    if lane and lane not in self._claimed:
                        self._counts[lane][topic] += count

    async def find_lanes(self, topics: Collection[str]) -> None:
        """Find the lanes with events in the retry and parked topics, from the bookmark on."""
        ends = (retry_topic(""), parked_topic(""))
        for topic in sorted(topic for topic in topics if topic.endswith(ends)):
            for partition, stored in (await self._broker.reader.describe(topic)).items():
                source = TopicPartition(topic, partition)
                start = max(self._read.get(source, stored.start), stored.start)
                if start > stored.start and not await self._is_same(source, stored):
                    start = stored.start
                self._lanes |= (await self._count(source, PartitionRange(start, stored.end))).keys() - {""}
                if source not in self._unread:
                    self._read[source] = stored.end

    async def _is_same(self, source: TopicPartition, stored: PartitionRange) -> bool:
        """Whether the partition still has the last record that was read. It does not when the topic was created again."""
        if source not in self._last or self._read[source] > stored.end:
            return False
        offset, digest = self._last[source]
        try:
            batch = await self._broker.reader.read(*source, offset, max_records=1)
        except (OffsetOutOfRange, DataDamaged):
            return False
        return batch is not None and batch.offsets[0] == offset and digest_of(batch.records[0]).hex() == digest

    async def count_undelivered(self, topics: Collection[str]) -> None:
        """Count the unread events of removed lanes, in each stream that the lane has begun."""
        streams = [topic for topic in topics if not topic.startswith(_INTERNAL) and not topic.endswith(_SIDE_TOPICS)]
        for lane in sorted(self._lanes - self._claimed - self._left.keys()):
            group = delivery_group(*lane.split("/", 1))
            for topic in streams:
                if await self._broker.admin.has_begun(group, topic):
                    lags = await self._broker.admin.group_lag(group, topic)
                    self._undelivered[lane][topic] += sum(lag.records for lag in lags.values())

    async def count_unclaimed(self, topics: Collection[str]) -> None:
        for lane in sorted(self._lanes - self._claimed):
            pipe, _, destination = lane.partition("/")
            for topic in (retry_topic(pipe), parked_topic(pipe)):
                if topic in topics:
                    self._counts[lane][topic] += await self._count_lane(lane, delivery_group(pipe, destination), topic)
            if not (self._counts[lane].total() or self._undelivered[lane].total() or self._unread):
                self._lanes.discard(lane)  # until it has new events

    async def _count_lane(self, lane: str, group: str, topic: str) -> int:
        settled, count = await self._broker.admin.committed(group, topic), 0
        for partition, stored in (await self._broker.reader.describe(topic)).items():
            start = max(stored.start, settled.get(partition, stored.start - 1) + 1)
            count += (await self._count(TopicPartition(topic, partition), PartitionRange(start, stored.end)))[lane]
        return count

    async def _count(self, source: TopicPartition, stored: PartitionRange) -> Counter[str]:
        """The number of records by lane; "" for those that are no retry records."""
        found: Counter[str] = Counter()
        try:
            async for batch in read_topic(self._broker.reader, source.topic, source.partition, stored):
                found.update(map(lane_of, batch.records))
                self._last[source] = batch.offsets[-1], digest_of(batch.records[-1]).hex()
        except DataDamaged as error:
            self._unread[source] = str(error)
        return found

    def found(self) -> WaitingEvents:
        last = {source: self._last[source] for source in self._read if source in self._last}
        bookmark = Bookmark(self._read, frozenset(self._lanes), self._left, last)
        return WaitingEvents(_without_zeros(self._counts), _without_zeros(self._undelivered), self._unread, bookmark)


def _without_zeros(counts: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {lane: dict(+topics) for lane, topics in sorted(counts.items()) if topics.total()}


async def hand_over_positions(admin: Admin, pipes: PipeFile, left: Mapping[str, str] | None = None) -> dict[str, str]:
    """Let a destination that gets the waiting events of a removed one start in its streams at the removed one's position, also
    where that one had settled nothing. Returns the old lane by the new one.

    The new one then misses no event that the old one had not read, and the stream is not sent again. Partitions that the new
    one has begun already stay as they are, unless its name was left to another one before (`Bookmark.left`): its group is at
    a position of that time. Of several removed ones the first in `removed_lanes` counts. Call it before the new one runs. It
    raises GroupHasMembers while the new one runs and has not begun; then call it again.
    """
    former: defaultdict[str, list[str]] = defaultdict(list)
    for old, choice in removed_lanes(pipes).items():
        if choice.deliver_to is not None:
            former[choice.deliver_to].append(old)
    done: dict[str, str] = {}
    for new, olds in former.items():
        pipe = new.partition("/")[0]
        old_lane = await _take_over(admin, olds, new, delivery_topics(pipe, pipes.pipes[pipe]), left or {})
        if old_lane is not None:
            done[new] = old_lane
    return done


async def _take_over(
    admin: Admin, former: Sequence[str], new: str, topics: Collection[str], left: Mapping[str, str]
) -> str | None:
    """Returns the first lane of which `new` got a position; None: it got none."""
    group, givers = _group_of(new), set[str]()
    for topic in topics:
        givers.update([old for old in former if await admin.copy_positions(_group_of(old), group, topic)])
        if not left.get(new):
            continue
        wanted: dict[int, tuple[int, str]] = {}
        for old in former:
            if left.get(old) == new:  # it was taken over when the name was in use before
                continue
            for partition, offset in (await admin.positions(_group_of(old), topic)).items():
                wanted.setdefault(partition, (offset, old))
        own = await admin.positions(group, topic)
        moved = {partition: found for partition, found in wanted.items() if own.get(partition) != found[0]}
        if moved:
            await admin.set_committed(group, topic, {partition: at - 1 for partition, (at, _) in moved.items()})
            givers.update(old for _, old in moved.values())
    return next((old for old in former if old in givers), None)


async def find_takeover(
    admin: Admin, former: Sequence[str], lane: str, topics: Collection[str], left: Mapping[str, str]
) -> tuple[str, bool] | None:
    """The lane whose position this one gets at the next start, and True; or whose position it does not get, because it has begun
    itself, and False. None: there is none, or it was done. former: as in `take_over_positions`. topics: that exist."""
    for old in former:
        if left.get(old) == lane:
            continue
        inherited = [topic for topic in topics if await admin.has_begun(_group_of(old), topic)]
        if inherited:
            return old, bool(left.get(lane)) or not any(
                [await admin.has_begun(_group_of(lane), topic) for topic in inherited]
            )
    return None


def _group_of(lane: str) -> str:
    pipe, _, destination = lane.partition("/")
    return delivery_group(pipe, destination)


async def take_over_positions(
    broker: Broker,
    producer: Producer,
    lane: str,
    former: Sequence[str],
    topics: Collection[str],
    renames: Mapping[str, str] | None = None,
) -> None:
    """As `hand_over_positions`, for one lane that is about to join its group. former: the lanes whose events it gets. renames:
    as in `Pauses`, for the pause of a former name.

    When it returns, the position was taken over, or another member has joined: that one took it over before, or the group had
    begun. Raises BrokerError kinds; then call it again before the lane joins. It raises GroupHasMembers while the lane's group
    must be moved and has members: those of an earlier pipe file, in which the lane was removed.
    """
    before = await read_bookmark(broker.reader)
    if dict.fromkeys(former, lane).items() <= before.left.items():
        return
    own = {old: new for old, new in (renames or {}).items() if new == lane}
    await carry_pauses(broker.reader, producer, own)
    try:
        await _take_over(broker.admin, former, lane, topics, before.left)
    except GroupHasMembers as error:
        if not before.left.get(lane):
            return
        text = f"{lane} gets the position of {former[0]}, and its group has members, perhaps with an earlier pipe file"
        raise GroupHasMembers(f"{text}. Try: stop these members first") from error
    value = json.dumps({"lane": lane, "former": list(former)}).encode()
    (await producer.send_to(CONTROL, {0: [Record(_TAKEN_OVER, value, time.time_ns() // 1_000_000)]})).raise_first()


def lane_of(record: Record) -> str:
    """The lane of a waiting event; "" for a record that is none."""
    pipe, destination = record.header(_PIPE), record.header(_DESTINATION)
    if pipe is None or destination is None:
        return ""
    return lane_name(pipe.decode(errors="replace"), destination.decode(errors="replace"))


async def read_bookmark(reader: Reader) -> Bookmark:
    """The newest bookmark, with the takeovers since; an empty one when there is none. Raises BrokerError kinds, NewerFormat too:
    the lanes of earlier pipe files, and decisions about their events, are only there."""
    newest = Bookmark()
    try:
        stored = await reader.describe(CONTROL)
    except UnknownTopic:
        return newest
    async for batch in read_topic(reader, CONTROL, 0, stored[0]):
        for record in batch.records:
            if record.key == _KEY:
                try:
                    newest = Bookmark.decode(record.value or b"")
                except (ValueError, KeyError, AttributeError, TypeError):
                    newest = Bookmark()  # none of ours: read everything
            elif record.key == _TAKEN_OVER:
                with suppress(ValueError, KeyError, AttributeError, TypeError):
                    newest = newest.after_takeover(record.value or b"")
    return newest


async def write_bookmark(producer: Producer, bookmark: Bookmark, now_ms: int) -> None:
    """Store it durably. Raises BrokerError kinds."""
    (await producer.send_to(CONTROL, {0: [Record(_KEY, bookmark.encode(), now_ms)]})).raise_first()
