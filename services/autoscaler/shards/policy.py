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
from services.autoscaler.shards.layout import Choice, Layout, choose_down, choose_up, excess, shard_loads

_MOST = 2.0
"""The highest forecast, as a multiple of the present load: no update gives more."""

_SHORTEST = 0.5
"""Of `lead`: growth over a shorter time is noise."""

_OWN_GROWTH, _OWN_SHARE = 0.02, 0.25
"""A slot that grew by more than this has a hot key: in shards, and as a share of its load."""


def requested_loads(figures: StreamFigures, rules: Rules) -> tuple[float, ...]:
    """The load of each slot as requested. A shard that refuses shows only the load that it accepted."""
    requested = list(figures.slots)
    for at in figures.full:
        inside = _slots_of(figures.layout, at, len(requested))
        accepted = sum(figures.slots[slot] for slot in inside)
        for slot in inside:
            share = figures.slots[slot] / accepted if accepted > 0 else 1 / len(inside)
            requested[slot] = share * max(1.0, accepted) * rules.fullness
    return tuple(requested)


def forecast(
    figures: StreamFigures, requested: tuple[float, ...], memory: StreamMemory, now: float, rules: Rules, ahead: float
) -> tuple[float, ...]:
    """The load of each slot in `ahead` seconds. It grows with most shards, or faster by its own growth.

    A single slot's growth is followed for twice `lead` at most.
    """
    factor = _growth_factor(figures, memory, now, rules, ahead)
    grown = [load * factor for load in requested]
    if (older := _earlier_sample(memory, now, rules)) is not None:
        at, slots = older
        for slot, (load, then) in enumerate(zip(figures.slots, slots, strict=True)):
            if load - then > max(_OWN_GROWTH, _OWN_SHARE * then):
                own = (load - then) / (now - at) * min(ahead, 2 * rules.lead)
                grown[slot] = max(grown[slot], requested[slot] + min(1.0, own))
    return tuple(grown)


def _growth_factor(figures: StreamFigures, memory: StreamMemory, now: float, rules: Rules, ahead: float) -> float:
    """The growth by the day's pattern where there is one, else of the median shard."""
    total = sum(figures.slots)
    usual = memory.day.expected(now + figures.ahead, ahead)
    older = _earlier_sample(memory, now, rules)
    trend = 0.0
    if older is not None:
        at, slots = older
        pairs = zip(shard_loads(figures.layout, figures.slots), shard_loads(figures.layout, slots), strict=True)
        trend = median((load / then - 1) / (now - at) if then > 0 else 0.0 for load, then in pairs)
    by_day = usual / total if usual is not None and total > 0 else 0.0
    by_trend = 1.0 + trend * (rules.lead if by_day else ahead)
    return min(_MOST, max(1.0, by_day, by_trend))


def _earlier_sample(memory: StreamMemory, now: float, rules: Rules) -> tuple[float, tuple[float, ...]] | None:
    """The sample of about `lead` seconds ago; None while there is none."""
    older = [sample for sample in memory.samples if now - sample[0] >= _SHORTEST * rules.lead]
    return min(older, key=lambda sample: abs(now - sample[0] - rules.lead), default=None)


def _slots_of(layout: Layout, shard: int, slots: int) -> range:
    return range(layout[shard], layout[shard + 1] if shard + 1 < len(layout) else slots)


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
    if figures.changing or figures.covered < rules.cover:
        return StreamDecision(None, _not_yet(figures, rules)), memory
    memory = memory.observe(figures, now, rules.calm)
    requested = requested_loads(figures, rules)
    coming = forecast(figures, requested, memory, now, rules, rules.lead)
    loads = shard_loads(figures.layout, coming)
    about = _describe(figures, loads, len(memory.recent(now)), rules)
    if max(loads) > rules.high:
        lasting = forecast(figures, requested, memory, now, rules, rules.size_for)
        return _grow(figures, memory, now, rules, tuple(map(max, coming, lasting)), about)
    return _shrink(figures, memory, now, rules, about)


def _not_yet(figures: StreamFigures, rules: Rules) -> str:
    if figures.changing:
        return "the stream is being changed"
    return f"figures of these shards for {figures.covered:.0f} s, {rules.cover:.0f} are needed"


def _grow(
    figures: StreamFigures,
    memory: StreamMemory,
    now: float,
    rules: Rules,
    slots: tuple[float, ...],
    about: str,
) -> tuple[StreamDecision, StreamMemory]:
    shards = len(figures.layout)
    most = min(2 * shards, max(shards, len(slots)), shards + figures.room)
    target = rules.target_with_plenty if _has_plenty(memory, now, rules) and not figures.full else rules.target
    choice = None
    if excess(figures.layout, slots, rules.high) > 0:
        enough = _enough(slots, target, memory, now, rules)
        places = (target, most, figures.room, rules.lead)
        choice = choose_up(figures.layout, enough, *places, hurry=bool(figures.full))
    why_not = _refusal(memory, "up", now, rules)
    if choice is None:
        why_not = _no_split_helps(figures, slots, rules, most)
        merged = _shrink(figures, memory, now, rules, about)  # the other shards may still be merged
        if merged[0].layout is not None:
            return merged
    if choice is None or why_not:
        return StreamDecision(None, f"more shards are needed, but {why_not}: {about}"), memory
    return _begin(choice, slots, memory, "up", now, f"a shard is too full: {about}")


