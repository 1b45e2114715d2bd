"""Groups by leases, in simulated time: who owns what, and who may commit."""

import random
from collections import defaultdict

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.core.broker.errors import NotOwner
from services.core.broker.kinesis.leases import OLDEST, StartPosition
from services.core.broker.record import TopicPartition
from tests.unit.kinesis.group_world import TIMING, TOPIC, Actor, World


def _world(shards: int) -> World:
    world = World()
    for _ in range(shards):
        world.add_shard()
    return world


async def _settle(world: World, actors: list[Actor], rounds: int = 40) -> None:
    for _ in range(rounds):
        for actor in actors:
            await actor.heartbeat()
        world.now += TIMING.heartbeat


async def _end(actors: list[Actor]) -> None:
    for actor in actors:
        await actor.die()


async def test_shares_are_fair_after_members_came_and_went() -> None:
    """If it fails, one worker of a group does all the work, or a shard has no reader."""
    world = _world(7)
    actors = [Actor(world)]
    await _settle(world, actors, 3)
    assert actors[0].readable() == set(range(7))
    actors += [Actor(world), Actor(world)]
    await _settle(world, actors)
    assert sorted(len(actor.readable()) for actor in actors) == [2, 2, 3]
    await actors[0].membership.leave()
    await _settle(world, actors[1:], 4)
    assert sorted(len(actor.readable()) for actor in actors[1:]) == [3, 4]
    assert actors[1].readable() | actors[2].readable() == set(range(7))
    await _end(actors)


async def test_a_balanced_group_is_left_alone() -> None:
    """If it fails, shards wander between members for ever: each time in-flight work is drained and caches are cold."""
    world = _world(5)
    actors = [Actor(world) for _ in range(3)]
    await _settle(world, actors)
    owners = {row.key: row.owner for row in world.table.stored.values()}
    revoked = [len(actor.revoked) for actor in actors]
    await _settle(world, actors)
    assert {row.key: row.owner for row in world.table.stored.values()} == owners
    assert [len(actor.revoked) for actor in actors] == revoked
    await _end(actors)


async def test_a_dead_member_is_replaced_after_the_lease_time_and_not_before() -> None:
    """If it fails, a killed worker's shards stop for ever, or a slow one's are read twice."""
    world = _world(2)
    dead, heir = Actor(world), Actor(world)
    await _settle(world, [dead], 3)
    await heir.heartbeat()
    await heir.heartbeat()
    asked = world.now
    await dead.die()
    while world.now < asked + TIMING.lease - TIMING.heartbeat:
        assert heir.readable() == set()
        world.now += TIMING.heartbeat
        await heir.heartbeat()
    await _settle(world, [heir], 3)
    assert heir.readable() == {0, 1}
    await heir.die()


async def test_a_late_commit_is_refused() -> None:
    """If it fails, a worker that wakes up after its lease moves its successor's offset: events are skipped or repeated."""
    world = _world(1)
    sleeper, heir = Actor(world), Actor(world)
    for _ in range(4):
        world.append(0)
    await sleeper.heartbeat()
    sleeper.take(2)
    await heir.heartbeat()
    world.now += TIMING.lease
    assert sleeper.readable() == set(), "it cannot know whether it was replaced"
    await heir.heartbeat()
    heir.take(4)
    assert await heir.commit() == set()
    assert await sleeper.commit() == {TopicPartition(TOPIC, 0)}
    (row,) = world.table.stored.values()
    assert row.committed == 3
    await sleeper.heartbeat()
    assert sleeper.revoked == [{TopicPartition(TOPIC, 0)}], "told, though it was too late to drain"
    assert sleeper.membership.held == {}
    await _end([sleeper, heir])


async def test_who_leaves_is_told_of_what_it_had_lost() -> None:
    """If it fails, what is in flight of a shard that was lost while another one drained is delivered after the member left."""
    world = _world(2)
    actor = Actor(world)
    await actor.heartbeat()
    lost, kept = sorted(actor.membership.held)
    actor.membership._lose(actor.membership.held[lost])  # noted by a beat during a drain: nobody was told yet
    await actor.membership.leave()
    assert actor.revoked == [{lost, kept}]


