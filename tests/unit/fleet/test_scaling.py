"""`penstock scaling`, on a log without a fleet and with an observer that knows groups."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.core.audit import Entry
from services.core.broker.contract import Broker
from services.fleet.dead.audit import read_audit
from services.fleet.observer_client import Observer
from services.fleet.verbs import scaling
from tests.unit.fleet.conftest import Shell, at_broker, make_fleet

PIPES = """\
streams: {s: {}}
pipes:
  a: {sources: [s], destinations: [{name: billing, webhook: {url: 'https://example.org/'}}]}
"""
EXPEL: dict[str, Any] = {
    "group": "expel",
    "at": "2026-11-23T03:00:00.000Z",
    "size": 3,
    "wanted": 4,
    "action": "hold",
    "reason": "frozen",
    "words": "out: 2.1 cores",
    "working": 2,
    "failed": ["expel-3 (silent for 6 min)"],
    "frozen": None,
    "hot": "partition 3 of orders.out",
    "dry_run": False,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    return make_fleet(tmp_path, PIPES)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the observer knows."""
    known = [dict(EXPEL)]

    async def get(_observer: Observer, path: str, _query: dict[str, str]) -> dict[str, Any]:
        assert path == "/v1/scaling"
        return {"groups": known}

    monkeypatch.setattr(scaling, "find_observer", lambda *_: Observer("127.0.0.1:1"))
    monkeypatch.setattr(scaling, "get_json", get)
    return known


def audit(folder: Path) -> list[Entry]:
    async def read(broker: Broker) -> list[Entry]:
        return [entry async for entry in read_audit(broker.reader)]

    return at_broker(f"log://{folder}/data/log", read)


def test_frozen_until_unfrozen_without_a_fleet(shell: Shell, folder: Path) -> None:
    """Broken: an operator cannot stop the autoscaler while the fleet is down, or nobody learns who did and why."""
    assert shell.run("scaling", "freeze", "expel", "--why", "we measure", "--for", "2h") == 0
    assert "expel is frozen by " in shell.err
    assert "because: we measure" in shell.err
    assert "was not checked: no fleet runs" in shell.err
    assert shell.run("scaling", "show", "--json") == 0
    (row,) = json.loads(shell.out)["groups"]
    assert (row["group"], row["frozen"]["why"], row["report"]) == ("expel", "we measure", None)
    assert row["frozen"]["until"] > row["frozen"]["since"]
    assert shell.run("scaling", "show") == 0
    assert "we measure" in shell.out
    assert shell.run("scaling", "unfreeze", "expel") == 0
    assert "expel is unfrozen" in shell.err
    assert shell.run("scaling", "unfreeze", "expel", "--json") == 0
    assert json.loads(shell.out)["frozen"] is None
    entries = audit(folder)  # the second unfreeze changed nothing
    assert [(one.action, one.filters["group"]) for one in entries] == [("freeze", "expel"), ("unfreeze", "expel")]
    assert (entries[0].filters["why"], "@" in entries[0].who) == ("we measure", True)


def test_an_unknown_group_lists_the_known_ones(shell: Shell, folder: Path, reports: list[dict[str, Any]]) -> None:
    """Broken: a slip of the pen freezes nothing and says nothing."""
    for command in (("freeze", "expell", "--why", "x"), ("unfreeze", "expell")):
        assert shell.run("scaling", *command) == 2
        assert "Try: one of: expel" in shell.err
    assert audit(folder) == []
    assert shell.run("scaling", "freeze", "expel", "--why", "x") == 0
    assert shell.run("scaling", "freeze", "expel", "--why", "x") == 0
    assert "already frozen" in shell.err
    reports.clear()  # the observer has just started
    assert shell.run("scaling", "unfreeze", "expell") == 2
    assert shell.run("scaling", "unfreeze", "expel") == 0


def test_the_decisions_are_shown(shell: Shell, reports: list[dict[str, Any]]) -> None:
    """Broken: the command hides a failed instance, a hot partition, or a freeze that only the platform can end."""
    reports[0]["frozen"] = "frozen on its platform because: load test"
    assert shell.run("scaling", "show") == 0
    for text in ("2 of 3", "hold: out: 2.1 cores", "failed: expel-3", "hot: partition 3", "load test"):
        assert text in shell.out
    assert shell.run("scaling", "unfreeze", "expel") == 0
    assert "remove the annotation or tag there" in shell.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--why", " "), "--why is empty"),
        (("--why", "x", "--for", "soon"), "--for"),
        (("--why", "x", "--for", "400d"), "366d"),
    ],
)
def test_mistakes_say_what_to_try(shell: Shell, options: tuple[str, ...], words: str) -> None:
    """Broken: a freeze for a time that nobody meant, or one without a reason."""
    assert shell.run("scaling", "freeze", "expel", *options) == 2
    assert words in shell.err
    assert "Try:" in shell.err
