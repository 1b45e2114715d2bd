"""A model of Kafka's group coordinator, and of aiokafka's view of it: generations, fencing, moves, answers that are lost.

The coordinator believes a commit by its generation and member id alone, as Kafka does; it does not know who owns what.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.kafka.cluster import PartitionState, Timing, TopicState
from services.core.broker.kafka.leaders import LATEST
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.positions import GroupStart
from services.core.broker.kafka.protocol import EpochEndRequest
from services.core.broker.record import TopicPartition

TOPIC = "t"
ID = "11111111-2222-3333-4444-555555555555"
EPOCH = 1
_NOT_COORDINATOR, _LOADING = 16, 14
_ILLEGAL_GENERATION, _UNKNOWN_MEMBER, _REBALANCING = 22, 25, 27


class Landed(NamedTuple):
    """A commit that was stored, for the topic that has the name."""

    source: TopicPartition
    position: int
    generation: int
    member: str
    life: int


class GroupModel:
    """One group and one topic of `partitions`, each with `end` records. `landed`: every commit that counts, in order."""

    def __init__(self, rng: random.Random, partitions: int, end: int) -> None:
        self.rng, self.end = rng, end
        self.sources = [TopicPartition(TOPIC, number) for number in range(partitions)]
        self.generation, self.stage = 0, "stable"
        self.members: set[str] = set()
        self.node = 0
        self.loading = 0
        self.faulty = True
        self.life = 0
        self.stale_id = ""
        """The topic's id as its leader knows it; "": the right one."""
        self.cut: int | None = None
        """Where EPOCH ended, when another one goes on there."""
        self.former = 0
        """How many of the next questions about epochs reach a node that led in EPOCH, and hears no news."""
        self.offsets: dict[TopicPartition, tuple[int, str]] = {}
        self.landed: list[Landed] = []
        self.timing = Timing(request=600.0, drain=600.0)

    async def pause(self) -> None:
        """Let others run for a while: a request is on its way."""
        for _ in range(self.rng.randrange(6) if self.faulty else 1):
            await asyncio.sleep(0)

    @property
    def id(self) -> str:
        """The topic's id, another one in each life."""
        return f"{self.life:08}{ID[8:]}"

    @property
    def epoch(self) -> int:
        """Of the leader."""
        return EPOCH if self.cut is None else EPOCH + 1

    def make_anew(self) -> None:
        """The topic is deleted, and Kafka forgets the group's offsets in it; another one gets its name, with as many records."""
        self.life += 1
        self.offsets.clear()

    def move(self) -> None:
        """The coordinator dies, the other node takes over with all that is stored, and loads it first."""
        self.node, self.loading = 1 - self.node, self.rng.randrange(3)

    def commit(self, node: int, request: OffsetCommitRequest) -> Any:
        """The answer of this node."""
        asked = request.prepare({8: (2, 2)}).to_object()
        generation, member = asked["consumer_group_generation_id"], asked["consumer_id"]
        code = self._judge(node, generation, member)
        topics = []
        for topic in asked["topics"]:
            for row in topic["partitions"]:
                if not code:
                    source = TopicPartition(topic["topic"], row["partition"])
                    self.offsets[source] = (row["offset"], row["metadata"])
                    if CommitMetadata.parse(row["metadata"]).topic == self.id:
                        self.landed.append(Landed(source, row["offset"], generation, member, self.life))
            topics.append((topic["topic"], [(row["partition"], code) for row in topic["partitions"]]))
        return SimpleNamespace(topics=topics)

    def _judge(self, node: int, generation: int, member: str) -> int:
        if node != self.node:
            return _NOT_COORDINATOR
        if self.loading:
            self.loading -= 1
            return _LOADING
        if member not in self.members:
            return _UNKNOWN_MEMBER
        if generation != self.generation:
            return _ILLEGAL_GENERATION
        return _REBALANCING if self.stage == "completing" else 0

    async def describe(self, topics: Sequence[str] | None = None) -> dict[str, TopicState]:
        """As `Cluster.describe`."""
        return {
            TOPIC: TopicState(
                {source.partition: PartitionState(0, 3, 3, self.epoch) for source in self.sources}, False, self.id
            )
        }

    async def describe_agreed(self, topics: Sequence[str]) -> dict[str, TopicState]:
        """As `Cluster.describe_agreed`."""
        return await self.describe(topics)

    async def describe_by_node(self, topics: Sequence[str]) -> AsyncGenerator[dict[str, TopicState], None]:
        """As `Cluster.describe_by_node`, of one node."""
        yield await self.describe(topics)

    async def describe_at(self, _node: int, topics: Sequence[str]) -> dict[str, TopicState]:
        """As `Cluster.describe_at`: all nodes know the same, unless `stale_id` is set."""
        found = await self.describe(topics)
        return {name: replace(state, id=self.stale_id or state.id) for name, state in found.items()}

    async def ask_coordinator(self, group: str, request: Any) -> Any:
        """As `Cluster.ask_coordinator`."""
        assert isinstance(request, OffsetFetchRequest)
        asked = request.prepare({9: (3, 3)}).to_object()
        topics = [
            (
                topic["topic"],
                [
                    (number, *self.offsets.get(TopicPartition(topic["topic"], number), (-1, "")), 0)
                    for number in topic["partitions"]
                ],
            )
            for topic in asked["topics"]
        ]
        return SimpleNamespace(topics=topics, error_code=0)

    async def ask(self, node: int, request: Any) -> Any:
        """As `Cluster.ask`: where the partitions begin, and that no log was ever cut off."""
        asked = request.prepare({request.API_KEY: (3, 3)}).to_object()
        topics = []
        for topic in asked["topics"]:
            rows = [self._answer(request, row) for row in topic["partitions"]]
            topics.append((topic["topic"], rows))
        return SimpleNamespace(topics=topics)

    def _answer(self, request: Any, row: dict[str, int]) -> tuple[int, int, int, int]:
        if isinstance(request, EpochEndRequest):
            return 0, row["partition"], *self._epoch_end(row["leader_epoch"])
        return row["partition"], 0, -1, self.end if row["timestamp"] == LATEST else 0

    def _epoch_end(self, epoch: int) -> tuple[int, int]:
        is_former, self.former = self.former > 0, max(0, self.former - 1)
        newest = EPOCH if is_former else self.epoch
        if epoch > newest:
            return -1, -1
        return (newest, self.end) if epoch == newest or self.cut is None else (EPOCH, self.cut)


