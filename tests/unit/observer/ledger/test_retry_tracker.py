"""What is lost while it waits for another attempt: when it is, at which node, and what is never called so."""

import itertools
import random

import msgspec
import pytest
from pyroaring import BitMap

from services.core.ledger.report import Outcome, Report, due_span, is_back, released_span
from services.observer import health
from services.observer.ledger.finality import FOUND_FOR_MS, Finding
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import RETRY_SLACK_MS, Ages, Table, TickResult
from services.observer.planned import PlannedWindows
from tests.unit.observer.ledger.snapshots import restarted
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS, accept, beat, hear, tell, with_due

FLOW = Flow({"raw": PipeFlow(("flights",), False, {"hook": None}, frozenset({"hook"}))})
HOUR = 3_600_000
DUE = START_MS + 2 * HOUR
LATE = DUE + 2 * RETRY_SLACK_MS


def expel(outcome: Outcome, numbers: range | list[int], due: int | None = None, *, wait: int = 2 * HOUR) -> Report:
    """expel told this; due: of those handed over."""
    return with_due(
        tell("expel", "raw", outcome, numbers, destination="hook"), due_span(due, wait) if due is not None else None
    )


def retrier(outcome: Outcome, numbers: range | list[int], due: int = DUE) -> Report:
    """The retrier told this."""
    span = released_span(due) if outcome == "released" else None
    return with_due(tell("retrier", "raw", outcome, numbers, destination="hook"), span)


def alive(table: Table, now: int, *, late: int | None = 0, back: int | None = 0) -> None:
    """Every node reports. late: of the retrier; back: how far expel is behind with released events. None: unknown."""
    hear(table, beat("ingest", "flights", at_ms=now))
    hear(table, beat("retrier", "", at_ms=now, behind_ms=late))
    hear(table, msgspec.structs.replace(beat("expel", "raw", "hook", at_ms=now), returned_ms=back))


def begin(handed_over: int = 4) -> Table:
    """Ten events, of which these were handed over, due at DUE. The minute is final."""
    table = Table(FLOW)
    hear(table, accept(range(10)))
    hear(table, expel("delivered", range(handed_over, 10)))
    hear(table, expel("retrying", range(handed_over), DUE))
    now = START_MS + MINUTE_MS + Ages().final
    alive(table, now)
    assert [row.missing for row in table.tick(now).final] == [0]
    return table


def look(table: Table, now: int) -> tuple[Row, TickResult]:
    turn = table.tick(now)
    return table.row("raw", MINUTE, now), turn


def worse(turn: TickResult) -> list[Finding]:
    return [verdict for verdict in turn.verdicts if verdict.before is not None]


def missing(row: Row) -> dict[str, int]:
    return {step.node: step.missing for step in row.steps}


def test_an_event_that_the_retrier_lost_is_missing_there_once_it_is_long_due() -> None:
    """Broken: what vanishes in the retrier counts as waiting for a month, and nobody is told."""
    table = begin()
    hear(table, retrier("released", [0]))
    hear(table, expel("delivered", [0]))
    hear(table, retrier("dead", [1]))
    alive(table, DUE + RETRY_SLACK_MS - 1)
    row, turn = look(table, DUE + RETRY_SLACK_MS - 1)
    assert (row.missing, row.waiting, worse(turn)) == (0, 2, [])
    assert table.count_waiting(Step("expel", "raw", "hook")) == 2
    alive(table, LATE + HOUR)
    row, turn = look(table, LATE + HOUR)
    assert (row.missing, row.waiting, missing(row)) == (2, 0, {"expel": 0, "retrier": 2})
    assert table.count_waiting(Step("expel", "raw", "hook")) == 0, "they are lost"
    assert row.steps[1].outcomes == {"dead": 1, "released": 1, "retrying": 0}
    assert [(before.missing, after.missing) for after, _, before in worse(turn) if before] == [(0, 2)]
    alive(table, LATE + HOUR + 10_000)
    assert worse(look(table, LATE + HOUR + 10_000)[1]) == [], "it is told once"


def test_what_is_lost_after_it_came_back_is_missing_at_expel() -> None:
    """Broken: the wrong node is blamed, or expel's losses behind the retrier are never seen."""
    table = begin()
    hear(table, retrier("released", range(4)))
    hear(table, expel("delivered", range(3)))
    for now in range(LATE + HOUR, LATE + HOUR + 4 * RETRY_SLACK_MS, 20_000):
        alive(table, now, back=None if now < LATE + HOUR + RETRY_SLACK_MS else 0)
        row, turn = look(table, now)
        if row.missing:
            break
    assert now >= LATE + HOUR + 2 * RETRY_SLACK_MS, "expel did not know how far it was before that"
    assert (missing(row), row.waiting) == ({"expel": 1, "retrier": 0}, 0)
    assert len(worse(turn)) == 1


