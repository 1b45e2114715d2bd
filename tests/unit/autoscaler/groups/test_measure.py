"""From metrics to figures: CPU across restarts, lag without the lanes that fail, pressure."""

import time
from typing import Any

import pytest

from services.autoscaler.groups import meter
from services.autoscaler.groups.drivers.contract import Group, Member
from services.autoscaler.groups.meter import Meter, failing_lanes, instance, oldest_lag, pressure
from services.core.process.scrape import Sample

MEMBER = Member("expel-1", "127.0.0.1:1", False)
GOOD, BAD = ("p", "good"), ("p", "bad")


def sample(at: float = 0.0, **values: float) -> Sample:
    names = {"cpu": "process_cpu_seconds_total", "started": "process_start_time_seconds"}
    return Sample(at, {(names[name], frozenset()): value for name, value in values.items()})


def labelled(*values: tuple[str, dict[str, Any], float]) -> Sample:
    return Sample(0.0, {(name, frozenset(labels.items())): value for name, labels, value in values})


def test_cpu_is_a_rate_over_one_run_of_a_process() -> None:
    """Broken: a restart looks like idleness, or like load, and moves the group."""
    before = sample(10.0, cpu=100.0, started=1000.0)
    assert instance(MEMBER, sample(20.0, cpu=104.0, started=1000.0), before).cpu == pytest.approx(0.4)
    assert instance(MEMBER, sample(20.0, cpu=1.0, started=1015.0), before).cpu is None
    assert instance(MEMBER, sample(20.0, cpu=104.0, started=1000.0), None).cpu is None
    silent = instance(MEMBER, None, before)
    assert (silent.ready, silent.age, silent.cpu) == (False, None, None)


async def test_a_clock_that_is_set_back_makes_nobody_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after a step of the clock no instance is warm, and no group grows for as long as the step was."""
    now, spoken, measured = 5_000.0, dict[str, Sample](), Meter()

    async def scrape(addresses: list[str]) -> Sample:
        return spoken[addresses[0]]

    monkeypatch.setattr(meter, "scrape", scrape)
    monkeypatch.setattr(time, "time", lambda: now)

    async def age(at: float, started: float) -> float | None:
        spoken["127.0.0.1:1"] = sample(at, cpu=at, started=started)
        return (await measured.measure(Group(1, (MEMBER,)), None, None)).instances[0].age

    assert await age(100.0, 4_000.0) == 1_000.0
    now -= 3_600.0
    assert await age(160.0, 4_000.0) == 60.0
    assert await age(220.0, 4_000.0) == 120.0
    assert await age(230.0, 5_000.0) == 0.0, "another process"


def lags(metric: str, good: float, bad: float) -> list[tuple[str, dict[str, Any], float]]:
    rows = [("p.good", good), ("p.bad", bad), ("penstock.retrier", 7200.0)]
    return [(metric, {"group": group, "topic": "t", "partition": "0"}, value) for group, value in rows]


def test_lag_without_failing_lanes_and_without_the_retrier() -> None:
    """Broken: a dead webhook, or events that wait on purpose, are answered with machines."""
    found = labelled(*lags("penstock_broker_lag_seconds", 12.0, 900.0))
    assert oldest_lag([found], frozenset({BAD})) == 12.0
    assert oldest_lag([found], frozenset()) == 900.0
    assert oldest_lag([labelled()], frozenset()) is None


def attempts(delivered: float, failed: float) -> Sample:
    name, lane = "penstock_expel_attempts_total", {"pipe": "p", "destination": "bad"}
    rows = [("delivered", delivered), ("http_503", failed)]
    return labelled(*[(name, {**lane, "outcome": outcome}, value) for outcome, value in rows])


def test_a_receiver_that_fails_often_is_failing_before_its_breaker_opens() -> None:
    """Broken: the group grows against a receiver that answers every second request with 503."""
    assert failing_lanes([(attempts(150, 50), attempts(110, 10))]) == {BAD}
    assert failing_lanes([(attempts(150, 12), attempts(110, 10))]) == frozenset()
    assert failing_lanes([(attempts(1, 3), attempts(0, 0))]) == frozenset()


def flow(records: float, delivered: float) -> Sample:
    lane = {"pipe": "p", "destination": "good"}
    lag = lags("penstock_broker_lag_records", records, 1e6)
    return labelled(*lag, ("penstock_expel_events_delivered_total", lane, delivered))


def test_pressure_is_what_came_in_per_event_delivered() -> None:
    """Broken: a saturated CPU says "one core", whether twice or ten times as much comes in."""
    assert pressure([(flow(2500, 1500), flow(500, 1000))], frozenset({BAD})) == pytest.approx(5.0)
    assert pressure([(flow(500, 1500), flow(2500, 1000))], frozenset({BAD})) == 1.0
    assert pressure([(flow(1e6, 1001), flow(0, 1000))], frozenset({BAD})) == 10.0
    assert pressure([], frozenset()) == 1.0
