"""When a stream gets another layout: a pure function of figures, memory and time."""

import math
from statistics import median

from services.autoscaler.shards.figures import (
    RULES,
    SAMPLE_S,
    Direction,
    Rules,
    StreamDecision,
    StreamFigures,
    StreamMemory,
)
from services.autoscaler.shards.layout import Choice, choose_down, choose_up, excess, shard_loads

Loads = tuple[float, ...]
"""Of each slot, in shards."""

_MOST = 2.0
"""The highest forecast, as a multiple of the present load: no update gives more."""

_SHORTEST = 0.5
"""Of `lead`: growth over a shorter time is noise."""

_OWN_GROWTH, _OWN_SHARE = 0.02, 0.25
"""A slot that grew by more than this has a hot key: in shards, and as a share of its load."""

_STILL_FALLING = 0.97
"""Of the highest load of the last minutes. While the load falls, merging waits: one merge then replaces several."""


def decide(
    figures: StreamFigures, memory: StreamMemory, now: float, rules: Rules = RULES
) -> tuple[StreamDecision, StreamMemory]:
    """The decision for a stream, and its new memory, which counts the update as begun. A caller that does not begin
    it keeps the old updates.

    now: seconds of a monotonic clock; only the day's pattern uses the wall clock, `figures.ahead` of it. At most
    `rules.updates` in a rolling day; at most twice and at least half the shards; no opposite update within
    `rules.calm`; no update while the stream is changing or its figures are of an older layout.
    """
    if figures.changing:
        return StreamDecision(None, "the stream is being changed"), memory
    if figures.covered < rules.cover:
        reason = f"the figures of these shards cover {figures.covered:.0f} s, and {rules.cover:.0f} s are needed"
        return StreamDecision(None, reason), memory
    return _Policy(figures, memory.observe(figures, now, rules.calm), now, rules).decide()


