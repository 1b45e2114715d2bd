"""The join against a naive oracle: any order, any repetition, any cut of the reports gives the same table."""

import random
from collections import Counter
from typing import Any, NamedTuple, get_args

import pytest

from services.core.ledger.report import Outcome, Report
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Table
from tests.unit.observer.ledger.stories import MINUTE, START_MS, accept, hear, split, tell

FLOW = Flow(
    {
        "late": PipeFlow(("flights", "trains"), transforms=True, destinations={"ops": None, "rest": "others"}),
        "raw": PipeFlow(("flights",), transforms=False, destinations={"copy": None}),
        "onward": PipeFlow(("others",), transforms=False, destinations={"end": None}),
    }
)


class Fate(NamedTuple):
    """What becomes of one event: None is nothing, a loss."""

    stream: str
    incarnation: str
    partition: int
    minute: int
    transform: Outcome | None
    ops: Outcome | None
    rest: Outcome | None
    copy: Outcome | None
    end: Outcome | None


SETTLED: list[Outcome | None] = [None, "delivered", "delivered", "delivered", "dead", "retrying", "parked", "filtered"]
SEEDS = range(40)


def make_fates(draw: random.Random) -> list[Fate]:
    """Up to forty events."""

    def settled() -> Outcome | None:
        return draw.choice(SETTLED)

    return [
        Fate(
            draw.choice(["flights", "trains"]),
            draw.choice("ab"),
            draw.randint(0, 1),
            MINUTE + draw.randint(0, 1),
            draw.choice([None, "passed", "passed", "filtered", "dead"]),
            *(settled() for _ in range(4)),
        )
        for _ in range(draw.randint(0, 40))
    ]


def story(fates: list[Fate]) -> list[Report]:
    """One report per event and step, as if nothing was ever gathered."""
    found: list[Report] = []
    numbers: Counter[tuple[str, int]] = Counter()
    for fate in fates:
        incarnation = fate.incarnation + fate.stream[0]
        number = numbers[incarnation, fate.partition]
        numbers[incarnation, fate.partition] += 1
        place = {"incarnation": incarnation, "partition": fate.partition}
        found.append(accept([number], stream=fate.stream, minute=fate.minute, **place))

        def add(outcome: Outcome | None, step: Step, number: int = number, place: dict[str, Any] = place) -> None:
            if outcome is not None:
                told = tell(step.node, step.pipe, outcome, [number], destination=step.destination, **place)
                found.append(told)

        add(fate.transform, Step("transform", "late"))
        if fate.transform == "passed":
            add(fate.ops, Step("expel", "late", "ops"))
            add(fate.rest, Step("expel", "late", "rest"))
            if fate.rest == "delivered":
                add(fate.end, Step("expel", "onward", "end"))
        if fate.stream == "flights":
            add(fate.copy, Step("expel", "raw", "copy"))
    return found


def missing_of(fate: Fate, pipe: str) -> bool | None:
    """Whether this event is missing in the pipe; None when it never came there. The oracle: one event at a time."""
    if pipe == "raw":
        return None if fate.stream != "flights" else fate.copy is None
    if pipe == "onward":
        came = fate.transform == "passed" and fate.rest == "delivered"
        return fate.end is None if came else None
    if fate.transform == "passed":
        # Nothing tells that it passed but the transform and the destinations.
        return fate.ops is None or fate.rest is None
    return fate.transform is None


def check(row: Row, fates: list[Fate]) -> None:
    """The row is what the oracle says, and every step shares out what it expected."""
    fits = [missing_of(fate, row.pipe) for fate in fates if fate.minute == row.minute]
    assert row.accepted == sum(missing is not None for missing in fits)
    assert row.missing == sum(missing is True for missing in fits)
    for step in row.steps:
        assert step.expected == step.missing + sum(step.outcomes.values())
        if (row.pipe, step.destination) == ("late", "ops"):  # as if it had an output of its own
            came = [fate.ops for fate in fates if fate.minute == row.minute and fate.transform == "passed"]
            for outcome in ("delivered", "filtered", "dead", None):
                told = step.missing if outcome is None else step.outcomes.get(outcome, 0)
                assert told == came.count(outcome), outcome


