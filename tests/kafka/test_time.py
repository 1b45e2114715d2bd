"""Time on a real Kafka: retention counts from storing, events keep their own time, and the last release reads both."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.kafka import open_kafka
from services.core.broker.reading import read_topic
from services.core.broker.record import Record
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import append, until_async
from tests.integration.fleet_process import Desk
from tests.support.kafka import make_topic, unique_name
from tests.upgrade.release import environ_of

pytestmark = pytest.mark.kafka

_DAY_MS = 86_400_000
_QUICK = {"log.retention.check.interval.ms": "300", "log.initial.task.delay.ms": "300"}
_RETENTION_MS = 3_600_000
_READ = """
import asyncio, json, sys
from services.core.broker.connect import open_broker

async def read(url, topic):
    async with open_broker(url) as broker:
        batch = await broker.reader.read(topic, 0, 0, max_records=10)
        print(json.dumps([[one.timestamp, [name for name, _ in one.headers]] for one in batch.records]))

asyncio.run(read(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def cleaning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One broker that looks for expired segments all the time."""
    with KafkaCluster(tmp_path_factory.mktemp("cleaning"), brokers=1, settings=_QUICK) as cluster:
        yield cluster


def _month_behind(count: int) -> list[Record]:
    """What a client sends whose clock is 30 days behind."""
    behind = round(time.time() * 1000) - 30 * _DAY_MS
    return [Record(b"k", b"%d" % number, behind + number, (("ce_id", b"%d" % number),)) for number in range(count)]


async def _stored(broker: Broker, topic: str) -> list[Record]:
    held = (await broker.reader.describe(topic))[0]
    return [record async for batch in read_topic(broker.reader, topic, 0, held, page=100) for record in batch.records]


async def test_a_clock_that_is_behind_deletes_nothing(cleaning: KafkaCluster) -> None:
    """If it fails, Kafka deletes acknowledged events within minutes, because a client's clock is wrong."""
    events = _month_behind(5)
    old = await make_topic(cleaning.bootstrap, "old", configs={"retention.ms": str(_RETENTION_MS)})
    async with open_kafka(cleaning.bootstrap) as broker:
        topic = unique_name("new")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1, retention_ms=_RETENTION_MS))
        assert await broker.admin.kept_by_event_time([topic, old]) == {old}
        for each in (topic, old):
            await append(broker, each, events)

        async def is_cleaned() -> bool:
            return (await broker.reader.describe(old))[0].start == len(events)

        await until_async(is_cleaned, "the events are deleted where retention counts from their own time")
        assert await _stored(broker, topic) == events, "all are there, with their own times"

        async def is_measured() -> bool:  # once the new cluster has found who answers for groups
            lag = (await broker.admin.group_lag(unique_name("g"), topic))[0]
            assert lag.millis < _DAY_MS, "not by event time"
            return lag.stored is not None and abs(lag.stored - time.time() * 1000) < _DAY_MS

        await until_async(is_measured, "the lag says when the oldest event was stored")


async def test_a_topic_of_an_earlier_version_is_altered(cleaning: KafkaCluster, tmp_path: Path) -> None:
    """If it fails, the command of docs/upgrading.md alters nothing, or another setting, or loses the times of events."""
    bootstrap, early, late = cleaning.bootstrap, _month_behind(3), _month_behind(2)
    topic = await make_topic(bootstrap, "altered", configs={"retention.ms": "-1"})
    async with open_kafka(bootstrap) as broker:
        await append(broker, topic, early)
        assert await broker.admin.kept_by_event_time([topic]) == {topic}
        (tmp_path / "pipes.yaml").write_text(f"streams: {{{topic}: {{id: id, partitions: 1}}}}\npipes: {{}}\n")
        where = "-f", "pipes.yaml", "--broker", f"kafka://{bootstrap}"
        before = await Desk(tmp_path).run("apply", *where)
        assert before.process.returncode == 0, before.out + before.err
        assert f"{topic}: Kafka counts its retention from the clients' clocks" in before.err.replace("\n", " ")
        assert await broker.admin.kept_by_event_time([topic]) == {topic}, "only when it is asked for"
        done = await Desk(tmp_path).run("apply", *where, "--log-append-time")
        assert done.process.returncode == 0, done.out + done.err
        assert f"altered        {topic}" in done.out
        assert await broker.admin.kept_by_event_time([topic]) == frozenset()
        await append(broker, topic, late)
        assert await _stored(broker, topic) == [*early, *late]
        lag = (await broker.admin.group_lag(unique_name("g"), topic))[0]
        assert lag.stored is None, "of the oldest event only the client's time is known: the other settings stay"


async def test_the_last_release_reads_the_times_of_this_version(cleaning: KafkaCluster, tmp_path: Path) -> None:
    """If it fails, services of the last release take the time of storing for that of the event, or deliver our header."""
    events = _month_behind(3)
    async with open_kafka(cleaning.bootstrap) as broker:
        topic = unique_name("new")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, events)
    command = [sys.executable, "-P", "-c", _READ, f"kafka://{cleaning.bootstrap}", topic]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environ_of("old"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[event.timestamp, ["ce_id"]] for event in events]
