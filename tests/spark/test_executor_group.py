"""The executors of a transform as a group that the autoscaler resizes, on a real standalone cluster."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from services.autoscaler.app import start
from services.autoscaler.groups.drivers.contract import Away, Group, Refused, SizeChanged
from services.autoscaler.groups.drivers.management_port import ControlDriver, open_executors
from services.autoscaler.groups.meter import Meter
from services.autoscaler.settings import AutoscalerSettings
from services.core.event import read_id
from services.core.process.lifecycle import Supervision
from services.core.process.settings import load_settings
from spark.cluster.executor_group import GROUP
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.log_pipeline import wait_for
from tests.spark.service_process import ServiceProcess
from tests.spark.test_cluster import COLUMNS, on, pipeline, send, spark_cluster
from tests.support.spark_cluster import SparkCluster
from tests.unit.autoscaler.groups.test_scaler import Observer

pytestmark = [pytest.mark.kafka, pytest.mark.spark]
__all__ = ["pipeline", "spark_cluster"]
PATIENCE_S = 600.0
SLOW = range(800, 1200)
"""These events wait, without CPU: for forty seconds in one executor."""
_MODULE = f"""
import time
from pyspark.sql import DataFrame
from pyspark.sql.functions import udf


@udf("int")
def slow(n: int) -> int:
    if {SLOW.start} <= n < {SLOW.stop}:
        time.sleep(0.1)
    return n


def run(events: DataFrame) -> DataFrame:
    return events.select("event", slow("n").alias("n"))
"""


async def until(driver: ControlDriver, condition: Callable[[Group], bool]) -> Group:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(group := await driver.describe(GROUP)):
            await asyncio.sleep(0.2)
    return group


def has(*names: str) -> Callable[[Group], bool]:
    """Whether these executors are at work, and no others."""
    return lambda group: [one.name for one in group.members if not one.leaving] == sorted(names)


def test_executors_are_a_group(pipeline: BrokerPipeline, spark_cluster: SparkCluster, tmp_path: Path) -> None:
    """Broken: a transform keeps the executors that it began with, whatever its lag; or one that leaves takes a batch along; or
    one that is lost after the group shrank is never replaced; or a driver that stands by takes the core of the executor that
    left, and the group never grows again."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    (tmp_path / "own.py").write_text(_MODULE)
    pipeline.chosen(columns=COLUMNS, python="own.py:run")
    send(pipeline, 0, 400)
    options = [*on(spark_cluster), "--executors", "1-2", "--control-token-file", str(token)]
    options += ["--management", "0.0.0.0:0"]  # as in a container: nobody can ask that address
    service, second = (ServiceProcess(tmp_path, pipeline.url, *options) for _ in range(2))  # one file for their output
    with service, second:
        process = service.start()
        pipeline.records("out", 400)
        standby = second.start()
        wait_for(lambda: "pipe_on_standby" in service.output.read_text(), "a driver on standby")
        first_at, second_at = (
            found.replace("0.0.0.0", "127.0.0.1")
            for found in re.findall(r'"address": ?"([^"]+)".*management_port_open', service.output.read_text())
        )
        asyncio.run(_until_it_stands_by(second_at, token))
        asyncio.run(_resize(first_at, token, partial(send, pipeline), partial(_kill_executors, spark_cluster)))
        pipeline.records("out", 1600)
        process.terminate()
        assert process.wait(600) == 0, service.output.read_text()[-3000:]
        send(pipeline, 1600, 2000)
        out = pipeline.records("out", 2000)
        standby.terminate()
        assert standby.wait(600) == 0, service.output.read_text()[-3000:]
    assert Counter(read_id(record) for record in out).keys() == {f"id-{n}" for n in range(2000)}


def _kill_executors(cluster: SparkCluster) -> None:
    for one in cluster.executors():
        one.kill()


async def _until_it_stands_by(address: str, token: Path) -> None:
    async with open_executors(address, token) as driver:
        with pytest.raises(Away, match="this driver stands by"):
            await until(driver, lambda _group: False)


async def _resize(
    address: str, token: Path, send_more: Callable[[int, int], None], kill_executors: Callable[[], object]
) -> None:
    async with open_executors(address, token) as driver:
        group = await until(driver, has("0", "1"))
        assert (group.size, group.reporters) == (2, (address,))
        meter = Meter()
        await meter.measure(group, frozenset(), None)
        await asyncio.to_thread(send_more, 400, 800)
        with pytest.raises(Refused, match="from 1 to 2 executors"):
            await driver.resize(GROUP, 2, 3)
        await driver.resize(GROUP, 2, 1)
        group = await until(driver, lambda group: len(group.members) == 1)
        assert group.size == 1
        figures = await meter.measure(group, frozenset(), None)
        assert [one.cpu is not None for one in figures.instances] == [True]
        assert figures.lag is not None, "the transform does not report its lag"
        with pytest.raises(SizeChanged, match="1 executors are ordered, not 2"):
            await driver.resize(GROUP, 2, 1)
        await asyncio.to_thread(kill_executors)
        await until(driver, has("2"))
        await asyncio.to_thread(send_more, SLOW.start, SLOW.stop)
        async with _autoscaler(address, token, calm="1h") as acted:
            group = await until(driver, lambda group: len(group.members) == 2)
            assert acted() == {("out", "lag")}
        newest = group.members[-1].name
        assert newest == "3"
        await driver.replace(GROUP, newest)
        await asyncio.to_thread(send_more, 1200, 1600)
        await until(driver, lambda group: [one.name for one in group.members if not one.leaving][-1:] == ["4"])
        with pytest.raises(SizeChanged, match="no executor 3"):
            await driver.replace(GROUP, newest)
        async with _autoscaler(address, token, calm="1s") as acted:
            group = await until(driver, lambda group: len(group.members) == 1)
            assert (group.size, acted()) == (1, {("in", "calm")})


@asynccontextmanager
async def _autoscaler(transform: str, token: Path, *, calm: str) -> AsyncIterator[Callable[[], set[tuple[str, str]]]]:
    """The service. No executor has the cores for which it would grow the group. Gives what it did so far, and why."""
    rules = {"max": 2, "target_cpu": 2, "max_lag": "6s", "warm_up": "1s", "cool_down": "1s", "calm": calm}
    observer = Observer()
    async with TestServer(observer.app()) as server, asyncio.TaskGroup() as tasks:
        flags = ["--broker", f"log:{token.parent / 'scaling'}", "--management", "127.0.0.1:0", "--group-every", "1s"]
        flags += [
            "--groups",
            json.dumps({GROUP: rules}),
            "--transform",
            transform,
            "--transform-token-file",
            str(token),
        ]
        flags += ["--observer", f"127.0.0.1:{server.port}"]
        supervision = Supervision(tasks)
        tasks.create_task(start(await asyncio.to_thread(load_settings, AutoscalerSettings, flags, {}), supervision))
        yield lambda: {(one["action"], one["reason"]) for one in observer.reports if one["action"] != "hold"}
        supervision.stopping.set()