def rows(table: Table) -> list[Row]:
    return [table.row(pipe, minute, START_MS) for pipe in FLOW.pipes for minute in (MINUTE, MINUTE + 1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_repetition_and_cut_gives_the_same_table(seed: int) -> None:
    """Broken: a crash, which repeats and reorders reports, hides a loss or invents one."""
    draw = random.Random(seed)
    fates = make_fates(draw)
    cuts = [draw.randint(0, 2) for _ in range(draw.randint(1, 5))]
    told = story(fates)
    straight = Table(FLOW)
    for report in told:
        hear(straight, report)
    pieces = [piece for report in told for piece in split(report, cuts)]
    pieces += draw.choices(pieces, k=len(pieces) // 2) if pieces else []
    draw.shuffle(pieces)
    shuffled = Table(FLOW)
    for report in pieces:
        hear(shuffled, report)
    assert rows(shuffled) == rows(straight)
    for row in rows(straight):
        check(row, fates)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_folded_and_told_again_changes_nothing(seed: int) -> None:
    """Broken: after an hour, a restart that repeats old reports counts them twice, or what settles late stays missing."""
    order = random.Random(seed)
    fates = make_fates(order)
    told = story(fates)
    accepted = [report for report in told if report.node == "ingest"]
    rest = [report for report in told if report.node != "ingest"]
    order.shuffle(rest)
    early = order.randint(0, len(rest))
    table = Table(FLOW)
    for report in accepted + rest[:early]:
        hear(table, report)
    for minute in order.sample(table.origin_sets.minutes(), k=order.randint(0, len(table.origin_sets.minutes()))):
        table._fold(minute)
    again = accepted + rest
    order.shuffle(again)
    for report in again:
        hear(table, report)
    table._forget_touched()
    for row in rows(table):
        check(row, fates)


def test_outcomes_are_ordered_by_what_an_event_came_to() -> None:
    """Broken: an event that was parked, retried and delivered counts as waiting for ever."""
    flow = Flow({"raw": PipeFlow(("flights",), transforms=False, destinations={"copy": None})})
    table = Table(flow)
    hear(table, accept(range(4)))
    outcome: Outcome
    for outcome, numbers in (("retrying", range(4)), ("parked", range(3)), ("delivered", [0]), ("dead", [1, 0])):
        assert outcome in get_args(Outcome)
        hear(table, tell("expel", "raw", outcome, numbers, destination="copy"))
    step = table.row("raw", MINUTE, START_MS).steps[0]
    assert step.outcomes == {"delivered": 1, "dead": 1, "parked": 1, "retrying": 1}


def test_skipped_events_are_not_missing() -> None:
    """Broken: what an operator skipped raises an alarm; or hides what became of an event that was delivered all the same."""
    table = Table(Flow({"raw": PipeFlow(("flights",), transforms=False, destinations={"copy": None})}))
    hear(table, accept(range(6)))
    assert "skipped" not in table.row("raw", MINUTE, START_MS).steps[0].outcomes, (
        "the rows of most fleets stay as they were"
    )
    hear(table, tell("expel", "raw", "skipped", range(5), destination="copy"))
    for outcome, numbers in (("retrying", [0]), ("dead", [1]), ("delivered", [2])):
        hear(table, tell("expel", "raw", outcome, numbers, destination="copy"))  # type: ignore[arg-type]
    row = table.row("raw", MINUTE, START_MS)
    assert (row.missing, row.waiting) == (1, 1)
    assert row.steps[0].outcomes == {"delivered": 1, "dead": 1, "parked": 0, "retrying": 1, "skipped": 2}
    table._fold(MINUTE)
    assert table.row("raw", MINUTE, START_MS).steps[0].outcomes["skipped"] == 2
    hear(table, tell("expel", "raw", "delivered", range(6), destination="copy"))
    assert table.row("raw", MINUTE, START_MS).missing == 0, "the group was set back, and delivered all"


def test_a_transform_that_makes_new_events_ends_the_old_ones() -> None:
    """Broken: every event that went into an aggregate counts as missing behind it."""
    flow = Flow({"sums": PipeFlow(("flights",), transforms=True, destinations={"ops": None})})
    table = Table(flow)
    hear(table, accept(range(10)))
    hear(table, tell("transform", "sums", "filtered", range(10)))
    hear(table, tell("transform", "sums", "accepted", range(2), minute=MINUTE, incarnation="made"))
    hear(table, tell("expel", "sums", "delivered", [1], destination="ops", incarnation="made"))
    row = table.row("sums", MINUTE, START_MS)
    assert (row.accepted, row.missing) == (10, 1)
    assert [(step.expected, step.missing) for step in row.steps] == [(10, 0), (2, 1)]
