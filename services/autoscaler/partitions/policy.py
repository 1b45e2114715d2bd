"""When a Kafka topic gets more partitions: a pure function. They never go away again, so it takes its time.

More partitions send keys elsewhere and break their order, so a stream whose events have keys is left as it is, and that is
said: a person decides (`penstock apply --grow`).
"""

import math
from dataclasses import dataclass

HIGH, TARGET = 0.85, 0.7
WINDOW_S, COOL_DOWN_S = 600.0, 3_600.0


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """bytes: a second that come in. partitions: there are. capacity: bytes a second that one takes. keyed: events have keys."""

    bytes: float
    partitions: int
    capacity: float
    keyed: bool


@dataclass(frozen=True, slots=True)
class TopicMemory:
    """looks: (when, bytes a second) of the last minutes. acted: when partitions were, or may have been, added last; or None."""

    looks: tuple[tuple[float, float], ...] = ()
    acted: float | None = None


@dataclass(frozen=True, slots=True)
class TopicDecision:
    """partitions: the new total; None: leave it. reason: for a person, with its figures."""

    partitions: int | None
    reason: str


def decide(figures: TopicFigures, memory: TopicMemory, now: float) -> tuple[TopicDecision, TopicMemory]:
    """At most twice as many, at most once an hour, when ten minutes on end were too much."""
    kept = tuple(look for look in memory.looks if look[0] > now - 1.2 * WINDOW_S)
    memory = TopicMemory((*kept, (now, figures.bytes)), memory.acted)
    window = [load for at, load in memory.looks if at >= now - WINDOW_S]
    used = min(window) / (figures.partitions * figures.capacity)
    about = (
        f"{figures.bytes:,.0f} bytes a second in {figures.partitions} partitions of {figures.capacity:,.0f}; "
        f"{used:.0%} at least in the last {WINDOW_S:.0f} s"
    )
    if used <= HIGH or now - memory.looks[0][0] < WINDOW_S:
        return TopicDecision(None, f"the partitions fit the load: {about}"), memory
    if figures.keyed:
        remedy = "more of them would break the order of keys. Try: penstock apply --grow, when it may break"
        return TopicDecision(None, f"more partitions are needed, but events have keys, and {remedy}: {about}"), memory
    if memory.acted is not None and now - memory.acted < COOL_DOWN_S:
        return TopicDecision(
            None, f"more partitions are needed, but within the hour some were added, or the autoscaler began: {about}"
        ), memory
    wanted = math.ceil(min(window) / (TARGET * figures.capacity))
    wanted = min(2 * figures.partitions, max(figures.partitions + 1, wanted))
    return TopicDecision(wanted, f"the partitions are too full: {about}"), TopicMemory((), now)
