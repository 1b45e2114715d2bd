"""Histograms of lags in ms: they can be merged, and their quantiles have a relative error of at most 0.5 %.

The buckets are those of DDSketch (Masson, Rim, Lee, VLDB 2019): a value v > 0 is in bucket ceil(log_g(v)) with
g = (1 + a) / (1 - a), where a is the relative error.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

RELATIVE_ERROR = 0.005
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_FOLD_AT = 4096
FINE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600, 86400)
"""The buckets of a family with few children."""
COARSE_SECONDS = (0.01, 0.05, 0.25, 1, 2.5, 10, 60, 300, 3600)
"""The buckets of a family with a child for each destination: enough for a P95 on a dashboard."""


def nearest_rank(share: float, count: int) -> int:
    """The rank, from 1, of the smallest of so many values that at least this share of them does not exceed."""
    return max(1, math.ceil(share * count - 1e-9))  # 0.07 * 100 is a little more than 7


class LagHistogram:
    """Counts lags in ms. Negative ones (the client's clock is ahead) count as 0. Not thread-safe."""

    def __init__(self) -> None:
        self._raw: Counter[int] = Counter()
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total_ms = 0

    def observe(self, lags_ms: Sequence[int]) -> None:
        """Count a batch; about 0.05 us per value."""
        if not lags_ms:
            return
        self._raw.update(lags_ms)
        self.count += len(lags_ms)
        self.total_ms += sum(lags_ms)
        if len(self._raw) > _FOLD_AT:
            self._fold()

    def observe_counts(self, events: Mapping[int, int]) -> None:
        """Count events. events: their number by lag."""
        if not events:
            return
        self._raw.update(events)
        self.count += sum(events.values())
        self.total_ms += sum(lag * count for lag, count in events.items())
        if len(self._raw) > _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        for lag, count in self._raw.items():
            self._buckets[_bucket(lag)] += count
        self._raw.clear()

    def merge(self, other: "LagHistogram") -> None:
        """Add the counts of another histogram; exact, because both have the same buckets."""
        other._fold()
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total_ms += other.total_ms

    def buckets(self) -> Counter[int]:
        """A copy of the counts by bucket, for `services.core.ledger.report.LagSet`."""
        self._fold()
        return self._buckets.copy()

    def dump(self) -> dict[str, Any]:
        """As JSON for `load`, without loss of precision."""
        self._fold()
        buckets = {str(bucket): count for bucket, count in self._buckets.items()}
        return {"count": self.count, "total_ms": self.total_ms, "buckets": buckets}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> "LagHistogram":
        """From the JSON of `dump`. Raises KeyError, ValueError."""
        histogram = cls()
        histogram._buckets.update({int(bucket): int(count) for bucket, count in data["buckets"].items()})
        histogram.count, histogram.total_ms = int(data["count"]), int(data["total_ms"])
        return histogram

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Milliseconds at these shares (0..1), within the relative error; 0 for an empty histogram.

        By the nearest rank: the smallest lag that at least this share of the events does not exceed. So P99 of a few events is
        the longest lag.
        """
        self._fold()
        ordered = sorted(self._buckets.items())
        found = []
        for share in shares:
            rank, seen, value = nearest_rank(share, self.count), 0, 0.0
            for bucket, count in ordered:
                value, seen = _value(bucket), seen + count
                if seen >= rank:
                    break
            found.append(value)
        return found

    def cumulative(self, bounds_ms: Sequence[float]) -> list[int]:
        """The number of lags at or below each bound, within the relative error."""
        self._fold()
        lasts = _last_buckets(tuple(bounds_ms))
        found = [0] * (len(lasts) + 1)
        for bucket, count in self._buckets.items():
            found[bisect_left(lasts, bucket)] += count
        return list(accumulate(found[:-1]))


@lru_cache
def _last_buckets(bounds_ms: tuple[float, ...]) -> list[int]:
    """The last bucket at or below each bound, of ascending bounds."""
    buckets = [math.floor(math.log(max(bound, 1e-9) * (_GAMMA + 1) / 2) / _LOG_GAMMA) for bound in bounds_ms]
    return [max(-1, bucket) for bucket in buckets]


@lru_cache(maxsize=1 << 14)
def _bucket(lag_ms: int) -> int:
    return math.ceil(math.log(lag_ms) / _LOG_GAMMA) if lag_ms > 0 else -1


def _value(bucket: int) -> float:
    return 2 * _GAMMA**bucket / (_GAMMA + 1) if bucket >= 0 else 0.0


class LagFamily(Collector):
    """A Prometheus family in seconds over labelled LagHistograms; register it once.

    bounds: of the buckets in Prometheus, ascending, a series each. Without any it is a summary of a count and a sum.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float] = ()) -> None:
        self._bounds = tuple(bounds)
        self._name, self._documentation, self._label_names = name, documentation, tuple(labels)
        self._children: dict[tuple[str, ...], LagHistogram] = {}

    def labels(self, *values: str) -> LagHistogram:
        """The histogram of these label values. Keep it; do not look it up for every event."""
        return self._children.setdefault(values, LagHistogram())

    @property
    def name(self) -> str:
        """The metric's name."""
        return self._name

    def dump(self) -> list[dict[str, Any]]:
        """All histograms as JSON: each `LagHistogram.dump` with its `labels`."""
        return [
            {"labels": dict(zip(self._label_names, values, strict=True)), **histogram.dump()}
            for values, histogram in self._children.items()
        ]

    @property
    def has_buckets(self) -> bool:
        """Whether it is a histogram in Prometheus."""
        return bool(self._bounds)

    def collect(self) -> Iterator[HistogramMetricFamily | SummaryMetricFamily]:
        """Called by the registry at each scrape."""
        if not self._bounds:
            summary = SummaryMetricFamily(self._name, self._documentation, labels=self._label_names)
            for values, histogram in self._children.items():
                summary.add_metric(values, histogram.count, histogram.total_ms / 1000)
            yield summary
            return
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, histogram in self._children.items():
            counts = histogram.cumulative([bound * 1000 for bound in self._bounds])
            pairs = [(str(bound), float(count)) for bound, count in zip(self._bounds, counts, strict=True)]
            family.add_metric(values, [*pairs, ("+Inf", float(histogram.count))], sum_value=histogram.total_ms / 1000)
        yield family
