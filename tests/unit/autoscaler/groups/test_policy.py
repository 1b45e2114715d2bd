"""The group policy over simulated days: it follows the load, never flaps, keeps its bounds, shrinks one at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.autoscaler.groups.policy import GroupFigures, GroupMemory, GroupRules, Instance, decide
from tests.unit.autoscaler.groups.world import World


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
) -> None:
    """Broken: some load makes the group flap, leave its bounds, or lose two instances at once."""
    limits = rules(
        min=floor,
        fault_tolerance=tolerance,
        max=max(floor, tolerance) + more,
        cool_down=f"{cool_down}s",
        calm=f"{window}s",
        warm_up=f"{warm_up}s",
    )
    world = World(limits, limits.floor, drains=drains)
    for demand, ticks, failing in loads:
        for _ in range(ticks):
            before = world.size
            world.tick(demand, failing=failing)
            assert limits.floor <= world.size <= limits.max
            assert world.size >= before - 1
    assert world.most_leaving <= 1
    for (earlier, one), (later, other) in zip(world.taken, world.taken[1:], strict=False):
        assert later - earlier >= cool_down * (1 if one.action == other.action else 2)


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
        {"maximum": 3},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    """Broken: a slip in the settings empties a group, or makes it grow for ever."""
    with pytest.raises(ValidationError):
        rules(**wrong)
