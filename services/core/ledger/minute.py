"""The minute that an event counts in."""

MINUTE_MS = 60_000
BEHIND_MS, AHEAD_MS = MINUTE_MS, 1_000
"""How long after its end an event may arrive for a minute, and how long before its beginning."""


def minute_of(time: int, arrival: int) -> int:
    """Minutes since the epoch: of the event time, when the event arrived close enough to that minute, else of the arrival.

    Both in ms. So no event arrives for a minute that ended more than `BEHIND_MS` ago, however wrong a client's clock is.
    """
    first, last = near_minutes(arrival)
    minute = time // MINUTE_MS
    return minute if first <= minute <= last else arrival // MINUTE_MS


def near_minutes(arrival: int) -> tuple[int, int]:
    """The first and last minute that an event arriving now may count in."""
    return -((BEHIND_MS + MINUTE_MS - arrival) // MINUTE_MS), (arrival + AHEAD_MS) // MINUTE_MS


def common_minute(times: list[int], arrival: int) -> int | None:
    """The minute of all these events; None when there are several, or when that takes a look at each."""
    first, last = near_minutes(arrival)
    low, high = min(times) // MINUTE_MS, max(times) // MINUTE_MS
    if low == high:
        return low if first <= low <= last else arrival // MINUTE_MS
    return arrival // MINUTE_MS if high < first or low > last else None
