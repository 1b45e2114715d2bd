"""Percentiles as the API and the page show them, against the exact ones of everything that was measured."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.lag import LagHistogram, nearest_rank
from services.core.ledger.report import Report, decode_report
from services.core.ledger.reporter import LagTap, join_lags
from services.observer.lags import LagTable
from services.observer.ledger.flow import Step
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS

STEP = Step("expel", "late", "ops")
ERROR = 0.01
lags_ms = st.integers(0, 80_000_000) | st.integers(0, 300)
told = st.lists(st.lists(st.lists(lags_ms, max_size=40), max_size=4), min_size=1, max_size=4)
"""By instance and report."""


@given(told, st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_within_one_per_cent_of_the_exact_value(told: list[list[list[int]]], share: float) -> None:
    """Broken: a P95 that is shown, or that an autoscaler goes by, is another one than the events'."""
    book = LagTable()
    for instance, reports in enumerate(told):
        tap = LagTap("e2e", histogram := LagHistogram())
        for number, measured in enumerate(reports):
            histogram.observe(measured)
            taken = tap.drain(MINUTE)
            report = Report(
                node="expel",
                instance=f"i{instance}",
                pipe="late",
                destination="ops",
                at_ms=MINUTE * MINUTE_MS + number,
                lags=tuple(join_lags([taken] if taken is not None else [])),
            )
            for _ in range(2):
                book.record(decode_report(report.encode()))
    every = sorted(lag for reports in told for measured in reports for lag in measured)
    found = book.kinds(MINUTE).get((STEP, "e2e"))
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.count == len(every)
    exact = every[nearest_rank(share, len(every)) - 1]
    assert abs(found.quantiles([share])[0] - exact) <= ERROR * exact, (exact, every)
