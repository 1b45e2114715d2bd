"""The shard policy: what it never does, whatever the figures are, and what it does when they are plain."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.shards.figures import (
    DAY_S,
    QUARTER_S,
    QUOTA_S,
    RULES,
    DayPattern,
    Rules,
    StreamDecision,
    StreamFigures,
    StreamMemory,
)
from services.autoscaler.shards.layout import Layout, coarsen, refine, shard_loads, uniform
from services.autoscaler.shards.policy import decide

SLOTS = 24
QUICK = Rules(lead=10.0, size_for=20.0, calm=20.0, cover=2.0)
"""As the live test has them."""

START = 1_800_000_000.0

Look = tuple[float, float, bool, float, bool]
looks = st.tuples(
    st.sampled_from([15.0, 60.0, 400.0, 3_000.0]),  # seconds since the look before
    st.sampled_from([0.0, 0.3, 1.0, 4.0, 9.0, 40.0]),  # total load
    st.booleans(),  # a hot slot
    st.sampled_from([0.0, 20.0, 600.0]),  # covered
    st.booleans(),  # a full shard
)


def _figures(layout: Layout, look: Look) -> StreamFigures:
    _, load, hot, covered, full = look
    slots = [load / SLOTS] * SLOTS
    if hot:
        slots[5] += 0.7
    return StreamFigures(layout, tuple(slots), frozenset({0}) if full else frozenset(), covered)


@given(st.lists(looks, max_size=120), st.integers(1, SLOTS), st.sampled_from([RULES, QUICK]))
def test_quotas_and_cool_downs_hold_whatever_comes(course: list[Look], shards: int, rules: Rules) -> None:
    """Broken: the service refuses an update, or the stream is split and merged in turns."""
    layout, memory, now = uniform(shards, SLOTS), StreamMemory(), START
    done: list[tuple[float, int]] = []
    for look in course:
        now += look[0]
        decision, memory = decide(_figures(layout, look), memory, now, rules)
        if decision.layout is None:
            continue
        assert look[3] >= rules.cover, "the figures are of an older layout"
        assert len(layout) / 2 <= len(decision.layout) <= 2 * len(layout)
        assert decision.layout[0] == 0
        assert list(decision.layout) == sorted(set(decision.layout))
        assert decision.layout[-1] < SLOTS
        assert decision.layout != layout
        done.append((now, len(decision.layout) - len(layout)))
        layout = decision.layout
    for at, _ in done:
        assert sum(at <= other < at + DAY_S for other, _ in done) <= rules.updates
    for (at, one), (then, two) in pairwise(done):
        assert one * two > 0 or then - at >= rules.calm


def _say(figures: StreamFigures, memory: StreamMemory | None = None) -> StreamDecision:
    return decide(figures, memory or StreamMemory(), START)[0]


def test_nothing_is_done_while_the_stream_changes() -> None:
    """Broken: an update is begun during another one, and fails; or is decided by figures of shards that are gone."""
    full = StreamFigures((0,), (0.5,) * 4, frozenset({0}), covered=600.0)
    assert _say(full).layout is not None
    assert _say(replace(full, changing=True)).layout is None
    assert _say(replace(full, covered=RULES.cover - 1)).layout is None


def test_a_hot_shard_alone_is_split() -> None:
    """Broken: one hot key doubles the price of a whole stream."""
    slots = [0.1] * 24
    slots[4] = 0.65
    decision = _say(StreamFigures(uniform(6, 24), tuple(slots), covered=600.0))
    assert decision.layout is not None
    assert set(uniform(6, 24)) < set(decision.layout)
    assert len(decision.layout) <= 8
    assert max(shard_loads(decision.layout, slots)) <= RULES.target
    assert not decision.at_once


def test_one_slot_cannot_be_split_and_it_says_so() -> None:
    """Broken: an operator waits for an autoscaler that can do nothing."""
    decision = _say(StreamFigures((0, 1), (0.1, 1.0), frozenset({1}), covered=600.0))
    assert decision.layout is None
    assert decision.is_refused
    assert "as many shards as partitions" in decision.reason
    decision = _say(StreamFigures((0, 2, 3), (0.1, 0.1, 1.0, 0.1), frozenset({1}), covered=600.0))
    assert decision.layout is None
    assert "partition 2 alone" in decision.reason
    assert decision.is_refused


def test_cold_neighbours_of_what_cannot_be_split_are_merged() -> None:
    """Broken: one key that is too hot for its shard keeps a whole stream of empty shards open."""
    slots = (0.95, *(0.02,) * 11)
    layout, memory, now = (0, 1, 2, 4, 6, 8, 10), StreamMemory(), START
    for _ in range(60):
        decision, memory = decide(StreamFigures(layout, slots, covered=9_000.0), memory, now)
        if decision.layout is not None:
            break
        now += 15.0
    assert decision.layout is not None
    assert decision.layout[:2] == (0, 1)
    assert len(decision.layout) == 4


def test_the_accounts_limit_is_kept() -> None:
    """Broken: the service refuses an update that counts against nobody's quota but ours."""
    full = StreamFigures(uniform(4, 24), (0.2,) * 24, frozenset(range(4)), covered=600.0, room=2)
    decision = _say(full)
    assert decision.layout is not None
    assert len(decision.layout) == 6
    assert not decision.at_once, "UpdateShardCount opens short-lived shards, too"
    assert _say(replace(full, room=4)).at_once
    assert "higher limit" in _say(replace(full, room=0)).reason


