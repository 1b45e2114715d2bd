"""Which layout to go to: our own splits and merges, or UpdateShardCount in one of its cheap steps."""

from dataclasses import dataclass

from services.autoscaler.shards.layout import Layout, coarsen, operations, refine, shard_loads, uniform

OWN_S, AT_ONCE_S = 30.0, 60.0
"""About what one split or merge of ours takes, one after the other, and what UpdateShardCount takes for all."""

_ABOUT = 1.25
"""Of the least that is left above the target: fewer shards are worth that much where none refuses afterwards."""

_ROUNDING = 1e-9
"""A shard of one slot, summed up, is not quite what that slot is."""


def at_once_seconds(shards: int, count: int) -> float:
    """To a whole number of quarters directly; elsewhere by way of short-lived shards, which takes twice as long."""
    return AT_ONCE_S if (4 * count) % shards == 0 else 2 * AT_ONCE_S


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and how it is reached. worst: the load of its fullest shard. seconds: about how long it takes."""

    layout: Layout
    at_once: bool
    worst: float
    seconds: float


def choose_up(
    layout: Layout, slots: tuple[float, ...], target: float, most: int, room: int, hurry: float = 0.0
) -> Choice | None:
    """The fewest shards of which none has above `target`, then the most even; if none does it, the most, and the fastest.

    room: what more shards the account may have, short-lived ones included. At most `most` shards. hurry: some shards refuse
    now, and the next update is so many seconds away: then what leaves least above `target` until then, if anything helps so
    soon. None: nothing is better than what there is.
    """
    found = [_own(layout, refine(layout, slots, target, most), slots)]
    found += [_at_once(layout, count, slots) for count in _cheap_steps(len(layout), len(layout), most, room)]
    larger = [one for one in found if len(one.layout) > len(layout)]
    if hurry and (choice := _soonest(layout, larger, slots, target, hurry)) is not None:
        return choice
    # What no split helps (one slot above the target) asks no more of a choice than to leave it as it is.
    bound = max(target, *slots)
    now = max(shard_loads(layout, slots))
    better = [one for one in larger if one.worst < now]
    return min(better, key=lambda one: _rank(one, bound), default=None)


def _soonest(
    layout: Layout, larger: list[Choice], slots: tuple[float, ...], target: float, hurry: float
) -> Choice | None:
    """None: nothing helps within that time."""
    loads = shard_loads(layout, slots)
    left = {one: _left_above(one, loads, slots, target, hurry) for one in larger}
    helping = [one for one in larger if left[one] < hurry * _above(loads, target)]
    best = min(helping, key=lambda one: left[one], default=None)
    if best is None:
        return None
    fitting = [one for one in helping if left[one] <= _ABOUT * left[best] and one.worst <= 1.0]
    return min(fitting, key=lambda one: (len(one.layout), left[one]), default=best)


def _left_above(choice: Choice, loads: list[float], slots: tuple[float, ...], target: float, seconds: float) -> float:
    """Load times time above the target until so many seconds from now. That splits help one by one is not counted: nothing
    else can be done before the last of them."""
    after = _above(shard_loads(choice.layout, slots), target)
    return choice.seconds * _above(loads, target) + after * max(0.0, seconds - choice.seconds)


def _above(loads: list[float], target: float) -> float:
    return sum(max(0.0, load - target) for load in loads)


def choose_down(layout: Layout, slots: tuple[float, ...], low: float, fewest: int, room: int) -> Choice | None:
    """The fewest shards of which none has above `low`, then the most even. None: there are no fewer."""
    found = [_own(layout, coarsen(layout, slots, low, fewest), slots)]
    found += [_at_once(layout, count, slots) for count in _cheap_steps(len(layout), fewest - 1, len(layout) - 1, room)]
    bound = max(low, *slots)
    fitting = [one for one in found if len(one.layout) < len(layout) and one.worst <= bound + _ROUNDING]
    return min(fitting, key=lambda one: _rank(one, bound), default=None)


def _rank(choice: Choice, bound: float) -> tuple[bool, int, float, float]:
    count, misses = len(choice.layout), choice.worst > bound + _ROUNDING
    return (True, -count, choice.seconds, choice.worst) if misses else (False, count, choice.worst, choice.seconds)


def _cheap_steps(shards: int, above: int, most: int, room: int) -> list[int]:
    """Counts that differ by quarters, as near as whole numbers come: AWS makes these with the fewest splits and merges."""
    steps = sorted({(shards * quarters + 2) // 4 for quarters in range(2, 9)})
    return [count for count in steps if above < count <= most and _opened_meanwhile(shards, count) <= room]


def _opened_meanwhile(shards: int, count: int) -> int:
    """How many more shards UpdateShardCount has open at once, at worst: doubling and halving are made directly, others
    by way of short-lived shards, which count against the account's limit."""
    if 2 * count == shards:
        return 0
    return shards if count == 2 * shards else max(shards, count)


def _own(before: Layout, after: Layout, slots: tuple[float, ...]) -> Choice:
    return Choice(after, False, max(shard_loads(after, slots)), OWN_S * operations(before, after))


def _at_once(before: Layout, count: int, slots: tuple[float, ...]) -> Choice:
    after = uniform(count, len(slots))
    return Choice(after, True, max(shard_loads(after, slots)), at_once_seconds(len(before), count))
