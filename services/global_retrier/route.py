"""Where an event goes from here, by nothing but the time that it has left. Pure; all in milliseconds."""

from bisect import bisect_right

from services.core.pipes import DELAYS_S, RETRY_IN, delay_topic

DELAY_BY_TOPIC = {RETRY_IN: 0} | {delay_topic(seconds): seconds * 1000 for seconds in DELAYS_S}
"""What the retrier reads, and how long a record stays there."""

SHORTEST_MS = DELAYS_S[0] * 1000
_DELAYS = [seconds * 1000 for seconds in DELAYS_S]
_TOPICS = [delay_topic(seconds) for seconds in DELAYS_S]


def choose_delay(left: int) -> str | None:
    """The topic with the longest delay that fits into the time left; None when nothing is left.

    What has less than the shortest delay left goes there, too: it leaves that topic when it is due (`find_wake`).
    """
    if left <= 0:
        return None
    return _TOPICS[max(0, bisect_right(_DELAYS, left) - 1)]


def choose_delays(least: int, most: int) -> list[str | None]:
    """All that `choose_delay` can answer for a time left between these two, ascending by delay."""
    first, last = (bisect_right(_DELAYS, max(left, _DELAYS[0])) - 1 if left > 0 else -1 for left in (least, most))
    return [_TOPICS[at] if at >= 0 else None for at in range(first, last + 1)]


def find_wake(delay: int, written: int, due: int, now: int) -> int:
    """When a record leaves its topic: after the topic's delay, and no later than it is due.

    written: when it came into the topic, by the clock of whoever wrote it; one ahead of `now`, when it is read, is not believed.
    """
    return min(min(written, now) + delay, due)
