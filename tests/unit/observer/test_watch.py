"""Alarms of what changed: each once, none while something is planned."""

from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.core import metrics
from services.core.broker.producer import Producer
from services.core.security.signing import SigningKeys
from services.observer.alarms import AlarmQueue, AlarmWebhook, drift_alarm
from services.observer.follower import Follower
from services.observer.ledger.finality import FOUND_FOR_MS, Finding
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row, StepRow
from services.observer.ledger.table import Ages, TickResult
from services.observer.ledger_api import format_minute
from services.observer.payload_fields import Drift
from services.observer.planned import PlannedWindows, Window
from services.observer.watch import Watch
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.ledger.stories import MINUTE_MS, PLAIN, START_MS, accept, beat, hear, tell

HOUR = 3_600_000
DRIFT = Drift(Step("ingest", "flights"), "delay", "nulls", "delay: null in 61%, 2% before")


@pytest.fixture
def watch() -> Watch:
    no_admin: Any = None
    watch = Watch(0.01, AlarmWebhook("http://127.0.0.1:9/", SigningKeys()), lambda pipe: [])
    watch.follower = Follower(PLAIN, no_admin, Producer(MemoryAppender()), watch.on_final)
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
    watch.follower.planned = PlannedWindows((Window("deploy", "late", 0, HOUR // 6, "ci"),))
    before = raised()
    watch.on_drifts("late", [DRIFT], HOUR // 5)
    assert raised() == before
    watch.on_drifts("late", [DRIFT], HOUR // 2)
    assert raised() - before == 1, "the field is still not as it was, long after the deploy"


def row(missing: int, why_open: str | None = None) -> Row:
    return Row(
        "late", 5, 100, (StepRow("expel", "ops", 100, {}, missing, why_open),), missing, 0, why_open, lost=missing
    )


def test_a_loss_found_later_is_excused_by_what_was_planned_then(watch: Watch) -> None:
    """Broken: a deploy of this morning hides what the retrier lost this evening, or a deploy of this evening does not."""
    follower = watch.follower
    assert follower is not None
    now = follower.now_ms()
    worse = TickResult([Finding(row(50), "ops", row(0))], [], [])
    for planned, alarms in ((5 * 60_000, 1), (now - HOUR, 1), (now - FOUND_FOR_MS // 2, 0)):
        follower.planned, follower.untold = (
            PlannedWindows((Window("deploy", "late", planned, planned + 60_000, "ci"),)),
            AlarmQueue(),
        )
        watch.on_final(worse)
        assert len(follower.untold.all()) == alarms


def test_what_was_found_lately_is_a_series(watch: Watch) -> None:
    """Broken: on a dashboard nothing is lost, for the minute that lost it is old."""
    table = watch.follower.table
    hear(table, accept(range(10)))
    hear(table, tell("transform", "late", "passed", range(9)))
    hear(table, tell("expel", "late", "delivered", range(9), destination="ops"))
    now = START_MS + HOUR
    for step in PLAIN.steps("late"):
        hear(table, beat(step.node, step.pipe, step.destination, at_ms=now))
    for at, loss in ((now, 0.1), (now + FOUND_FOR_MS, 0.0)):
        table.tick(at)
        watch.measure(at)
        assert REGISTRY.get_sample_value("penstock_ledger_found_loss_ratio", {"pipe": "late"}) == loss


def test_the_log_names_the_minute_and_the_whole_command(watch: Watch) -> None:
    hear(watch.follower.table, accept(range(10), at_ms=START_MS))
    at_ms = START_MS + MINUTE_MS + Ages().final
    for beating in (beat("ingest", "flights", at_ms=at_ms), beat("transform", "late", at_ms=at_ms)):
        hear(watch.follower.table, beating)
    with capture_logs() as logs:
        watch.on_final(watch.follower.table.tick(at_ms))
    (line,) = [one for one in logs if one["event"] == "loss"]
    minute = format_minute(START_MS // MINUTE_MS)
    assert (line["minute"], line["hint"]) == (minute, f"Try: penstock loss explain late {minute}")
