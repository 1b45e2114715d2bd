"""Lag histograms: quantiles within the stated error, merging without loss, Prometheus exposition."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.core.lag import FINE_SECONDS, RELATIVE_ERROR, LagFamily, LagHistogram, nearest_rank

lags = st.lists(st.integers(-5, 10**9), min_size=1, max_size=300)
shares = st.floats(0, 1)


def filled(values: list[int]) -> LagHistogram:
    histogram = LagHistogram()
    histogram.observe(values)
    return histogram


@given(lags, shares)
def test_quantiles_are_within_the_error(values: list[int], share: float) -> None:
    """Broken: the P95 that people are paged on is wrong."""
    exact = max(0, sorted(values)[nearest_rank(share, len(values)) - 1])
    assert filled(values).quantiles([share])[0] == pytest.approx(exact, rel=RELATIVE_ERROR * 1.0001)


@given(lags, lags)
def test_merging_is_counting_together(left: list[int], right: list[int]) -> None:
    """Broken: the figure of two processes is not that of their events."""
    merged, together = filled(left), filled(left + right)
    merged.merge(LagHistogram.load(json.loads(json.dumps(filled(right).dump()))))
    points = [0.0, 0.5, 0.95, 0.99, 1.0]
    assert merged.quantiles(points) == together.quantiles(points)
    assert (merged.count, merged.total_ms) == (together.count, together.total_ms)


def test_many_distinct_values_are_folded() -> None:
    """Broken: memory grows with the number of distinct lags for ever."""
    histogram = LagHistogram()
    for start in range(0, 2_000_000, 20_000):
        histogram.observe(range(start, start + 20_000))
    assert histogram.count == 2_000_000
    assert len(histogram._raw) <= 24_096
    assert len(histogram._buckets) < 2_000
    assert histogram.quantiles([0.5])[0] == pytest.approx(1_000_000, rel=0.01)


def test_few_events() -> None:
    """Broken: an event that is five minutes late is in no percentile of three events, and the fleet looks better than it is."""
    assert filled([-1_500_000, 330_000]).quantiles([0.5, 0.95]) == [0.0, pytest.approx(330_000, rel=0.01)]
    assert filled([0, 0, 330_000]).quantiles([0.5, 0.99]) == [0.0, pytest.approx(330_000, rel=0.01)]
    assert [nearest_rank(share, 100) for share in (0.0, 0.07, 0.5, 0.95, 0.99, 1.0)] == [1, 7, 50, 95, 99, 100]
    assert [nearest_rank(0.95, count) for count in (1, 19, 20, 21)] == [1, 19, 19, 20]


def test_empty() -> None:
    """Broken: a node without events divides by zero."""
    assert LagHistogram().quantiles([0.5, 0.99]) == [0.0, 0.0]
    assert LagHistogram().cumulative([1, 2]) == [0, 0]


def test_exposition() -> None:
    """Broken: Prometheus refuses the page, or its seconds are milliseconds."""
    registry, family = CollectorRegistry(), LagFamily("x_seconds", "X.", ["pipe"], FINE_SECONDS)
    registry.register(family)
    family.labels("p").observe([4, 40, 400, 4000])
    assert family.labels("p") is family.labels("p")
    text = generate_latest(registry).decode()
    assert 'x_seconds_bucket{le="0.005",pipe="p"} 1.0' in text
    assert 'x_seconds_bucket{le="0.5",pipe="p"} 3.0' in text
    assert 'x_seconds_bucket{le="+Inf",pipe="p"} 4.0' in text
    assert 'x_seconds_sum{pipe="p"} 4.444' in text
    assert 'x_seconds_count{pipe="p"} 4.0' in text
