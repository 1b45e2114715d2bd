"""Events that wait for another attempt or for a resume, and whom they wait for: no one may be passed over for ever.

A **lane** is `pipe/destination`. What waits for one lies with the global retrier (`penstock.retry-in` and the delay topics,
behind what the retrier has committed), in `<pipe>.retry` or in `<pipe>.parked` (behind what the lane's own group has). A lane
that a pipe file no longer has is read by nobody: what waits for it would end with the topics' retention.

The retry and parked topics are read once: how far, and which lanes were seen there, is kept in `penstock.control`
(`Bookmark`). It only saves time; without it all is read again.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.errors import DataDamaged, UnknownTopic
from services.core.broker.pages import read_topic
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.pipes import (
    CONTROL,
    DELAYS_S,
    RETRIER_GROUP,
    RETRY_IN,
    PipeFile,
    delay_topic,
    delivery_group,
    delivery_topics,
    lane_name,
    parked_topic,
    retry_topic,
)
from services.core.retry_state import PREFIX

_KEY = b"waiting"
_PIPE, _DESTINATION = PREFIX + "pipe", PREFIX + "destination"


@dataclass(frozen=True, slots=True)
class Bookmark:
    """read: the offset before which a partition was looked through. lanes: those that had events there, or were claimed."""

    read: Mapping[TopicPartition, int] = field(default_factory=dict)
    lanes: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        """Offsets as text: on Kinesis they have 56 digits."""
        read = {f"{topic}:{partition}": str(offset) for (topic, partition), offset in sorted(self.read.items())}
        return json.dumps({"read": read, "lanes": sorted(self.lanes)}).encode()

    @classmethod
    def decode(cls, value: bytes) -> "Bookmark":
        """Raises ValueError, KeyError, AttributeError for anything else."""
        found = json.loads(value)
        places = ((name.rpartition(":"), offset) for name, offset in found["read"].items())
        read = {TopicPartition(topic, int(partition)): int(offset) for (topic, _, partition), offset in places}
        return cls(read, frozenset(map(str, found["lanes"])))


@dataclass(frozen=True, slots=True)
class Waiting:
    """What was found. unclaimed: events by lane and topic, of lanes that nobody claims. with_retrier: events that the retrier has
    still to move, whomever they are for. unread: partitions that could not be read to their end, and why.
    """

    unclaimed: Mapping[str, Mapping[str, int]]
    with_retrier: int
    unread: Mapping[TopicPartition, str]
    bookmark: Bookmark


async def find_waiting(admin: Admin, claimed: Collection[str], bookmark: Bookmark) -> Waiting:
    """Look through everything that waits, as it is now; also beside a working fleet. claimed: lanes that somebody serves.

    Takes as long as reading what waits with the retrier, and what came into the other topics since the bookmark. Raises
    BrokerError kinds, but for damage.
    """
    search = _Search(admin, claimed, bookmark)
    topics = await admin.topics()
    await search.look_at_retrier(topics)
    await search.look_for_lanes(topics)
    await search.count_unclaimed(topics)
    return search.found()


class _Search:
    def __init__(self, admin: Admin, claimed: Collection[str], bookmark: Bookmark) -> None:
        self._admin, self._claimed = admin, frozenset(claimed)
        self._read, self._lanes = dict(bookmark.read), set(bookmark.lanes) | self._claimed
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._with_retrier = 0
        self._unread: dict[TopicPartition, str] = {}

    async def look_at_retrier(self, topics: Collection[str]) -> None:
        """In the direction in which events go, from longer to shorter delays: what is moved meanwhile is seen once at least."""
        for topic in (RETRY_IN, *map(delay_topic, reversed(DELAYS_S))):
            if topic not in topics:
                continue
            settled = await self._admin.committed(RETRIER_GROUP, topic)
            for partition, held in (await self._admin.describe(topic)).items():
                source = TopicPartition(topic, partition)
                start = max(held.start, settled.get(partition, held.start - 1) + 1)
                found = await self._count(source, PartitionRange(start, held.end))
                self._with_retrier += sum(found.values())
                for lane, count in found.items():
                    if lane and lane not in self._claimed:
                        self._counts[lane][topic] += count

    async def look_for_lanes(self, topics: Collection[str]) -> None:
        """Whose events are in the topics that lanes read: from where the last look ended."""
        ends = (retry_topic(""), parked_topic(""))
        for topic in sorted(topic for topic in topics if topic.endswith(ends)):
            for partition, held in (await self._admin.describe(topic)).items():
                source = TopicPartition(topic, partition)
                start = self._read.get(source, held.start)
                start = held.start if start > held.end else max(start, held.start)  # beyond the end: it was made anew
                self._lanes |= (await self._count(source, PartitionRange(start, held.end))).keys() - {""}
                if source not in self._unread:
                    self._read[source] = held.end

    async def count_unclaimed(self, topics: Collection[str]) -> None:
        for lane in sorted(self._lanes - self._claimed):
            pipe, _, destination = lane.partition("/")
            for topic in (retry_topic(pipe), parked_topic(pipe)):
                if topic in topics:
                    self._counts[lane][topic] += await self._count_lane(lane, delivery_group(pipe, destination), topic)
            if not self._counts[lane].total() and not self._unread:
                self._lanes.discard(lane)  # until new events for it are seen

    async def _count_lane(self, lane: str, group: str, topic: str) -> int:
        settled, count = await self._admin.committed(group, topic), 0
        for partition, held in (await self._admin.describe(topic)).items():
            start = max(held.start, settled.get(partition, held.start - 1) + 1)
            count += (await self._count(TopicPartition(topic, partition), PartitionRange(start, held.end)))[lane]
        return count

    async def _count(self, source: TopicPartition, held: PartitionRange) -> Counter[str]:
        """Records by lane; "" for those that are no retry records."""
        found: Counter[str] = Counter()
        try:
            async for batch in read_topic(self._admin, source.topic, source.partition, held):
                found.update(map(_lane_of, batch.records))
        except DataDamaged as error:
            self._unread[source] = str(error)
        return found

    def found(self) -> Waiting:
        counts = {lane: dict(+topics) for lane, topics in sorted(self._counts.items()) if topics.total()}
        return Waiting(counts, self._with_retrier, self._unread, Bookmark(self._read, frozenset(self._lanes)))


async def hand_over_positions(admin: Admin, pipes: PipeFile) -> dict[str, str]:
    """Let each destination that gets what waited for a removed one begin in its streams where that one ended, also where
    that one had begun and settled nothing.

    Where it has begun already it is left alone; of several removed ones the first in the file counts. So what the old name had
    not read is not lost to the new one, nor the whole stream sent again. Gives the old lane by the new one. To be called
    before the new one runs: raises Unavailable while it does and has not begun, and BrokerError kinds; then call it again.
    """
    done: dict[str, str] = {}
    for old, choice in pipes.removed.items():
        if choice.deliver_to is None:
            continue
        pipe, _, destination = choice.deliver_to.partition("/")
        group, ended = delivery_group(pipe, destination), delivery_group(*old.split("/"))
        for topic in delivery_topics(pipe, pipes.pipes[pipe]):
            if await admin.copy_positions(ended, group, topic):
                done.setdefault(choice.deliver_to, old)
    return done


def _lane_of(record: Record) -> str:
    pipe, destination = record.header(_PIPE), record.header(_DESTINATION)
    if pipe is None or destination is None:
        return ""
    return lane_name(pipe.decode(errors="replace"), destination.decode(errors="replace"))


async def read_bookmark(admin: Admin) -> Bookmark:
    """The newest one; an empty one without any. Raises BrokerError kinds."""
    newest = Bookmark()
    try:
        held = await admin.describe(CONTROL)
    except UnknownTopic:
        return newest
    async for batch in read_topic(admin, CONTROL, 0, held[0]):
        for record in batch.records:
            if record.key == _KEY:
                try:
                    newest = Bookmark.decode(record.value or b"")
                except (ValueError, KeyError, AttributeError, TypeError):
                    newest = Bookmark()  # of another version: look through everything
    return newest


async def write_bookmark(producer: Producer, bookmark: Bookmark, now_ms: int) -> None:
    """Durably. Raises BrokerError kinds."""
    (await producer.send_to(CONTROL, {0: [Record(_KEY, bookmark.encode(), now_ms)]})).raise_first()
