"""Lags for reports: what a histogram that is filled anyway holds more than at the last look. Nothing is done per event."""

from collections import Counter

from services.core.lag import LagHistogram
from services.core.ledger.report import LagSet


class LagTap:
    """What comes into one histogram from now on."""

    def __init__(self, kind: str, histogram: LagHistogram) -> None:
        self.kind = kind
        self._histogram = histogram
        self._seen = histogram.copy()

    def take(self, minute: int) -> LagSet | None:
        """The lags since the last call, as measured in this minute; None for none."""
        if self._histogram.count == self._seen.count:
            return None
        seen, self._seen = self._seen, self._histogram.copy()
        buckets = self._seen.buckets()
        buckets.subtract(seen.buckets())
        added = {bucket: count for bucket, count in buckets.items() if count}
        return LagSet(self.kind, minute, self._seen.count - seen.count, self._seen.total_ms - seen.total_ms, added)


def join_lags(lags: list[LagSet]) -> list[LagSet]:
    """Those of one kind and minute in one."""
    joined: dict[tuple[str, int], LagSet] = {}
    for lag in lags:
        key = lag.kind, lag.minute
        if (other := joined.get(key)) is not None:
            buckets = dict(Counter(other.buckets) + Counter(lag.buckets))
            lag = LagSet(*key, other.count + lag.count, other.total_ms + lag.total_ms, buckets)
        joined[key] = lag
    return list(joined.values())
