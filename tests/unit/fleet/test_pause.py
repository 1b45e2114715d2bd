"""`penstock destination pause`, `resume` and `list`, `penstock pause` and `resume`, on a log without a fleet."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.core.broker.contract import Broker
from services.core.control.pauses import Pauses
from services.core.pipe_file.snapshot import read_contents, write_snapshot
from services.core.process.scrape import Sample
from services.fleet.verbs.destination import list_deliveries
from tests.unit.fleet.conftest import Shell, at_broker, make_fleet

HOOK = "webhook: {url: 'https://example.org/'}"
PIPES = f"""\
streams: {{s: {{}}, copy: {{}}}}
pipes:
  a: {{sources: [s], destinations: [{{name: billing, {HOOK}}}, {{name: copied, stream: copy}}]}}
  b: {{sources: [s], destinations: [{{name: billing, {HOOK}}}, {{name: other, {HOOK}}}]}}
  t: {{sources: [s], transform: {{sql: 'SELECT event, value FROM s'}}, destinations: [{{name: copied, stream: copy}}]}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    return make_fleet(tmp_path, PIPES)


def listed(shell: Shell) -> dict[str, str]:
    assert shell.run("destination", "list", "--json") == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in shell.out.splitlines()]
    return {f"{row['pipe']}/{row['destination']}": row["state"] for row in rows}


def test_paused_until_resumed(shell: Shell, folder: Path) -> None:
    """Broken: an operator pauses the wrong destination, or cannot see, lift or explain a pause."""
    assert listed(shell) == dict.fromkeys(["a/billing", "b/billing", "b/other"], "running")
    assert shell.run("destination", "pause", "billing", "--pipe", "b", "--reason", "they move") == 0
    assert listed(shell) == {"a/billing": "running", "b/billing": "paused", "b/other": "running"}
    assert shell.run("destination", "list") == 0
    assert re.findall(r"^(\S+) +(not paused|paused) ", shell.out, re.MULTILINE) == [
        ("a/billing", "not paused"),
        ("b/billing", "paused"),
        ("b/other", "not paused"),
    ]
    assert shell.run("destination", "show", "billing") == 0
    assert "b/billing is paused since 20" in shell.out
    assert "because: they move, 0 events parked" in shell.out
    assert shell.run("destination", "show", "billing", "--json") == 0
    (paused,) = json.loads(shell.out)["paused"]
    assert (paused["pipe"], paused["because"], paused["reason"]) == ("b", "they move", "operator")
    assert shell.run("destination", "resume", "billing", "--json") == 0
    assert {json.loads(line)["state"] for line in shell.out.splitlines()} == {"running"}

    async def read(broker: Broker) -> Pauses:
        pauses = Pauses(broker.reader)
        await pauses.refresh()
        return pauses

    pauses = at_broker(f"log://{folder}/data/log", read)
    assert pauses.of("a/billing") is None  # it was not paused, so nothing was written


def test_an_unknown_name_lists_the_known_ones(shell: Shell) -> None:
    """Broken: a slip of the pen pauses nothing and says nothing."""
    for name in ("biling", "copied"):
        assert shell.run("destination", "pause", name) == 2
        assert f"no webhook destination {name}" in shell.err
        assert "Try: one of: a/billing, b/billing, b/other" in shell.err


def test_a_destination_is_found_by_the_name_that_is_shown(shell: Shell) -> None:
    """Broken: the name in a table is refused, and the refusal recommends the same name."""
    assert shell.run("destination", "pause", "a/billing") == 0
    assert "a/billing is paused since 20" in shell.err
    assert listed(shell) == {"a/billing": "paused", "b/billing": "running", "b/other": "running"}
    assert shell.run("destination", "show", "a/billing", "--json") == 0
    assert json.loads(shell.out)["paused"][0]["pipe"] == "a"
    assert shell.run("destination", "pause", "c/billing") == 2
    assert "no webhook destination billing in the pipe c" in shell.err


