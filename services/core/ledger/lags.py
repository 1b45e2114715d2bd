"""Lags for reports: what a histogram that is filled anyway holds more than at the last look. Nothing is done per event."""

from collections import Counter
from collections.abc import Mapping

from services.core.lag import LagHistogram
from services.core.ledger.report import LagSet


class LagTap:
    """What comes into one histogram from now on."""

    def __init__(self, kind: str, histogram: LagHistogram) -> None:
        self.kind = kind
        self._histogram = histogram
        self._seen: Mapping[int, int] = histogram.buckets()
        self._count, self._total_ms = histogram.count, histogram.total_ms

    def take(self, minute: int) -> LagSet | None:
        """The lags since the last call, as measured in this minute; None for none."""
        count, total_ms = self._histogram.count - self._count, self._histogram.total_ms - self._total_ms
        if not count:
            return None
        before, self._seen = self._seen, self._histogram.buckets()
        self._count, self._total_ms = self._histogram.count, self._histogram.total_ms
        added = {bucket: more for bucket, known in self._seen.items() if (more := known - before.get(bucket, 0))}
        return LagSet(self.kind, minute, count, total_ms, added)


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
