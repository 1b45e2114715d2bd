"""Transforms on a real Kafka of three brokers: micro-batches and real-time mode."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from services.core import dead_letter
from services.core.broker.connect import open_broker
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.jvm.kafka_server import KafkaCluster
from tests.spark.broker_river import BrokerRiver
from tests.spark.river import NOW, event, interrupt_queries, numbers, wait_for
from tests.spark.service_process import kill_service, start_service
from tests.spark.test_checkpoint import truncate

pytestmark = pytest.mark.kafka
COLUMNS = "carrier STRING, delay INT"
MakeRiver = Callable[[int], BrokerRiver]


@pytest.fixture
def make_river(spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path) -> Iterator[MakeRiver]:
    """Makes a river with so many partitions; its jobs are stopped at the end."""
    rivers: list[BrokerRiver] = []

    def make(partitions: int) -> BrokerRiver:
        rivers.append(BrokerRiver(spark, f"kafka://{kafka_cluster.bootstrap}", tmp_path, partitions=partitions))
        return rivers[-1]

    yield make
    for river in rivers:
        river.stop()


def flight(number: int, delay: int | str | None = None) -> Record:
    return event(number, orjson.dumps({"carrier": "UA", "delay": number if delay is None else delay}))


def reasons(records: list[Record]) -> dict[str | None, str]:
    return {read_id(r): (r.header(dead_letter.REASON) or b"").decode() for r in records}


def test_micro_batches(make_river: MakeRiver) -> None:
    """If this fails, events on Kafka lose identity, time or order in a transform, or foreign records stop the pipe."""
    river = make_river(2)
    sent = [flight(n) for n in range(100)]
    foreign = [
        Record(None, None, NOW, ()),
        Record(b"k", b"{}", NOW, ()),
        Record(b"k", None, NOW, (("ce_id", b"gone"),)),
    ]
    river.send([*sent[:50], *foreign], 0)
    river.send([*sent[50:], flight(500, delay=0), flight(501, delay="late")], 1)
    river.start(
        river.chosen(columns=COLUMNS, sql="SELECT event, carrier, 100 / (delay - 0) AS share FROM {s} WHERE delay <> 7")
    )
    dead = river.records("dead", 5)
    out = river.records("out", 98)
    river.stop()
    assert river.problem is None
    expected = {read_id(r): r for r in sent if r.timestamp not in (NOW, NOW + 7)}
    assert {read_id(r) for r in out} == expected.keys()
    for record in out:
        original = expected[read_id(record)]
        assert record.key == original.key
        assert record.headers == original.headers
        assert record.timestamp == original.timestamp
    assert sorted(reasons(dead).items(), key=str) == sorted(
        {
            None: "bad_record",
            "gone": "bad_record",
            "id-0": "transform_error",
            "id-500": "transform_error",
            "id-501": "schema_mismatch",
        }.items(),
        key=str,
    )
    assert len(dead) == 6


def test_real_time(make_river: MakeRiver) -> None:
    """If this fails, real-time mode does not run our SQL, or what is no event, or raises, stops it, vanishes or is not told."""
    river = make_river(1)
    chosen = river.chosen(
        columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM {s} WHERE delay < 90", mode="real-time"
    )
    river.send([flight(n) for n in range(1, 20)])
    river.start(chosen)
    assert {read_id(r) for r in river.records("out", 19)} == {f"id-{n}" for n in range(1, 20)}
    river.send([flight(100), flight(21), event(22, b"no json"), flight(23, delay=0), flight(24)])
    dead = river.records("dead", 2)
    assert reasons(dead) == {"id-22": "schema_mismatch", "id-23": "transform_error"}
    wait_for(
        lambda: {"id-21", "id-24"} <= {read_id(r) for r in river.records("out", 21)},
        "the events after the poisoned one",
    )
    river.send([flight(n) for n in range(30, 40)])
    wait_for(lambda: {f"id-{n}" for n in range(30, 40)} <= {read_id(r) for r in river.records("out", 31)}, "new events")
    river.stop()
    assert sum(report.written for report in river.batches) >= 31, "batches in real-time mode are not reported"
    assert "id-100" not in {read_id(r) for r in river.records("out", 31)}
    told = river.reports()
    assert numbers(told, "dead") == {22, 23}
    assert numbers(told, "filtered") == {100}
    assert numbers(told, "passed") == {*range(1, 20), 21, 24, *range(30, 40)}
    lags = [lag for report in told for lag in report.lags]
    counts = Counter({kind: sum(lag.count for lag in lags if lag.kind == kind) for kind in {lag.kind for lag in lags}})
    assert counts.keys() == {"lag_in", "lag_out", "process_time"}, "how late events are in real-time mode is not told"
    assert counts["process_time"] == counts["lag_out"], "an event's time is not its own"
    took = sum(lag.total_ms for lag in lags if lag.kind == "process_time")
    assert took < 30_000 * counts["process_time"], "that is the batch's time, not the events'"


def test_what_was_rolled_back_is_no_event(make_river: MakeRiver) -> None:
    """If this fails, a transform passes on events that their producer took back, or waits for ever at a transaction's mark."""
    river = make_river(1)
    asyncio.run(_send_in_transactions(river, range(0, 20, 5), 5))
    river.start(river.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}"))
    assert {read_id(r) for r in river.records("out", 10)} == {f"id-{n}" for n in (*range(5), *range(10, 15))}
    (held,) = river.endpoint.held(river.session, [river.stream])
    assert (held.start, held.end) == (0, 24)
    river.send([flight(50)])
    assert len(river.records("out", 11)) == 11
    river.stop()
    assert river.problem is None


