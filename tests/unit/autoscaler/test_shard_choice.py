"""Which layout is chosen: fast where shards refuse, few where one partition is hot, even where nothing hurries."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.shards.layout import choose_down, choose_up, shard_loads, uniform

_TARGET, _LEAD = 0.78, 300.0


@pytest.mark.parametrize("shards", range(3, 40))
def test_any_number_of_shards_doubles_at_once(shards: int) -> None:
    """Broken: a crowd comes to 9 or 18 shards, and nine splits one after the other take five minutes instead of one."""
    slots = (2.0 * shards / 240,) * 240
    choice = choose_up(uniform(shards, 240), slots, _TARGET, 2 * shards, 10_000, _LEAD)
    assert choice is not None
    assert (len(choice.layout), choice.at_once, choice.seconds) == (2 * shards, True, 60.0)


@pytest.mark.parametrize("shards", range(2, 40, 2))
def test_any_even_number_of_shards_is_halved_at_once(shards: int) -> None:
    """Broken: shards that a crowd left behind go one by one."""
    slots = (0.1 * shards / 240,) * 240
    choice = choose_down(uniform(shards, 240), slots, 0.68, shards // 2, 10_000, _LEAD)
    assert choice is not None
    assert len(choice.layout) == shards // 2
    assert choice.seconds <= 60.0


@given(
    st.integers(2, 40),
    st.integers(0, 119),
    st.floats(0.9, 1.9),
    st.lists(st.floats(0.5, 1.5), min_size=120, max_size=120),
)
def test_a_partition_that_nothing_helps_does_not_double_the_stream(
    shards: int, hot: int, load: float, uneven: list[float]
) -> None:
    """Broken: one hot key doubles the shards, because its own one, summed up, is a rounding error above what it has."""
    slots = [share * 0.5 * shards / sum(uneven) for share in uneven]
    slots[hot] = load
    choice = choose_up(uniform(shards, 120), tuple(slots), _TARGET, 2 * shards, 10_000, _LEAD)
    if choice is None:
        return  # it was alone already
    assert choice.worst <= load + 1e-6
    alone = math.ceil(math.log2(120 / shards)) + 1  # halving its shard until it is alone
    crowded = sum(one > _TARGET for one in shard_loads(uniform(shards, 120), slots))
    assert len(choice.layout) <= shards + alone + crowded


def test_of_two_equally_many_the_more_even_one() -> None:
    """Broken: a stream that grows slowly is split lopsidedly for half a minute saved, and needs its next update sooner."""
    slots = tuple(load / 10 for load in (0.9, 0.77, 0.77, 0.77) for _ in range(10))
    choice = choose_up(uniform(4, 40), slots, _TARGET, 8, 10_000, _LEAD)
    assert choice is not None
    assert len(choice.layout) == 5
    assert choice.at_once


def test_who_is_refused_now_does_not_wait_for_the_perfect_layout() -> None:
    """Broken: a crowd is refused for half an hour, because 51 splits one after the other end a little more even."""
    slots = tuple(0.16 + 0.16 * (slot * slot % 13) / 12 for slot in range(240))
    choice = choose_up(uniform(56, 240), slots, _TARGET, 112, 10_000, _LEAD, hurry=True)
    assert choice is not None
    assert (len(choice.layout), choice.seconds) == (98, 60.0)


def test_who_will_be_refused_soon_does_not_either() -> None:
    """Broken: a crowd that was seen coming finds a stream in the middle of 24 splits, which can do nothing else meanwhile."""
    random = Random(3)
    uneven = [random.lognormvariate(0.0, 0.3) for _ in range(240)]
    slots = tuple(0.95 * 24 * share / sum(uneven) for share in uneven)
    choice = choose_up(uniform(24, 240), slots, _TARGET, 48, 10_000, _LEAD)
    assert choice is not None
    assert choice.seconds <= _LEAD


@pytest.mark.parametrize("hot", [0.6, 0.99, 2.0])
def test_a_partition_that_is_alone_changes_nothing_for_the_others(hot: float) -> None:
    """Broken: for one hot key that nothing helps a stream is doubled, or others that could be split are not."""
    layout = (0, *range(1, 100, 10))
    assert choose_up(layout, (hot, *(0.07,) * 99), _TARGET, 20, 10_000, _LEAD) is None
    choice = choose_up(layout, (hot, *(0.097,) * 99), _TARGET, 20, 10_000, _LEAD)
    assert choice is not None
    assert len(choice.layout) > len(layout)


def test_in_a_hurry_something_slow_is_better_than_nothing() -> None:
    """Broken: an account at its limit allows no UpdateShardCount, and a stream that refuses gets no shard at all."""
    slots = (1.9 / 6,) * 240
    choice = choose_up(uniform(40, 240), slots, _TARGET, 60, 20, _LEAD, hurry=True)
    assert choice is not None
    assert (len(choice.layout), choice.at_once) == (60, False)
