"""The page's view, made from what the steps told."""

from typing import Any

import msgspec
import pytest

from services.core.broker.producer import Producer
from services.core.control.pauses import Pause
from services.core.lag import LagHistogram
from services.core.ledger.fields import FieldSample
from services.core.ledger.report import LagSet, SparkFigures
from services.core.ledger.reporter import LagTap
from services.observer.follower import Follower
from services.observer.health import Health, find_health, list_pauses
from services.observer.ledger.flow import Flow, PipeFlow
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows
from services.observer.transforms import TransformView
from services.observer.view import CauseView, LossCell, ShardView, View, make_view
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, hear, tell

NOW = START_MS + MINUTE_MS + 10_000
SHARD = ShardView("late.out", "late.ops", 4, None, 0, 0)
CAUSE = CauseView("status 503", 3, START_MS)


def view_of(*reports: Any, flow: Flow = PLAIN) -> View:
    no_admin: Any = None
    follower = Follower(flow, no_admin, Producer(MemoryAppender()), lambda turn: None, now_ms=lambda: NOW)
    for report in reports:
        hear(follower.table, report)
        follower.lags.record(report)
        follower.fields.record(report)
        follower.transforms.record(report)
    follower.fields.refresh()
    return make_view(
        follower,
        NOW,
        0.01,
        lambda pipe, now: Health("degraded", ("because",), None),
        lambda pipe, destination: "active",
        lambda pipe, destination: (CAUSE,),
        lambda pipe: (SHARD,),
    )


def lags(**medians: int) -> tuple[LagSet, ...]:
    taken = []
    for kind, millis in medians.items():
        tap = LagTap(kind, histogram := LagHistogram())
        histogram.observe([millis] * 10)
        taken.append(tap.drain(MINUTE))
    return tuple(lag for lag in taken if lag is not None)


def test_everything_told_is_shown() -> None:
    """Broken: the page leaves out what the observer knows."""
    sample = FieldSample(lambda: START_MS / 1000)
    sample.offer(b'{"delay": 3}')
    lag = LagSet("e2e", MINUTE, 2, 300, {500: 2})
    said = msgspec.structs.replace(
        beat("expel", "late", "ops", at_ms=NOW), breaker="open", lags=(lag,), fields=(sample.drain(last=True),)
    )
    view = view_of(
        accept(range(600)),
        tell("transform", "late", "passed", range(600)),
        tell("expel", "late", "delivered", range(590), destination="ops"),
        tell("expel", "late", "retrying", range(590, 595), destination="ops"),
        said,
        msgspec.structs.replace(
            beat("transform", "late", at_ms=NOW, behind_ms=7),
            lags=lags(lag_out=250),
            spark=SparkFigures(10.0, 500, 20, 4_000, 900, 3, 2_048, 2, "http://127.0.0.1:4040", True),
        ),
    )
    (pipe,) = view.pipes
    assert (pipe.health, pipe.reasons, pipe.per_second) == ("degraded", ("because",), 10.0)
    assert pipe.nodes == ("transform", "expel to ops")
    assert [row.cells for row in pipe.loss] == [(LossCell(0, "final"), LossCell(5, "open"))]
    (ops,) = pipe.destinations
    assert (ops.state, ops.breaker, ops.delivered, ops.retrying, ops.causes) == ("active", "open", 590, 5, (CAUSE,))
    assert pipe.shards == (SHARD,)
    assert [(one.step, one.name, one.mean, one.drift) for one in pipe.fields] == [("expel to ops", "delay", 3.0, "")]
    assert [row.minute for row in pipe.lag] == [MINUTE]
    assert pipe.transform is not None
    lag_out = pipe.transform.lag_p95_ms
    assert lag_out == pytest.approx(250, rel=0.02)
    assert pipe.transform == TransformView(50, 2, 200, 900, lag_out, 7, 3, 2_048, 2, "http://127.0.0.1:4040", True)
    assert [group.service for group in view.groups] == ["ingest", "transform", "expel"]


def test_what_the_retrier_tells_counts_once() -> None:
    """Broken: an event that waits, or that the retrier gave up, stands twice on the page and in the health's reasons."""
    flow = Flow({"raw": PipeFlow(("flights",), False, {"hook": None}, frozenset({"hook"}))})
    reports = (
        accept(range(10)),
        tell("expel", "raw", "delivered", range(4), destination="hook"),
        tell("expel", "raw", "dead", [4], destination="hook"),
        tell("expel", "raw", "retrying", range(5, 10), destination="hook"),
        tell("retrier", "raw", "dead", [5, 6], destination="hook"),
    )
    (pipe,) = view_of(*reports, flow=flow).pipes
    assert pipe.nodes == ("expel to hook", "retrier to hook")
    (hook,) = pipe.destinations
    assert (hook.delivered, hook.retrying, hook.dead) == (4, 3, 3)
    table = Table(flow)
    for report in reports:
        hear(table, report)
    reasons = find_health(table, PlannedWindows(), "raw", NOW, 0.01).reasons
    assert "3 events of the last 15 minutes went to the dead letters" in reasons
    assert "3 events of the last 15 minutes wait for another attempt" in reasons


def test_a_fleet_that_has_said_nothing_has_a_view() -> None:
    """Broken: the page of a fleet that just started is an error."""
    (pipe,) = view_of().pipes
    assert (pipe.loss, pipe.nodes, pipe.fields, pipe.lag) == ((), (), (), ())
    assert [one.breaker for one in pipe.destinations] == ["unknown"]


def test_the_transform_has_a_share_of_its_own() -> None:
    """Broken: the pie says that the time goes into transit, and nobody sees that the transform is slow; or it counts twice."""
    ingest = msgspec.structs.replace(beat("ingest", "flights", at_ms=NOW), lags=lags(ingest_time=10))
    expel = msgspec.structs.replace(beat("expel", "late", "ops", at_ms=NOW), lags=lags(transit_time=500, expel_time=20))
    (pipe,) = view_of(ingest, expel).pipes
    assert pipe.steps == ("ingest", "transit", "expel"), "a transform that was not heard of has no share"
    transform = msgspec.structs.replace(beat("transform", "late", at_ms=NOW), lags=lags(process_time=300))
    (pipe,) = view_of(ingest, expel, transform).pipes
    assert pipe.steps == ("ingest", "transit", "transform", "expel")
    ((*millis,),) = [row.millis for row in pipe.durations]
    assert millis == pytest.approx([10, 200, 300, 20], rel=0.02)


def test_pauses_are_reasons() -> None:
    """Broken: a paused pipe looks healthy, or another pipe's pause is shown."""
    pause = Pause("paused", "operator", "ann", START_MS, "wrong VAT")
    paused = {"late": pause, "late/ops": pause, "other": pause, "other/crm": pause}
    assert list_pauses(paused, "late", ["ops", "crm"]) == [
        ("degraded", "ops is paused"),
        ("degraded", "the transform is paused by ann: wrong VAT"),
    ]
