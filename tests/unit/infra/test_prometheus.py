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


def discover(file: str, targets: list[dict[str, str]], folder: Path) -> list[dict[str, str] | None]:
    """The labels of each target after the file's relabelling, without those of Prometheus; None when it is not scraped."""
    job = yaml.safe_load((FOLDER / file).read_text())["scrape_configs"][0]
    listed, config = folder / "targets.json", folder / "prometheus.yml"
    listed.write_text(json.dumps([{"targets": [f"10.0.0.{at}:9100"], "labels": one} for at, one in enumerate(targets)]))
    found = {
        "job_name": job["job_name"],
        "file_sd_configs": [{"files": [str(listed)]}],
        "relabel_configs": job["relabel_configs"],
    }
    config.write_text(yaml.safe_dump({"scrape_configs": [found]}))
    command = ["promtool", "check", "service-discovery", "--timeout=2s", str(config), "penstock"]
    results = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    by_address = {one["discoveredLabels"]["__address__"]: one.get("labels") or {} for one in results}
    kept = [by_address[f"10.0.0.{at}:9100"] for at in range(len(targets))]
    return [{name: value for name, value in one.items() if not name.startswith("__")} or None for one in kept]


def test_labels_of_pods(tmp_path: Path) -> None:
    """Broken: on Kubernetes the alerts do not know the component of a process, or each pod counts once for each of its ports."""
    targets: list[dict[str, str]] = []
    expected: list[dict[str, str] | None] = []
    files = [path for path in (REPOSITORY / "infra" / "kubernetes").rglob("*.yaml") if path.parent.name != "config"]
    for deployment in (one for file in files for one in yaml.safe_load_all(file.read_text())):
        if deployment["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = deployment["spec"]["template"]
        meta = {f"label_{name}": value for name, value in template["metadata"]["labels"].items()}
        meta |= {f"annotation_{name}": value for name, value in template["metadata"]["annotations"].items()}
        name = deployment["metadata"]["name"]
        for port in template["spec"]["containers"][0]["ports"]:
            more = {"name": f"{name}-0", "phase": "Running", "container_port_name": port["name"]}
            labels = {re.sub(r"\W", "_", f"__meta_kubernetes_pod_{key}"): value for key, value in (meta | more).items()}
            wanted = {"component": name.removeprefix("global-"), "process": f"{name}-0", "job": "penstock"}
            wanted["instance"] = f"10.0.0.{len(targets)}:9100"
            targets.append(labels)
            expected.append(wanted if port["name"] == "management" else None)
    targets.append({**targets[-1], "__meta_kubernetes_pod_phase": "Failed"})
    assert len({one["component"] for one in expected if one}) == 8
    assert discover("prometheus.kubernetes.yml", targets, tmp_path) == [*expected, None]


def test_labels_of_instances(tmp_path: Path) -> None:
    """Broken: on EC2 the alerts do not know the component of a process, or Prometheus searches for tags that no stack sets; or
    the core nodes of EMR, which have no management port, count as processes that are down."""
    stack = (REPOSITORY / "infra" / "aws" / "service.yaml").read_text()
    job = yaml.safe_load((FOLDER / "prometheus.ec2.yml").read_text())["scrape_configs"][0]["ec2_sd_configs"][0]
    tags = [one["name"].removeprefix("tag:") for one in job["filters"] if one["name"].startswith("tag:")]
    assert tags == ["penstock:fleet"]
    assert all(f"Key: {tag}, " in stack for tag in [*tags, "penstock:service"])
    labels = {"__meta_ec2_tag_penstock_service": "global-retrier", "__meta_ec2_instance_id": "i-1"}
    expected = {"job": "penstock", "instance": "10.0.0.0:9100", "component": "retrier", "process": "i-1"}
    emr = (REPOSITORY / "infra" / "aws" / "emr.yaml").read_text()
    assert all(f"Key: {tag}, " in emr for tag in [*tags, "penstock:service"])
    roles = [{**labels, "__meta_ec2_tag_aws_elasticmapreduce_instance_group_role": role} for role in ("MASTER", "CORE")]
    primary = {**expected, "instance": "10.0.0.1:9100"}
    assert discover("prometheus.ec2.yml", [labels, *roles], tmp_path) == [expected, primary, None]


def matches(matchers: list[str], labels: dict[str, str]) -> bool:
    """As Alertmanager: all of them hold, a regular expression for the whole value, and a missing label is an empty one."""
    for matcher in matchers:
        form = re.fullmatch(r'(\w+) (=|=~) "([^"]*)"', matcher)
        assert form is not None, matcher
        value = labels.get(form[1], "")
        if not (value == form[3] if form[2] == "=" else re.fullmatch(form[3], value)):
            return False
    return True


def is_muted(target: dict[str, str], source: dict[str, str], inhibitions: list[dict[str, Any]]) -> bool:
    """Whether one of the rules mutes the target while the source fires."""
    return any(
        matches(rule["source_matchers"], source)
        and matches(rule["target_matchers"], target)
        and all(source.get(name, "") == target.get(name, "") for name in rule.get("equal", ()))
        for rule in inhibitions
    )


MUTES = {
    "NotScraped": ((), ("ComponentDown", "ProcessDown", "CrashLoop", "ProcessRestarts", "NotReady")),
    "CrashLoop": (("component",), ("ComponentDown", "ProcessDown", "ProcessRestarts")),
    "ComponentDown": (("component",), ("ProcessDown", "ProcessRestarts", "NotReady")),
    "IngestRefuses": (("stream",), ("IngestNotReady",)),
    "DiskFull": (("folder", "host"), ("DiskFills",)),
    "EveryDestinationDown": ((), ("DestinationDown",)),
    "CertificateExpired": (("name", "key"), ("CertificateExpires",)),
    "StreamTableStuck": (("stream",), ("StreamTableBehind",)),
}
"""By the alert that explains others: the labels that both have with one value, and the others."""


def test_what_is_muted() -> None:
    """Broken: an alert is muted because of another component, stream or disk; a label in `equal` is in none of the two, so that
    everything is muted; a page of its own reason is muted; or the consequence pages beside the cause."""
    inhibitions = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())["inhibit_rules"]
    fired: dict[str, list[dict[str, str]]] = {}
    for path in FOLDER.glob("*.test.yml"):  # promtool has proved these labels to be what our rules give
        for case in (
            one for test in yaml.safe_load(path.read_text())["tests"] for one in test.get("alert_rule_test", ())
        ):
            name = case["alertname"]
            fired.setdefault(name, []).extend({"alertname": name, **one["exp_labels"]} for one in case["exp_alerts"])
    assert fired.keys() == {rule["alert"] for rule in rules("alerts.yml")}
    for source in (one for examples in fired.values() for one in examples):
        scope, names = MUTES.get(source["alertname"].removeprefix("Penstock"), ((), ()))
        for target in (one for examples in fired.values() for one in examples):
            if target["alertname"].removeprefix("Penstock") not in names:
                assert not is_muted(target, source, inhibitions), (target, source)
                continue
            assert source.keys() & target.keys() >= set(scope), (target, source)
            same = {label: source[label] for label in scope}
            assert is_muted(target | same, source, inhibitions), (target, source)
            for label in scope:
                assert not is_muted(target | same | {label: "another"}, source, inhibitions), (target, source)


def test_alertmanager() -> None:
    """Broken: an alert reaches nobody; or a rule mutes an alert that does not exist any more, or a page because of a warning."""
    config = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())
    assert config.keys() == {"route", "receivers", "inhibit_rules"}
    receivers = {one["name"] for one in config["receivers"]}
    assert {config["route"]["receiver"], *(one["receiver"] for one in config["route"]["routes"])} == receivers
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules("alerts.yml")}
    for rule in config["inhibit_rules"]:
        assert rule.keys() <= {"source_matchers", "target_matchers", "equal"}, "Alertmanager refuses other keys"
        sources, targets = (
            {name for name in severities if matches(rule[f"{side}_matchers"], {"alertname": name})}
            for side in ("source", "target")
        )
        named = str(rule["target_matchers"]).count("|") + 1
        assert (len(sources), len(targets)) == (1, named), rule
        if any(severities[one] == "warning" for one in sources):
            assert all(severities[one] == "warning" for one in targets), rule


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
