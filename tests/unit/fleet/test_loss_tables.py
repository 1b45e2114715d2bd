"""The tables of the observer's answer about loss, as `penstock loss show` and a demo print them."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from services.fleet.demo.stage import render_loss
from services.fleet.observer_client import describe_results, loss_table, outcome_table


@pytest.mark.parametrize("final", [(True, True), (True, False)])
def test_minutes_that_are_open_are_said_to_be(final: tuple[bool, bool]) -> None:
    """Broken: a newcomer takes figures that may still change for the last ones."""
    row = {
        "minute": "2026-11-21T08:05Z",
        "accepted": 10,
        "waiting": 0,
        "lost": 0,
        "loss": 0.0,
        "final_loss": 0.0,
        "late": 0,
        "steps": [],
    }
    rows = [{**row, "final": one, "why_open": None if one else "late events may come"} for one in final]
    out = StringIO()
    Console(file=out, width=200).print(
        render_loss({"minutes": rows, "accepted": 20, "missing": 0, "threshold": 0.01, "catching_up": False})
    )
    assert "0 of 20 events are missing\n" in out.getvalue()
    assert ("The demo does not wait" in out.getvalue()) != all(final)


def _cells(table: Table) -> list[dict[str, str]]:
    columns = [(str(column.header), [str(cell) for cell in column.cells]) for column in table.columns]
    return [{name: cells[row] for name, cells in columns} for row in range(table.row_count)]


def test_the_loss_table_says_where_events_are_missing_and_what_became_of_the_others() -> None:
    """Broken: a zero that counts missing events is read as "nothing was delivered"; a dead letter, or an operator's skip,
    cannot be told from a loss."""
    transform: dict[str, Any] = {"node": "transform", "destination": None, "expected": 9, "missing": 0, "final": True}
    transform["outcomes"] = {"passed": 7, "dead": 1, "filtered": 1}
    expel: dict[str, Any] = {"node": "expel", "destination": "crm", "expected": 7, "missing": 0, "final": True}
    expel["outcomes"] = {"delivered": 1, "dead": 2, "retrying": 2, "parked": 1, "skipped": 1}
    retrier = {**expel, "node": "retrier", "expected": 2, "outcomes": {"retrying": 1}}
    row = {"minute": "2026-11-21T08:05Z", "accepted": 9, "waiting": 3, "final_loss": 0.0, "loss": 0.0}
    row |= {"steps": [transform, expel, retrier], "final": True, "why_open": None, "late": 0}
    body: dict[str, Any] = {"threshold": 0.01, "minutes": [row]}
    assert _cells(loss_table(body))[0] | {"state": ""} == {
        "minute": "2026-11-21T08:05Z", "accepted": "9", "missing": "0", "waiting": "3", "loss": "0.00%", "state": "",
    }  # fmt: skip
    first = {
        "outcome so far": "transform",
        "events": "9",
        "passed on": "7",
        "delivered": "",
        "waiting": "",
        "dead": "1",
    }
    second = {
        "outcome so far": "expel to crm", "events": "7", "passed on": "", "delivered": "1", "waiting": "3", "dead": "2",
    }  # fmt: skip
    assert _cells(outcome_table(body)) == [
        first | {"filtered": "1", "skipped": "0", "missing": "0"},
        second | {"filtered": "0", "skipped": "1", "missing": "0"},
    ]
    assert describe_results(body) is None

    retrier["missing"] = 1  # of the two that expel handed over
    shown = _cells(loss_table(body))[0]
    assert (shown["missing at retrier to crm"], "missing at transform" in shown) == ("1", False)
    assert [(one["waiting"], one["missing"]) for one in _cells(outcome_table(body))] == [("", "0"), ("2", "1")]

    retrier["missing"], expel["missing"], expel["final"] = 0, 2, False
    row |= {"final": False, "loss": 0.2, "why_open": "late events may come"}
    shown = _cells(loss_table(body))[0]
    assert (shown["missing at expel to crm"], shown["loss"]) == ("2 open", "open")
    assert [(one["open"], one["missing"]) for one in _cells(outcome_table(body))] == [("0", "0"), ("2", "0")]
    expel["final"], row["final_loss"] = True, 0.2
    shown = _cells(loss_table(body))[0]
    assert (shown["missing at expel to crm"], shown["loss"]) == ("2", "20.00%")


def test_results_over_several_events_are_not_counted_as_none() -> None:
    """Broken: a pipe with an aggregate shows 0 delivered, and a newcomer thinks that nothing was."""
    transform: dict[str, Any] = {"node": "transform", "destination": None, "expected": 9, "missing": 0, "final": True}
    transform["outcomes"] = {"passed": 0, "filtered": 9}
    expel = {**transform, "node": "expel", "destination": "crm", "expected": 0, "outcomes": {"delivered": 0, "dead": 0}}
    body: dict[str, Any] = {"minutes": [{"steps": [transform, expel]}]}
    first, second = _cells(outcome_table(body))
    assert (first["filtered"], second["events"], second["delivered"], second["dead"]) == ("9", "not counted", "", "")
    assert "penstock status, which has the number of delivered results" in (describe_results(body) or "")
    expel.update(expected=4, outcomes={"delivered": 4})  # of a transform that makes new events
    assert _cells(outcome_table(body))[1]["delivered"] == "4"
