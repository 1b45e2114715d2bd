"""The group policy over simulated days: it follows the load, never flaps, keeps its bounds, shrinks one at a time."""

from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.autoscaler.groups.backlog import Backlog
from services.autoscaler.groups.members import Instance
from services.autoscaler.groups.policy import MOST_REPLACEMENTS, GroupFigures, GroupMemory, GroupRules, decide
from tests.unit.autoscaler.groups.world import Fate, World


def rules(**changes: object) -> GroupRules:
    return GroupRules.model_validate({"max": 10, **changes})


def warm(*cpu: float) -> tuple[Instance, ...]:
    return tuple(Instance(f"i{number}", True, 1e6, value) for number, value in enumerate(cpu))


def calm(size: int) -> GroupMemory:
    """As after a long time in which one instance was enough."""
    return GroupMemory(since=-1e6, needs=((0.0, 1),))


LOADS = st.lists(st.tuples(st.floats(0, 12), st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=12)


@settings(max_examples=300)
@given(
    loads=LOADS,
    floor=st.integers(1, 4),
    tolerance=st.integers(1, 4),
    more=st.integers(0, 8),
    cool_down=st.integers(1, 120),
    window=st.integers(10, 400),
    warm_up=st.integers(1, 120),
    drains=st.floats(0, 100),
    fates=st.lists(st.sampled_from(["well", "stuck", "silent", "loop", "hangs"]), max_size=12),
)
def test_bounds_flapping_and_one_at_a_time(
    loads: list[tuple[float, int, float]],
    floor: int,
    tolerance: int,
    more: int,
    cool_down: int,
    window: int,
    warm_up: int,
    drains: float,
    fates: list[Fate],
) -> None:
    """Broken: some load, or instances that never work, make the group flap, leave its bounds, or lose two instances at once."""
    limits = rules(
        min=floor,
        fault_tolerance=tolerance,
        max=max(floor, tolerance) + more,
        cool_down=f"{cool_down}s",
        calm=f"{window}s",
        warm_up=f"{warm_up}s",
        failed_after="150s",
    )
    world = World(limits, limits.floor, drains=drains, fates=fates)
    for demand, ticks, failing in loads:
        for _ in range(ticks):
            before = world.size
            world.tick(demand, failing=failing)
            assert limits.floor <= world.size <= limits.max
            assert world.size >= before - 1
    assert world.most_draining <= 1
    for (earlier, one), (later, other) in zip(world.taken, world.taken[1:], strict=False):
        assert later - earlier >= cool_down * (1 if (one.action == "in") == (other.action == "in") else 2)


def test_load_times_three_and_back() -> None:
    """Broken: the group does not follow its load up, or never comes back down."""
    world = World(rules(), 2)
    for _ in range(60):
        world.tick(1.2)
    assert (world.size, world.taken) == (2, [])
    for _ in range(60):
        world.tick(3.6)
    assert world.size == 6
    assert world.backlog == 0
    for _ in range(200):
        world.tick(1.2)
    assert world.size == 2
    assert {decision.action for _, decision in world.taken[1:]} >= {"in"}


def test_a_flash_crowd_is_met_in_one_step_where_pressure_is_known() -> None:
    """Broken: a saturated CPU hides the load, and the group creeps after a crowd of ten times as many."""
    decision, _ = decide(rules(max=40), GroupFigures(2, warm(1.0, 1.0), pressure=6.0), GroupMemory(), 0.0)
    assert (decision.action, decision.size, decision.reason) == ("out", 20, "cpu")


def test_what_is_starting_is_not_ordered_twice() -> None:
    """Broken: each look during a slow start orders the same instances again."""
    starting = (Instance("new", False, None, None), Instance("young", True, 5.0, 0.9))
    decision, _ = decide(rules(), GroupFigures(4, (*warm(1.0, 1.0), *starting)), GroupMemory(), 1000.0)
    assert decision.action == "hold"


def test_the_cpu_of_a_new_instance_does_not_count() -> None:
    """Broken: the work of starting looks like load, and a start causes the next."""
    young = Instance("young", True, 59.0, 1.0)
    assert decide(rules(), GroupFigures(2, (*warm(0.5), young)), GroupMemory(), 0.0)[0].action == "hold"
    old = Instance("old", True, 60.0, 1.0)
    assert decide(rules(), GroupFigures(2, (*warm(0.5), old)), GroupMemory(), 0.0)[0].action == "out"


@pytest.mark.parametrize(("cpu", "action"), [(0.65, "hold"), (0.67, "out"), (0.55, "hold")])
def test_tolerance(cpu: float, action: str) -> None:
    """Broken: noise around the target moves the group."""
    assert decide(rules(), GroupFigures(3, warm(cpu, cpu, cpu)), GroupMemory(), 0.0)[0].action == action


def test_lag_makes_it_grow_although_cpu_is_low() -> None:
    """Broken: a group that waits for its receivers most of the time is never enlarged, however late its events are."""
    decision, _ = decide(rules(), GroupFigures(4, warm(0.1, 0.1, 0.1, 0.1), lag=61.0), GroupMemory(), 0.0)
    assert (decision.action, decision.size, decision.reason) == ("out", 6, "lag")
    assert decide(rules(), GroupFigures(1, warm(0.1), lag=60.0), GroupMemory(), 0.0)[0].action == "hold"


def test_failing_receivers_do_not_make_it_grow() -> None:
    """Broken: a dead webhook is answered with machines. Its events are left out of lag and pressure."""
    world = World(rules(), 1)
    for _ in range(200):
        world.tick(4.0, failing=0.95)
    assert (world.size, world.taken) == (1, [])


def test_no_shrinking_during_a_deploy_or_a_rebalance() -> None:
    """Broken: an instance is taken away while others are being replaced, or partitions move twice."""
    figures = GroupFigures(3, warm(0.1, 0.1, 0.1), under_way="a deploy is announced")
    decision, _ = decide(rules(), figures, calm(3), 1000.0)
    assert (decision.action, decision.reason) == ("hold", "under_way")
    assert decide(rules(), GroupFigures(3, warm(0.1, 0.1, 0.1)), calm(3), 1000.0)[0].action == "in"


@pytest.mark.parametrize(
    "unsettled",
    [
        Instance("leaving", True, 1e6, 0.1, leaving=True),
        Instance("silent", False, None, None),
        Instance("young", True, 3.0, 0.1),
    ],
)
def test_no_shrinking_while_an_instance_is_not_settled(unsettled: Instance) -> None:
    """Broken: two drain at once, or one leaves before its successor works."""
    figures = GroupFigures(3, (*warm(0.1, 0.1, 0.1), unsettled))
    assert decide(rules(), figures, calm(3), 1000.0)[0].action == "hold"


def test_an_instance_that_was_ordered_and_is_not_there_is_waited_for() -> None:
    """Broken: a platform that is slow to start instances loses those that it has."""
    assert decide(rules(), GroupFigures(3, warm(0.1, 0.1)), calm(3), 1000.0)[0].action == "hold"


def test_a_new_autoscaler_does_not_shrink_before_it_saw_a_whole_window() -> None:
    """Broken: a restart of the autoscaler shrinks a group in a lull."""
    world = World(rules(), 5)
    while not world.taken:
        world.tick(0.5)
    assert world.now >= world.rules.calm
    [(_, decision)] = world.taken
    assert (decision.action, decision.size, decision.reason) == ("in", 4, "calm")


def test_silent_instances_begin_the_window_anew() -> None:
    """Broken: a group shrinks on the word of those that are well."""
    world = World(rules(), 3)
    for _ in range(15):
        world.tick(0.1)
    silent = GroupFigures(3, (*warm(0.1, 0.1), Instance("x", False, None, None)))
    assert decide(world.rules, silent, world.state, 155.0)[1].since is None


def test_bounds_that_somebody_else_left_are_restored() -> None:
    """Broken: a size set by hand below the fault tolerance stays, or one above the maximum is cut at once."""
    low, _ = decide(rules(fault_tolerance=3), GroupFigures(1, warm(0.1)), GroupMemory("in", 999.0), 1000.0)
    assert (low.action, low.size, low.reason) == ("out", 3, "below_min")
    high, _ = decide(rules(max=2), GroupFigures(5, warm(*[0.6] * 5)), GroupMemory(), 1000.0)
    assert (high.action, high.size, high.reason) == ("in", 4, "above_max")


STUCK: list[Fate] = ["stuck", "silent", "loop"]


@pytest.mark.parametrize("fate", STUCK)
def test_a_failed_instance_does_not_keep_a_group_large(fate: Fate) -> None:
    """Broken: one instance that never works blocks every step in, and the rest is paid for until a person looks."""
    world = World(rules(), 4, fates=repeat(fate))
    while world.size < 6:
        world.tick(4.0)
    last = [world.tick(0.3) for _ in range(250)][-1]
    assert (world.size, [box.fate for box in world.staying]) == (1, ["well"]), last


def test_a_failed_instance_does_not_stop_growth_for_lag() -> None:
    """Broken: a group whose receivers are slow does not grow for as long as one instance is broken."""
    state, broken = GroupMemory(), Instance("x", False, None, None)
    decisions = []
    for now in range(0, 400, 10):
        decision, state = decide(rules(), GroupFigures(4, (*warm(0.1, 0.1, 0.1), broken), lag=90.0), state, float(now))
        decisions.append(decision)
    grown = next(number for number, one in enumerate(decisions) if one.action == "out")
    assert (decisions[grown].size, decisions[grown].reason, 10 * grown) == (6, "lag", 300)
    assert {one.reason for one in decisions[:grown]} == {"warming"}
    assert "failed: x (silent for 5 min)" in decisions[grown].words


@pytest.mark.parametrize("fate", STUCK)
@pytest.mark.parametrize("demand", [2.5, 9.0])
def test_a_crash_loop_is_not_answered_with_instances(fate: Fate, demand: float) -> None:
    """Broken: a version that does not start drives its group to the maximum."""
    world = World(rules(max=40), 2, fates=repeat(fate))
    decisions = [world.tick(demand) for _ in range(1000)]
    outs = [one for _, one in world.taken if one.action == "out"]
    assert len(outs) == 1, outs
    assert (decisions[-1].action, decisions[-1].reason) == ("hold", "failed")
    assert "new instances fail, so more would not help" in decisions[-1].words


def test_a_failed_instance_is_replaced_and_not_for_ever() -> None:
    """Broken: an instance that hangs stays until a person looks; or instances are replaced again and again for nothing."""
    world = World(rules(), 3)
    world.boxes[0].fate = "silent"
    for _ in range(60):
        world.tick(1.28)
    assert [(one.action, one.instance) for _, one in world.taken] == [("replace", "i0")]
    assert (world.size, {box.fate for box in world.staying}) == (3, {"well"})
    world = World(rules(), 3, fates=repeat("stuck"))
    world.boxes[0].fate = "silent"
    last = [world.tick(1.28) for _ in range(600)][-1]
    assert [one.action for _, one in world.taken] == ["replace"] * MOST_REPLACEMENTS
    assert last.members.count("failed") == 1


def test_nobody_leaves_when_most_are_silent() -> None:
    """Broken: the autoscaler's own network fails, and it ends instances that work."""
    world = World(rules(), 5)
    for box in world.boxes[:3]:
        box.fate = "silent"
    decisions = [world.tick(1.0) for _ in range(200)]
    assert world.taken == []
    assert decisions[-1].members.count("failed") == 3


def test_a_leaver_that_hangs_is_waited_for_until_it_has_failed() -> None:
    """Broken: a node that is lost with a leaving pod on it blocks every step for days; or two drain at once."""
    world = World(rules(), 4)
    world.boxes[-1].fate = "hangs"
    for _ in range(200):
        world.tick(0.3)
    times = [at for at, one in world.taken if one.action == "in"]
    assert times[1] - times[0] >= world.rules.failed_after
    assert (world.size, world.most_draining) == (1, 1)
    leaver = Instance("slow", True, 1e6, 0.1, leaving=True)
    state = calm(3)
    for now in range(0, 2000, 10):
        decision, state = decide(rules(), GroupFigures(3, (*warm(0.1, 0.1, 0.1), leaver)), state, float(now))
        assert decision.action == "hold", "it still answers, so it may have events in flight"
    assert "slow (leaving for 33 min, still answers)" in decision.words


def hot(*partitions: tuple[float, float], group: str = "p.d") -> tuple[Backlog, ...]:
    """One for each (records, seconds)."""
    return tuple(Backlog(group, "orders", number, *one) for number, one in enumerate(partitions))


def test_a_hot_partition_is_named_and_not_answered_with_instances() -> None:
    """Broken: one key fills one partition, and the group grows to its maximum, where nothing is faster."""
    place = hot((1_000_000, 600), (200, 2), (100, 1), (0, 0))
    for cpus, pressure in (((0.9, 0.1, 0.1), 1.0), ((1.0, 0.55), 8.0)):
        figures = GroupFigures(len(cpus), warm(*cpus), lag=600, pressure=pressure, backlogs=place)
        decision, _ = decide(rules(), figures, GroupMemory(), 0.0)
        assert (decision.action, decision.reason) == ("hold", "hot_partition")
        assert "partition 0 of orders (group p.d) has 100% of the lag: 1000000 records, 600 s" in decision.words
        assert decision.hot is not None


@pytest.mark.parametrize(
    ("backlogs", "why"),
    [
        (hot((9e5, 600), (9e5, 590), (9e5, 600)), "the lag is in as many partitions as instances"),
        ((*hot((1e6, 600)), *hot(*[(9e3, 90)] * 8, group="p.other")), "another group's lag is everywhere"),
    ],
)
def test_lag_that_more_instances_may_reduce_makes_it_grow(backlogs: tuple[Backlog, ...], why: str) -> None:
    """Broken: one hot partition hides that others need more instances."""
    figures = GroupFigures(3, warm(0.2, 0.2, 0.2), lag=600, backlogs=backlogs)
    assert decide(rules(), figures, GroupMemory(), 0.0)[0].reason == "lag", why


def test_a_hot_partition_with_busy_neighbours_makes_it_grow() -> None:
    """Broken: the whole group is overloaded, and one partition is blamed."""
    figures = GroupFigures(3, warm(1.0, 0.9, 0.8), lag=600, backlogs=hot((1e6, 600), (200, 2)))
    assert decide(rules(), figures, GroupMemory(), 0.0)[0].action == "out"


def test_a_group_that_a_person_has_switched_off_stays_off() -> None:
    """Broken: replicas that a person set to 0 are repaired at the next look."""
    for fault_tolerance in (1, 3):
        limits = rules(fault_tolerance=fault_tolerance)
        for figures in (GroupFigures(0, ()), GroupFigures(0, warm(1.0), lag=900.0)):
            decision, state = decide(limits, figures, calm(1), 1000.0)
            assert (decision.action, decision.size, decision.reason, state.since) == ("hold", 0, "off", None)
    on_again, _ = decide(rules(min=2), GroupFigures(1, ()), GroupMemory(), 0.0)
    assert (on_again.action, on_again.size) == ("out", 2)


def test_a_frozen_group_is_decided_and_not_changed() -> None:
    """Broken: what a person has frozen moves; or nobody sees what the group would do."""
    world = World(rules(), 3)
    for _ in range(40):
        last = world.tick(2.4, frozen="frozen by ann because: we measure")
    assert (world.size, world.taken, world.state.last) == (3, [], None)
    assert (last.action, last.size, last.reason) == ("hold", 4, "frozen")
    assert last.words.startswith("frozen by ann because: we measure; otherwise out 3 -> 4: CPU")
    assert world.tick(2.4).action == "out"
    quiet, _ = decide(rules(), GroupFigures(3, warm(0.5, 0.5, 0.5), frozen="frozen by ann"), GroupMemory(), 0.0)
    assert (quiet.reason, quiet.words.endswith("frozen by ann")) == ("cpu", True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min": 5, "max": 4},
        {"fault_tolerance": 11},
        {"max": 0},
        {"min": 0},
        {"target_cpu": 0},
        {"target_cpu": float("nan")},
        {"tolerance": float("nan")},
        {"cool_down": "0s"},
        {"failed_after": "60s", "warm_up": "60s"},
        {"maximum": 3},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    """Broken: a slip in the settings empties a group, or makes it grow for ever."""
    with pytest.raises(ValidationError):
        rules(**wrong)
