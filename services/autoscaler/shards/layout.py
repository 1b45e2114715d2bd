"""How a stream's slots are shared out among its shards, and what another sharing-out would be.

A layout is the first slot of each shard, by hash range, ascending: (0, 4, 6) of 8 slots are shards of 4, 2 and 2. Two
equal numbers are a shard that holds no slot and so takes nothing. Cuts lie between slots (ADR 0010), so a shard of one
slot is as small as it gets. Loads are in shards: 1 is what one shard takes.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise

Layout = tuple[int, ...]


def shard_loads(layout: Layout, slots: Sequence[float]) -> list[float]:
    """The load of each shard, from the load of each slot."""
    sums = [0.0, *accumulate(slots)]
    return [sums[last] - sums[first] for first, last in pairwise((*layout, len(slots)))]


def uniform(shards: int, slots: int) -> Layout:
    """Equal ranges of hash keys, as CreateStream and UpdateShardCount make them: a slot goes where its middle lies."""
    return tuple(max(0, -(-(2 * slots * shard - shards) // (2 * shards))) for shard in range(shards))


def refine(layout: Layout, slots: Sequence[float], target: float, most: int) -> Layout:
    """Split the fullest shard where its halves are most even, until none has above `target`, or there are `most`.

    Shards of one slot stay, whatever they have.
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
    """Merge the two neighbours that have least together, while they have `target` at most and there are above `fewest`."""
    firsts, loads = list(layout), shard_loads(layout, slots)
    while len(firsts) > fewest:
        left = min(range(len(firsts) - 1), key=lambda at: loads[at] + loads[at + 1])
        if loads[left] + loads[left + 1] > target:
            break
        loads[left] += loads.pop(left + 1)
        firsts.pop(left + 1)
    return tuple(firsts)


def operations(before: Layout, after: Layout) -> int:
    """How many splits and merges lead from one to the other."""
    return len(set(before) ^ set(after)) + len(before) - len(set(before))
