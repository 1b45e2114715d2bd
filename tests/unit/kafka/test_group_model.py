"""The real consumer's commits against a model of Kafka's group coordinator, driven at random."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.kafka import aiokafka_internals
from services.core.broker.kafka.aiokafka_internals import FetchBudget, generation_of
from services.core.broker.kafka.assignment import Assignment
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.consumer import FreezeDetector, KafkaConsumer, SharedResources
from services.core.broker.kafka.positions import GroupStarts
from services.core.broker.record import Batch, TopicPartition
from tests.support.cpu_budget import CpuBudget, report_cases
from tests.support.group_model import TOPIC, Client, GroupModel, OnRecord
from tests.support.turns import cases_of_the_day

pytestmark = pytest.mark.long

_SEEDS, _STEPS = 5000, 40
_BLOCKS, _CPU_S = 10, 60.0
_PARTITIONS, _END = 3, 30
_MEMBERS = 3


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aiokafka_internals, "_PAUSE", 0)
    with capture_logs():  # thousands of topics made anew
        yield


class Member:
    """One process: the real consumer and ownership, and a service that commits what it has processed, in the background."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self._world = name, world
        self.client = Client(world.group)
        self.own = Assignment(self._on_revoke, 600.0, lambda: generation_of(self.client))
        shared = SharedResources(cast(Cluster, world.group), cast(GroupStarts, world.on_record), FetchBudget())
        self.consumer = KafkaConsumer(shared, cast(Any, self.client), self.own, "g", "earliest", FreezeDetector(600.0))
        self.own.on_assigned = self.consumer.position_early
        self.processed: dict[TopicPartition, int] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_frozen = False
        self.generation = 0

    async def process(self) -> None:
        """Poll, and take each record for delivered at once."""
        if self._world.rng.random() < 0.5:
            self.consumer._checked_at = float("-inf")  # some seconds have passed
        for batch in await self.consumer.poll(max_records=100, max_wait=0):
            self._world.processed(self, batch)
            self.processed[batch.source] = batch.offsets[-1]

    def commit_later(self, rng: random.Random) -> None:
        """As a service's timer does; sometimes of less than what is processed by now."""
        marks = {source: max(0, last - rng.randrange(3)) for source, last in self.processed.items()}
        if marks:
            task = asyncio.create_task(self.commit(marks))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def commit(self, marks: dict[TopicPartition, int]) -> None:
        """What is refused or fails is tried again by later commits."""
        refused: frozenset[tuple[str, int]] = frozenset()
        topic = self._world.group.id
        of_it = {source for source in marks if source in self.own.metadata and self.own.metadata[source].topic == topic}
        try:
            await self.consumer.commit(marks)
        except NotOwner as error:
            refused = error.partitions
        except BrokerError:
            return
        if topic == self._world.group.id:
            self._world.acknowledged({source: marks[source] for source in of_it if source not in refused})

    async def _on_revoke(self, partitions: frozenset[TopicPartition]) -> None:
        if not self._world.cuts_drains_off():
            await self.commit(dict(self.processed))
        for source in partitions:
            self.processed.pop(source, None)

    async def leave_old(self) -> None:
        """The group rebalances, or has gone on without this member."""
        self.client.revoke()
        await self.own.on_partitions_revoked([])


