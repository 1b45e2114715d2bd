"""The minute that an event counts in."""

MINUTE_MS = 60_000
BEHIND_MS, AHEAD_MS = MINUTE_MS, 1_000
"""The time after its end, and before its beginning, in which an event may arrive for a minute."""


def minute_of(time: int, arrival: int) -> int:
    """In minutes since the epoch: of the event time, if the event arrived close enough to that minute, else of the arrival.

    Both times are in ms. So no event counts in a minute that ended more than `BEHIND_MS` ago.
    """
    first, last = near_minutes(arrival)
    minute = time // MINUTE_MS
    return minute if first <= minute <= last else arrival // MINUTE_MS


def near_minutes(arrival: int) -> tuple[int, int]:
    """The first and last minute that an event arriving now may count in."""
    return -((BEHIND_MS + MINUTE_MS - arrival) // MINUTE_MS), (arrival + AHEAD_MS) // MINUTE_MS


def common_minute(times: list[int], arrival: int) -> int | None:
    """The minute of all these events; None when there are several, or each event must be checked."""
    own = arrival // MINUTE_MS
    low = high = times[0] // MINUTE_MS
    if len(times) > 1:
        low, high = min(times) // MINUTE_MS, max(times) // MINUTE_MS
    if low == high == own:  # nearly always, and ingest calls this once per request
        return own
    first, last = near_minutes(arrival)
    if low == high:
        return low if first <= low <= last else own
    return own if high < first or low > last else None


def group_by_minute(times: list[int], arrival: int) -> dict[int, list[int]]:
    """The indexes of these events by their minute."""
    own: dict[int, list[int]] = {}
    for index, minute in enumerate([time // MINUTE_MS for time in times]):
        own.setdefault(minute, []).append(index)
    first, last = near_minutes(arrival)
    found: dict[int, list[int]] = {}
    for minute, indexes in own.items():
        found.setdefault(minute if first <= minute <= last else arrival // MINUTE_MS, []).extend(indexes)
    return found
