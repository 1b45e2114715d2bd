"""What ingest did not say, and what is missing, read from the streams of a real embedded log."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN
from services.core.ledger.report import Report, due_span, released_span
from services.core.pipe_file.topic_names import RETRY_IN, delay_topic, retry_topic
from services.core.undelivered.retry_state import RetryState, wrap
from services.observer import recovery
from services.observer.explain import explain
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.table import Ages, Table
from services.observer.recovery import recover
from tests.unit.observer.ledger.stories import (
    MINUTE,
    MINUTE_MS,
    PLAIN,
    START_MS,
    accept,
    beat,
    hear,
    reach,
    tell,
    with_due,
)

LATER_MS = START_MS + MINUTE_MS + Ages().final


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """With the stream and the transform's output."""
    async with LogBroker.open(str(tmp_path / "log")) as opened:
        for topic in ("flights", "late.out"):
            await opened.admin.create_topic(TopicSpec(topic, 2))
        yield opened


async def store(
    broker: Broker,
    topic: str,
    numbers: Sequence[int],
    *,
    partition: int = 0,
    at: int = START_MS,
    incarnation: str = "a",
) -> None:
    """Events as ingest stores them: partition 0 of this incarnation, wherever they lie."""
    records = [
        Record(
            None,
            b"{}",
            at,
            (
                (ID, b"id-%d" % number),
                (ARRIVAL, b"%d" % at),
                (ORIGIN, f"{incarnation}:0:{number}".encode()),
            ),
        )
        for number in numbers
    ]
    await broker.appender.append(topic, partition, records, timeout=600)


async def recovered(table: Table, broker: Broker, now: int = LATER_MS) -> list[Report]:
    """Let it speak, and the table hear."""
    reports = [report async for report in recover(table, broker.reader, now)]
    for report in reports:
        hear(table, report)
    return reports


async def test_what_a_killed_ingest_did_not_tell_is_read_from_the_stream(broker: Broker) -> None:
    """Broken: events that were acknowledged within a second of a kill -9 are not counted as accepted."""
    await store(broker, "flights", range(10))
    await store(broker, "flights", range(10, 14), at=START_MS + MINUTE_MS)
    table = Table(PLAIN)
    hear(table, accept(range(6)))
    hear(table, reach("flights", {0: 5}))
    assert table.liveness.fallen_silent(Step("ingest", "flights"), LATER_MS)
    reports = await recovered(table, broker)
    assert sum(len(report.sets) for report in reports) == 2, "what was told is not read again"
    assert table.row("late", MINUTE, LATER_MS).accepted == 10
    assert table.row("late", MINUTE + 1, LATER_MS).accepted == 4
    assert await recovered(table, broker) == [], "once is enough"
    assert table.offsets.before("flights", 0, MINUTE + 1) == 6, (
        "what was read later did not exist at that time for sure"
    )
    alive = Report(node="ingest", instance="one", pipe="flights", at_ms=LATER_MS)
    hear(table, alive)
    assert table.liveness.alive(Step("ingest", "flights"), LATER_MS), "one that was only slow may speak again"


async def test_an_incarnation_that_never_reported_is_found(broker: Broker) -> None:
    """Broken: ingest killed in its first second leaves events that are delivered and were never accepted."""
    await store(broker, "flights", range(5), incarnation="b")
    table = Table(PLAIN)
    hear(table, tell("transform", "late", "passed", range(3), incarnation="b"))
    assert await recovered(table, broker, START_MS + 1000) == [], "its report may be on the way"
    await recovered(table, broker)
    row = table.row("late", MINUTE, LATER_MS)
    assert (row.accepted, row.missing) == (5, 5)
    assert await recovered(table, broker) == []


