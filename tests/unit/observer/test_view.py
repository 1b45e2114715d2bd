"""The page's view, made from what the steps told."""

from typing import Any

import msgspec

from services.core.broker.producer import Producer
from services.core.ledger.fields import FieldSample
from services.core.ledger.report import LagSet
from services.observer.health import Health
from services.observer.ledger.follow import Follower
from services.observer.page.model import Cause, LossCell, ShardView, View
from services.observer.view import make_view
from tests.support.memory_driver import MemoryDriver
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, tell

NOW = START_MS + MINUTE_MS + 10_000
SHARD = ShardView("late.out", "late.ops", 4, None, 0, 0)
CAUSE = Cause("status 503", 3, START_MS)


def view_of(*reports: Any) -> View:
    no_admin: Any = None
    follower = Follower(PLAIN, no_admin, Producer(MemoryDriver()), lambda rows: None, now_ms=lambda: NOW)
    for report in reports:
        follower.table.apply(report)
        follower.lags.hear(report)
        follower.fields.hear(report)
    return make_view(
        follower,
        NOW,
        0.01,
        lambda pipe, now: Health("degraded", ("because",), None),
        lambda pipe, destination: "active",
        lambda pipe, destination: (CAUSE,),
        lambda pipe: (SHARD,),
    )


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
    assert [group.service for group in view.groups] == ["ingest", "transform", "expel"]


def test_a_fleet_that_has_said_nothing_has_a_view() -> None:
    """Broken: the page of a fleet that just started is an error."""
    (pipe,) = view_of().pipes
    assert (pipe.loss, pipe.nodes, pipe.fields, pipe.lag) == ((), (), (), ())
    assert [one.breaker for one in pipe.destinations] == ["unknown"]
