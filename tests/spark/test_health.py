"""What the transform service says about itself: readiness, metrics, giving up."""

import asyncio
from typing import cast
from unittest.mock import MagicMock

import aiohttp
from prometheus_client import REGISTRY
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from services.core.process.management import serve_management
from spark.batch_report import BatchReport
from spark.brokers.contract import Measurement
from spark.health import (
    ANSWER,
    FIRST_PART,
    MAX_FAILURES,
    OLD_JAVA_S,
    PART,
    STANDBY_S,
    STARTING,
    PipesHealth,
    QueryState,
    Watchdog,
)
from spark.jobs.query import ANSWER_S, BatchHandler, MicroBatchQuery, wait_for_end


def test_ready_when_every_query_has_worked() -> None:
    """If this fails, work is sent to a transform that does not run, or a query that keeps failing looks ready."""
    health = PipesHealth(["a", "b"])
    assert health.ready() == "a: starting; b: starting"
    health.record_phase("Java and Spark start")
    health.record_phase("reads the first batch", "a")
    assert health.ready() == "a: starting (reads the first batch); b: starting (Java and Spark start)"
    health.record_waiting("the broker cannot be opened: refused")
    assert health.ready() == "a: the broker cannot be opened: refused; b: the broker cannot be opened: refused"
    health.record_waiting(STARTING)
    health.record_state(QueryState("a", None, 0))
    assert health.ready() == "b: starting (Java and Spark start)"
    health.record_state(QueryState("b", None, 0))
    assert health.ready() is None
    for failures in range(1, MAX_FAILURES + 1):
        health.record_state(QueryState("b", "TransformBroken: it fails", failures))
        assert health.ready() == "b: TransformBroken: it fails"
    assert not health.gave_up.is_set()
    health.record_state(QueryState("b", None, 0))
    assert health.ready() is None


def test_gives_up_when_no_query_can_be_kept_running() -> None:
    """If this fails, a process whose queries are all dead lives on, and nobody starts another."""
    health = PipesHealth(["a", "b"])
    health.record_state(QueryState("a", "broken", MAX_FAILURES))
    assert not health.gave_up.is_set()
    health.record_state(QueryState("b", "broken", MAX_FAILURES))
    assert health.gave_up.is_set()


def test_one_pipe_gets_a_fresh_java() -> None:
    """If this fails, a pipe whose Spark is spoilt fails for ever because another pipe works; or each failure of one pipe, which
    another Java would not mend, stops the others every few minutes."""
    for spoilt, age_s, gave_up in ((True, 60.0, False), (False, OLD_JAVA_S + 1, False), (True, OLD_JAVA_S + 1, True)):
        clock = iter([0.0, *[age_s] * 100])
        health = PipesHealth(["a", "b"], clock=clock.__next__)
        health.record_state(QueryState("a", None, 0))
        for failures in range(1, MAX_FAILURES):
            health.record_state(QueryState("b", "OptionalDataException", failures, spoilt))
            assert not health.gave_up.is_set()
        health.record_state(QueryState("b", "OptionalDataException", MAX_FAILURES, spoilt))
        assert health.gave_up.is_set() == gave_up


def test_a_process_that_stands_by_is_ready_for_a_while() -> None:
    """If this fails, an update waits for ever for a process that waits for the former one; or a process that never gets to work
    looks healthy for ever."""
    now = [0.0]
    health = PipesHealth(["p"], clock=lambda: now[0])
    waiting = QueryState("p", None, 0, standby="checkpoint /c/p is in use by process 7")
    health.record_state(waiting)
    now[0] = STANDBY_S
    health.record_state(waiting)
    assert (health.ready(), health.note()) == (None, "p: checkpoint /c/p is in use by process 7")
    assert REGISTRY.get_sample_value("penstock_transform_query_up", {"pipe": "p"}) == 0.0
    now[0] += 1
    assert health.ready() == "p: it has stood by for 601 s, checkpoint /c/p is in use by process 7"
    health.record_state(QueryState("p", None, 0))
    assert (health.ready(), health.note()) == (None, None)


def test_backlog_is_shown_by_partition() -> None:
    """If this fails, `penstock status` cannot say how far a transform is behind."""
    health = PipesHealth(["behind"], wall_clock=lambda: 100.0)
    health.record_backlog("behind", Measurement({("s", 0): 5, ("s", 1): 0}, 40_000))

    def value(what: str, partition: str) -> float | None:
        labels = {"group": "behind", "topic": "s", "partition": partition}
        return REGISTRY.get_sample_value(f"penstock_broker_lag_{what}", labels)

    assert (value("records", "0"), value("records", "1")) == (5.0, 0.0)
    assert (value("seconds", "0"), value("seconds", "1")) == (60.0, 0.0)
    health.record_backlog("behind", Measurement({("s", 0): 5}, None))
    assert value("seconds", "0") == 0.0, "an unknown age is not late"


