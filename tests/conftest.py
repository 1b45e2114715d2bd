"""What all tests share: the event loop of production, an alarm for code that blocks it, one real Kafka cluster."""

import asyncio
import gc
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from services.core.aws_emulator import CREDENTIALS, AwsEmulator
from services.core.jvm.kafka import KafkaCluster
from tests.support import cpu_budget, fault_table, second_try, turns
from tests.support.kafka import wait_until_all_are_known
from tests.support.kinesis_limits import KinesisLimits
from tests.support.workers import SharedWorkers, sort_for_workers

START_S = 600.0
_UNIT_TIMEOUT_S = 600.0
"""A unit test that hangs ends after this, not after the time-out for tests on real clusters."""
_CLUSTER = pytest.StashKey[KafkaCluster]()

# A slow machine is no failure: no time limit of an example, and none of making it.
settings.register_profile(
    "no clock",
    parent=settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("no clock")

# Most tests end before the full compiler pays, also those that start the service as a process.
os.environ.setdefault("PENSTOCK_TRANSFORM_JAVA_COMPILER", "quick")
turns.begin()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on uvloop, as the services do."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: nobody looks for garbage in these millions of objects, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs Kafka or the emulator, and what may be tried twice."""
    for item in items:
        second_try.allow_second_try(item)
        if item.nodeid.startswith("tests/unit/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_UNIT_TIMEOUT_S))
        if "kafka_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("kafka")
        if {"kinesis_emulator", "kinesis_limits"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("kinesis")
    turns.leave_out(config, items)
    sort_for_workers(config, items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedWorkers:
    """Who runs what under `pytest -n`."""
    return SharedWorkers(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """In a run with several workers, a failure is printed when it happens: a run that is ended early has said what failed."""
    if config.getoption("dist", "no") != "no":
        config.pluginmanager.register(_FailuresAtOnce(config))


_LAST_CHARACTERS = 4000
"""Of each captured output of a failed test."""


class _FailuresAtOnce:
    """Prints each failed test of a run with workers at once, and each failed first try. The summary prints failures again."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and report.outcome in ("failed", "rerun"):
            reporter.write_line("")
            reporter.section(f"{report.outcome} in {report.when}: {report.nodeid}", "_", red=report.failed)
            reporter.write_line(report.longreprtext)
            for name, text in report.sections:
                reporter.section(name, "-")
                reporter.write_line(text[-_LAST_CHARACTERS:])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a person should see beside passed and failed."""
    fault_table.pytest_terminal_summary(terminalreporter)
    cpu_budget.pytest_terminal_summary(terminalreporter)
    turns.pytest_terminal_summary(terminalreporter)
    second_try.pytest_terminal_summary(terminalreporter)


@pytest.fixture(scope="session", autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    """Project code that blocks a running event loop (sleep, file, blocking socket) raises BlockingError."""
    with blockbuster_ctx(["services", "spark"]) as found:
        # The end of a loop waits for its threads. That of uvloop joins them in its own thread.
        for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            found.functions[name].can_block_in("asyncio/runners.py", "close")
        yield


@pytest.fixture(scope="session")
def kafka_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three real brokers (RF 3, min ISR 2), started once a session. Without Java or jars the test fails.

    A test may kill brokers: all are up again before the next one. Its topics and groups need names of their own
    (tests/support/kafka.py). The cluster's methods block: use asyncio.to_thread in async tests.
    """
    cluster = KafkaCluster(tmp_path_factory.mktemp("kafka"))
    try:
        cluster.start(timeout_s=START_S)
        asyncio.run(wait_until_all_are_known(cluster.bootstrap))
        request.config.stash[_CLUSTER] = cluster
        yield cluster
    finally:
        cluster.stop(grace_s=0)


@pytest.fixture(scope="session")
def kinesis_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsEmulator]:
    """Kinesis and DynamoDB in memory, started once a session, with credentials for them in the environment.

    Streams and groups need names of their own. Without Node or the emulator the test fails.
    """
    with pytest.MonkeyPatch.context() as environment, AwsEmulator(tmp_path_factory.mktemp("aws")) as emulator:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield emulator


@pytest.fixture(scope="session")
def kinesis_limits(kinesis_emulator: AwsEmulator) -> Iterator[KinesisLimits]:
    """The emulator's Kinesis behind the service's limits, served by a thread of its own. A test resets its `faults`."""
    limits = KinesisLimits(kinesis_emulator.endpoint)
    with limits.serve_in_thread():
        yield limits


@pytest.fixture(autouse=True)
def _whole_cluster_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    cluster = request.config.stash.get(_CLUSTER, None)
    if cluster is not None and request.node.get_closest_marker("kafka") is not None:
        cluster.restart(timeout_s=START_S)