class Coordinator:
    """What of aiokafka's GroupCoordinator a member's commits touch."""

    def __init__(self, group: GroupModel) -> None:
        self._group = group
        self.generation, self.member_id = -1, ""
        self.coordinator_id: int | None = None

    async def ensure_coordinator_known(self) -> None:
        """May find the one that was, while it moves."""
        while self.coordinator_id is None:
            await self._group.pause()
            self.coordinator_id = self._group.node

    async def _send_req(self, request: OffsetCommitRequest) -> Any:
        group, node = self._group, self.coordinator_id
        if node is None:
            raise kafka.GroupCoordinatorNotAvailableError
        await group.pause()
        fate = group.rng.random() if group.faulty else 1.0
        if fate < 0.1:
            self.coordinator_dead()
            raise kafka.KafkaConnectionError("the request was lost")
        answer = group.commit(node, request)
        await group.pause()
        if fate < 0.2:
            self.coordinator_dead()
            raise kafka.KafkaConnectionError("the answer was lost")
        return answer

    def coordinator_dead(self) -> None:
        """Ask again who it is."""
        self.coordinator_id = None

    def reset_generation(self) -> None:
        """As aiokafka does when it is told that it is no member."""
        self.generation, self.member_id = -1, ""

    def request_rejoin(self) -> None:
        """As aiokafka does when it is told of a rebalance."""


class Client:
    """What of AIOKafkaConsumer a member's reading touches: it returns up to three records of each partition in turn."""

    def __init__(self, group: GroupModel) -> None:
        self._group = group
        self._coordinator = Coordinator(group)
        self.epoch: int | None = None
        """Of the leader that wrote what is fetched."""
        self._fetcher = SimpleNamespace(epochs_between=self._epochs_between)
        self._positions: dict[KafkaPartition, int] = {}
        self._paused: set[KafkaPartition] = set()

    def _epochs_between(self, source: KafkaPartition, first: int, last: int) -> list[tuple[int, int]]:
        return [] if self.epoch is None else [(first, self.epoch)]

    def assignment(self) -> Collection[KafkaPartition]:
        """Those with a position."""
        return set(self._positions)

    def partitions_for_topic(self, _topic: str) -> set[int]:
        """All, by number."""
        return {source.partition for source in self._group.sources}

    def seek(self, source: KafkaPartition, position: int) -> None:
        """Read on there."""
        self._positions[source] = position

    def pause(self, source: KafkaPartition) -> None:
        """Return none of its records until `resume`, or until it is assigned anew."""
        self._paused.add(source)

    def resume(self, source: KafkaPartition) -> None:
        """Undo it."""
        self._paused.discard(source)

    def revoke(self) -> None:
        """All is taken away."""
        self._positions.clear()
        self._paused.clear()

    async def getmany(self, *, timeout_ms: int, max_records: int) -> Mapping[KafkaPartition, list[Any]]:
        """The next records, at once."""
        found = {}
        for source, position in self._positions.items():
            if source in self._paused:
                continue
            if rows := [
                _row(offset, self._group.life) for offset in range(position, min(position + 3, self._group.end))
            ]:
                found[source] = rows
                self._positions[source] = rows[-1].offset + 1
        return found


def _row(offset: int, life: int) -> Any:
    return SimpleNamespace(offset=offset, key=None, value=b"", timestamp=life, headers=())


class OnRecord:
    """Stands for `GroupStarts`, in memory."""

    def __init__(self, known: Mapping[TopicPartition, GroupStart] | None = None) -> None:
        self._known = dict(known or {})

    async def find(self, group: str, sources: Collection[TopicPartition]) -> dict[TopicPartition, GroupStart]:
        """What is on record of these."""
        return {source: row for source, row in self._known.items() if source in sources}

    async def record(self, group: str, begun: Mapping[TopicPartition, GroupStart]) -> None:
        """Put on record."""
        self._known |= begun
