"""A member that owns little, or nothing for a moment, does not say that its group is done."""

from collections.abc import Mapping
from typing import Any

import pytest

from services.core.broker.contract import Lag
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition
from services.core.group_lag import ASK_EVERY_S, LEARN_EVERY_S, SETTLING_S, MixedLag, OwnLag, WholeLag


class Brokers:
    """Knows the lag of a group in topic `s`."""

    def __init__(self, lags: Mapping[int, Lag]) -> None:
        self.lags, self.asked, self.away = dict(lags), 0, False

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        assert (group, topic) == ("g", "s")
        self.asked += 1
        if self.away:
            raise Unavailable("away")
        return self.lags


class Bench:
    def __init__(self, *partitions: int) -> None:
        self.now = 0.0
        self.brokers = Brokers({number: Lag(9, 600_000) for number in partitions})
        admin: Any = self.brokers
        self.group = WholeLag(admin, "g", ["s"], lambda: self.now)

    async def ask(self, *own: int) -> dict[int, int] | None:
        found = await self.group.complete({TopicPartition("s", number): Lag(0, 0) for number in own})
        return None if found is None else {source.partition: lag.records for source, lag in found.items()}


async def test_who_owns_nothing_tells_of_the_group() -> None:
    """Broken: during a rebalance, or just after an outage, every member says "behind by 0": the backlog is final as lost."""
    bench = Bench(0, 1)
    assert await bench.ask() == {0: 9, 1: 9}
    assert await bench.ask() is None, "an earlier word stands"
    bench.now += ASK_EVERY_S
    assert await bench.ask(1) == {0: 9, 1: 0}


async def test_who_owns_all_asks_nobody() -> None:
    """Broken: a fleet of one asks the brokers for what it has just measured, every two seconds and for each destination."""
    bench = Bench(0, 1)
    await bench.ask(0, 1)
    asked = bench.brokers.asked
    for _ in range(20):
        bench.now += 2
        assert await bench.ask(0, 1) == {0: 0, 1: 0}
    assert bench.brokers.asked == asked
    bench.brokers.lags[2] = Lag(5, 5)
    bench.now += LEARN_EVERY_S
    assert await bench.ask(0, 1) == {0: 0, 1: 0, 2: 5}, "a new partition, another's"


async def test_brokers_that_are_away_are_an_error() -> None:
    """Broken: what could not be asked counts as done."""
    bench = Bench(0)
    bench.brokers.away = True
    with pytest.raises(Unavailable):
        await bench.ask()
    assert await bench.ask() is None
    bench.brokers.away, bench.now = False, ASK_EVERY_S
    assert await bench.ask() == {0: 9}


async def test_own_lag_waits_for_a_share() -> None:
    """Broken: on Kinesis a new member calls everything done before it has a lease; or one that never gets any is never final."""
    now = 0.0
    group, mine = OwnLag(lambda: now), {TopicPartition("s", 0): Lag(3, 3)}
    assert await group.complete({}) is None
    assert await group.complete(mine) == mine
    now = SETTLING_S
    assert await group.complete({}) == {}


async def test_a_stream_that_has_moved_to_kinesis_waits_for_its_share() -> None:
    """Broken: just after the move no member has a lease there, and each says that everything is done."""
    bench, sparse = Bench(0), set[str]()
    admin: Any = bench.brokers
    whole = WholeLag(admin, "g", ["s", "k"], lambda: bench.now)
    group = MixedLag(whole, ["s", "k"], lambda topic: topic not in sparse, lambda: bench.now)
    own = {TopicPartition("s", 0): Lag(3, 3)}
    sparse.add("k")
    assert await group.complete(own) is None
    there = own | {TopicPartition("k", 7): Lag(1, 1, 5)}
    assert await group.complete(there) == there, "the topic of the other kind is asked about, and only that"
    bench.now += SETTLING_S
    assert await group.complete(own) == own, "others have the shards"
    sparse.add("s")
    assert await group.complete({}) is None
