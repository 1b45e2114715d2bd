"""Times as text for people, to and from milliseconds since the epoch."""

import datetime
import re
import time

from services.core.units import parse_duration

_LAST_MS = 253_402_300_799_000
"""The end of the year 9999."""


def now_ms() -> int:
    """The wall clock, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def parse_time(text: str, now: float) -> int:
    """Milliseconds from `2h` (ago) or an RFC 3339 time with a time zone. now: seconds. Raises ValueError."""
    try:
        return int((now - parse_duration(text)) * 1000)
    except ValueError:
        pass
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError(f"{text[:40]!r} is not a time. Try: 2h (ago) or 2026-11-21T08:00:00Z")
    return int(when.timestamp() * 1000)


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def parse_date(text: str) -> float:
    """Seconds since the epoch from `2027-01-31` (00:00 UTC) or an RFC 3339 time with a time zone. Raises ValueError."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is not None and _DATE.fullmatch(text):
        when = when.replace(tzinfo=datetime.UTC)
    if when is None or when.tzinfo is None:
        raise ValueError(f"{text[:40]!r} is not a date. Try: 2027-01-31 or 2027-01-31T08:00:00Z")
    return when.timestamp()


def date_of(millis: int) -> datetime.datetime:
    """The nearest date that a broker can be asked for: people and other programs may write any number as a time."""
    return datetime.datetime.fromtimestamp(min(max(0, millis), _LAST_MS) / 1000, datetime.UTC)


def format_time(millis: int) -> str:
    """RFC 3339 in UTC; the number itself when it is out of range."""
    try:
        when = datetime.datetime.fromtimestamp(millis / 1000, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(millis)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
