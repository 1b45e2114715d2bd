"""The loss table of a topic of others: accepted by whoever reads first, once, whatever else reads it."""

from pathlib import Path

import pytest
from pyroaring import BitMap

from services.core import metrics
from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Batch, Record
from services.core.event import TOPIC_NUMBERS, Origin, offset_of, topic_incarnation
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.stream import Stream
from services.observer.explain import explain
from services.observer.ledger import origin_sets
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.origin_sets import OriginSets
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.table import Table
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS, accept, hear, tell

TOPIC_ID = "3d9c2b1e-0f4a-4c55-8f7e-3a5b6c7d8e9f"
RUN = topic_incarnation(TOPIC_ID, 0)
FLOW = Flow(
    {
        "one": PipeFlow(("invoices",), transforms=False, destinations={"a": None, "b": None}),
        "two": PipeFlow(("invoices",), transforms=False, destinations={"c": None}),
    },
    others=frozenset({"invoices"}),
)
FINAL = START_MS + 6 * MINUTE_MS


def reads(table: Table, numbers: range, minute: int, instance: str) -> None:
    at_ms = minute * MINUTE_MS + 30_000
    hear(table, accept(numbers, stream="invoices", minute=minute, incarnation=RUN, instance=instance, at_ms=at_ms))


def settles(table: Table, pipe: str, destination: str, numbers: range, at_ms: int = FINAL) -> None:
    hear(table, tell("expel", pipe, "delivered", numbers, destination=destination, incarnation=RUN, at_ms=at_ms))


def test_an_event_counts_in_the_minute_of_the_first_report() -> None:
    """Broken: two readers in two minutes double the events, or make them missing once the first minute is folded."""
    table = Table(FLOW)
    reads(table, range(10), MINUTE, "a")
    reads(table, range(5, 15), MINUTE + 1, "b")
    reads(table, range(15), MINUTE + 2, "c")
    assert [table.row("one", minute, FINAL).accepted for minute in table.minutes("one")] == [10, 5]
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, range(15))
    late = FINAL + 2 * 3_600_000
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, range(0), late)
    assert not any(verdict.row.missing for verdict in table.tick(late).verdicts)
    table.tick(late + 10_000)  # the minutes are folded
    assert not table.origin_sets.unfolded
    reads(table, range(15), MINUTE + 130, "c")  # a group was set back: all of it is counted already
    assert [table.row("two", minute, late).accepted for minute in table.minutes("two")] == [10, 5]
    assert table.row("two", MINUTE, late).missing == 0


def test_what_one_destination_did_not_get_is_missing() -> None:
    """Broken: a loss behind the first reader is not seen."""
    table = Table(FLOW)
    reads(table, range(10), MINUTE, "a")
    settles(table, "one", "a", range(10))
    settles(table, "one", "b", range(9))
    row = table.row("one", MINUTE, FINAL)
    assert {step.destination: step.missing for step in row.steps} == {"a": 0, "b": 1}
    assert row.lost == 1


def test_there_is_no_ingest_to_wait_for() -> None:
    """Broken: a minute stays open for the ingest of a stream that has none, or somebody searches its topic for reports."""
    table = Table(FLOW)
    assert Step("ingest", "invoices") not in table.flow.steps("one")
    settles(table, "one", "a", range(3), START_MS)
    assert table.unknown_incarnations(FINAL) == []
    reads(table, range(3), MINUTE, "a")
    assert table.silent_ingests(FINAL) == []
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, range(3))
    assert table.row("one", MINUTE, FINAL).why_open is None


