"""infra/prometheus: the rules are valid, fire when they should, and name what the services show."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.fleet.folder import FleetState, ProcessState
from tests.unit.infra.named_metrics import TARGET_LABELS, existing, find_recorded, find_strangers

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "infra" / "prometheus"


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_commands_of_the_page() -> None:
    """Broken: docs/monitoring.md shows commands that do not work; or promtool finds a rule that is wrong, or does not fire."""
    assert shutil.which("promtool"), "promtool is missing. Try: sudo apt-get install prometheus"
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", blocks[0]], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["recording.yml", "alerts.yml"])
def test_metrics_exist(name: str) -> None:
    """Broken: a rule watches a metric or label that nobody shows, and is silent for ever."""
    for rule in rules(name):
        assert not find_strangers(rule["expr"]), rule
        recorded = {one["record"] for one in rules("recording.yml")}
        assert find_recorded(rule["expr"]) <= recorded, rule


def test_every_alert_is_tested_and_explained() -> None:
    """Broken: an alert that never fires, or fires on anything, or one whose page says nothing of what to do."""
    tests = [test for path in FOLDER.glob("*.test.yml") for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    alerts = {rule["alert"] for rule in rules("alerts.yml")}
    explained = set(
        re.findall(r"^\| `(Penstock\w+)` \|", (REPOSITORY / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    )
    assert alerts == fired == explained
    assert alerts - {"PenstockWatchdog"} == silent


def test_severities_and_runbooks() -> None:
    """Broken: an alert reaches nobody, or the page that helps at night is not in it."""
    for rule in rules("alerts.yml"):
        labels = rule["labels"]
        assert labels["severity"] in ("critical", "warning", "none"), rule
        assert labels.get("owner", "receiver") in ("receiver", "sender"), rule
        assert labels["severity"] == "warning" or "owner" not in labels, rule
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{rule['alert']}.md", rule


def test_groups_in_order() -> None:
    """Broken: promtool evaluates a group at any time, and a case fails now and then."""
    files = [yaml.safe_load((FOLDER / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    groups = [group["name"] for file in files for group in file["groups"]]
    for path in FOLDER.glob("*.test.yml"):
        assert yaml.safe_load(path.read_text())["group_eval_order"] == groups, path.name


def test_targets(tmp_path: Path) -> None:
    """Broken: Prometheus is told of no process, or its labels push a metric's own ones aside."""
    processes = [
        ProcessState("ingest-0", "ingest", 2, "127.0.0.1:7001", 0, "ingest-0.log"),
        ProcessState("expel", "expel", None, "", 1, "expel.log"),
    ]
    state = FleetState(
        pid=1,
        management="127.0.0.1:7000",
        broker="log:///data/log",
        pipes="pipes.yaml",
        listen="127.0.0.1:8080",
        observer="127.0.0.1:8081",
        processes=processes,
    )
    path = tmp_path / "fleet.json"
    path.write_bytes(msgspec.json.encode(state))
    done = subprocess.run([sys.executable, FOLDER / "targets.py", path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        {"targets": ["127.0.0.1:7000"], "labels": {"component": "fleet", "process": "fleet"}},
        {"targets": ["127.0.0.1:7001"], "labels": {"component": "ingest", "process": "ingest-0"}},
    ]
    assert not set(TARGET_LABELS) & {label for labels in existing().values() for label in labels}


def test_targets_without_a_fleet(tmp_path: Path) -> None:
    """Broken: a fleet that is down empties the list, and no alert says that its processes are gone."""
    command = [sys.executable, str(FOLDER / "targets.py"), str(tmp_path / "fleet.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert not done.stdout
    assert "Try: " in done.stderr
