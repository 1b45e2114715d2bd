"""The order of findings, the exit status, and what a person and a program get of them."""

import json
from collections.abc import Iterator

from rich.console import Console

from services.fleet.doctor.checks import CHECKS
from services.fleet.doctor.diagnosis import Check, Diagnosis, Finding, about, diagnose
from services.fleet.doctor.facts import Facts
from services.fleet.doctor.view import render_diagnosis
from tests.unit.fleet.doctor.fleet_facts import healthy


def check(name: str, *findings: Finding, explains: tuple[str, ...] = ()) -> Check:
    return Check(name, f"Penstock{name}", lambda _facts: findings, frozenset(explains))


def names(found: Diagnosis) -> list[str]:
    return [cause.check.name for cause in found.causes]


def test_consequences_are_beneath_their_cause() -> None:
    """Broken: a dead broker and its ten consequences are eleven equal lines."""
    chain = [
        check("a", Finding("the broker"), explains=("b",)),
        check("b", Finding("expel", about=about("expel")), explains=("c",)),
        check("c", Finding("lane", about=about("expel", "p/d")), Finding("another", about=about("p/e"))),
    ]
    found = diagnose(healthy(), chain)
    assert names(found) == ["a", "c"]
    assert [one.finding.what for one in found.causes[0].symptoms] == ["expel", "lane"]
    assert found.causes[1].finding.what == "another"


def test_a_check_that_fails_hides_nothing() -> None:
    """Broken: one fault of the doctor, or one part that does not answer, and the engineer gets a traceback."""

    def fail(_facts: Facts) -> Iterator[Finding]:
        raise ZeroDivisionError("oops")

    facts = healthy()
    facts.unknown["the broker"] = "no answer within 40 s"
    found = diagnose(facts, [Check("bad", "x", fail), check("a", Finding("fault"))])
    assert names(found) == ["a"]
    assert found.unknown == ["the broker: no answer within 40 s", "the check bad failed: ZeroDivisionError: oops"]
    assert found.status == 1


def test_exit_status() -> None:
    """Broken: a script takes a fleet for healthy at which nobody could look."""
    facts = healthy()
    assert diagnose(facts, []).status == 0
    assert diagnose(facts, [check("a", Finding("note", is_note=True))]).status == 0
    facts.unknown["the broker"] = "no answer"
    assert diagnose(facts, []).status == 2


def test_the_checks_name_each_other() -> None:
    """Broken: a misspelt name in `explains`: the consequence is listed as a cause of its own."""
    names = [one.name for one in CHECKS]
    assert len(set(names)) == len(names)
    assert {name for one in CHECKS for name in one.explains} <= set(names)


def test_what_a_person_and_a_program_get() -> None:
    """Broken: the evidence, the first thing to do or the runbook is missing; or text of an event moves the terminal's cursor."""
    finding = Finding("Expel is dead.", ["process 7\x1b[2J"], "kill -CONT 7", about("expel"))
    checks = [check("dead", finding, explains=("lag",)), check("lag", Finding("Events wait.", about=about("expel")))]
    facts = healthy()
    facts.unknown["the broker"] = "no answer"
    found = diagnose(facts, checks)
    console = Console(width=200, record=True)
    console.print(render_diagnosis(found))
    text = console.export_text()
    for part in ("1. Expel is dead.", "evidence: process 7", "do first: kill -CONT 7", "docs/runbooks/Penstockdead.md"):
        assert part in text
    assert "it explains:\n     Events wait." in text
    assert "the broker: no answer" in text
    assert "\x1b" not in text
    body = json.loads(json.dumps(found.as_json()))
    assert body["causes"][0]["check"] == "dead"
    assert body["causes"][0]["symptoms"][0]["what"] == "Events wait."
    assert (body["status"], body["unknown"]) == (1, ["the broker: no answer"])
