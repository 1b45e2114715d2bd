"""What was parked, or dead and redriven, and is lost afterwards: when it is missing, and what is never called so."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from services.core.ledger.report import Node, Outcome, Report, due_span, since_span
from services.observer.ledger.finality import Finding
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.table import RETRY_SLACK_MS, Ages, Table, TickResult
from tests.unit.observer.ledger.snapshots import restarted
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS, accept, beat, hear, tell, with_due

FLOW = Flow({"raw": PipeFlow(("flights",), False, {"hook": None}, frozenset({"hook"}))})
HOUR = 3_600_000
FINAL_MS = START_MS + MINUTE_MS + Ages().final


def say(node: Node, outcome: Outcome, numbers: Sequence[int], at_ms: int) -> Report:
    """Reported at this time, that it is so since then."""
    return with_due(tell(node, "raw", outcome, numbers, destination="hook", at_ms=at_ms), since_span(at_ms))


def park(numbers: Sequence[int], at_ms: int) -> Report:
    return say("expel", "parked", numbers, at_ms)


def bury(numbers: Sequence[int], at_ms: int) -> Report:
    return say("expel", "dead", numbers, at_ms)


def redrive(numbers: Sequence[int], at_ms: int) -> Report:
    return msgspec.structs.replace(say("retrier", "redriven", numbers, at_ms), instance="redrive", closed=True)


def hand_over(numbers: Sequence[int], due_ms: int, at_ms: int) -> Report:
    told = tell("expel", "raw", "retrying", numbers, destination="hook", at_ms=at_ms)
    return with_due(told, due_span(due_ms, due_ms - at_ms))


def deliver(numbers: Sequence[int], at_ms: int) -> Report:
    return tell("expel", "raw", "delivered", numbers, destination="hook", at_ms=at_ms)


def alive(table: Table, now: int, *, held: int | None = 0) -> None:
    hear(table, beat("ingest", "flights", at_ms=now))
    hear(table, beat("retrier", "", at_ms=now))
    hear(table, msgspec.structs.replace(beat("expel", "raw", "hook", at_ms=now), returned_ms=0, held_ms=held))


def begin(*reports: Report) -> Table:
    """Ten events, of which four are not delivered; the minute is final."""
    table = Table(FLOW)
    hear(table, accept(range(10)))
    hear(table, deliver(range(4, 10), START_MS))
    for report in reports:
        hear(table, report)
    alive(table, FINAL_MS)
    assert [row.missing for row in table.tick(FINAL_MS).final] == [0]
    return table


def pass_time(table: Table, since: int, until: int, *, held: int | None = 0, step: int = 20_000) -> list[Finding]:
    """What becomes worse; held: how far expel is behind with what comes back, None: since the beginning."""
    worse: list[Finding] = []
    for now in range(since, until, step):
        alive(table, now, held=now - since + held if held else held)
        turn: TickResult = table.tick(now)
        worse += [verdict for verdict in turn.verdicts if verdict.before is not None]
    return worse


def outcomes(table: Table, now: int) -> tuple[int, int, dict[Outcome, int]]:
    row = table.row("raw", MINUTE, now)
    return row.missing, row.waiting, {name: n for name, n in row.steps[0].outcomes.items() if n}


PAUSED, RESUMED = FINAL_MS + HOUR, FINAL_MS + 30 * HOUR
LONG = 4 * RETRY_SLACK_MS


def test_what_was_parked_and_is_lost_after_the_resume_is_missing() -> None:
    """Broken: a parked event that vanishes, in its topic or when it is read again, counts as waiting for a month."""
    table = begin(park(range(4), START_MS))
    pass_time(table, FINAL_MS, PAUSED, held=1000, step=HOUR)
    assert pass_time(table, PAUSED, RESUMED, held=PAUSED - START_MS, step=HOUR) == [], "while it is paused it waits"
    assert outcomes(table, RESUMED) == (0, 4, {"delivered": 6, "parked": 4})
    hear(table, deliver([0], RESUMED))
    hear(table, bury([1], RESUMED))
    hear(table, hand_over([2], RESUMED + 10 * HOUR, RESUMED))
    (worse,) = pass_time(table, RESUMED, RESUMED + LONG)
    assert (worse.part, worse.row.missing) == ("hook", 1)
    assert outcomes(table, RESUMED + LONG) == (1, 1, {"delivered": 7, "dead": 1, "retrying": 1})
    hear(table, deliver([3], RESUMED + LONG))
    assert outcomes(table, RESUMED + LONG)[0] == 0, "it came after all"


@pytest.mark.parametrize("held", [None, 50_000_000])
def test_nothing_is_missing_before_expel_has_read_all_that_came_back(held: int | None) -> None:
    """Broken: a replay that takes its time, or an expel that does not know, makes losses of what it has not read yet."""
    table = begin(park(range(2), START_MS), bury([2, 3], START_MS))
    hear(table, redrive([2, 3], FINAL_MS))
    assert pass_time(table, FINAL_MS, FINAL_MS + LONG, held=held) == []
    assert outcomes(table, FINAL_MS + LONG) == (0, 4, {"delivered": 6, "parked": 2, "retrying": 2})


def test_what_was_redriven_and_is_lost_then_is_missing() -> None:
    """Broken: an operator redrives dead letters, they vanish on their way, and the table says that they are dead."""
    table = begin(bury(range(4), START_MS))
    redriven = START_MS + 3 * Ages().drop
    pass_time(table, FINAL_MS, redriven, step=6 * HOUR)
    assert outcomes(table, redriven) == (0, 0, {"delivered": 6, "dead": 4})
    for one in (table, restarted(table)):
        hear(one, redrive(range(3), redriven))
        hear(one, deliver([0], redriven + 1000))
        hear(one, bury([1], redriven + 2000))
        alive(one, redriven + 3000)
        assert outcomes(one, redriven)[:2] == (0, 1)
        (worse,) = pass_time(one, redriven + 3000, redriven + LONG)
        assert (worse.part, worse.row.missing) == ("hook", 1)
        assert outcomes(one, redriven + LONG) == (1, 0, {"delivered": 7, "dead": 2})
        assert (one.row("raw", MINUTE, redriven).accepted, len(one.settlement("raw", MINUTE).missing())) == (10, 1)


def test_only_the_latest_counts_in_any_order() -> None:
    """Broken: a crash that repeats or delays reports makes a redriven event dead again, or one that is dead again missing."""
    at = [START_MS + second * 1000 for second in range(6)]
    told = [
        hand_over([0, 1, 2], at[1], at[0]),
        bury([0, 1], at[2]),
        redrive([0, 1], at[3]),
        park([1, 2], at[4]),
        bury([0], at[5]),
    ]
    found = set()
    for order in itertools.permutations(told):
        table = Table(FLOW)
        hear(table, accept(range(3)))
        for report in (*order, order[0], order[1]):
            hear(table, report)
        row = table.row("raw", MINUTE, START_MS)
        found.add((row.missing, row.waiting, *((name, n) for name, n in row.steps[0].outcomes.items() if n)))
    assert found == {(0, 2, ("dead", 1), ("parked", 2))}


def test_a_clock_that_is_late_makes_nothing_missing() -> None:
    """Broken: an expel whose clock is an hour late parks an event, and it is lost because others are done with that time."""
    table = begin(*(deliver([n], START_MS) for n in range(3)), park([3], START_MS))
    pass_time(table, FINAL_MS, FINAL_MS + HOUR, held=FINAL_MS - START_MS)
    resumed = FINAL_MS + HOUR
    table.apply(park([3], resumed - HOUR), resumed)  # paused again, by a clock of before
    assert pass_time(table, resumed, resumed + RETRY_SLACK_MS - 20_000) == []


def test_who_does_not_say_since_when_loses_nothing() -> None:
    """Broken: what an expel of before parked or buried is called lost."""
    table = begin(
        tell("expel", "raw", "parked", [0, 1], destination="hook"),
        tell("expel", "raw", "dead", [2, 3], destination="hook"),
    )
    hear(table, redrive([2], FINAL_MS))
    assert pass_time(table, FINAL_MS, FINAL_MS + LONG) == []
    assert outcomes(table, FINAL_MS + LONG) == (0, 2, {"delivered": 6, "dead": 2, "parked": 2})


def test_a_long_pause_is_little_to_keep() -> None:
    """Broken: a destination that is paused for a day makes the observer slower with every second of it."""
    table, seconds = begin(*(deliver([n], START_MS) for n in range(4))), 3000
    hear(table, accept(range(100, 100 + seconds)))
    for second in range(seconds):
        now = FINAL_MS + 1000 * second
        hear(table, park([100 + second], now))
        if second % 20 == 0:
            alive(table, now, held=now - FINAL_MS)
            table.tick(now)
    (held,) = table.origin_sets.retries.held.values()
    assert len(held) <= 700
    assert table.row("raw", MINUTE, now).waiting == seconds == table.count_waiting(Step("expel", "raw", "hook"))


def test_a_restart_knows_what_was_found_lost() -> None:
    """Broken: after a restart of the observer what was found lost while it waited counts as waiting for minutes, and the pipe
    is healthy meanwhile."""
    table = begin(park(range(4), START_MS))
    assert len(pass_time(table, FINAL_MS, FINAL_MS + LONG)) == 1
    now = FINAL_MS + LONG
    table = restarted(table)
    assert [row.lost for row in table.found_lately("raw", now)] == [4]
    assert outcomes(table, now) == (4, 0, {"delivered": 6})
    assert pass_time(table, now, now + LONG) == []
    assert [row.lost for row in table.found_lately("raw", now + LONG)] == [4]


def test_a_restart_goes_on_with_what_it_was_about_to_find() -> None:
    """Broken: an observer that is restarted again and again never finds what was lost while it waited."""
    table = begin(park(range(4), START_MS))
    assert pass_time(table, FINAL_MS, FINAL_MS + RETRY_SLACK_MS) == []
    table = restarted(table)
    assert len(pass_time(table, FINAL_MS + RETRY_SLACK_MS, FINAL_MS + RETRY_SLACK_MS + 60_000)) == 1


WITHOUT = Flow({"raw": PipeFlow(("flights",), False, {"other": None})})


def test_what_waited_for_a_destination_that_was_removed_is_not_missing_when_it_is_put_back() -> None:
    """Broken: a destination is removed, what waited for it goes to the dead letters, and once it is put back these events are
    missing: a loss that was none."""
    waiting = hand_over([0, 1], FINAL_MS + 60_000, START_MS)
    table = restarted(begin(park([2, 3], START_MS), waiting), WITHOUT)
    removed = FINAL_MS + LONG
    hear(table, deliver([0], removed))  # by an expel that was not restarted yet
    pass_time(table, removed, removed + LONG)
    table = restarted(table, FLOW)
    back = removed + LONG
    assert pass_time(table, back, back + LONG) == []
    assert outcomes(table, back + LONG) == (0, 0, {"delivered": 7, "dead": 3})
    hear(table, redrive([2], back + LONG))
    assert outcomes(table, back + LONG) == (0, 1, {"delivered": 7, "dead": 2, "retrying": 1})
