"""The Retry-After header: seconds or an HTTP date, from anybody, so never trusted."""

from email.utils import parsedate_to_datetime

MAX_SECONDS = 86_400.0
"""The longest wish that is granted."""


def parse_retry_after(text: str | None, *, now: float) -> float | None:
    """Seconds to wait, 0 to MAX_SECONDS; None when there is no (understandable) wish. `now` in seconds since the epoch."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return MAX_SECONDS if len(text) > 6 else min(float(text), MAX_SECONDS)
    try:
        moment = parsedate_to_datetime(text[:100])
        return min(max(moment.timestamp() - now, 0.0), MAX_SECONDS)
    except (ValueError, OverflowError, OSError):
        return None