@pytest.mark.parametrize("who", ["retrier is late", "retrier does not know", "retrier is silent"])
def test_a_retrier_that_is_late_loses_nothing(who: str) -> None:
    """Broken: after an outage of the retrier everything that waits is called lost."""
    table, now = begin(), LATE + 3 * HOUR
    for at in range(now, now + 3 * RETRY_SLACK_MS, 20_000):
        alive(table, at, late=at - DUE if who == "retrier is late" else None)
        if who == "retrier is silent":
            table.liveness.heartbeats().clear()
        assert (look(table, at)[0].missing, look(table, at)[0].waiting) == (0, 4)


def test_the_next_round_is_waited_for() -> None:
    """Broken: an event in its second round counts as lost, because it was given back once; or a crash that repeats or delays
    the reports of one round makes the table another one."""
    second = DUE + 8 * HOUR
    told = [
        retrier("released", range(4), DUE),
        expel("retrying", range(4), second, wait=8 * HOUR),
        expel("retrying", range(4), DUE),
        retrier("released", [0], second),
    ]
    rows = set()
    for order in itertools.permutations(told):
        table = begin()
        for report in (*order, order[0]):
            hear(table, report)
        alive(table, LATE + HOUR)
        early = look(table, LATE + HOUR)[0]
        assert (early.missing, early.waiting) == (0, 4)
        alive(table, second + HOUR + 3 * RETRY_SLACK_MS)
        row = look(table, second + HOUR + 3 * RETRY_SLACK_MS)[0]
        rows.add((row.missing, row.waiting, *missing(row).values()))
    assert rows == {(3, 1, 0, 3)}


def test_what_comes_after_all_is_no_longer_missing() -> None:
    """Broken: the table does not correct itself."""
    table = begin(1)
    alive(table, LATE + HOUR)
    assert look(table, LATE + HOUR)[0].missing == 1
    hear(table, expel("delivered", [0]))
    alive(table, LATE + HOUR + 1)
    row = look(table, LATE + HOUR + 1)[0]
    assert (row.missing, row.late, row.steps[0].outcomes["delivered"]) == (0, 1, 10)