def _enough(
    slots: tuple[float, ...], target: float, memory: StreamMemory, now: float, rules: Rules
) -> tuple[float, ...]:
    """Raised so far that the updates left after this one can grow back to the peak of the last day."""
    left, total = rules.updates - len(memory.recent(now)) - 1, sum(slots)
    usual = max(memory.day.newest) / rules.step ** max(0, left)
    if not 0 < total < usual:
        return slots
    return tuple(max(load, min(target, load * usual / total)) for load in slots)


def _has_plenty(memory: StreamMemory, now: float, rules: Rules) -> bool:
    return rules.updates - len(memory.recent(now)) >= rules.plenty


def _shrink(
    figures: StreamFigures, memory: StreamMemory, now: float, rules: Rules, about: str
) -> tuple[StreamDecision, StreamMemory]:
    shards, total = len(figures.layout), sum(figures.slots)
    seen = now - memory.samples[0][0] if memory.samples else 0.0
    if figures.partial:
        return StreamDecision(None, f"not all processes answer: {about}"), memory
    if not memory.samples or seen < rules.calm - 2 * SAMPLE_S:
        return StreamDecision(None, f"figures of {seen:.0f} s are too few to merge: {about}"), memory
    highest = max([total, *(sum(slots) for _, slots in memory.samples)])
    likely = sum(forecast(figures, figures.slots, memory, now, rules, rules.size_for))
    likely = max(highest, likely, memory.day.expected(now + figures.ahead, rules.outlook) or 0.0)
    slots = tuple(load * likely / total for load in figures.slots) if total > 0 else figures.slots
    half = -(-shards // 2)
    has_plenty = _has_plenty(memory, now, rules)
    low = rules.low_with_plenty if has_plenty else rules.low
    choice = choose_down(figures.layout, slots, low, half, figures.room, rules.lead)
    worth = max(1, rules.worth_with_plenty * shards) if has_plenty else rules.worth * shards
    if choice is None or shards - len(choice.layout) < worth:
        return StreamDecision(None, f"the shards fit the load: {about}"), memory
    if total < _STILL_FALLING * highest and len(choice.layout) > half:
        return StreamDecision(None, f"fewer shards would do; the load is still falling: {about}"), memory
    if why_not := _refusal(memory, "down", now, rules) or _no_way_back(len(choice.layout), memory, now, rules):
        return StreamDecision(None, f"fewer shards would do, but {why_not}: {about}"), memory
    return _begin(choice, slots, memory, "down", now, f"the shards are too empty: {about}")


def _refusal(memory: StreamMemory, direction: Direction, now: float, rules: Rules) -> str:
    """Why no update of this direction may begin now; empty if it may."""
    left = rules.updates - len(memory.recent(now))
    if left <= 0:
        return f"{rules.updates} updates were made within 24 h, the service takes no more"
    if memory.updates and memory.updates[-1].direction != direction:
        passed = now - memory.updates[-1].at
        if passed < rules.calm:
            return f"the opposite was done {passed:.0f} s ago, {rules.calm:.0f} must pass"
    return ""


def _no_way_back(shards: int, memory: StreamMemory, now: float, rules: Rules) -> str:
    """Why the updates that are left could not grow back to the need of the last day."""
    left = rules.updates - len(memory.recent(now)) - 1
    needed = math.ceil(max(memory.day.newest) / rules.target)
    if left >= rules.reserve and shards * rules.step**left >= needed:
        return ""
    return f"the {left + 1} updates that are left are kept for growing{f' back to {needed} shards' if needed > shards else ''}"


def _no_split_helps(figures: StreamFigures, slots: tuple[float, ...], rules: Rules, most: int) -> str:
    if figures.room < 1:
        return "the account has all the shards that it may have. Try: asking for a higher limit"
    if most <= len(figures.layout):
        return f"there are as many shards as partitions, {len(slots)}. Try: more partitions"
    hottest = max(range(len(slots)), key=lambda slot: slots[slot])
    return (
        f"partition {hottest} alone has {slots[hottest]:.0%} of a shard and cannot be split. "
        "Try: keys with more values, or more partitions"
    )


def _begin(
    choice: Choice,
    slots: tuple[float, ...],
    memory: StreamMemory,
    direction: Direction,
    now: float,
    reason: str,
) -> tuple[StreamDecision, StreamMemory]:
    reason = f"{reason}; {len(choice.layout)} shards, the fullest with {max(shard_loads(choice.layout, slots)):.0%}"
    return StreamDecision(choice.layout, reason, choice.at_once), memory.with_update(direction, now)


def _describe(figures: StreamFigures, loads: list[float], used: int, rules: Rules) -> str:
    fullest = max(range(len(loads)), key=lambda at: loads[at])
    return (
        f"{len(loads)} shards take {sum(figures.slots):.2f}, expected {sum(loads):.2f}; the fullest, number {fullest} by "
        f"range, {loads[fullest]:.0%}; {len(figures.full)} refuse or delay; {used} of {rules.updates} updates used"
    )