def test_a_transform_is_paused_until_resumed(shell: Shell, folder: Path) -> None:
    """Broken: an operator cannot pause a transform or explain the pause, or the pause of a transform stops a destination."""
    for reason, words in (("wrong VAT", ""), ("again", "already ")):  # the second one changes nothing
        assert shell.run("pause", "t", "--reason", reason) == 0
        assert f"the transform of t is {words}paused since 20" in shell.err
        assert "because: wrong VAT. Its events wait in its streams for at most 7d" in shell.err
    assert set(listed(shell).values()) == {"running"}
    assert shell.run("pause", "t", "--json") == 0
    paused = json.loads(shell.out)
    assert (paused["pipe"], paused["state"], paused["because"]) == ("t", "paused", "wrong VAT")
    for _ in range(2):
        assert shell.run("resume", "t", "--json") == 0
        assert json.loads(shell.out) == {"pipe": "t", "state": "running"}
    assert shell.run("resume", "t") == 0
    assert "the transform of t is already running" in shell.err
    assert shell.run("pause", "t") == 0
    assert "because: no reason given. Its events" in shell.err
    for words in ("", "already "):
        assert shell.run("destination", "pause", "other") == 0
        assert f"b/other is {words}paused since 20" in shell.err
        assert "because: no reason given, 0 events parked" in shell.err
    for words in ("b/other is resumed", "b/other is not paused"):
        assert shell.run("destination", "resume", "other") == 0
        assert words in shell.err


def test_a_pipe_without_a_transform_is_not_paused(shell: Shell) -> None:
    """Broken: an operator thinks that a pipe is paused, and its events are still delivered."""
    assert shell.run("pause", "a") == 2
    assert "the pipe a has no transform" in shell.err
    assert "Try: penstock destination pause billing --pipe a" in shell.err
    assert shell.run("resume", "z") == 2
    assert "has no pipe z" in shell.err
    assert "Try: one of: t" in shell.err


def test_the_file_is_named_and_not_its_copy(shell: Shell, folder: Path) -> None:
    """Broken: an operator looks for the pipe in a file of the data folder."""
    copies = folder / "data/snapshot"
    write_snapshot(copies, read_contents([folder / "pipes.yaml"]))
    assert shell.run("pause", "nope", "-f", copies / "0-pipes.yaml") == 2
    assert f"{folder}/pipes.yaml, as it was when the fleet started, has no pipe nope" in shell.err


def test_an_outage_is_shown_where_there_are_no_dead_letters() -> None:
    """Broken: `destination show` says "0 dead letters, 0 causes" of a receiver that refuses everything."""
    values = {
        ("penstock_expel_breaker_state", "shop", "crm", ""): 2.0,
        ("penstock_expel_attempts_total", "shop", "crm", "http_503"): 84.0,
        ("penstock_expel_attempts_total", "shop", "crm", "delivered"): 3.0,
        ("penstock_expel_breaker_state", "shop", "erp", ""): 0.0,
        ("penstock_expel_breaker_state", "late", "crm", ""): 0.0,
    }
    sample = Sample(0.0)
    for (metric, pipe, destination, outcome), value in values.items():
        labels = {"pipe": pipe, "destination": destination} | ({"outcome": outcome} if outcome else {})
        sample.values[metric, frozenset(labels.items())] = value
    late, shop = list_deliveries(sample, "crm", None)
    assert (late.lane, late.breaker, late.requests) == ("late/crm", "closed", {})
    assert (shop.breaker, shop.requests) == ("open", {"delivered": 3, "http_503": 84})
    assert list_deliveries(sample, "crm", "shop") == [shop]
    assert "circuit breaker open (too many requests failed" in shop.describe()
    assert "its events wait; where: penstock group show shop/crm" in shop.describe(), "the status has no places"
    assert "delivered 3, http_503 84" in shop.describe()