def test_it_is_known_after_days_and_over_a_restart() -> None:
    """Broken: an event that waits longer than a day is forgotten when it is lost, or a restart of the observer forgets when
    it was due; or the restart raises the alarm again."""
    table = begin()
    for now in range(START_MS + HOUR, DUE, HOUR // 2):
        alive(table, now)
        table.tick(now)
    other = restarted(table)
    for one in (table, other):
        alive(one, LATE + HOUR)
        row, turn = look(one, LATE + HOUR)
        assert (missing(row), len(worse(turn))) == ({"expel": 0, "retrier": 4}, 1)
    again = restarted(other)
    alive(again, LATE + HOUR + 1)
    row, turn = look(again, LATE + HOUR + 1)
    assert (row.missing, worse(turn)) == (4, [])
    days = START_MS + 2 * Ages().drop
    for now in range(LATE + 2 * HOUR, days, HOUR):
        alive(again, now)
        again.tick(now)
    assert len(again.settlement("raw", MINUTE).missing()) == 4


def test_who_never_says_when_something_is_due_loses_nothing() -> None:
    """Broken: events that expel handed over before it said due times count as lost."""
    table = begin()
    hear(table, accept([20]))
    hear(table, expel("retrying", [20]))
    hear(table, expel("delivered", range(4)))
    alive(table, LATE + 9 * HOUR)
    row = look(table, LATE + 9 * HOUR)[0]
    assert (row.missing, row.waiting) == (0, 1)


def test_spans_order_the_retries() -> None:
    """Broken: the retrier's word about one round is taken for that about the next one."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(2000):
        wait = chance.randrange(30_000, 40 * HOUR)
        due = chance.randrange(START_MS, START_MS + 100 * HOUR)
        span, released = due_span(due, wait), released_span(due)
        assert span[0] <= due // 1000 < span[1]
        assert span[1] - span[0] <= max(1, wait // 8000)
        assert is_back(released, span)
        longer = chance.randrange(wait, 2 * wait)
        later = due_span(due + chance.randrange(5000) + longer, longer)
        assert later > span
        assert not is_back(released, later)


def test_a_loss_that_is_found_hours_later_makes_the_pipe_unstable_for_a_while() -> None:
    """Broken: events vanish in the retrier, an alarm is raised, and the pipe's health says that all is well; or it never ends;
    or a restart of the observer ends it."""
    table, found = begin(), LATE + HOUR
    alive(table, found)
    assert health.find_health(table, PlannedWindows(), "raw", found, 0.01).state == "healthy"
    table.tick(found)
    for one in (table, restarted(table)):
        alive(one, found + FOUND_FOR_MS - 1)
        one.tick(found + FOUND_FOR_MS - 1)
        judged = health.find_health(one, PlannedWindows(), "raw", found + FOUND_FOR_MS - 1, 0.01)
        assert (judged.state, judged.reasons) == ("unstable", ("4 of 10 events are missing in 1 minute",))
        alive(one, found + FOUND_FOR_MS)
        one.tick(found + FOUND_FOR_MS)
        assert health.find_health(one, PlannedWindows(), "raw", found + FOUND_FOR_MS, 0.01).state == "healthy"


@pytest.mark.parametrize("wait", [2_000, 5_000, 15_000])
def test_after_short_waits_the_right_node_is_named(wait: int) -> None:
    """Broken: expel is blamed for what the retrier lost in a later round, seconds after it gave the same events back."""
    table = begin()
    due = DUE
    for _ in range(3):
        hear(table, expel("retrying", range(4), due, wait=wait))
        hear(table, retrier("released", range(4), due))
        due += wait
    hear(table, expel("retrying", range(4), due, wait=wait))
    hear(table, retrier("released", [3], due))
    for now in range(LATE + HOUR, LATE + HOUR + 4 * RETRY_SLACK_MS, 20_000):
        alive(table, now)
        row = look(table, now)[0]
    assert missing(row) == {"expel": 1, "retrier": 3}


def test_spans_do_not_pile_up() -> None:
    """Broken: a destination that takes everything at the second try, or nothing for hours, makes the observer slower by the hour,
    and again after a restart that reads an hour of reports once more."""
    table, seconds, reports = begin(0), 800, list[Report]()
    for second in range(seconds):
        short, long, due = [100 + second], [10_000 + second], START_MS + 1000 * second
        hear(table, accept([*short, *long]))
        new = [expel("retrying", short, due, wait=5_000), retrier("released", short, due), expel("delivered", short)]
        new += [expel("retrying", long, due, wait=HOUR), retrier("released", long, due)]
        new.append(expel("retrying", long, due + 2 * HOUR, wait=2 * HOUR))
        for told in new:
            hear(table, told)
        reports += new
        if second % 10 == 0:
            table.tick(due)
    for told in reports:
        hear(table, told)
    retries = table.origin_sets.retries
    spans = sum(len(known[step]) for known in (retries.handed_over, retries.released) for step in known)
    assert spans <= seconds // 512 + 4 * 10 + 4


def test_a_backlog_that_comes_back_at_once_is_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after an hour without the retrier the observer stands still for half a minute, and answers nobody."""
    seconds, looked_at, numbers_of = 1500, 0, Origins.numbers

    def counted(self: Origins, run: SequenceKey) -> BitMap:
        nonlocal looked_at
        looked_at += 1
        return numbers_of(self, run)

    table = begin(0)
    hear(table, accept(range(100, 100 + seconds)))
    monkeypatch.setattr(Origins, "numbers", counted)
    for second in range(seconds):
        hear(table, expel("retrying", [100 + second], DUE + 1000 * second, wait=5_000))
    for second in range(seconds):
        hear(table, retrier("released", [100 + second], DUE + 1000 * second))
    for second in range(seconds):
        hear(table, expel("retrying", [100 + second], DUE + HOUR + 1000 * second, wait=HOUR))
    alive(table, DUE + HOUR)
    table.tick(DUE + HOUR)
    assert looked_at < 100 * seconds
    assert table.row("raw", MINUTE, DUE + HOUR).waiting == seconds


def test_our_clock_may_be_set_back() -> None:
    """Broken: after the observer's clock was an hour ahead for a moment, losses in the retrier are not looked for for an hour."""
    table = begin()
    table.tick(LATE + 3 * HOUR)
    alive(table, LATE + HOUR)
    assert look(table, LATE + HOUR)[0].missing == 4
