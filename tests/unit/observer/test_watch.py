"""Alarms of what changed: each once, none while something is planned."""

from typing import Any

import pytest

from services.core import metrics
from services.core.broker.producer import Producer
from services.observer.ledger.alarm import AlarmWebhook, drift_alarm
from services.observer.ledger.fields import Drift
from services.observer.ledger.flow import Step
from services.observer.ledger.follow import Follower
from services.observer.ledger.planned import Planned, Window
from services.observer.watch import Watch
from tests.support.memory_driver import MemoryDriver
from tests.unit.observer.ledger.stories import PLAIN

HOUR = 3_600_000
DRIFT = Drift(Step("ingest", "flights"), "delay", "nulls", "delay: null in 61%, 2% before")


@pytest.fixture
def watch() -> Watch:
    no_admin: Any = None
    watch = Watch(0.01, AlarmWebhook("http://127.0.0.1:9/", []), lambda pipe: [])
    watch.follower = Follower(PLAIN, no_admin, Producer(MemoryDriver()), watch.on_final)
    return watch


def raised() -> float:
    return float(metrics.LEDGER_DRIFTS.labels("late")._value.get())


def test_a_drift_is_one_alarm(watch: Watch) -> None:
    """Broken: people are woken every five seconds while a field is not as it was, or never again."""
    before = raised()
    for now in range(0, 2 * HOUR, HOUR // 4):
        watch.on_drifts("late", [DRIFT], now)
    assert raised() - before == 1
    watch.on_drifts("late", [], 3 * HOUR)
    watch.on_drifts("late", [DRIFT], 4 * HOUR)
    assert raised() - before == 2
    alarm = drift_alarm("late", DRIFT, 100)
    assert alarm.id == drift_alarm("late", DRIFT, 101).id, "a restart of the observer may raise it again"
    assert alarm.body["text"] == DRIFT.text


def test_a_planned_action_keeps_it_quiet(watch: Watch) -> None:
    """Broken: a deploy that adds a field wakes somebody."""
    assert watch.follower is not None
    watch.follower.planned = Planned((Window("deploy", "late", 0, HOUR // 6, "ci"),))
    before = raised()
    watch.on_drifts("late", [DRIFT], HOUR // 5)
    assert raised() == before
