"""Links that are slow, cut or silent, and names that nobody answers: rows 8, 9 and 11 of the fault matrix."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest

from services.core.jvm.kafka import KafkaCluster
from tests.faults.conftest import Report
from tests.faults.fleet import wait_until
from tests.faults.sink import open_sink
from tests.faults.trial import Trial, open_trial
from tests.support.oracle import KEYS
from tests.support.ports import free_port
from tests.support.tcp_proxy import TcpProxy, open_proxy


async def test_slow_and_cut_link_to_the_receiver(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a bad line to a receiver loses events, mixes up the order of a key, or fills expel's memory."""
    name = "8 slow, cut link expel-receiver"
    async with (
        open_trial(name, url, tmp_path, workers=1, order="key") as trial,
        open_proxy("127.0.0.1", port_of(trial.sink.url)) as link,
    ):
        trial.webhook |= {"url": f"http://127.0.0.1:{link.port}/hook", "timeout": "2s"}
        await trial.start_ingest()
        expel = await trial.start_expel()
        async with trial.load():
            link.delay, link.bytes_per_s = 0.05, 60_000
            await asyncio.sleep(2)
            for _ in range(5):
                await asyncio.sleep(trial.chance.uniform(0.2, 0.8))
                link.cut()
            link.refuses = True
            await asyncio.sleep(1.5)
            link.refuses, link.delay, link.bytes_per_s = False, 0.0, None
            healed = time.monotonic()
        await trial.recover(healed)  # not beside the load: its event would have no order among those of its key
        await trial.settle()
        await wait_until(lambda: expel.metric("penstock_expel_events_retried_total"))
        assert not disorders(trial), f"the order of a key changed: {disorders(trial)[:5]}"
        report(await trial.judge(strikes=6))


@pytest.mark.kafka
async def test_slow_and_cut_link_to_kafka(tmp_path: Path, report: Report) -> None:
    """If it fails, a bad line to Kafka loses what was acknowledged, or ingest takes more than it can hold."""
    name = "8 slow, cut link to the broker"
    async with proxied_kafka(tmp_path) as (url, link), open_trial(name, url, tmp_path) as trial:
        await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            start = time.monotonic()
            link.delay = 0.05
            await asyncio.sleep(2)
            for _ in range(4):
                await asyncio.sleep(trial.chance.uniform(0.5, 1.0))
                link.cut()
            link.refuses = True
            link.cut()
            await asyncio.sleep(2)
            link.refuses, link.delay = False, 0.0
            await trial.recover(time.monotonic())
            trial.gap = trial.sender.longest_gap(start, time.monotonic())
        await trial.settle()
        trial.evidence["cut"] = link.connections
        report(await trial.judge())


@pytest.mark.kafka
async def test_kafka_acknowledges_late(tmp_path: Path, report: Report) -> None:
    """If it fails, an answer that came too late counts as "not stored", or as stored: a client draws the wrong conclusion."""
    name = "9 the broker acknowledges late"
    async with proxied_kafka(tmp_path) as (url, link), open_trial(name, url, tmp_path) as trial:
        await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
            start = time.monotonic()
            link.answers.clear()
            await wait_until(lambda: trial.sender.reasons["outcome-unknown"] > 0)
            link.answers.set()
            await trial.recover(time.monotonic())
            trial.gap = trial.sender.longest_gap(start, time.monotonic())
        await trial.settle()
        report(await trial.judge())


async def test_log_locked_for_long(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, one process that holds the log's write lock makes the others acknowledge nothing ever again, or too much."""
    async with open_trial("9 another process holds the log's lock", log_url, tmp_path) as trial:
        await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
            database = tmp_path / "data" / "topics" / f"{trial.stream}.db"
            start = time.monotonic()
            connection = await asyncio.to_thread(lock, database)
            await trial.wait_refused()
            await asyncio.to_thread(connection.close)
            await trial.recover(time.monotonic())
            trial.gap = trial.sender.longest_gap(start, time.monotonic())
        await trial.settle()
        report(await trial.judge())


async def test_slow_dns_for_one_host(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a name server that does not answer for one receiver delays the deliveries and commits of the others."""
    async with open_trial("11 slow DNS for one host", url, tmp_path) as trial:
        port = port_of(trial.sink.url)
        trial.webhook["url"] = f"http://quick.test:{port}/hook"
        (tmp_path / "slow.test").touch()
        slowly = trial.ledger.twin()
        await trial.start_ingest()
        async with open_sink(slowly, trial.seed) as sink:
            webhook = {"url": f"http://slow.test:{port_of(sink.url)}/hook", "retry": {"attempts": 20}, "schedule": []}
            trial.destinations.append({"name": "slow", "webhook": webhook})
            expel = await trial.start_expel(module="tests.faults.slow_dns")
            async with trial.load():
                await asyncio.sleep(3)
            await trial.wait_no_lag()
            assert sink.requests == 0
            await wait_until(lambda: expel.metric("penstock_expel_events_delivered_total", destination="hook"))
            (tmp_path / "slow.test").unlink()
            await trial.settle()
            await wait_until(lambda: not slowly.lost())
        trial.evidence["slow"] = 1
        assert not slowly.altered
        assert not slowly.trespassers()
        report(await trial.judge())


def disorders(trial: Trial) -> list[tuple[int, int]]:
    """(earlier, later) pairs of one key that arrived for the first time in the wrong order."""
    last: dict[int, int] = {}
    found = []
    for number, _ in trial.sink.firsts:
        key = number % KEYS
        if number < last.get(key, -1):
            found.append((last[key], number))
        last[key] = max(number, last.get(key, -1))
    return found


def port_of(url: str) -> int:
    """The port in a URL."""
    return int(url.rpartition(":")[2].partition("/")[0])


def lock(database: Path) -> apsw.Connection:
    """A connection that holds the write lock, like a process that hangs in the middle of a write."""
    connection = apsw.Connection(str(database))
    connection.set_busy_timeout(60_000)  # ingest and expel write, too
    connection.execute("BEGIN IMMEDIATE")
    return connection


@asynccontextmanager
async def proxied_kafka(folder: Path) -> AsyncIterator[tuple[str, TcpProxy]]:
    """One Kafka broker that clients reach through the proxy alone, because that is the address that it advertises."""
    port = free_port()
    settings = {"advertised.listeners": f"BROKER://127.0.0.1:{port}"}
    cluster = await asyncio.to_thread(KafkaCluster, folder / "kafka", brokers=1, settings=settings)
    async with open_proxy("127.0.0.1", cluster.brokers[1].node.port, listen=port) as link:
        await asyncio.to_thread(cluster.start)
        try:
            yield f"kafka://127.0.0.1:{port}", link
        finally:
            await asyncio.to_thread(cluster.stop, grace_s=0)