async def test_a_stranger_is_found_although_it_was_named_long_after(broker: Broker) -> None:
    """Broken: expel was down when ingest died; what it delivers later was never accepted."""
    hour = 3_600_000
    await store(broker, "flights", range(5), incarnation="b")
    table = Table(PLAIN)
    for at_ms, offset in ((START_MS, 4), (START_MS + hour, 9), (START_MS + 2 * hour, 14)):
        hear(table, reach("flights", {0: offset, 1: offset}, at_ms=at_ms))
    hear(table, Report(node="ingest", instance="one", pipe="flights", at_ms=START_MS + 2 * hour, closed=True))
    hear(table, tell("transform", "late", "passed", range(3), incarnation="b", at_ms=START_MS + 2 * hour))
    await recovered(table, broker, START_MS + 2 * hour + MINUTE_MS)
    assert table.row("late", MINUTE, LATER_MS).accepted == 5


async def test_the_search_for_a_stranger_has_an_end(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one odd origin makes the observer read a day of events, again and again; or it gives up and nobody knows."""
    monkeypatch.setattr(recovery, "UNKNOWN_RECORDS", 5)
    await store(broker, "flights", range(10), incarnation="b")
    table = Table(PLAIN)
    hear(table, tell("transform", "late", "passed", range(3), incarnation="b"))
    before = REGISTRY.get_sample_value("penstock_ledger_strangers_given_up_total") or 0.0
    assert [report.closed for report in await recovered(table, broker)] == [True]
    assert (REGISTRY.get_sample_value("penstock_ledger_strangers_given_up_total") or 0.0) - before == 1
    assert await recovered(table, broker) == []
    assert table.row("late", MINUTE, LATER_MS).accepted == 0


async def test_a_letter_redriven_days_later_brings_no_old_minute_back(broker: Broker) -> None:
    """Broken: one redriven event makes a minute of last week final with everything else of it missing, and wakes somebody."""
    await store(broker, "flights", range(1000), incarnation="b")
    table, now = Table(PLAIN), START_MS + 3 * Ages().drop
    hear(table, tell("expel", "late", "delivered", [7], destination="ops", incarnation="b", at_ms=now))
    await recovered(table, broker, now + MINUTE_MS)
    assert table.minutes("late") == []


async def test_reports_about_a_pipe_that_is_gone_change_nothing(broker: Broker) -> None:
    """Broken: whoever takes a pipe or a destination out of the pipe file finds an observer that dies at every start."""
    table = Table(PLAIN)
    hear(table, accept(range(5), stream="gone"))
    hear(table, tell("expel", "gone", "delivered", range(5), destination="ops", incarnation="b"))
    hear(table, tell("expel", "late", "delivered", range(5), destination="gone", incarnation="b"))
    assert await recovered(table, broker) == []
    assert not table.origin_sets.unfolded
    assert {step.pipe for step, _ in table.origin_sets.reported_sets} == {"late"}, "a destination may be put back"
    old = Step("expel", "gone", "ops")
    table.origin_sets.apply(tell("expel", "gone", "delivered", range(5), destination="ops", incarnation="b"))
    assert table.origin_sets.unknown_incarnations()["b"] >= {old}, (
        "as a snapshot of a time when there was one would bring it"
    )
    assert await recovered(table, broker) == []


async def test_missing_events_are_named_with_where_they_were_last_seen(broker: Broker) -> None:
    """Broken: somebody who sees a loss cannot look at what was lost."""
    await store(broker, "flights", range(20))
    passed = [number for number in range(20) if number not in (4, 5)]
    await store(broker, "late.out", passed, partition=1)
    table = Table(PLAIN)
    hear(table, accept(range(20)))
    hear(table, reach("flights", {0: 19}))
    hear(table, tell("transform", "late", "passed", passed))
    hear(table, tell("expel", "late", "delivered", set(passed) - {17}, destination="ops"))
    found = await explain(table, broker.reader, "late", MINUTE)
    assert (found.missing, found.complete) == (3, True)
    lines = [
        (one.origin, one.event_id, one.missing_at, one.destination, one.seen_by, one.topic, one.partition, one.offset)
        for one in found.named
    ]
    assert lines == [
        ("a:0:4", "id-4", "transform", None, "ingest", "flights", 0, "4"),
        ("a:0:5", "id-5", "transform", None, "ingest", "flights", 0, "5"),
        ("a:0:17", "id-17", "expel", "ops", "transform", "late.out", 1, "15"),
    ]


async def test_what_is_not_found_is_named_all_the_same(broker: Broker) -> None:
    """Broken: an event that the broker lost is not named because it is not there."""
    table = Table(PLAIN)
    hear(table, accept(range(2)))
    found = await explain(table, broker.reader, "late", MINUTE)
    assert [(one.origin, one.topic, one.event_id) for one in found.named] == [
        ("a:0:0", None, None),
        ("a:0:1", None, None),
    ]


async def test_what_was_lost_while_it_waited_is_named_where_it_waited_last(broker: Broker) -> None:
    """Broken: of an event that the retrier lost, somebody looks in the stream, where it never was missing; or is shown what
    another destination's copy, or an earlier round of it, came to."""
    hour = 3_600_000
    flow = Flow({"late": PipeFlow(("flights",), False, {"ops": None, "more": None}, frozenset({"ops", "more"}))})
    table, due = Table(flow), START_MS + 2 * hour
    await store(broker, "flights", range(5))
    hear(table, accept(range(5)))
    hear(table, reach("flights", {0: 4}))
    hear(table, tell("expel", "late", "delivered", range(5), destination="more"))
    told = tell("expel", "late", "retrying", range(4), destination="ops")
    hear(table, tell("expel", "late", "delivered", [4], destination="ops"))
    hear(table, with_due(told, due_span(due, 2 * hour)))
    hear(table, with_due(tell("retrier", "late", "released", [3], destination="ops"), released_span(due)))
    for topic in (RETRY_IN, delay_topic(4096), delay_topic(16), retry_topic("late")):
        await broker.admin.create_topic(TopicSpec(topic, 1))

    async def wait(topic: str, numbers: Sequence[int], at: int, due: int = due, destination: str = "ops") -> None:
        state = RetryState("late", destination, 1, 1, at, due, "http_503", "", "flights:0:1", START_MS)
        batch = await broker.reader.read("flights", 0, 0, max_records=5)
        assert batch is not None
        records = [wrap(batch.records[number], state, at) for number in numbers]
        await broker.appender.append(topic, 0, records, timeout=600)

    await wait(RETRY_IN, [0, 1], START_MS - hour // 2, START_MS)
    await wait(RETRY_IN, [3, 2, 1, 0], START_MS)
    await wait(delay_topic(4096), [3, 2, 1], START_MS + 1)
    await wait(delay_topic(4096), [0], START_MS + 1, destination="more")
    await wait(delay_topic(16), [1], START_MS - hour, START_MS)
    await wait(delay_topic(16), [3, 2], due - 16_000)
    await wait(retry_topic("late"), [3], due)
    for now in (due + hour, due + 2 * hour, due + 3 * hour):
        hear(table, beat("retrier", "", at_ms=now))
        hear(table, msgspec.structs.replace(beat("expel", "late", "ops", at_ms=now), returned_ms=0))
        table.tick(now)
    found = await explain(table, broker.reader, "late", MINUTE)
    lines = {one.origin: (one.missing_at, one.seen_by, one.topic, one.offset, one.event_id) for one in found.named}
    assert (found.missing, found.complete) == (4, True)
    assert lines == {
        "a:0:0": ("retrier", "expel", RETRY_IN, "5", "id-0"),
        "a:0:1": ("retrier", "expel", delay_topic(4096), "2", "id-1"),
        "a:0:2": ("retrier", "expel", delay_topic(16), "2", "id-2"),
        "a:0:3": ("expel", "retrier", retry_topic("late"), "0", "id-3"),
    }
    await broker.admin.delete_topic(RETRY_IN)
    found = await explain(table, broker.reader, "late", MINUTE)
    assert [one.topic for one in found.named if one.origin == "a:0:0"] == ["flights"], (
        "what is gone there is named as it came"
    )
