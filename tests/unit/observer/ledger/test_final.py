"""When a minute is final, what happens to it afterwards, and what that costs."""

from typing import Any

from services.core.ledger.report import Report
from services.observer.ledger.flow import Flow, PipeFlow
from services.observer.ledger.table import Ages, Table
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, tell

END_MS = START_MS + MINUTE_MS
FINAL_MS = END_MS + Ages().final


def everybody(table: Table, at_ms: int, *, behind_ms: int | None = 0) -> None:
    """All nodes of PLAIN are alive; expel is behind by so much."""
    table.apply(beat("ingest", "flights", at_ms=at_ms))
    table.apply(beat("transform", "late", at_ms=at_ms))
    table.apply(beat("expel", "late", "ops", at_ms=at_ms, behind_ms=behind_ms))


def lossy(dropped: int = 3) -> Table:
    """Ten events of MINUTE, all passed, some of them not delivered."""
    table = Table(PLAIN)
    table.apply(accept(range(10)))
    table.apply(tell("transform", "late", "passed", range(10)))
    table.apply(tell("expel", "late", "delivered", range(10 - dropped), destination="ops"))
    return table


def test_a_minute_is_final_within_three_minutes_of_its_end() -> None:
    """Broken: the loss of a minute is shown too early, as late events may come, or too late to act on."""
    table = lossy()
    everybody(table, FINAL_MS - 1)
    assert table.tick(FINAL_MS - 1) == []
    (row,) = table.tick(FINAL_MS)
    assert (row.accepted, row.missing, row.why_open, row.loss) == (10, 3, None, 0.3)
    assert table.tick(FINAL_MS + 1) == [], "it is told once"
    assert FINAL_MS <= END_MS + 180_000


def test_a_node_that_is_behind_is_late_not_lossy() -> None:
    """Broken: every backlog is reported as loss."""
    table = lossy()
    everybody(table, FINAL_MS, behind_ms=200_000)
    assert table.tick(FINAL_MS) == []
    assert table.row("late", MINUTE, FINAL_MS).why_open == "expel to ops is behind by 200 s"
    everybody(table, FINAL_MS + 1000, behind_ms=None)
    assert table.row("late", MINUTE, FINAL_MS + 1000).why_open == "expel to ops does not know how far behind it is"
    everybody(table, FINAL_MS + 2000, behind_ms=1000)
    assert [row.missing for row in table.tick(FINAL_MS + 2000)] == [3]


def test_a_minute_of_which_nothing_is_missing_needs_nobodys_word() -> None:
    """Broken: minutes stay open because a node is behind with younger events, or has nothing more to do and ended."""
    table = lossy(0)
    everybody(table, FINAL_MS, behind_ms=10_000_000)
    assert [row.missing for row in table.tick(FINAL_MS)] == [0]


def test_a_silent_node_keeps_minutes_open_until_somebody_speaks_for_it() -> None:
    """Broken: a crash of expel is reported as loss of what it had not delivered."""
    table = lossy()
    everybody(table, END_MS)
    table.apply(beat("ingest", "flights", at_ms=FINAL_MS))
    assert table.tick(FINAL_MS) == []
    assert table.row("late", MINUTE, FINAL_MS).why_open == "expel to ops is silent"
    fresh = Report(node="expel", instance="two", pipe="late", destination="ops", at_ms=FINAL_MS, behind_ms=0)
    table.apply(fresh)
    assert len(table.tick(FINAL_MS)) == 1


def test_a_partition_without_an_owner_is_waited_for() -> None:
    """Broken: one of two instances dies, and what it held is lost to the table before the other took it over."""
    table = lossy()
    everybody(table, FINAL_MS)
    died = Report(
        node="expel", instance="two", pipe="late", destination="ops", at_ms=FINAL_MS - 40_000, behind_ms=300_000
    )
    table.apply(died)
    assert table.tick(FINAL_MS) == []
    assert table.row("late", MINUTE, FINAL_MS).why_open == "an instance of expel to ops fell silent"
    everybody(table, FINAL_MS + 80_001)
    assert len(table.tick(FINAL_MS + 80_001)) == 1


def test_ingest_that_fell_silent_is_read_up_on_first() -> None:
    """Broken: what ingest did not tell before it was killed is missing from the accepted events."""
    table = lossy()
    everybody(table, END_MS)
    everybody(table, FINAL_MS)
    died = Report(node="ingest", instance="two", pipe="flights", at_ms=END_MS)
    table.apply(died)
    assert table.tick(FINAL_MS) == []
    why = table.row("late", MINUTE, FINAL_MS).why_open
    assert why == "ingest of flights fell silent; what it did not tell is read from the stream"
    table.apply(Report(node="ingest", instance="two", pipe="flights", at_ms=END_MS, closed=True))
    assert len(table.tick(FINAL_MS)) == 1


