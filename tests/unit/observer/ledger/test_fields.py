"""What payloads are like, and when that has changed: a sample at ingest and expel, compared with the hour before."""

import random
from collections.abc import Callable

import msgspec
import orjson
import pytest

from services.core.ledger.fields import KEPT_HASHES, PER_SECOND, FieldSample, FieldSet, FieldStats
from services.core.ledger.report import Report, decode_report
from services.observer.ledger.flow import Step
from services.observer.payload_fields import FieldTable
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS

INGEST = Step("ingest", "flights")
Make = Callable[[int], dict[str, object]]


class Clock:
    now = float(MINUTE * 60)

    def __call__(self) -> float:
        return self.now


def sampled(make: Make, minute: int, events: int = 100) -> FieldSet:
    """So many of a minute's events; `make` by number."""
    clock = Clock()
    sample = FieldSample(clock)
    for number in range(events):
        clock.now = minute * 60 + number // PER_SECOND
        sample.offer(orjson.dumps(make(minute * events + number)))
    found = sample.drain(last=True)
    assert found is not None
    return found


def book_of(make: Make, change: Make | None = None) -> FieldTable:
    """An hour of events, the last five minutes of which are as `change` has them."""
    book = FieldTable()
    for minute in range(MINUTE, MINUTE + 60):
        late = change is not None and minute >= MINUTE + 55
        told = sampled(change if late and change is not None else make, minute)
        report = Report(node="ingest", instance="i", pipe="flights", at_ms=(minute + 1) * MINUTE_MS, fields=(told,))
        for _ in range(2):
            book.record(report)
    book.refresh()
    return book


def usual(number: int) -> dict[str, object]:
    chance = random.Random(number)
    delay = None if chance.random() < 0.02 else chance.gauss(10, 5)
    return {
        "id": f"e{number}",
        "n": number,
        "delay": delay,
        "carrier": chance.choice("ABCDEFGH"),
        "more": {"x": number},
    }


def test_figures_of_each_field() -> None:
    """Broken: the figures that a person compares are those of other events, or of some twice."""
    found = book_of(usual).figures(INGEST)
    assert {name: one.events for name, one in found.items()} == dict.fromkeys(found, 6000)
    assert found["delay"].nulls == pytest.approx(0.02, abs=0.01)
    assert found["delay"].mean == pytest.approx(10, abs=0.5)
    assert found["carrier"].distinct == 8
    assert found["id"].distinct == pytest.approx(6000, rel=0.5)
    assert found["id"].mean is None


def test_what_is_as_it_was_is_no_drift() -> None:
    """Broken: people are woken because a counter counts."""
    assert not book_of(usual).drifts(INGEST)


@pytest.mark.parametrize(
    ("change", "field", "what"),
    [
        ({"delay": None}, "delay", "nulls"),
        ({"delay": 60.0}, "delay", "mean"),
        ({"carrier": ...}, "carrier", "present"),
        ({"id": "same"}, "id", "distinct"),
        ({"new": 1}, "new", "present"),
    ],
)
def test_what_has_changed_is_named(change: dict[str, object], field: str, what: str) -> None:
    """Broken: a producer's mistake that fills a field with nothing is found by the customer."""

    def changed(number: int) -> dict[str, object]:
        whole = {**usual(number), **change}
        return {name: value for name, value in whole.items() if value is not ...}

    found = [(drift.field, drift.what) for drift in book_of(usual, changed).drifts(INGEST)]
    assert (field, what) in found
    assert {name for name, _ in found} == {field}


def test_a_change_is_over_when_nothing_comes_any_more() -> None:
    """Broken: a pipe is degraded for ever because its last events were odd."""
    book = book_of(usual, lambda number: {**usual(number), "delay": None})
    assert book.drifts(INGEST)
    book.record(Report(node="expel", instance="e", pipe="late", destination="ops", at_ms=(MINUTE + 66) * MINUTE_MS))
    book.refresh()
    assert not book.drifts(INGEST)
    assert book.figures(INGEST)
    book.record(Report(node="expel", instance="e", pipe="late", destination="ops", at_ms=(MINUTE + 130) * MINUTE_MS))
    book.refresh()
    assert not book.figures(INGEST)


def test_instances_are_one_step_and_take_no_more_memory() -> None:
    """Broken: the observer's memory grows with instances, or figures are those of one instance only."""
    book = FieldTable()
    for instance in range(20):
        for name in ("a", "b"):
            told = sampled(lambda number, name=name: {f"{name}{number % 30}": number}, MINUTE, 30)  # type: ignore[misc]
            report = Report(node="ingest", instance=f"i{instance}", pipe="flights", at_ms=START_MS, fields=(told,))
            book.record(report)
            book.record(report)
    book.refresh()
    found = book.figures(INGEST)
    assert {one.events for one in found.values()} == {600}, "an instance tells a minute once"
    assert len(found) == 30
    assert found["a3"].present == pytest.approx(1 / 30)


def test_a_look_at_many_steps_is_done_bit_by_bit() -> None:
    """Broken: each minute the observer answers nobody for seconds, because it looks at all fields of all pipes at once."""
    book = FieldTable()
    for number in range(5):
        report = Report(
            node="ingest", instance="i", pipe=f"s{number}", at_ms=START_MS, fields=(sampled(usual, MINUTE),)
        )
        book.record(report)
    known = []
    for _ in range(5):
        book.refresh(0)
        known.append(sum(bool(book.figures(Step("ingest", f"s{number}"))) for number in range(5)))
    assert known == [1, 2, 3, 4, 5]
    book.record(msgspec.structs.replace(report, instance="j"))
    assert list(book._changed) == [Step("ingest", "s4")]


def test_a_sample_is_bounded_and_passes_over_what_it_cannot_read() -> None:
    """Broken: the ledger's cost grows with the rate, with the size of payloads or with their fields."""
    clock = Clock()
    sample = FieldSample(clock)
    for value in (None, b"", b"[1]", b"nonsense", b"1", b'{"a": "' + b"x" * 20_000 + b'"}'):
        sample.offer(value)
    clock.now += 1
    for _ in range(PER_SECOND * 2):
        sample.offer(orjson.dumps({f"f{n}": n for n in range(100)}))
    assert sample.drain() is None, "the minute is not over"
    clock.now += 60
    found = sample.drain()
    assert found is not None
    assert (found.events, len(found.fields)) == (PER_SECOND, 40)
    assert sample.drain(last=True) is None


def test_different_values_are_estimated() -> None:
    """Broken: a field of a million values looks like one of sixty-four."""
    for count in (10, KEPT_HASHES, 1000, 50_000):
        stats, other = FieldStats(), FieldStats()
        for number in range(count):
            (stats if number % 2 else other).add(f"v{number}")
        stats.merge(other)
        assert stats.distinct() == pytest.approx(count, rel=0.5)


def test_values_that_cannot_be_written_again_are_passed_over() -> None:
    """Broken: one deeply nested event stops its destination for ever, or ingest answers 500 for what it stored."""
    sample = FieldSample(Clock())
    sample.offer(b'{"deep":' + b"[" * 300 + b"]" * 300 + b',"large":1e308,"small":1}')
    found = sample.drain(last=True)
    assert found is not None
    assert (found.fields["deep"].seen, found.fields["small"].seen) == (0, 1)
    report = Report(node="ingest", instance="one", pipe="flights", at_ms=1, fields=(found,))
    assert decode_report(report.encode()) == report