def test_cold_shards_are_merged_only_after_a_calm() -> None:
    """Broken: shards are given away between two waves of a busy hour."""
    cold, memory, now = StreamFigures(uniform(8, 24), (0.05,) * 24, covered=9_000.0), StreamMemory(), START
    acted = None
    for _ in range(60):
        decision, memory = decide(cold, memory, now)
        if decision.layout is not None:
            acted = now
            assert len(decision.layout) == 4
            break
        now += 15.0
    assert acted is not None
    assert acted - START >= RULES.calm - 120


def test_there_is_no_eleventh_update() -> None:
    """Broken: the service refuses it, and what else was about to be done with it."""
    memory = StreamMemory()
    full = StreamFigures(uniform(4, 24), (0.2,) * 24, frozenset(range(4)), covered=600.0)
    for number in range(RULES.updates):
        assert decide(full, memory, START + number)[0].layout is not None
        memory = memory.with_update("up", START + number)
    decision, _ = decide(full, memory, START + 3_600.0)
    assert decision.layout is None
    assert "takes no more" in decision.reason
    assert decide(full, memory, START + DAY_S + 1.0)[0].layout is None, "its day begins when it takes a request"
    assert decide(full, memory, START + QUOTA_S + 1.0)[0].layout is not None


def test_updates_are_kept_for_growing() -> None:
    """Broken: merging uses the day's last updates, and the next crowd meets none."""
    cold, memory = StreamFigures(uniform(8, 24), (0.05,) * 24, covered=9_000.0), StreamMemory()
    for number in range(RULES.updates - RULES.reserve):
        memory = memory.with_update("down", START - 10_000 + number)
    for step in range(80):
        decision, memory = decide(cold, memory, START + 15.0 * step)
        assert decision.layout is None
    assert "kept for growing" in decision.reason


def test_the_last_updates_lead_back_to_what_the_day_had() -> None:
    """Broken: the evening's peak is met in small steps, the day's updates end half-way, and it is refused for hours."""
    day, memory = 20.0, StreamMemory()
    _, memory = decide(StreamFigures(uniform(24, 240), (day / 240,) * 240, covered=9_000.0), memory, START - 40_000)
    for number in range(RULES.updates - 2):
        memory = memory.with_update("down", START - 30_000 + number)
    counts = [8]
    for number in range(2):
        shards = counts[-1]
        figures = StreamFigures(uniform(shards, 240), (0.95 * shards / 240,) * 240, covered=600.0)
        decision, memory = decide(figures, memory, START + 900.0 * number)
        assert decision.layout is not None
        counts.append(len(decision.layout))
    assert 2 * counts[1] * RULES.target >= day, "no update gives more than twice"
    assert counts[2] * RULES.target >= day


def test_the_days_pattern_needs_two_days() -> None:
    """Broken: a crowd that came once is prepared for every day."""
    pattern = DayPattern()
    for quarter in range(2 * 96):
        load = 8.0 if quarter in (40, 40 + 96) or quarter == 60 else 2.0
        pattern = pattern.observe(load, START + quarter * QUARTER_S)
    third = START + 2 * DAY_S
    for quarter in range(60):
        now = third + quarter * QUARTER_S
        pattern = pattern.observe(8.0 if quarter == 40 else 2.0, now)
        expected = pattern.expected(now + QUARTER_S - 1, 300.0)
        assert expected == (8.0 if quarter == 39 else 2.0), quarter


def test_a_pattern_with_holes_predicts_nothing_there() -> None:
    """Broken: hours in which the autoscaler was down count as hours without load."""
    pattern = DayPattern().observe(3.0, START).observe(3.0, START + 2 * QUARTER_S)
    assert pattern.expected(START + 3 * QUARTER_S - 1, 300.0) is None
    assert DayPattern().observe(3.0, START).observe(3.0, START + 3 * DAY_S).before == DayPattern().before


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30), st.integers(1, 30))
def test_refining_and_merging_keep_every_slot(slots: list[float], most: int) -> None:
    """Broken: a layout loses a slot, and keys go nowhere."""
    finer = refine((0,), slots, 0.5, most)
    assert finer[0] == 0
    assert len(finer) <= max(1, min(most, len(slots)))
    assert abs(sum(shard_loads(finer, slots)) - sum(slots)) < 1e-9
    coarser = coarsen(finer, slots, 0.7, 1)
    assert set(coarser) <= set(finer)
    assert coarser[0] == 0
