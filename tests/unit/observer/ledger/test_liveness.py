"""Who speaks and what is done, whatever the reporters' clocks say."""

import msgspec
import pytest

from services.core.ledger.report import Report
from services.observer.ledger.flow import RETRIER, Step
from services.observer.ledger.liveness import COMPARED, SILENT_AFTER_MS, STORED_WITHIN_MS, TAKEOVER_MS, Liveness
from services.observer.ledger.table import Ages, Table
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, hear, tell

HOUR = 3_600_000
END_MS = START_MS + MINUTE_MS
FINAL_MS = END_MS + Ages().final
OPS = Step("expel", "late", "ops")


def expel(at_ms: int, *, behind_ms: int = 0, instance: str = "one", closed: bool = False) -> Report:
    said = beat("expel", "late", "ops", at_ms=at_ms, behind_ms=behind_ms)
    return msgspec.structs.replace(said, instance=instance, closed=closed)


def lossy() -> Table:
    """Ten events of MINUTE, one not delivered; ingest and transform speak."""
    table = Table(PLAIN)
    hear(table, accept(range(10)))
    hear(table, tell("transform", "late", "passed", range(10)))
    hear(table, tell("expel", "late", "delivered", range(9), destination="ops", instance="gone"))
    hear(table, beat("ingest", "flights", at_ms=FINAL_MS))
    hear(table, beat("transform", "late", at_ms=FINAL_MS))
    return table


@pytest.mark.parametrize("skew", [-24 * HOUR, -HOUR, -2 * SILENT_AFTER_MS, 0, 20_000, HOUR])
def test_a_wrong_clock_holds_no_minute_open(skew: int) -> None:
    """Broken: one machine whose clock is 30 s late is silent to the observer, and no minute with loss is ever final."""
    table = lossy()
    table.apply(expel(FINAL_MS + skew), FINAL_MS)
    assert table.liveness.alive(OPS, FINAL_MS + SILENT_AFTER_MS)
    assert [row.missing for row in table.tick(FINAL_MS).final] == [1]


def test_a_clock_that_is_ahead_finishes_no_minute_early() -> None:
    """Broken: an expel an hour ahead dies, counts as alive for an hour, and what it left is called lost."""
    table = lossy()
    table.apply(expel(END_MS + HOUR), END_MS)
    assert table.tick(FINAL_MS).final == []
    assert table.row("late", MINUTE, FINAL_MS).why_open == "expel to ops is silent"
    assert table.liveness.alive(OPS, END_MS + SILENT_AFTER_MS + 1) == []
    table.apply(expel(FINAL_MS + HOUR, behind_ms=200_000, instance="two"), FINAL_MS)
    assert table.row("late", MINUTE, FINAL_MS).why_open == "expel to ops is behind by 200 s"


def test_what_was_said_is_as_old_as_it_says() -> None:
    """Broken: a report that could not be stored for twenty seconds is taken for one about now."""
    liveness = Liveness()
    liveness.record(expel(START_MS - 20_000), START_MS)
    assert liveness.done_up_to(OPS, START_MS) == START_MS - 20_000
    liveness.load({})
    liveness.record(expel(START_MS - HOUR), START_MS)
    assert liveness.done_up_to(OPS, START_MS) == START_MS - STORED_WITHIN_MS, "but no older than it mostly can be"


@pytest.mark.parametrize("skew", [-HOUR, -2_000, 0, HOUR])
def test_a_report_that_was_held_up_is_as_old_as_it_is(skew: int) -> None:
    """Broken: an expel stands still for two minutes with a report on its way, and what came meanwhile is called lost."""
    liveness, frozen = Liveness(), START_MS + 60_000
    for at in range(START_MS, frozen, 10_000):
        liveness.record(expel(at + skew), at)
    thawed = frozen + 120_000
    liveness.record(expel(frozen + skew), thawed)
    assert liveness.done_up_to(OPS, thawed) == frozen
    liveness.record(expel(thawed + skew, behind_ms=120_000), thawed + 500)
    assert liveness.done_up_to(OPS, thawed + 500) == thawed - 120_000


def test_a_minute_waits_for_who_stood_still_with_a_report_on_its_way() -> None:
    """Broken: the report that is stored at last finishes the minute, with an alarm, before what came meanwhile is delivered."""
    table, frozen = lossy(), START_MS - 60_000
    for at in (frozen - 10_000, frozen):
        table.apply(expel(at), at if at < frozen else FINAL_MS)
    assert table.tick(FINAL_MS).final == []