def test_what_settles_late_corrects_the_row() -> None:
    """Broken: a minute that was final stays lossy although everything arrived."""
    table = lossy()
    everybody(table, FINAL_MS)
    table.tick(FINAL_MS)
    table.apply(tell("expel", "late", "delivered", [7, 8], destination="ops"))
    table.tick(FINAL_MS + 1000)
    row = table.row("late", MINUTE, FINAL_MS + 1000)
    assert (row.missing, row.late, row.why_open) == (1, 2, None)


def test_after_an_hour_sets_become_counts_and_what_is_open_stays() -> None:
    """Broken: the observer's memory grows, or what comes back after hours of retries is not known any more."""
    table = lossy(1)
    table.apply(tell("expel", "late", "retrying", [9], destination="ops"))
    everybody(table, FINAL_MS)
    table.tick(FINAL_MS)
    before = table.row("late", MINUTE, FINAL_MS)
    hour = END_MS + Ages().fold
    table.tick(hour)
    assert [len(origins) for origins in table.book.accepted(MINUTE).values()] == [1]
    assert table.row("late", MINUTE, hour) == before
    table.apply(tell("expel", "late", "delivered", range(10), destination="ops"))
    table.tick(hour + 1)
    row = table.row("late", MINUTE, hour + 1)
    assert (row.waiting, row.steps[1].outcomes["delivered"]) == (0, 10)


def test_what_waits_for_days_is_known_until_it_is_delivered() -> None:
    """Broken: a parked event is forgotten after a day."""
    table = lossy(2)
    table.apply(tell("expel", "late", "parked", [9], destination="ops"))
    everybody(table, FINAL_MS)
    table.tick(FINAL_MS)
    days = END_MS + 3 * Ages().drop
    for now in range(END_MS + Ages().fold, days, Ages().drop // 4):
        table.tick(now)
    row = table.row("late", MINUTE, days)
    assert (row.accepted, row.waiting, row.missing) == (10, 1, 1)
    table.apply(tell("expel", "late", "delivered", [9], destination="ops", at_ms=days))
    table.tick(days)
    assert table.row("late", MINUTE, days).waiting == 0
    table.tick(days + 1)
    assert table.minutes("late") == []


def test_a_feeding_pipe_that_is_not_final_keeps_the_fed_one_open() -> None:
    """Broken: a pipe behind another is final before its events came."""
    flow = Flow(
        {
            "late": PipeFlow(("flights",), transforms=False, destinations={"on": "others"}),
            "onward": PipeFlow(("others",), transforms=False, destinations={"end": None}),
        }
    )
    table = Table(flow)
    table.apply(accept(range(10)))
    table.apply(tell("expel", "late", "delivered", range(8), destination="on"))
    table.apply(tell("expel", "onward", "delivered", range(8), destination="end"))
    table.apply(beat("ingest", "flights", at_ms=FINAL_MS))
    table.apply(beat("expel", "late", "on", at_ms=FINAL_MS, behind_ms=500_000))
    assert table.tick(FINAL_MS) == []
    assert table.row("onward", MINUTE, FINAL_MS).why_open == "late, which feeds others, is not final"


def held(table: Table) -> int:
    """Packed bytes and rows that the table holds, roughly."""
    book = table.book
    sets = [origins for places in book.held.values() for origins in places.values()]
    sets += [*book.all_told.values(), book.kept]
    bitmaps = sum(len(numbers.serialize()) for origins in sets for _, numbers in origins.runs())
    return bitmaps + 100 * (len(book.floors) + len(book.heard) + len(table.base) + len(table.final))


def run_for(table: Table, minutes: int, per_minute: int) -> None:
    """A healthy pipe for so long; ingest restarts every half hour."""
    for minute in range(minutes):
        now = (MINUTE + minute + 1) * MINUTE_MS
        more: dict[str, Any] = {"incarnation": f"i{minute // 30}", "at_ms": now}
        numbers = range(minute % 30 * per_minute, (minute % 30 + 1) * per_minute)
        table.apply(accept(numbers, minute=MINUTE + minute, **more))
        table.apply(tell("transform", "late", "passed", numbers, **more))
        table.apply(tell("expel", "late", "delivered", numbers, destination="ops", **more))
        everybody(table, now)
        table.tick(now)


def test_memory_does_not_grow_with_events_nor_with_days() -> None:
    """Broken: the observer needs more memory the more events there are, or the longer it runs."""
    ages = Ages(fold=10 * MINUTE_MS, drop=60 * MINUTE_MS)
    few, many, longer = Table(PLAIN, ages), Table(PLAIN, ages), Table(PLAIN, ages)
    run_for(few, 90, 10)
    run_for(many, 90, 10_000)
    run_for(longer, 300, 10)
    assert held(many) < 2 * held(few)
    assert held(longer) < 2 * held(few)
    assert len(longer.minutes("late")) <= 60 + 4