async def _send_in_transactions(river: BrokerRiver, starts: Iterable[int], count: int) -> None:
    """Every other one is rolled back."""
    servers = river.url.removeprefix("kafka://")
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=river.stream) as foreign:
        for turn, start in enumerate(starts):
            await foreign.begin_transaction()
            for one in (flight(n) for n in range(start, start + count)):
                await foreign.send_and_wait(river.stream, one.value, one.key, 0, one.timestamp, list(one.headers))
            await (foreign.abort_transaction() if turn % 2 else foreign.commit_transaction())
    async with open_broker(river.url) as broker, asyncio.timeout(240):
        while (await broker.admin.describe(river.stream))[0].end < 24:
            await asyncio.sleep(0.2)


def test_records_that_are_gone_stop_the_query(make_river: MakeRiver) -> None:
    """If this fails, what retention deletes before the transform read it is lost without a word."""
    river = make_river(1)
    river.send([flight(n) for n in range(10)])
    chosen = river.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    river.start(chosen)
    river.records("out", 10)
    river.stop()
    river.send([flight(n) for n in range(10, 30)])
    asyncio.run(_delete_before(river, 20))
    river.start(chosen)
    assert "offset" in river.wait_for_problem().lower()
    river.stop()
    assert len(river.records("out", 10)) == 10


def test_checkpoint_faults(make_river: MakeRiver) -> None:
    """If this fails, a second query, a dead one, or a damaged checkpoint on Kafka is not told, or doubles events."""
    river = make_river(1)
    river.send([flight(n) for n in range(1, 11)])
    chosen = river.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    river.start(chosen)
    river.records("out", 10)
    river.start(chosen)
    assert "in use by process" in river.wait_for_problem()
    river.states.clear()
    interrupt_queries(river.session)
    wait_for(lambda: any(s.problem and "in use" not in s.problem for s in river.states), "the dead query is told")
    river.send([flight(n) for n in range(11, 21)])
    assert Counter(read_id(r) for r in river.records("out", 20)) == Counter(f"id-{n}" for n in range(1, 21))
    river.stop()
    truncate(river.folder / "checkpoints" / river.pipe)
    river.states.clear()
    river.send([flight(n) for n in range(21, 31)])
    river.start(chosen)
    assert "CheckpointDamaged" in river.wait_for_problem()
    river.stop()
    assert len(river.records("out", 20)) == 20


def test_killed_in_the_middle(make_river: MakeRiver, tmp_path: Path) -> None:
    """If this fails, a killed transform on Kafka loses events, writes more again than the batch at work, or tells the ledger
    of less than it did."""
    river = make_river(1)
    total, batch = 6000, 200
    river.send([flight(n) for n in range(total)])
    river.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}", max_events=batch, interval="50ms")
    output = tmp_path / "output.log"
    process = start_service(tmp_path, river.url, output)
    try:
        assert len(river.records("out", batch)) < total, "killed too late to mean anything"
    finally:
        kill_service(process)
    process = start_service(tmp_path, river.url, output)
    try:
        counts = Counter(read_id(r) for r in river.records("out", total))
        while len(counts) < total:
            counts = Counter(read_id(r) for r in river.records("out", counts.total() + 1))
        process.terminate()
        assert process.wait(60) == 0
        assert numbers(river.reports(), "passed") == set(range(total))
    finally:
        kill_service(process)
    assert counts.keys() == {f"id-{n}" for n in range(total)}
    assert counts.total() - total <= batch


async def _delete_before(river: BrokerRiver, offset: int) -> None:
    from aiokafka import TopicPartition
    from aiokafka.admin import RecordsToDelete

    from tests.support.kafka import open_admin

    async with open_admin(river.url.removeprefix("kafka://")) as admin:
        await admin.delete_records({TopicPartition(river.stream, 0): RecordsToDelete(before_offset=offset)})


def test_recreated_topic_stops_the_query(make_river: MakeRiver) -> None:
    """If this fails, a topic that was made again is read from an offset that means other records."""
    river = make_river(1)
    river.send([flight(n) for n in range(10)])
    chosen = river.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    river.start(chosen)
    river.records("out", 10)
    river.stop()
    asyncio.run(_make_again(river))
    river.send([flight(n) for n in range(100, 150)])
    river.start(chosen)
    assert "made again" in river.wait_for_problem()
    river.stop()
    assert len(river.records("out", 10)) == 10


async def _make_again(river: BrokerRiver) -> None:
    async with open_broker(river.url) as broker:
        await broker.admin.delete_topic(river.stream)
        async with asyncio.timeout(120):
            while river.stream in await broker.admin.topics():
                await asyncio.sleep(0.1)
    await river.create([river.stream], 1)
