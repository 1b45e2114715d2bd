"""How a stream's load will have grown: by what it did lately, and by the day's pattern."""

from statistics import median

from services.autoscaler.shards.figures import StreamFigures, StreamMemory
from services.autoscaler.shards.layout import Layout, shard_loads
from services.autoscaler.shards.rules import Rules

_MOST = 2.0
"""No forecast is above twice what there is: no update gives more."""

_SHORTEST = 0.5
"""Of `lead`: growth over less is noise."""

_OWN_GROWTH, _OWN_SHARE = 0.02, 0.25
"""In shards, and of what it had: a slot that grew by more has a hot key."""


def asked_for(figures: StreamFigures, rules: Rules) -> tuple[float, ...]:
    """The load of each slot as it is asked for: of a shard that refuses nobody sees more than it took."""
    asked = list(figures.slots)
    for at in figures.full:
        inside = _slots_of(figures.layout, at, len(asked))
        took = sum(figures.slots[slot] for slot in inside)
        for slot in inside:
            share = figures.slots[slot] / took if took > 0 else 1 / len(inside)
            asked[slot] = share * max(1.0, took) * rules.fullness
    return tuple(asked)


def expected(
    figures: StreamFigures, asked: tuple[float, ...], memory: StreamMemory, now: float, rules: Rules, ahead: float
) -> tuple[float, ...]:
    """The load of each slot in `ahead` seconds: as most shards grow, and a slot that grows more than they by its own growth.

    A single slot's growth is followed for twice `lead` at most.
    """
    factor = _factor(figures, memory, now, rules, ahead)
    grown = [load * factor for load in asked]
    if (older := _older(memory, now, rules)) is not None:
        at, slots = older
        for slot, (load, then) in enumerate(zip(figures.slots, slots, strict=True)):
            if load - then > max(_OWN_GROWTH, _OWN_SHARE * then):
                own = (load - then) / (now - at) * min(ahead, 2 * rules.lead)
                grown[slot] = max(grown[slot], asked[slot] + min(1.0, own))
    return tuple(grown)


def _factor(figures: StreamFigures, memory: StreamMemory, now: float, rules: Rules, ahead: float) -> float:
    """By how much the load will have grown: by the day's pattern where it has one, else as the median shard grows."""
    total = sum(figures.slots)
    usual = memory.day.expected(now + figures.ahead, ahead)
    older = _older(memory, now, rules)
    trend = 0.0
    if older is not None:
        at, slots = older
        pairs = zip(shard_loads(figures.layout, figures.slots), shard_loads(figures.layout, slots), strict=True)
        trend = median((load / then - 1) / (now - at) if then > 0 else 0.0 for load, then in pairs)
    by_day = usual / total if usual is not None and total > 0 else 0.0
    by_trend = 1.0 + trend * (rules.lead if by_day else ahead)
    return min(_MOST, max(1.0, by_day, by_trend))


def _older(memory: StreamMemory, now: float, rules: Rules) -> tuple[float, tuple[float, ...]] | None:
    """The look of about `lead` seconds ago; None while there is none."""
    older = [look for look in memory.looks if now - look[0] >= _SHORTEST * rules.lead]
    return min(older, key=lambda look: abs(now - look[0] - rules.lead), default=None)


def _slots_of(layout: Layout, shard: int, slots: int) -> range:
    return range(layout[shard], layout[shard + 1] if shard + 1 < len(layout) else slots)