async def test_a_member_that_was_silent_goes_on_when_nobody_took_its_place() -> None:
    """If it fails, an outage of DynamoDB makes every worker throw away what it has in flight."""
    world = _world(1)
    world.append(0)
    alone = Actor(world)
    await alone.heartbeat()
    alone.take(1)
    world.now += 10 * TIMING.lease
    assert alone.readable() == set()
    await alone.heartbeat()
    assert alone.readable() == {0}
    assert await alone.commit() == set()
    assert alone.revoked == []
    await alone.die()


async def test_who_is_asked_drains_before_the_next_reads() -> None:
    """If it fails, a rebalance delivers in-flight events twice."""
    world = _world(2)
    first = Actor(world)
    for number in range(2):
        world.append(number)
    await first.heartbeat()
    first.take(1)
    second = Actor(world)
    await second.heartbeat()
    assert second.readable() == set(), "asked for, not taken"
    assert first.readable() == {0, 1}
    await first.heartbeat()
    (drained,) = first.revoked
    assert len(drained) == 1
    await second.heartbeat()
    second.take(1)
    assert second.readable() == {source.partition for source in drained}
    assert second.in_flight == {}, "committed while draining"
    with pytest.raises(NotOwner):
        await first.membership.commit(dict.fromkeys(drained, 5))
    await _end([first, second])


async def test_who_dies_while_draining_is_replaced() -> None:
    """If it fails, a shard that was asked for waits for ever for a member that is no more."""
    world = _world(2)
    first, second = Actor(world), Actor(world)
    await first.heartbeat()
    await second.heartbeat()
    await first.die()
    await _settle(world, [second], 15)
    assert second.readable() == {0, 1}
    await second.die()


async def test_a_lost_answer_does_not_lose_the_lease() -> None:
    """If it fails, one time-out towards DynamoDB costs a member its shard and everything in flight."""
    world = _world(1)
    world.append(0)
    actor = Actor(world)
    await actor.heartbeat()
    actor.take(1)
    world.table.unsure = 1
    await actor.commit()
    assert actor.in_flight, "not known to be committed"
    assert await actor.commit() == set()
    assert actor.readable() == {0}
    (row,) = world.table.stored.values()
    assert row.committed == 0
    await actor.die()


async def test_children_wait_for_their_parents() -> None:
    """If it fails, a split or merge delivers a key's later events before its earlier ones."""
    world = _world(2)
    for number in (0, 1):
        world.append(number)
    actor = Actor(world)
    await actor.heartbeat()
    world.close(0, 1)
    child = world.add_shard(0, 1)
    world.append(child)
    actor.take(10)
    await _settle(world, [actor], 3)
    assert child not in actor.readable(), "nothing is committed of its parents"
    await actor.membership.commit({TopicPartition(TOPIC, 0): 0})
    await _settle(world, [actor], 3)
    assert child not in actor.readable(), "one of two parents is not done"
    actor.in_flight.pop(TopicPartition(TOPIC, 0), None)
    assert await actor.commit() == set()
    await _settle(world, [actor], 3)
    assert actor.readable() == {child}
    assert {source.partition for sources in actor.revoked for source in sources} == {0, 1}
    await actor.die()


async def test_a_shard_that_aged_out_leaves_no_row() -> None:
    """If it fails, the lease table of a stream that is resharded every day grows for ever, and each beat reads all of it."""
    world = _world(1)
    actor = Actor(world, start="latest")
    world.append(0)
    await _settle(world, [actor], 2)
    actor.take(1)
    assert await actor.commit() == set()
    world.close(0)
    children = [world.add_shard(0), world.add_shard(0)]
    world.aged.add(0)  # before anybody looked: the row tells that the children may begin
    actor.take(1)
    await _settle(world, [actor], 3)
    assert actor.readable() == set(children)
    assert sorted(row.shard for row in world.table.stored.values()) == children
    late = world.add_shard(9)  # a grandchild whose parents came and went while the group had no members
    await _settle(world, [actor], 3)
    (row,) = (row for row in world.table.stored.values() if row.shard == late)
    assert row.start == OLDEST, "nothing is passed over"
    await actor.die()


