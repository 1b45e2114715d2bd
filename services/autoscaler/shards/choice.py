"""Which layout to go to: our own splits and merges, or UpdateShardCount in one of its cheap steps."""

from dataclasses import dataclass

from services.autoscaler.shards.layout import Layout, coarsen, operations, refine, shard_loads, uniform

OWN_S, AT_ONCE_S = 30.0, 60.0
"""About what one split or merge of ours takes, one after the other, and what UpdateShardCount takes for all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and how it is reached. worst: the load of its fullest shard. seconds: about how long it takes."""

    layout: Layout
    at_once: bool
    worst: float
    seconds: float


def choose_up(layout: Layout, slots: tuple[float, ...], target: float, most: int, room: int) -> Choice | None:
    """The fewest shards of which none has above `target`, then the fastest; if none does it, the most, and the fastest.

    room: what more shards the account may have, short-lived ones included. At most `most` shards. None: nothing is better than
    what there is.
    """
    now = max(shard_loads(layout, slots))
    found = [_own(layout, refine(layout, slots, target, most), slots)]
    found += [_at_once(count, slots) for count in _cheap_steps(len(layout), len(layout), most, room)]
    better = [one for one in found if len(one.layout) > len(layout) and one.worst < now]
    # What no split helps (one slot above the target) asks no more of a choice than to leave it as it is.
    bound = max(target, *slots)
    return min(better, key=lambda one: _rank(one, bound), default=None)


def choose_down(layout: Layout, slots: tuple[float, ...], low: float, fewest: int, room: int) -> Choice | None:
    """The fewest shards of which none has above `low`, then the fastest. None: there are no fewer."""
    found = [_own(layout, coarsen(layout, slots, low, fewest), slots)]
    found += [_at_once(count, slots) for count in _cheap_steps(len(layout), fewest - 1, len(layout) - 1, room)]
    bound = max(low, *slots)
    fitting = [one for one in found if len(one.layout) < len(layout) and one.worst <= bound]
    return min(fitting, key=lambda one: _rank(one, bound), default=None)


def _rank(choice: Choice, bound: float) -> tuple[bool, int, float, float]:
    count, misses = len(choice.layout), choice.worst > bound
    return misses, -count if misses else count, choice.seconds, choice.worst


def _cheap_steps(shards: int, above: int, most: int, room: int) -> list[int]:
    """Counts that differ by quarters, as near as whole numbers come: AWS makes these with the fewest splits and merges."""
    step = max(1, shards // 4)
    steps = range(shards - 2 * step, 2 * shards + 1, step)
    return [count for count in steps if above < count <= most and _opened_meanwhile(shards, count) <= room]


def _opened_meanwhile(shards: int, count: int) -> int:
    """How many more shards UpdateShardCount has open at once, at worst: doubling and halving are made directly, others
    by way of short-lived shards, which count against the account's limit."""
    if 2 * count == shards:
        return 0
    return shards if count == 2 * shards else max(shards, count)


def _own(before: Layout, after: Layout, slots: tuple[float, ...]) -> Choice:
    return Choice(after, False, max(shard_loads(after, slots)), OWN_S * operations(before, after))


def _at_once(count: int, slots: tuple[float, ...]) -> Choice:
    layout = uniform(count, len(slots))
    return Choice(layout, True, max(shard_loads(layout, slots)), AT_ONCE_S)
