"""Which layout to go to: our own splits and merges, or UpdateShardCount in one of its cheap steps."""

from dataclasses import dataclass
from itertools import pairwise

from services.autoscaler.shards.layout import Layout, coarsen, operations, refine, shard_loads, uniform

OWN_S, AT_ONCE_S = 30.0, 60.0
"""About what one split or merge of ours takes, one after the other, and what UpdateShardCount takes for all."""

_ABOUT = 1.25
"""Of the least that is left above the target: fewer shards are worth that much where none refuses afterwards."""

_ROUNDING = 1e-9
"""A shard of one slot, summed up, is not quite what that slot is."""


def at_once_seconds(shards: int, count: int) -> float:
    """Twice as long to a count that is no whole number of quarters, of which AWS says that it may take longer."""
    return AT_ONCE_S if (4 * count) % shards == 0 else 2 * AT_ONCE_S


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and how it is reached. worst: the load of its fullest shard. seconds: about how long it takes."""

    layout: Layout
    at_once: bool
    worst: float
    seconds: float


def choose_up(
    layout: Layout, slots: tuple[float, ...], target: float, most: int, room: int, lead: float, *, hurry: bool = False
) -> Choice | None:
    """The fewest shards of which splits can bring none further down to `target`; if none does it, the most, and the fastest.

    Of as many, first what is there within `lead` seconds, when the next update may come; then the most even. hurry: some
    refuse now; then what leaves least above `target` in that time, if anything helps so soon. room: what more shards the
    account may have, short-lived ones included. At most `most` shards. None: nothing is better than what there is.
    """
    found = [_own(layout, refine(layout, slots, target, most), slots)]
    found += [_at_once(layout, count, slots) for count in _cheap_steps(layout, len(layout), most, room, len(slots))]
    now = excess(layout, slots, target)
    better = [
        one for one in found if len(one.layout) > len(layout) and excess(one.layout, slots, target) < now - _ROUNDING
    ]
    is_urgent = hurry and excess(layout, slots, 1.0) > 0
    if is_urgent and (choice := _soonest(layout, better, slots, target, lead)) is not None:
        return choice
    return min(better, key=lambda one: _rank(one, slots, target, lead), default=None)


def choose_down(
    layout: Layout, slots: tuple[float, ...], low: float, fewest: int, room: int, lead: float
) -> Choice | None:
    """The fewest shards of which none has above `low`, but for one slot alone; then as `choose_up`. None: there are no fewer."""
    found = [_own(layout, coarsen(layout, slots, low, fewest), slots)]
    found += [
        _at_once(layout, count, slots) for count in _cheap_steps(layout, fewest - 1, len(layout) - 1, room, len(slots))
    ]
    bound = max(low, *slots) + _ROUNDING
    fitting = [one for one in found if len(one.layout) < len(layout) and one.worst <= bound]
    return min(fitting, key=lambda one: (len(one.layout), one.seconds > lead, one.worst, one.seconds), default=None)


def excess(layout: Layout, slots: tuple[float, ...], bound: float) -> float:
    """The load above `bound` that splits can take from its shards: of a shard with one slot above it, what the others have."""
    over = 0.0
    for (first, last), load in zip(pairwise((*layout, len(slots))), shard_loads(layout, slots), strict=True):
        if load > bound:
            over += max(0.0, load - max(bound, *slots[first:last]) - _ROUNDING)
    return over


def _rank(choice: Choice, slots: tuple[float, ...], target: float, lead: float) -> tuple[bool, int, bool, float, float]:
    count = len(choice.layout)
    if excess(choice.layout, slots, target) > 0:
        return True, -count, False, choice.seconds, choice.worst
    return False, count, choice.seconds > lead, choice.worst, choice.seconds


def _soonest(
    layout: Layout, better: list[Choice], slots: tuple[float, ...], target: float, lead: float
) -> Choice | None:
    """Load times time above the target until then. That splits help one by one is not counted: nothing else can be done
    before the last of them. None: nothing helps within that time."""
    now = excess(layout, slots, target)
    helping = {
        one: one.seconds * now + (lead - one.seconds) * excess(one.layout, slots, target)
        for one in better
        if one.seconds < lead
    }
    if not helping:
        return None
    best = min(helping, key=lambda one: helping[one])
    enough = [one for one in helping if helping[one] <= _ABOUT * helping[best] and not excess(one.layout, slots, 1.0)]
    return min(enough, key=lambda one: (len(one.layout), helping[one]), default=best)


def _cheap_steps(layout: Layout, above: int, most: int, room: int, slots: int) -> list[int]:
    """Counts that differ by quarters, as near as whole numbers come: AWS makes these with the fewest splits and merges."""
    shards = len(layout)
    steps = sorted({(shards * quarters + 2) // 4 for quarters in range(2, 9)})
    return [count for count in steps if above < count <= most and _opened_meanwhile(layout, count, slots) <= room]


def _opened_meanwhile(layout: Layout, count: int, slots: int) -> int:
    """How many more shards UpdateShardCount has open at once, at worst: equal ranges are doubled and halved as they are,
    all else goes by way of short-lived shards, which count against the account's limit."""
    shards = len(layout)
    if layout == uniform(shards, slots):
        if 2 * count == shards:
            return 0
        if count == 2 * shards:
            return shards
    return max(shards, count)


def _own(before: Layout, after: Layout, slots: tuple[float, ...]) -> Choice:
    return Choice(after, False, max(shard_loads(after, slots)), OWN_S * operations(before, after))


def _at_once(before: Layout, count: int, slots: tuple[float, ...]) -> Choice:
    after = uniform(count, len(slots))
    return Choice(after, True, max(shard_loads(after, slots)), at_once_seconds(len(before), count))
