"""What the watch over a cluster's executors makes of what it sees, on a clock of its own."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from spark.cluster.executors import FRESH_S, WITHOUT_S, ExecutorsGoneError, ExecutorState, ExecutorWatch
from spark.jobs.job import Job
from tests.spark.stored_marks import StoredMarks
from tests.spark.test_state import HOUR, prepared

MASTER = "spark://one:7077"


class Watched:
    """A watch, looked at once a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = ExecutorWatch(MASTER, lambda: self.now)

    def see(self, *ids: str, seconds: float = 0.0, has_work: bool = True, stopped: bool = False) -> None:
        """These executors, and again so many seconds later."""
        for _ in range(int(seconds) + 1):
            self.watch.record(ExecutorState(frozenset(ids), stopped), has_work=has_work)
            self.now += 1.0
        self.now -= 1.0


def test_the_clock_of_batches_stands_still_without_executors() -> None:
    """If this fails, a cluster without workers makes each batch look stuck: the process ends, and events become suspects."""
    watched = Watched()
    watched.see("0", "1", seconds=10)
    assert watched.watch.clock() == 10
    watched.see(seconds=100)
    assert watched.watch.clock() == 10
    watched.now += 1
    watched.see("2", seconds=5)
    assert watched.watch.clock() == 10 + 5


def test_a_java_that_answers_nothing_is_no_lack_of_executors() -> None:
    """If this fails, a Java that hangs while there are no executors hangs for ever: no time limit ends it."""
    watched = Watched()
    watched.see(seconds=3)
    before = watched.watch.clock()
    watched.now += FRESH_S + 100
    assert watched.watch.clock() >= before + 100


def test_waiting_for_executors_is_told_and_ends() -> None:
    """If this fails, a service that a master has forgotten waits for ever, or one without work ends."""
    watched = Watched()
    watched.see(seconds=2 * WITHOUT_S, has_work=False)
    watched.watch.check()
    assert watched.watch.problem() is None
    watched.see(seconds=20)
    watched.watch.check()
    assert watched.watch.problem() == f"{MASTER} has given no executor for 20 s"
    watched.see("0")
    assert watched.watch.problem() is None
    watched.see(seconds=WITHOUT_S + 1)
    with pytest.raises(ExecutorsGoneError, match="has given no executor"):
        watched.watch.check()


def test_an_executor_that_leaves_by_order_is_not_lost() -> None:
    """If this fails, each step of the autoscaler looks like a worker that died."""

    def lost() -> float:
        return REGISTRY.get_sample_value("penstock_transform_executors_lost_total") or 0.0

    watched, before = Watched(), lost()
    watched.see("0", "1", "2")
    watched.watch.expect_end("2")
    watched.see("0", "1", "2", seconds=3)  # it ends its tasks first
    watched.see("0", "1")
    assert lost() == before
    watched.see("0")
    assert lost() == before + 1


def test_an_application_that_was_ended() -> None:
    """If this fails, a driver whose application is gone lives on, ready and useless."""
    watched = Watched()
    watched.see("0")
    watched.watch.check()
    watched.see(stopped=True)
    with pytest.raises(ExecutorsGoneError, match=f"{MASTER} has ended the application"):
        watched.watch.check()


def test_the_number_of_executors_is_shown() -> None:
    """If this fails, the metric or the pipe's report has another number of executors than Spark, or another figure for it."""
    watched = Watched()
    broker: Any = None
    job = Job(
        prepared(HOUR),
        broker,
        StoredMarks(),
        checkpoints="",
        ledger=True,
        on_batch=lambda _: None,
        on_state=lambda _: None,
        executors=watched.watch.count,
        ui="http://127.0.0.1:4040",
    )
    for ids in (("0", "1", "2"), ("0", "2"), ()):
        watched.see(*ids)
        assert REGISTRY.get_sample_value("penstock_transform_executors") == len(ids)
        figures = job._take_figures(10.0, 5)
        assert (figures.executors, figures.ui, figures.events) == (len(ids), "http://127.0.0.1:4040", 5)