async def test_a_latest_group_begins_by_the_services_clock() -> None:
    """If it fails, what arrives first is not read where this machine's clock is ahead of the service's."""
    world = _world(2)
    actor = Actor(world, start="latest")
    await actor.heartbeat()
    assert {row.start for row in world.table.stored.values()} == {StartPosition("arrival", int(world.now * 1000) - 7)}
    await actor.die()


def streams_made_anew() -> float:
    return REGISTRY.get_sample_value("penstock_broker_streams_made_anew_total", {"group": "g", "topic": TOPIC}) or 0.0


async def test_a_stream_made_anew_is_read_from_its_beginning() -> None:
    """If it fails, a `latest` group skips what arrives before a member notices: half a minute, or as long as all were down."""
    world = _world(2)
    actor = Actor(world, start="latest")
    await actor.heartbeat()
    world.append(1)
    world.now += 5
    world.make_anew(1)
    world.append(0)
    world.now += 600
    counted = streams_made_anew()
    with capture_logs() as logs:
        await _settle(world, [actor], 3)
    (row,) = (row for row in world.table.stored.values() if row.stream.endswith(":2"))
    assert (row.start, row.settled) == (OLDEST, world.made_ms)
    (told,) = (one for one in logs if one["event"] == "stream_made_anew")
    assert told["shards_not_done"] == [0, 1]
    assert told["settled_ms"] == 1_000_000 - 7, "nothing was ever processed"
    assert streams_made_anew() == counted + 1
    actor.take(1)
    assert await actor.commit() == set()
    await actor.die()


async def test_marks_of_another_ownership_are_refused() -> None:
    """If it fails, what was processed of a deleted stream, or of nothing at all, passes over records of the one made anew."""
    world = _world(1)
    actor, shard = Actor(world), TopicPartition(TOPIC, 0)
    for _ in range(4):
        world.append(0)
    await actor.heartbeat()
    actor.take(3)
    marks = dict(actor.in_flight)
    world.make_anew(1)
    world.next_offset = 0
    for _ in range(9):
        world.append(0)
    await _settle(world, [actor], 3)
    assert marks == {shard: 2}
    with pytest.raises(NotOwner):
        await actor.membership.commit(marks)  # of the deleted one; of this one nothing was polled
    actor.take(3)
    for unknown in (3, 8, 9, 1 << 90):
        with pytest.raises(NotOwner):
            await actor.membership.commit({shard: unknown})
    assert await actor.commit() == set()
    (row,) = (row for row in world.table.stored.values() if row.stream.endswith(":2"))
    assert row.committed == 2
    await actor.membership.commit({shard: 1})
    assert actor.membership.held[shard].row.committed == 2, "an older one again is nothing"
    await actor.die()


@pytest.mark.parametrize("merged", [False, True])
async def test_a_child_counts_from_when_its_parents_were_open(merged: bool) -> None:
    """If it fails, what a child got while the group was away, or busy with its parents, expires and is passed over in silence."""
    world = _world(2)
    actor = Actor(world)
    for number in (0, 1):
        world.append(number)
    await _settle(world, [actor], 2)
    actor.feed()
    seen_open = int(world.now * 1000)
    world.close(*((0, 1) if merged else (0,)))
    child = world.add_shard(*((0, 1) if merged else (0,)))
    world.append(child)
    world.now += 23 * 3600
    await _settle(world, [actor], 2)
    actor.take(10)
    assert await actor.commit() == set()
    await _settle(world, [actor], 3)
    (row,) = (row for row in world.table.stored.values() if row.shard == child)
    assert seen_open - 2000 <= row.settled <= seen_open
    await actor.die()


