"""What a pipe's reports are made of, without Spark: origins, ages, and the reporter itself."""

from collections import Counter
from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY
from pyroaring import BitMap

from services.core.broker.errors import Unavailable
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.report import Report, decode_report, unpack_numbers
from services.core.ledger.reporter import HEARTBEAT_S
from spark.batch_report import BatchLags, BatchReport, Gathered, add_accepted, add_settled, origins_of, union, without
from spark.records import OffsetRange, cut_evenly
from spark.reporter import PipeReporter
from spark.transforms.output import number_batch
from tests.support.clock import Clock


class Shelf:
    """Keeps what is appended, or refuses it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.away = False

    def append(self, records: Sequence[Record]) -> None:
        if self.away:
            raise Unavailable("away")
        self.records += records

    def reports(self) -> list[Report]:
        return [decode_report(record.value) for record in self.records]


def sets(report: Report) -> dict[tuple[str, str, int, int | None], list[int]]:
    return {
        (reported.outcome, reported.incarnation, reported.partition, reported.minute): list(
            unpack_numbers(reported.numbers)
        )
        for reported in report.sets
    }


def outside(reason: str) -> float:
    labels = {"node": "transform", "pipe": "odd", "reason": reason}
    return REGISTRY.get_sample_value("penstock_ledger_events_outside_total", labels) or 0.0


def record(origin: str | None, time: int = 1) -> Record:
    return Record(None, b"", time, () if origin is None else ((ORIGIN, origin.encode()),))


def gathered(*origins: str | None) -> Gathered:
    return origins_of([record(origin) for origin in origins])


def test_origins_are_read_and_what_is_none_is_counted() -> None:
    """If this fails, one record that others wrote stops a pipe, or an event is taken for another one."""
    text = "a:0:5 b:1:7 a:0:6 a:0:6 A:0:1 x a:0: a::3 a:0:2147483648 a:0:-1 a:0:12345678901 a:0:1_0 a:0:2147483647"
    found = gathered(*text.split(), None, None, None)
    assert found.counted("odd", 16) == {("a", 0): BitMap([5, 6, 2**31 - 1]), ("b", 1): BitMap([7])}
    assert outside("bad_origin") == 8
    assert outside("no_origin") == 3
    assert found.counted("odd") == found.all
    assert (outside("bad_origin"), outside("no_origin")) == (16, 3)
    assert gathered().all == {}


def test_settled_is_passed_or_filtered() -> None:
    """If this fails, an event counts twice or not at all behind a transform."""
    report = BatchReport("p")
    read = [(gathered("a:0:1", "a:0:2", "a:1:1"), 3), (gathered("b:0:1"), 1)]
    add_settled(report, read, gathered("a:0:2", "b:0:1", "b:0:1"))
    assert {(reported.outcome, reported.incarnation, reported.partition) for reported in report.sets.pack()} == {
        ("passed", "a", 0),
        ("passed", "b", 0),
        ("filtered", "a", 0),
        ("filtered", "a", 1),
    }
    other = BatchReport("p")
    read = [(gathered("a:0:1", "a:0:2", "a:0:3"), 3)]
    add_settled(other, read, gathered("a:0:2"), [{("a", 0): BitMap([3])}])
    assert {(reported.outcome, tuple(unpack_numbers(reported.numbers))) for reported in other.sets.pack()} == {
        ("passed", (2,)),
        ("filtered", (1,)),
    }
    left = without(union([gathered("a:0:1").all, gathered("a:0:2").all]), gathered("a:0:1").all)
    assert left == {("a", 0): BitMap([2])}


def test_new_events_count_in_their_minute() -> None:
    """If this fails, events that a transform makes are missing from the minutes that the observer shows, or in the wrong ones."""
    report, at = BatchReport("p"), 100 * 60_000 + 5
    times = [at, at - 60_000, at - 600_000, at + 600_000]
    made = [record(f"q:0:{number}", time) for number, time in enumerate(times, start=1)]
    add_accepted(report, origins_of(made, arrival=at))
    found = {(reported.minute, tuple(unpack_numbers(reported.numbers))) for reported in report.sets.pack()}
    assert found == {(100, (1, 3, 4)), (99, (2,))}


def test_numbers_of_batches_never_meet() -> None:
    """If this fails, two new events have one origin, and the loss of one of them is never seen."""
    first = [number_batch("q", batch, 0)[:2] for batch in range(5000)]
    assert len(set(first)) == 5000
    assert max(number for _, number in first) + (1 << 20) <= 1 << 31
    assert first == [number_batch("q", batch, 99)[:2] for batch in range(5000)]


def test_windows_cover_everything_once() -> None:
    """If this fails, events are left out, or done twice, when what a crash left is done in parts."""
    spans = [OffsetRange("s", 0, 5, 17), OffsetRange("s", 1, 0, 0), OffsetRange("u", 0, 2, 3)]
    found = [(s.topic, s.partition, n) for part in cut_evenly(spans, 6) for s in part for n in range(s.start, s.end)]
    assert sorted(found) == [*(("s", 0, n) for n in range(5, 17)), ("u", 0, 2)]
    assert all(sum(s.end - s.start for s in part) <= 6 for part in cut_evenly(spans, 6))


def test_reporter_reports_batches_and_heartbeats() -> None:
    """If this fails, the observer takes a pipe that lives for a silent one, or misses what it settled."""
    shelf, clock = Shelf(), Clock(1_000_000.0)
    reporter = PipeReporter("p", shelf.append, clock)
    reporter.report_heartbeat()
    reporter.report_heartbeat()
    assert [report.behind_ms for report in shelf.reports()] == [None]
    done = BatchReport("p", read=3, lag_in=Counter([5, 6]), lag_out=Counter([7, 8]), took=Counter({2: 2}))
    add_settled(done, [(gathered("a:0:1", "a:0:2", "a:0:3"), 3)], gathered("a:0:1", "a:0:2"))
    clock.now += 7
    reporter.record_settled_up_to(int(clock.now * 1000) - 4000)
    reporter.report(done)
    reporter.report(BatchReport("p"))
    clock.now += HEARTBEAT_S - 1
    reporter.report_heartbeat()
    assert len(shelf.records) == 2
    clock.now += 1
    reporter.report_heartbeat()
    reporter.close()
    _, reported, beat, end = shelf.reports()
    assert sets(reported) == {("passed", "a", 0, None): [1, 2], ("filtered", "a", 0, None): [3]}
    assert {(lag.kind, lag.count, lag.total_ms) for lag in reported.lags} == {
        ("lag_in", 2, 11),
        ("lag_out", 2, 15),
        ("process_time", 2, 4),
    }
    assert (reported.behind_ms, beat.behind_ms) == (4000, 14_000)
    assert not beat.sets
    assert not beat.lags
    assert [report.closed for report in (reported, beat, end)] == [False, False, True]


def test_lags_of_real_time_mode_are_in_their_minutes() -> None:
    """If this fails, the table of lags has up to 15 s of each minute in the next one, or counts them twice, or not at all."""
    shelf, clock = Shelf(), Clock(1_000_000.0)
    reporter = PipeReporter("p", shelf.append, clock)
    done = BatchReport("p", lag_in=Counter([5, 5, 6]), lag_out=Counter([7, 8]), took=Counter({2: 2}), minute=1000)
    done.earlier = BatchLags(lag_in=Counter([5]), lag_out=Counter([8]), took=Counter({2: 1}))
    for _ in range(2):  # the second time after a failure of the caller
        reporter.report(done)
        reporter.report_heartbeat()
    reporter.close()
    lags = [lag for report in shelf.reports() for lag in report.lags]
    assert sorted((lag.kind, lag.minute, lag.count, lag.total_ms) for lag in lags) == [
        ("lag_in", 999, 1, 5),
        ("lag_in", 1000, 2, 11),
        ("lag_out", 999, 1, 8),
        ("lag_out", 1000, 1, 7),
        ("process_time", 999, 1, 2),
        ("process_time", 1000, 1, 2),
    ]


def test_reporter_that_cannot_write() -> None:
    """If this fails, a batch counts as done though it was not reported, or lags are reported twice or never."""
    shelf, clock = Shelf(), Clock(1_000_000.0)
    reporter = PipeReporter("p", shelf.append, clock)
    done = BatchReport("p", lag_out=Counter([7]))
    add_settled(done, [(gathered("a:0:1"), 1)], gathered("a:0:1"))
    shelf.away = True
    with pytest.raises(Unavailable):
        reporter.report(done)
    reporter.report_heartbeat()
    shelf.away = False
    reporter.report(done)
    (reported,) = shelf.reports()
    assert sets(reported) == {("passed", "a", 0, None): [1]}
    assert sum(lag.count for lag in reported.lags if lag.kind == "lag_out") == 1
    clock.now += 60
    shelf.away = True
    reporter.close()