def test_a_clock_that_was_set_back_is_believed_again_soon() -> None:
    """Broken: minutes stay open for as long as a clock was set back."""
    liveness = Liveness()
    for at in range(START_MS, START_MS + 50_000, 10_000):
        liveness.record(expel(at), at)
    for at in range(START_MS + 50_000, START_MS + 50_000 + COMPARED * 10_000, 10_000):
        liveness.record(expel(at - HOUR), at)
    assert liveness.done_up_to(OPS, at) == at


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    """Broken: after a clock was set back by an hour, its reporter's words are passed over for an hour."""
    liveness = Liveness()
    liveness.record(expel(START_MS), START_MS)
    liveness.record(expel(START_MS - HOUR, behind_ms=7_000), START_MS + 60_000)
    assert liveness.alive(OPS, START_MS + 60_000) == ["one"]
    assert liveness.behind_ms(OPS, START_MS + 60_000) == 7_000


def test_ours_may_be_set_back() -> None:
    """Broken: after the observer's own clock was set back, who dies counts as alive for as long."""
    liveness = Liveness()
    liveness.record(expel(START_MS), START_MS)
    liveness.listened(START_MS, START_MS - HOUR)
    assert liveness.alive(OPS, START_MS - HOUR) == ["one"]
    assert liveness.alive(OPS, START_MS - HOUR + SILENT_AFTER_MS + 1) == []
    assert liveness.done_up_to(OPS, START_MS - HOUR) == START_MS - HOUR


def test_the_retrier_says_what_was_due_by_its_own_clock() -> None:
    """Broken: a retrier whose clock is late holds events longer, and they are called lost meanwhile."""
    liveness = Liveness()
    for skew, behind, done in ((-HOUR, 0, -HOUR), (-HOUR, 1_000, -HOUR - 1_000), (HOUR, 0, 0), (HOUR, HOUR + 5, -5)):
        liveness.record(beat("retrier", "", at_ms=START_MS + skew, behind_ms=behind), START_MS)
        assert liveness.done_up_to(RETRIER, START_MS) == START_MS + done
        liveness.load({})


def test_an_age_by_the_brokers_clock_is_never_too_little() -> None:
    """Broken: on Kinesis, who is minutes behind by a clock that is late calls a backlog done."""
    liveness = Liveness(stamped=True)
    stored = START_MS - 240_000
    for skew in (-300_000, 0, 300_000):
        clock = START_MS + skew
        liveness.record(expel(clock, behind_ms=max(0, clock - stored)), START_MS)
        done = liveness.done_up_to(OPS, START_MS)
        assert done is not None
        assert done <= stored
        liveness.load({})


def test_a_goodbye_in_the_name_of_one_that_was_only_slow_does_not_count() -> None:
    """Broken: an ingest that stood still for half a minute speaks again, is taken for gone, and dies unnoticed."""
    liveness = Liveness()
    liveness.record(expel(START_MS), START_MS)
    liveness.record(expel(START_MS + 40_000), START_MS + 40_000)
    liveness.record(expel(START_MS, closed=True), START_MS + 41_000)
    assert liveness.alive(OPS, START_MS + 41_000) == ["one"]
    liveness.record(expel(START_MS + 42_000, closed=True), START_MS + 42_000)
    assert liveness.alive(OPS, START_MS + 42_000) == []


def test_nobody_is_silent_for_that_we_did_not_listen() -> None:
    """Broken: after the observer was away for an hour everybody is silent, and it reads up on each ingest that lives."""
    liveness, back = Liveness(), START_MS + HOUR
    liveness.record(expel(START_MS - SILENT_AFTER_MS - 1, instance="dead"), START_MS - SILENT_AFTER_MS - 1)
    liveness.record(expel(START_MS - 10_000), START_MS - 10_000)
    liveness.listened(START_MS, back)
    assert liveness.alive(OPS, back) == ["one"]
    assert [*liveness.fallen_silent(OPS, back + 20_001)] == ["dead", "one"], "after thirty seconds of listening in all"
    assert liveness.done_up_to(OPS, back) == START_MS - 10_000, "what it did meanwhile, nobody knows"
    assert liveness.done_up_to(OPS, back + TAKEOVER_MS) is None


def test_who_is_read_up_on_has_not_spoken() -> None:
    """Broken: while the observer reads what a dead ingest did not tell, the first part of it says that it told all."""
    liveness, step, now = Liveness(), Step("ingest", "flights"), START_MS + 60_000
    liveness.record(beat("ingest", "flights", at_ms=START_MS), START_MS)
    liveness.record(beat("ingest", "flights", at_ms=START_MS, behind_ms=None), now)
    assert [*liveness.fallen_silent(step, now)] == ["one"]
    assert not liveness.has_reported(step, START_MS + 1)
    liveness.record(msgspec.structs.replace(beat("ingest", "flights", at_ms=START_MS), closed=True), now)
    assert liveness.has_reported(step, START_MS + 1)
    assert liveness.fallen_silent(step, now) == {}
