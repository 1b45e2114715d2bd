"""Changes of the facts of a healthy fleet, to put together: counters, log lines, reports of the autoscaler."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from services.core.group_report import GroupReport
from services.core.process.scrape import Sample
from services.fleet.doctor.checks import CHECKS
from services.fleet.doctor.diagnosis import Diagnosis, diagnose
from services.fleet.doctor.facts import Facts, Instance
from tests.unit.fleet.doctor.fleet_facts import BILLING, NOW, count, healthy, instance, line, make_instance

Change = Callable[[Facts], object]


def broken(*changes: Change) -> Diagnosis:
    """What all checks find at a healthy fleet that was changed so."""
    facts = healthy()
    for change in changes:
        change(facts)
    return diagnose(facts, CHECKS)


def add_autoscaler(facts: Facts) -> Instance:
    """One that works."""
    one = Instance("autoscaler-1", "autoscaler", "127.0.0.1:7009", 110, 0, 0, Path("/srv/data/logs/autoscaler-1.log"))
    one.answer, one.status, one.age = "ready", "sleeping", 5000.0
    one.first, one.second = Sample(0.0), Sample(5.0)
    facts.instances.append(one)
    return one


def report(**changes: object) -> GroupReport:
    """Of an autoscaler that works."""
    usual = GroupReport("expel", int(NOW * 1000), 1, 1, "hold", "steady", "CPU 0.4 an instance", 1)
    return msgspec.structs.replace(usual, **changes)


def decisions(reason: str, number: int) -> Change:
    def change(facts: Facts) -> None:
        lines = [line("group_decision", "info", NOW - 15 * at, group="expel", reason=reason) for at in range(number)]
        add_autoscaler(facts).lines = tuple(reversed(lines))

    return change


def reports(**changes: object) -> Change:
    def change(facts: Facts) -> None:
        facts.observer.groups = (report(**changes),)

    return change


def lose_schema_store(facts: Facts) -> None:
    """Of a registry, which a fleet need not have."""
    one = make_instance("ingest")
    one.name, one.service = "registry-1", "registry"
    count(one, "penstock_registry_store_up", {}, 0, 0)
    one.lines = (line("registry_store_unavailable", error="AccessDenied"),)
    facts.instances.append(one)


def counted(service: str, metric: str, labels: dict[str, str], *values: float, **log: object) -> Change:
    """A counter of a service in both readings. log: a line with `event`, and `age` in seconds."""

    def change(facts: Facts) -> None:
        one = add_autoscaler(facts) if service == "autoscaler" else instance(facts, service)
        count(one, metric, labels, values[0], values[-1])
        if log:
            fields = {name: value for name, value in log.items() if name not in ("event", "age", "times")}
            times = int(str(log.get("times", 1)))
            one.lines = (line(str(log["event"]), "warning", NOW - float(str(log["age"])), **fields),) * times

    return change


def starts(service: str, change: Change, age: float = 20.0) -> Change:
    def both(facts: Facts) -> None:
        change(facts)
        for one in facts.of(service):
            one.age = age

    return both


def elsewhere(change: Change) -> Change:
    """A fleet whose logs and processes are on other machines, started long ago."""

    def both(facts: Facts) -> None:
        change(facts)
        for one in facts.instances:
            one.log, one.age, one.lines = None, None, ()
            count(one, "process_start_time_seconds", {}, NOW - 9000, NOW - 9000)

    return both


def unserve(facts: Facts) -> None:
    for sample in (instance(facts, "expel").first, instance(facts, "expel").second):
        assert sample is not None
        del sample.values["penstock_expel_lane_up", frozenset(BILLING.items())]


def unserve_unready(facts: Facts) -> None:
    unserve(facts)
    instance(facts, "expel").answer, instance(facts, "expel").reason = "not ready", "it joins its groups"


def fail_everywhere(outcome: str, *lanes: dict[str, str]) -> Change:
    def change(facts: Facts) -> None:
        for lane in lanes:
            count(instance(facts, "expel"), "penstock_expel_breaker_state", lane, 2.0, 2.0)
            count(instance(facts, "expel"), "penstock_expel_attempts_total", {**lane, "outcome": outcome}, 5.0, 9.0)

    return change


def deliver(facts: Facts) -> None:
    labels = {**BILLING, "outcome": "delivered"}
    count(instance(facts, "expel"), "penstock_expel_attempts_total", labels, 5.0, 5.0)


def all_of(*changes: Change) -> Change:
    def change(facts: Facts) -> None:
        for one in changes:
            one(facts)

    return change


def due(age: float, before: float | None = None) -> Change:
    at = NOW - age
    metric = "penstock_retrier_next_due_timestamp_seconds"
    return counted("retrier", metric, {}, at if before is None else before, at)


def silent(facts: Facts) -> None:
    facts.observer.pipes = ({"pipe": "shop", "health": "unstable", "reasons": ["expel → crm is silent"]},)
    count(instance(facts, "expel"), "penstock_ledger_reports_total", {"node": "expel"}, 40.0, 40.0)


def drift(facts: Facts) -> None:
    facts.observer.drifts = (("shop", "ingest amount: missing in 40 % of the events"),)


def add_expel(facts: Facts) -> None:
    other = Instance("expel-2", "expel", "127.0.0.1:7010", 111, 0, 0)
    other.answer, other.status, other.age = "ready", "sleeping", 5000.0
    facts.instances.append(other)