async def test_the_shortest_retention_since_all_was_processed_is_kept() -> None:
    """If it fails, who raises the retention of a stream that a group is behind on hides what expired before."""
    world = _world(1)
    actor = Actor(world)
    world.append(0)
    await _settle(world, [actor], 5)

    def kept() -> int:
        (row,) = world.table.stored.values()
        return row.retention

    day = world.retention_ms
    actor.take(1)
    for hours, shortest in ((24, day), (12, day // 2), (48, day // 2)):
        world.retention_ms = day * hours // 24
        await _settle(world, [actor], 5)
        assert kept() == shortest
    assert await actor.commit() == set()
    actor.feed()
    await _settle(world, [actor], 5)
    assert kept() == 2 * day, "nothing is left that the shorter one could have taken"
    await actor.die()


class _Storm:
    """Members that come, freeze, die and leave while shards split and merge; checks what must hold at every moment."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.world = _world(3)
        self.committed: dict[int, int] = defaultdict(lambda: -1)
        self.actors = [self._enter()]

    def _enter(self) -> Actor:
        return Actor(self.world, on_take=self._check_taken)

    def _check_taken(self, shard: int, offset: int) -> None:
        for parent in self.world.shards[shard].parents:
            assert self.committed[parent] == self._last(parent), f"{offset} of {shard} before its parent {parent}"

    def _last(self, shard: int) -> int:
        return (self.world.stored[shard] or [-1])[-1]

    def _is_done(self, shard: int) -> bool:
        return any(row.shard == shard and row.is_done for row in self.world.table.stored.values())

    async def step(self) -> None:
        """Some time passes and something happens."""
        self.world.now += self.chance.uniform(0, 2)
        actor, what = self.chance.choice(self.actors), self.chance.randrange(20)
        if what == 0 and len(self.actors) < 5:
            self.actors.append(self._enter())
        elif what in (1, 2) and len(self.actors) > 1:
            await self._remove(actor, at_once=what == 1 or actor.frozen)
        elif what == 3:
            actor.frozen = not actor.frozen
        elif what == 4 and len(self.world.shards) < 14:
            self._reshard()
        elif what == 5:
            self.world.table.unsure = 1
        elif what == 6:
            self.world.aged |= {n for n, shard in self.world.shards.items() if not shard.is_open and self._is_done(n)}
        elif what < 10:
            self.world.append(self.chance.choice(self.world.open_numbers()))
        elif not actor.frozen:
            await self._work(actor, self.chance.random() < 0.7)
        self.check()

    async def _remove(self, actor: Actor, at_once: bool) -> None:
        self.actors.remove(actor)
        await (actor.die() if at_once else actor.membership.leave())

    async def _work(self, actor: Actor, commit: bool) -> None:
        await actor.heartbeat()
        actor.take(self.chance.randrange(1, 4))
        self.check()
        if commit:
            await actor.commit()

    def _reshard(self) -> None:
        numbers = self.world.open_numbers()
        merge = len(numbers) > 1 and self.chance.random() < 0.4
        parents = self.chance.sample(numbers, 2 if merge else 1)
        self.world.close(*parents)
        for _ in range(3 - len(parents)):
            self.world.add_shard(*parents)

    def check(self) -> None:
        """One reader a shard; no commit went back."""
        for row in self.world.table.stored.values():
            now = -1 if row.committed is None else row.committed
            assert now >= self.committed[row.shard], "a commit went back"
            self.committed[row.shard] = now
        readers = sorted(number for one in self.actors for number in one.readable())
        assert len(readers) == len(set(readers)), f"two readers: {readers}"

    async def calm(self) -> None:
        """Nothing happens any more: everybody works, and everything is done in the end."""
        for _ in range(80):
            for actor in self.actors:
                actor.frozen = False
                await self._work(actor, commit=True)
            self.world.now += TIMING.heartbeat
        readers = sorted(number for one in self.actors for number in one.readable())
        assert readers == self.world.open_numbers(), "every shard has a reader"
        assert {n: self.committed[n] for n in self.world.stored} == {n: self._last(n) for n in self.world.stored}


@pytest.mark.parametrize("seed", [None, *range(12)])
async def test_a_storm_keeps_the_promises(seed: int | None) -> None:
    """If it fails, a busy group loses or reorders events, or two workers have one shard."""
    seed = random.randrange(1 << 30) if seed is None else seed
    print(f"seed {seed}")
    storm = _Storm(random.Random(seed))
    for _ in range(400):
        await storm.step()
    await storm.calm()
    await _end(storm.actors)
