"""Layouts: how a stream's slots are divided among its shards; and the choice of the next one.

A layout is the first slot of each shard, by hash range, ascending: (0, 4, 6) of 8 slots are shards of 4, 2 and 2
slots. Of two equal numbers the first is a shard without slots, which gets nothing. Cuts lie between slots (ADR 0010),
so a shard of one slot cannot be split. Loads are in shards: 1 is the limit of one shard.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Layout = tuple[int, ...]


def shard_loads(layout: Layout, slots: Sequence[float]) -> list[float]:
    sums = [0.0, *accumulate(slots)]
    return [sums[last] - sums[first] for first, last in pairwise((*layout, len(slots)))]


def uniform(shards: int, slots: int) -> Layout:
    """Equal ranges of hash keys, as CreateStream and UpdateShardCount make them. A slot belongs where its middle is."""
    return tuple(max(0, -(-(2 * slots * shard - shards) // (2 * shards))) for shard in range(shards))


def refine(layout: Layout, slots: Sequence[float], target: float, most: int) -> Layout:
    """Split the fullest shard into the most even halves, until none is above `target` or there are `most`.

    Shards of one slot stay.
    """
    sums = [0.0, *accumulate(slots)]
    heap = [(sums[first] - sums[last], first, last) for first, last in pairwise((*layout, len(slots)))]
    heapq.heapify(heap)
    kept: list[int] = []
    while heap and len(heap) + len(kept) < most and -heap[0][0] > target:
        _, first, last = heapq.heappop(heap)
        if last - first < 2:
            kept.append(first)
            continue
        middle = (sums[first] + sums[last]) / 2
        cut = min(range(first + 1, last), key=lambda slot: abs(sums[slot] - middle))
        for one, end in ((first, cut), (cut, last)):
            heapq.heappush(heap, (sums[one] - sums[end], one, end))
    return tuple(sorted([*kept, *(first for _, first, _ in heap)]))


def coarsen(layout: Layout, slots: Sequence[float], target: float, fewest: int) -> Layout:
    """Merge the two neighbours with the least load, while they have `target` at most and there are more than `fewest`."""
    firsts, loads = list(layout), shard_loads(layout, slots)
    while len(firsts) > fewest:
        left = min(range(len(firsts) - 1), key=lambda at: loads[at] + loads[at + 1])
        if loads[left] + loads[left + 1] > target:
            break
        loads[left] += loads.pop(left + 1)
        firsts.pop(left + 1)
    return tuple(firsts)


def operations(before: Layout, after: Layout) -> int:
    """The number of splits and merges between two layouts."""
    return len(set(before) ^ set(after)) + len(before) - len(set(before))


OWN_S, AT_ONCE_S = 30.0, 60.0
"""About the seconds of one split or merge, and of an UpdateShardCount."""

_ABOUT = 1.25
"""Of the least load left above the target: the price that fewer shards are worth."""

_ROUNDING = 1e-9
"""For sums of floats."""


def at_once_seconds(shards: int, count: int) -> float:
    """Twice as long for a count that is no multiple of a quarter, which AWS calls slower."""
    return AT_ONCE_S if (4 * count) % shards == 0 else 2 * AT_ONCE_S


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and the way to it. worst: the load of its fullest shard. seconds: about how long it takes."""

    layout: Layout
    at_once: bool
    worst: float
    seconds: float


def choose_up(
    layout: Layout, slots: tuple[float, ...], target: float, most: int, room: int, lead: float, *, hurry: bool = False
) -> Choice | None:
    """The fewest shards of which no split brings one further down to `target`. If none does, the most shards, then
    the fastest.

    Among equal counts: first a layout reached within `lead` seconds, when the next update may come; then the most
    even. hurry: some shards refuse now; then the layout with the least load above `target` within that time, if one
    helps so soon. room: how many more shards the account may have, temporary ones included. At most `most` shards.
    None: nothing is better than the present layout.
    """
    found = [_by_splits(layout, refine(layout, slots, target, most), slots)]
    found += [_by_update(layout, count, slots) for count in _cheap_steps(layout, len(layout), most, room, len(slots))]
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
    """The fewest shards of which none is above `low`, except for a single slot; then as `choose_up`. None: not fewer."""
    found = [_by_splits(layout, coarsen(layout, slots, low, fewest), slots)]
    found += [
        _by_update(layout, count, slots)
        for count in _cheap_steps(layout, fewest - 1, len(layout) - 1, room, len(slots))
    ]
    bound = max(low, *slots) + _ROUNDING
    fitting = [one for one in found if len(one.layout) < len(layout) and one.worst <= bound]
    return min(fitting, key=lambda one: (len(one.layout), one.seconds > lead, one.worst, one.seconds), default=None)


def excess(layout: Layout, slots: tuple[float, ...], bound: float) -> float:
    """The load above `bound` that splits could move away. A slot above it does not count, the others of its shard do."""
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
    """By load above the target times time, until `lead`. Splits count when the last is done, since nothing else can
    be done before. None: nothing helps in time."""
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
    """Counts in steps of quarters, rounded: AWS makes these with the fewest splits and merges."""
    shards = len(layout)
    steps = sorted({(shards * quarters + 2) // 4 for quarters in range(2, 9)})
    return [count for count in steps if above < count <= most and _opened_meanwhile(layout, count, slots) <= room]


def _opened_meanwhile(layout: Layout, count: int, slots: int) -> int:
    """How many more shards UpdateShardCount may have open at once. It doubles and halves equal ranges directly; any
    other count needs temporary shards, which count against the account's limit."""
    shards = len(layout)
    if layout == uniform(shards, slots):
        if 2 * count == shards:
            return 0
        if count == 2 * shards:
            return shards
    return max(shards, count)


def _by_splits(before: Layout, after: Layout, slots: tuple[float, ...]) -> Choice:
    return Choice(after, False, max(shard_loads(after, slots)), OWN_S * operations(before, after))


def _by_update(before: Layout, count: int, slots: tuple[float, ...]) -> Choice:
    after = uniform(count, len(slots))
    return Choice(after, True, max(shard_loads(after, slots)), at_once_seconds(len(before), count))
