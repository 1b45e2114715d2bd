"""The loss table that a demo ends with."""

from io import StringIO

import pytest
from rich.console import Console

from services.fleet.demo.stage import render_loss


@pytest.mark.parametrize("final", [(True, True), (True, False)])
def test_minutes_that_are_open_are_said_to_be(final: tuple[bool, bool]) -> None:
    """Broken: a newcomer takes figures that may still change for the last ones."""
    row = {
        "minute": "2026-11-21T08:05Z",
        "accepted": 10,
        "waiting": 0,
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
    assert "0 of 20 events are missing; the columns between accepted and waiting count missing" in out.getvalue()
    assert ("The demo does not wait" in out.getvalue()) != all(final)