class _Policy:
    """memory: with these figures."""

    def __init__(self, figures: StreamFigures, memory: StreamMemory, now: float, rules: Rules) -> None:
        self._figures, self._memory, self._now, self._rules = figures, memory, now, rules
        self._left = rules.updates - len(memory.recent(now))
        """The updates that are left of the day's quota."""
        self._has_plenty = self._left >= rules.plenty
        older = [sample for sample in memory.samples if now - sample[0] >= _SHORTEST * rules.lead]
        self._older = min(older, key=lambda sample: abs(now - sample[0] - rules.lead), default=None)
        """The sample of about `lead` seconds ago; None while there is none."""
        self._about = ""

    def decide(self) -> tuple[StreamDecision, StreamMemory]:
        figures, rules = self._figures, self._rules
        requested = self._requested()
        coming = self._forecast(requested, rules.lead)
        loads = shard_loads(figures.layout, coming)
        fullest = max(range(len(loads)), key=lambda at: loads[at])
        self._about = (
            f"{len(loads)} shards take {sum(figures.slots):.2f}, expected {sum(loads):.2f}; the fullest, number {fullest} by "
            f"range, {loads[fullest]:.0%}; {len(figures.full)} refuse or delay; "
            f"{rules.updates - self._left} of {rules.updates} updates used"
        )
        if max(loads) > rules.high:
            return self._grow(tuple(map(max, coming, self._forecast(requested, rules.size_for))))
        return self._shrink()

    def _requested(self) -> Loads:
        """The load as requested. A shard that refuses shows only the load that it accepted."""
        figures = self._figures
        requested, firsts = list(figures.slots), (*figures.layout, len(figures.slots))
        for at in figures.full:
            inside = range(firsts[at], firsts[at + 1])
            accepted = sum(figures.slots[slot] for slot in inside)
            for slot in inside:
                share = figures.slots[slot] / accepted if accepted > 0 else 1 / len(inside)
                requested[slot] = share * max(1.0, accepted) * self._rules.fullness
        return tuple(requested)

    def _forecast(self, requested: Loads, ahead: float) -> Loads:
        """The load in `ahead` seconds. It grows with most shards, or faster by its own growth.

        A single slot's growth is followed for twice `lead` at most.
        """
        factor = self._growth_factor(ahead)
        grown = [load * factor for load in requested]
        if self._older is not None:
            at, slots = self._older
            for slot, (load, then) in enumerate(zip(self._figures.slots, slots, strict=True)):
                if load - then > max(_OWN_GROWTH, _OWN_SHARE * then):
                    own = (load - then) / (self._now - at) * min(ahead, 2 * self._rules.lead)
                    grown[slot] = max(grown[slot], requested[slot] + min(1.0, own))
        return tuple(grown)

    def _growth_factor(self, ahead: float) -> float:
        """The growth by the day's pattern where there is one, else of the median shard."""
        figures, total = self._figures, sum(self._figures.slots)
        usual = self._memory.day.expected(self._now + figures.ahead, ahead)
        trend = 0.0
        if self._older is not None:
            at, slots = self._older
            pairs = zip(shard_loads(figures.layout, figures.slots), shard_loads(figures.layout, slots), strict=True)
            trend = median((load / then - 1) / (self._now - at) if then > 0 else 0.0 for load, then in pairs)
        by_day = usual / total if usual is not None and total > 0 else 0.0
        by_trend = 1.0 + trend * (self._rules.lead if by_day else ahead)
        return min(_MOST, max(1.0, by_day, by_trend))

    def _grow(self, slots: Loads) -> tuple[StreamDecision, StreamMemory]:
        figures, rules, shards = self._figures, self._rules, len(self._figures.layout)
        most = min(2 * shards, max(shards, len(slots)), shards + figures.room)
        target = rules.target_with_plenty if self._has_plenty and not figures.full else rules.target
        choice = None
        if excess(figures.layout, slots, rules.high) > 0:
            places = (target, most, figures.room, rules.lead)
            choice = choose_up(figures.layout, self._enough(slots, target), *places, hurry=bool(figures.full))
        if choice is None:
            merged = self._shrink()  # the other shards may still be merged
            if merged[0].layout is not None:
                return merged
        why_not = self._no_split_helps(slots, most) if choice is None else self._refusal("up")
        if choice is None or why_not:
            return self._hold(f"more shards are needed, but {why_not}", is_refused=True)
        return self._begin(choice, slots, "up", "a shard is too full")

    def _enough(self, slots: Loads, target: float) -> Loads:
        """Raised so far that the updates left after this one can grow back to the peak of the last day."""
        total = sum(slots)
        usual = max(self._memory.day.newest) / self._rules.step ** max(0, self._left - 1)
        if not 0 < total < usual:
            return slots
        return tuple(max(load, min(target, load * usual / total)) for load in slots)

    def _shrink(self) -> tuple[StreamDecision, StreamMemory]:
        figures, memory, rules = self._figures, self._memory, self._rules
        shards, total = len(figures.layout), sum(figures.slots)
        sampled = self._now - memory.samples[0][0] if memory.samples else 0.0
        if figures.partial:
            return self._hold("not all processes answer")
        if not memory.samples or sampled < rules.calm - 2 * SAMPLE_S:
            return self._hold(f"figures of {sampled:.0f} s are too few to merge")
        highest = max([total, *(sum(slots) for _, slots in memory.samples)])
        likely = sum(self._forecast(figures.slots, rules.size_for))
        likely = max(highest, likely, memory.day.expected(self._now + figures.ahead, rules.outlook) or 0.0)
        slots = tuple(load * likely / total for load in figures.slots) if total > 0 else figures.slots
        half = -(-shards // 2)
        low = rules.low_with_plenty if self._has_plenty else rules.low
        choice = choose_down(figures.layout, slots, low, half, figures.room, rules.lead)
        worth = max(1, rules.worth_with_plenty * shards) if self._has_plenty else rules.worth * shards
        if choice is None or shards - len(choice.layout) < worth:
            return self._hold("the shards fit the load")
        if total < _STILL_FALLING * highest and len(choice.layout) > half:
            return self._hold("fewer shards would do; the load is still falling")
        if why_not := self._refusal("down") or self._no_way_back(len(choice.layout)):
            return self._hold(f"fewer shards would do, but {why_not}")
        return self._begin(choice, slots, "down", "the shards are too empty")

    def _refusal(self, direction: Direction) -> str:
        """Why no update of this direction may begin now; empty if it may."""
        rules, updates = self._rules, self._memory.updates
        if self._left <= 0:
            return f"{rules.updates} updates were made within 24 h, and Kinesis takes no more"
        if updates and updates[-1].direction != direction and (passed := self._now - updates[-1].at) < rules.calm:
            return f"the opposite update was made {passed:.0f} s ago, and {rules.calm:.0f} s must pass"
        return ""

    def _no_way_back(self, shards: int) -> str:
        """Why the updates that are left could not grow back to the need of the last day."""
        rules, left = self._rules, self._left - 1
        needed = math.ceil(max(self._memory.day.newest) / rules.target)
        if left >= rules.reserve and shards * rules.step**left >= needed:
            return ""
        back = f" back to {needed} shards" if needed > shards else ""
        return f"the {left + 1} updates that are left are kept for growing{back}"

    def _no_split_helps(self, slots: Loads, most: int) -> str:
        if self._figures.room < 1:
            return "the account has all the shards that it may have. Try: asking for a higher limit"
        if most <= len(self._figures.layout):
            return f"there are as many shards as partitions, {len(slots)}. Try: more partitions"
        hottest = max(range(len(slots)), key=lambda slot: slots[slot])
        return (
            f"partition {hottest} alone has {slots[hottest]:.0%} of a shard and cannot be split. "
            "Try: keys with more values, or more partitions"
        )

    def _hold(self, reason: str, *, is_refused: bool = False) -> tuple[StreamDecision, StreamMemory]:
        return StreamDecision(None, f"{reason}: {self._about}", is_refused=is_refused), self._memory

    def _begin(
        self, choice: Choice, slots: Loads, direction: Direction, reason: str
    ) -> tuple[StreamDecision, StreamMemory]:
        fullest = max(shard_loads(choice.layout, slots))
        reason = f"{reason}: {self._about}; {len(choice.layout)} shards, the fullest with {fullest:.0%}"
        return StreamDecision(choice.layout, reason, choice.at_once), self._memory.with_update(direction, self._now)