def test_a_paused_pipe_is_healthy() -> None:
    """If this fails, a pause of a pipe makes the service unready or counts as a failure, or hides that the others are broken."""
    health = PipesHealth(["a", "held"])
    health.record_state(QueryState("a", None, 0))
    health.record_state(QueryState("held", None, 0, paused="paused by ann: wrong VAT"))
    assert health.ready() is None
    assert health.note() == "held: paused by ann: wrong VAT"

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"penstock_transform_{name}", {"pipe": "held"})

    assert (value("query_up"), value("paused"), value("query_failures_total")) == (0.0, 1.0, None)
    health.record_state(QueryState("a", "broken", MAX_FAILURES))
    assert health.gave_up.is_set()
    health.record_state(QueryState("held", "starting", 0))
    assert (health.note(), value("paused"), value("query_failures_total")) == (None, 0.0, None)


class SlowJava:
    """A query whose Java answers only after some seconds. seen: what the watchdog says before it does."""

    def __init__(self, watchdog: Watchdog, clock: list[float], seconds: float) -> None:
        self._watchdog, self._clock, self._seconds = watchdog, clock, seconds
        self.seen: str | None = None

    def awaitTermination(self, _seconds: float) -> bool:  # noqa: N802 - Spark's name
        self._clock[0] += self._seconds
        self.seen = self._watchdog.stuck()
        return False


def test_java_that_does_not_answer_is_stuck() -> None:
    """If this fails, a Java that hangs between two batches stops a pipe for ever, and nobody notices; or a long batch, during
    which Java answers, ends the process before its limit."""
    for limit in (6.0, 300.0, 3600.0):
        clock = [0.0]
        watchdog = Watchdog(limit, clock=lambda clock=clock: clock[0])  # type: ignore[misc]
        for seconds, stuck in (
            (ANSWER_S - 1, None),
            (ANSWER_S + 1, "the answer of Java has made no progress for 121 s"),
        ):
            java = SlowJava(watchdog, clock, seconds)
            wait_for_end(cast(StreamingQuery, java), watchdog)
            assert java.seen == stuck
            assert watchdog.stuck() is None


def test_a_source_that_does_not_answer_is_stuck() -> None:
    """If this fails, a disk or a network mount that hangs while Spark asks for new events stops a pipe for ever, and it looks
    ready; or a pipe that looks for new events again and again does not."""
    clock = [0.0]
    watchdog = Watchdog(100.0, clock=lambda: clock[0])
    query, running = MagicMock(watchdog=watchdog, figures=None), MagicMock(isActive=True)
    running.awaitTermination.return_value = False
    source = MagicMock()
    source.writeStream.foreachBatch().queryName().option().trigger().start.return_value = running

    class Handler(BatchHandler):
        def process(self, raw: DataFrame, batch_id: int) -> BatchReport:
            clock[0] += 50
            started.wait()  # a long batch
            assert watchdog.slow() == "batch 0 has made no progress for 50 s"
            return BatchReport("p")

    handler = Handler(query)
    started = MicroBatchQuery(query, source, handler, name="p", interval=1.0)
    for is_active in (True, False) * 20:
        running.status = {"isTriggerActive": is_active}
        started.wait()
        clock[0] += 10
        assert watchdog.slow() is None
    running.status = {"isTriggerActive": True}
    started.wait()
    handler(MagicMock(), 0)
    started.wait()
    assert (watchdog.slow(), watchdog.at_work) == (None, False)
    clock[0] += 101
    started.wait()
    assert watchdog.stuck() == "the search for new events has made no progress for 101 s"
    started.stop(lambda: False)
    assert watchdog.stuck() is None


def test_the_first_part_of_a_process_has_more_time() -> None:
    """If this fails, a busy machine on which Java and Python load for more than half a minute ends process after process; or an
    event that hangs holds each process for the time of a whole batch."""
    now = 0.0
    watchdog = Watchdog(300.0, clock=lambda: now)
    watchdog.begin("p", "the first batch")
    for trial, limit in enumerate((FIRST_PART * 300, PART * 300, PART * 300)):
        watchdog.begin("p", f"trial {trial}", PART)
        now += limit
        assert watchdog.stuck() is None
        now += 1
        assert watchdog.stuck() is not None
    watchdog.end("p")


async def test_a_stuck_batch_is_no_sign_of_life() -> None:
    """If this fails, a platform keeps a transform whose batch never ends, or ends one whose batch only takes long."""
    clock = [0.0]
    watchdog, health = Watchdog(100.0, clock=lambda: clock[0]), PipesHealth(["p"])
    health.add_watchdog("p", watchdog)
    watchdog.begin("p", "batch 3")
    async with (
        serve_management("127.0.0.1:0", health.ready, why_not_alive=health.stuck) as address,
        aiohttp.ClientSession() as session,
    ):

        async def ask() -> tuple[int, str]:
            async with asyncio.timeout(300), session.get(f"http://{address}/healthz") as answer:
                return answer.status, await answer.text()

        clock[0] = 99.0
        assert await ask() == (200, "ok\n")
        clock[0] = 101.0
        assert await ask() == (503, "p: batch 3 has made no progress for 101 s\n")
        watchdog.end("p")
        assert await ask() == (200, "ok\n")


def test_a_query_that_only_asks_java_has_no_work() -> None:
    """If this fails, an idle pipe on a cluster that gave it no executor yet counts as waiting for one, and its process ends."""
    health, watchdog = PipesHealth(["p"]), Watchdog(300.0)
    health.add_watchdog("p", watchdog)
    with watchdog.watching(ANSWER, "the answer of Java"):
        assert not health.has_work()
        with watchdog.watching("p:1", "batch 1"):
            assert health.has_work()
    assert not health.has_work()