async def test_a_missing_event_is_named_by_its_place(tmp_path: Path) -> None:
    """Broken: `penstock loss explain` reads a whole topic of others for one event, and gives up before it has found it."""
    table = Table(FLOW)
    reads(table, range(2_500), MINUTE, "a")
    settles(table, "one", "a", range(2_500))
    settles(table, "one", "b", range(1, 2_499))
    settles(table, "two", "c", range(2_500))
    offsets = range(2_500)
    batch = Batch("billing", 0, offsets, [Record(None, b"{}", START_MS)] * len(offsets))
    records = Translation(Stream(topic="billing"))(batch, TOPIC_ID).records
    async with LogBroker.open(str(tmp_path / "log")) as broker:
        await broker.admin.create_topic(TopicSpec("invoices", 1))
        await broker.appender.append("invoices", 0, records, timeout=600)
        found = await explain(table, broker.reader, "one", MINUTE)
    assert [(one.event_id, one.offset) for one in found.named] == [("billing-0-0", "0"), ("billing-0-2499", "2499")]
    assert found.records_read == 2
    assert offset_of(Origin(topic_incarnation(TOPIC_ID, TOPIC_NUMBERS + 7), 0, 7)) == TOPIC_NUMBERS + 7


def test_the_readers_of_a_day_leave_nothing_behind() -> None:
    """Broken: each start of a lane makes the observer, and its snapshots, larger for ever."""
    table = Table(FLOW)
    for number in range(5):
        reads(table, range(number, number + 1), MINUTE, f"start-{number}")
    assert not table.offsets.runs


def fold_all(table: Table, numbers: range) -> int:
    """All destinations get these, and the minutes are folded. Returns the time."""
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, numbers)
    late = FINAL + 2 * 3_600_000
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, range(0), late)
    table.tick(late)
    table.tick(late + 10_000)
    assert not table.origin_sets.unfolded
    return late


def test_a_loss_before_the_place_where_the_first_reader_began_is_seen() -> None:
    """Broken: a destination that begins before the others, and loses events there, has an empty loss table."""
    table = Table(FLOW)
    reads(table, range(1_000, 1_010), MINUTE, "a")
    late = fold_all(table, range(1_000, 1_010))
    reads(table, range(1_010), MINUTE + 130, "c")
    for pipe, destination in (("one", "a"), ("one", "b")):
        hear(
            table,
            tell("expel", pipe, "skipped", range(1_000), destination=destination, incarnation=RUN, at_ms=late + 60_000),
        )
    settles(table, "two", "c", range(3, 1_010), late + 60_000)
    row = table.row("two", MINUTE + 130, late + 600_000)
    assert (row.accepted, row.missing) == (1_000, 3), "the ten events behind it were counted before"
    assert table.row("one", MINUTE + 130, late + 600_000).missing == 0
    later = late + 7 * 3_600_000
    for pipe, destination in (("one", "a"), ("one", "b"), ("two", "c")):
        settles(table, pipe, destination, range(0), later)
    table.tick(later)
    table.tick(later + 10_000)
    assert not table.origin_sets.unfolded
    assert table.row("two", MINUTE + 130, later).missing == 3
    assert table.origin_sets.floors[SequenceKey(RUN, 0)] == 1_010
    assert not table.origin_sets.gone


def test_a_topic_that_is_full_of_gaps_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a compacted topic makes the observer larger for ever, or what it gives up is not counted."""
    monkeypatch.setattr(origin_sets, "_MOST_GONE_BYTES", 500)
    sets = OriginSets()
    run = SequenceKey(RUN, 0)
    before = metrics.LEDGER_OUTSIDE.labels("observer", "invoices", "gaps_closed")._value.get()
    for minute in range(20):
        numbers = range(minute * 100, minute * 100 + 100, 3)
        sets.apply(accept(numbers, stream="invoices", minute=minute, incarnation=RUN, instance="a", at_ms=1))
        sets.fold(minute, Origins([(run, BitMap(numbers))]))
    held = sets.gone.numbers(run)
    held.run_optimize()
    assert len(held.serialize()) <= 500
    assert 0 < sets.floors[run] <= 2_000
    closed = metrics.LEDGER_OUTSIDE.labels("observer", "invoices", "gaps_closed")._value.get() - before
    assert closed == len(set(range(sets.floors[run])) - {n + m * 100 for m in range(20) for n in range(0, 100, 3)})