class World:
    """The group, its members, and what is known to be true of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.group = GroupModel(self.rng, _PARTITIONS, _END)
        self.on_record = OnRecord()
        self.members = [Member(f"m{number}", self) for number in range(_MEMBERS)]
        self.owner: dict[TopicPartition, Member] = {}
        self.done: dict[tuple[int, TopicPartition], int] = {}
        self.seen: set[tuple[int, TopicPartition, int]] = set()
        self.safe: dict[TopicPartition, int] = {}
        self._checked = 0

    def processed(self, member: Member, batch: Batch) -> None:
        """Note what was processed: under which generation, and which life's records."""
        self.done[(member.generation, batch.source)] = batch.offsets[-1]
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            self.seen.add((record.timestamp, batch.source, offset))

    def make_anew(self) -> None:
        """What counted for the old topic does not count for the new one."""
        self.group.make_anew()
        self.safe.clear()

    def acknowledged(self, marks: dict[TopicPartition, int]) -> None:
        """A commit was answered with success: from here on it counts."""
        for source, mark in marks.items():
            self.safe[source] = max(self.safe.get(source, 0), mark + 1)

    def cuts_drains_off(self) -> bool:
        """Whether a drain takes too long: the member joins anew with commits still under way."""
        return self.group.faulty and self.rng.random() < 0.3

    async def step(self) -> None:
        """One thing happens to somebody."""
        member = self.rng.choice(self.members)
        what = self.rng.random()
        if what < 0.35 and not member.is_frozen:
            await member.process()
        elif what < 0.65:
            member.commit_later(self.rng)
        elif what < 0.75:
            self.group.move()
        elif what < 0.8:
            member.is_frozen = True
        elif what < 0.85 and member.tasks:
            self.rng.choice(sorted(member.tasks, key=lambda task: task.get_name())).cancel()
        elif what < 0.95:
            await self.rebalance()
        elif what < 0.96:
            self.make_anew()
        await self.group.pause()
        self.check()

    async def rebalance(self) -> None:
        """Who lives drains under the old generation, then all join the next; the frozen are expelled."""
        self.group.stage = "preparing"
        alive = [member for member in self.members if not member.is_frozen] or self.members[:1]
        await asyncio.gather(*(member.leave_old() for member in alive))
        self.check()
        self.group.stage, self.group.members = "completing", {member.name for member in alive}
        self.group.generation += 1
        shares: dict[str, list[TopicPartition]] = {member.name: [] for member in alive}
        for source in self.group.sources:
            self.owner[source] = owner = self.rng.choice(alive)
            shares[owner.name].append(source)
        for member in alive:
            member.client._coordinator.generation = member.generation = self.group.generation
            member.client._coordinator.member_id, member.is_frozen = member.name, False
        await self.group.pause()
        self.group.stage = "stable"
        await asyncio.gather(*(member.own.on_partitions_assigned(shares[member.name]) for member in alive))
        for source in self.group.sources:
            begun = self.owner[source].own.begun.get(source)
            assert begun is None or begun >= self.safe.get(source, 0), f"{source} begins behind an acknowledged commit"
        for member in self.members:
            if member not in alive:  # thaws later, hears that it is no member, and joins with the next rebalance
                member.client._coordinator.reset_generation()
                await member.leave_old()
                member.is_frozen = False

    def check(self) -> None:
        """Of each commit that was stored since the last look."""
        for source, position, generation, member, _ in self.group.landed[self._checked :]:
            assert generation == self.group.generation, f"{source}: {position} was stored under {generation}"
            assert self.owner[source].name == member, f"{source}: {position} was stored by {member}, which had lost it"
            begun = self.owner[source].own.begun.get(source, 0)
            assert position <= self.done.get((generation, source), begun - 1) + 1, (
                f"{source}: {position} is not processed"
            )
        self._checked = len(self.group.landed)
        last: dict[tuple[TopicPartition, int, int], int] = {}
        for source, position, generation, _, life in self.group.landed:
            before = last.get((source, generation, life), 0)
            assert position >= before, f"{source} went back from {before} to {position} within {generation}"
            last[(source, generation, life)] = position

    async def settle(self) -> None:
        """Without faults everything is processed and committed, also of a topic that is made anew in between."""
        self.group.faulty = False
        for member in self.members:
            await asyncio.gather(*member.tasks, return_exceptions=True)
            member.is_frozen = False
        await self.rebalance()
        self.make_anew()
        for _ in range(_END):
            for member in self.members:
                await member.process()
        for member in self.members:
            await member.commit(dict(member.processed))
        self.check()
        assert {source: at for source, (at, _) in self.group.offsets.items()} == dict.fromkeys(self.group.sources, _END)
        missed = {(source, offset) for source in self.group.sources for offset in range(_END)} - {
            (source, offset) for life, source, offset in self.seen if life == self.group.life
        }
        assert not missed, f"never delivered: {sorted(missed)}"


@pytest.mark.parametrize("block", range(_BLOCKS))
async def test_commits_are_sound_whatever_the_group_does(block: int, request: pytest.FixtureRequest) -> None:
    """If it fails, a member that lost a partition moves its successor, or marks of a topic that was made anew count for
    the new one: events are skipped. Or a commit that was acknowledged does not count, or goes back."""
    share, done = _SEEDS // _BLOCKS, 0
    seeds = cases_of_the_day(range(block * share, (block + 1) * share))
    budget = CpuBudget(_CPU_S * len(seeds) / _SEEDS)
    for seed in seeds:
        if not budget.is_left:
            break
        done += 1
        world = World(seed)
        try:
            await world.rebalance()
            for _ in range(_STEPS):
                await world.step()
            await world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert TOPIC in {source.topic for source, *_ in world.group.landed}
    report_cases(request, "commits to a model of Kafka's group coordinator", done, len(seeds))
