"""The figures of a pipe's transform on the page: the newest ones of a process that lives."""

import msgspec
import pytest

from services.core.ledger.report import Report, SparkFigures, decode_known
from services.observer.transforms import FRESH_MS, TransformTable

NOW = 1_700_000_000_000


def report(at_ms: int, figures: SparkFigures | None, pipe: str = "p") -> Report:
    return Report(node="transform", instance="t", pipe=pipe, at_ms=at_ms, spark=figures)


def test_the_newest_figures_are_shown_while_they_are_fresh() -> None:
    """If this fails, the page shows the work of a process that has ended, or of another pipe."""
    table = TransformTable()
    table.record(report(NOW, SparkFigures(10.0, 5_000, 20, 4_000, 900, 7, 2_048, 3, "http://127.0.0.1:4040", True)))
    table.record(report(NOW - 10_000, SparkFigures(10.0, 1, 1, 1, 1)))
    table.record(report(NOW + 5_000, None))
    table.record(report(NOW, SparkFigures(10.0, 0, 0, 0, 0), "idle"))
    shown = table.view("p", NOW + FRESH_MS, lambda: 31.5, 12)
    assert shown is not None
    assert (shown.per_second, shown.batches_per_second, shown.batch_ms, shown.longest_ms) == (500, 2, 200, 900)
    assert (shown.lag_p95_ms, shown.behind_ms) == (31.5, 12)
    assert (shown.state_rows, shown.state_bytes, shown.executors) == (7, 2_048, 3)
    assert (shown.ui, shown.real_time) == ("http://127.0.0.1:4040", True)
    idle = table.view("idle", NOW, lambda: None, None)
    assert idle is not None
    assert (idle.per_second, idle.batch_ms, idle.lag_p95_ms, idle.real_time) == (0, None, None, False)
    assert table.view("p", NOW + FRESH_MS + 1, lambda: 31.5, 12) is None
    assert table.view("other", NOW, lambda: None, None) is None


def test_figures_that_a_newer_version_changed_are_passed_over() -> None:
    """If this fails, a newer transform makes the observer drop its reports: its events look lost."""
    raw = msgspec.msgpack.decode(report(NOW, SparkFigures(10.0, 5, 1, 2, 2)).encode())
    assert decode_known(msgspec.msgpack.encode(raw)).report.spark == SparkFigures(10.0, 5, 1, 2, 2)
    place = Report.__struct_fields__.index("spark")
    raw[place] = ["ten seconds"]
    decoded = decode_known(msgspec.msgpack.encode(raw))
    assert decoded.report.spark is None
    assert decoded.unknown == ["spark"]
    raw[place] = [10.0, 5, 1, 2, 2, 0, 0, 0, "", False, "added later"]
    assert decode_known(msgspec.msgpack.encode(raw)).report.spark == SparkFigures(10.0, 5, 1, 2, 2)


@pytest.mark.parametrize("seconds", [0.0, -3.0])
def test_no_time_at_all_is_no_endless_rate(seconds: float) -> None:
    """If this fails, a clock that is set back ends the page."""
    table = TransformTable()
    table.record(report(NOW, SparkFigures(seconds, 5, 1, 2, 2)))
    shown = table.view("p", NOW, lambda: None, None)
    assert shown is not None
    assert shown.per_second == 5
