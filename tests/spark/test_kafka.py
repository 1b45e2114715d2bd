"""Transforms on a real Kafka: micro-batches and real-time mode."""

import asyncio
import time
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import orjson
import pytest
from aiokafka import AIOKafkaProducer
from pyspark.sql import SparkSession

from services.core.broker.connect import open_broker
from services.core.broker.errors import OffsetOutOfRange, Unavailable
from services.core.broker.record import Record
from services.core.control.pauses import Pause
from services.core.control.transform_marks import Begin, TransformMark
from services.core.event import read_arrival, read_id
from services.core.jvm.kafka import KafkaCluster
from services.core.lag import nearest_rank
from services.core.metrics import TRANSFORM_MODE
from services.core.undelivered import dead_letter
from spark.brokers.kafka import KafkaSparkBroker
from spark.jobs.attempts import MAX_ENDED, Attempt, Attempts
from spark.jobs.replay import BadRecords
from spark.sources.offsets import TopicRecreated
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.log_pipeline import NOW, event, interrupt_queries, merged_lags, numbers, wait_for
from tests.spark.service_process import ServiceProcess, TooLateError
from tests.spark.test_checkpoint import truncate

pytestmark = pytest.mark.kafka
COLUMNS = "carrier STRING, delay INT"
DAY_MS = 86_400_000
FAILS, EXPLODES = -1, -2
MakePipeline = Callable[..., BrokerPipeline]


@pytest.fixture
def make_pipeline(spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path) -> Iterator[MakePipeline]:
    """Makes a pipeline with so many partitions, in a fleet with this prefix or none; its jobs are stopped at the end."""
    with ExitStack() as stack:

        def make(partitions: int, prefix: str = "") -> BrokerPipeline:
            url = f"kafka://{kafka_cluster.bootstrap}" + (f"?prefix={prefix}" if prefix else "")
            return stack.enter_context(BrokerPipeline(spark, url, tmp_path, partitions=partitions))

        yield make


def flight(number: int, delay: int | str | None = None) -> Record:
    return event(number, orjson.dumps({"carrier": "UA", "delay": number if delay is None else delay}))


def reasons(records: list[Record]) -> dict[str | None, str]:
    return {read_id(r): (r.header(dead_letter.REASON) or b"").decode() for r in records}


def test_micro_batches(make_pipeline: MakePipeline) -> None:
    """If this fails, events on Kafka lose identity, time or order in a transform, or foreign records stop the pipe; or a fleet
    with a prefix cannot transform."""
    pipeline = make_pipeline(2, "acme.")
    sent = [flight(n) for n in range(30)]
    foreign = [
        Record(None, None, NOW, ()),
        Record(b"k", b"{}", NOW, ()),
        Record(None, None, NOW, (("ce_id", b"gone"),)),
        Record(b"k", None, NOW, (("ce_id", b"deleted"),)),  # a tombstone, which is filtered
    ]
    pipeline.send([*sent[:15], *foreign], 0)
    pipeline.send([*sent[15:], flight(500, delay=0), flight(501, delay="late")], 1)
    pipeline.start(
        pipeline.chosen(
            columns=COLUMNS, sql="SELECT event, carrier, 100 / (delay - 0) AS share FROM {s} WHERE delay <> 7"
        )
    )
    dead = pipeline.records("dead", 5)
    out = pipeline.records("out", 28)
    pipeline.stop()
    assert pipeline.problem is None
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


@pytest.mark.parametrize("mode", ["micro-batch", "real-time"])
def test_begins_where_a_reset_to_a_time_says(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """If this fails, a reset to a time does not start, or transforms all events, or skips those of another partition; or bad
    records from before the time become dead letters again."""
    monkeypatch.setattr("spark.jobs.streaming_plan.REAL_TIME_BATCH", "5 seconds")
    pipeline = make_pipeline(2)
    pipeline.send([event(n, b"no json") if n in (3, 8) else flight(n) for n in range(10)], 0)
    pipeline.send([flight(n) for n in range(10, 20)], 1)

    async def find_incarnation() -> str:
        async with open_broker(pipeline.url) as broker:
            return await broker.admin.incarnation(pipeline.stream)

    begins = {pipeline.stream: Begin(asyncio.run(find_incarnation()), {0: 7})}
    pipeline.marks.newest[pipeline.pipe] = TransformMark("reset", "", "ann", 1, begins=begins)
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}", mode=mode))
    out, dead = pipeline.records("out", 12), pipeline.records("dead", 1)
    pipeline.stop()
    assert pipeline.problem is None
    assert sorted(read_id(record) or "" for record in out) == sorted(f"id-{n}" for n in (7, 9, *range(10, 20)))
    assert reasons(dead) == {"id-8": "schema_mismatch"}


def test_begins_at_an_offset_that_is_not_stored(make_pipeline: MakePipeline, spark: SparkSession) -> None:
    """If this fails, a transform that was reset to a time begins in the middle of a topic that was made anew, or behind records
    that got the offsets of lost ones."""
    pipeline = make_pipeline(2)
    pipeline.send([flight(n) for n in range(10)], 0)
    broker, stream = KafkaSparkBroker(pipeline.url.removeprefix("kafka://")), pipeline.stream
    identity = broker.identify(spark, [stream])[stream]
    for offset in (11, -1):
        with pytest.raises(OffsetOutOfRange):
            broker.read_stream(spark, [stream], 10, checkpoint="", begins={stream: (identity, {0: offset})})
    with pytest.raises(TopicRecreated):
        broker.read_stream(spark, [stream], 10, checkpoint="", begins={stream: ("another", {0: 5})})
    broker.read_stream(spark, [stream], 10, checkpoint="", begins={stream: (identity, {0: 10})})
    begins = {stream: Begin(str(UUID(bytes=urlsafe_b64decode(identity + "=="))), {0: 11})}
    pipeline.marks.newest[pipeline.pipe] = TransformMark("reset", "", "ann", 1, begins=begins)
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}"))
    wait_for(lambda: "has offset 11" in (pipeline.problem or ""), "the refusal")
    pipeline.stop()


def test_real_time(make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, real-time mode does not run our SQL, or a bad record, or an event that raises, stops it or vanishes; or a
    pause stops it without a commit, so that events come out twice; or it reports other lags than the events had."""
    monkeypatch.setattr("spark.jobs.streaming_plan.REAL_TIME_BATCH", "5 seconds")
    pipeline = make_pipeline(1)
    chosen = pipeline.chosen(
        columns=COLUMNS,
        sql="SELECT event, 100 / delay AS share, CAST(delay AS DECIMAL(5,1)) AS exact FROM {s} WHERE delay < 90",
        mode="real-time",
        decimals="string",
    )
    now = time.time_ns() // 1_000_000

    def send(*several: Record) -> None:
        """Each one is as many days old as its number says."""
        pipeline.send([msgspec.structs.replace(one, timestamp=now - (one.timestamp - NOW) * DAY_MS) for one in several])

    send(*(flight(n) for n in range(1, 20)))
    job = pipeline.start(chosen)
    first = pipeline.records("out", 19)
    assert {read_id(r) for r in first} == {f"id-{n}" for n in range(1, 20)}
    assert all(b'"exact":"' in (r.value or b"") for r in first), "decimals: string is without effect in real-time mode"
    send(flight(100), flight(21), event(22, b"no json"), flight(23, delay=0), flight(24))
    dead = pipeline.records("dead", 2)
    assert reasons(dead) == {"id-22": "schema_mismatch", "id-23": "transform_error"}
    wait_for(
        lambda: {"id-21", "id-24"} <= {read_id(r) for r in pipeline.records("out", 21)},
        "the events after the poisoned one",
    )
    job.set_pause(Pause("paused", "operator", "ann", 0))
    wait_for(lambda: pipeline.states[-1].paused == "paused by ann: no reason given", "the pause")
    before = len(pipeline.records("out", 21))
    send(*(flight(n) for n in range(30, 40)))
    assert len(pipeline.records("out", before)) == before
    job.set_pause(None)
    wait_for(
        lambda: {f"id-{n}" for n in range(30, 40)} <= {read_id(r) for r in pipeline.records("out", 31)}, "new events"
    )
    assert len(pipeline.records("out", before)) == before + 10
    pipeline.stop()
    assert sum(report.written for report in pipeline.batches) >= 31, "batches in real-time mode are not reported"
    assert "id-100" not in {read_id(r) for r in pipeline.records("out", 31)}
    reported = pipeline.reports()
    assert numbers(reported, "dead") == {22, 23}
    assert numbers(reported, "filtered") == {100}
    assert numbers(reported, "passed") == {*range(1, 20), 21, 24, *range(30, 40)}
    lags = [lag for report in reported for lag in report.lags]
    counts = Counter({kind: sum(lag.count for lag in lags if lag.kind == kind) for kind in {lag.kind for lag in lags}})
    assert counts.keys() == {"lag_in", "lag_out", "process_time"}, (
        "how late events are in real-time mode is not reported"
    )
    assert counts["process_time"] == counts["lag_out"], "an event's time is not its own"
    assert counts["lag_out"] == sum(report.written for report in pipeline.batches), "events without a lag"
    took = sum(lag.total_ms for lag in lags if lag.kind == "process_time")
    assert took < 30_000 * counts["process_time"], "that is the batch's time, not the events'"
    days = sorted([*range(1, 20), 21, 22, 24, *range(30, 40), 100])
    shares, read = (0.1, 0.5, 0.95, 1.0), merged_lags(reported, "lag_in")
    assert read.count == len(days), "an event was counted twice, or not at all"
    exact = [days[nearest_rank(share, len(days)) - 1] * DAY_MS for share in shares]
    assert read.quantiles(shares) == [pytest.approx(lag, rel=0.01) for lag in exact]


def test_one_event_of_four_million_rows(make_pipeline: MakePipeline) -> None:
    """If this fails, the search for an event that fails ends Java at another one, whose rows take all its memory."""
    pipeline = make_pipeline(1)
    pipeline.send([flight(0, delay=FAILS), flight(1, delay=EXPLODES), *(flight(n) for n in range(2, 6))])
    sql = f"""SELECT concat(event.id, '-', n) AS id, event.key AS key, repeat('x', 100) AS text, 1 / (delay - {FAILS}) AS share
              FROM {{s}} LATERAL VIEW explode(sequence(1, IF(delay = {EXPLODES}, 4000000, 2))) AS n"""
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql=sql))
    dead = pipeline.records("dead", 2)
    out = pipeline.records("out", 8)
    pipeline.stop()
    assert reasons(dead) == {"id-0": "transform_error", "id-1": "transform_error"}
    assert "rows come out of one task" in "".join((one.header(dead_letter.DETAIL) or b"").decode() for one in dead)
    assert Counter(map(read_id, out)) == Counter(f"id-{n}-{row}" for n in range(2, 6) for row in (1, 2))


def test_parts_of_a_batch_that_ended_processes(make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each part of such a batch ends another process, until one event of very many rows is alone."""

    def suspected(attempts: Attempts, batch: int) -> Attempt:
        found = attempts.current
        if found is None or found.batch != batch:
            found = attempts.save(msgspec.structs.replace(attempts.begin(batch), ended=MAX_ENDED))
        return found

    monkeypatch.setattr(Attempts, "of", suspected)
    monkeypatch.setattr("spark.brokers.contract.MAX_ROWS", 30)
    pipeline = make_pipeline(1)
    pipeline.send([flight(0), flight(1, delay=EXPLODES), *(flight(n) for n in range(2, 20))])
    sql = f"""SELECT concat(event.id, '-', n) AS id, event.key AS key, delay
              FROM {{s}} LATERAL VIEW explode(sequence(1, IF(delay = {EXPLODES}, 40, 10))) AS n"""
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql=sql), per_batch=True)
    assert reasons(pipeline.records("dead", 1)) == {"id-1": "transform_error"}
    expected = {f"id-{n}-{row}" for n in range(20) if n != 1 for row in range(1, 11)}
    wait_for(lambda: {read_id(one) for one in pipeline.records("out", len(expected))} == expected, "the other events")
    pipeline.stop()
    assert pipeline.problem is None


def test_what_was_rolled_back_is_no_event(make_pipeline: MakePipeline) -> None:
    """If this fails, a transform passes on events that their producer took back, or waits for ever at a transaction's mark."""
    pipeline = make_pipeline(1)
    asyncio.run(_send_in_transactions(pipeline, range(0, 20, 5), 5))
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}"))
    assert {read_id(r) for r in pipeline.records("out", 10)} == {f"id-{n}" for n in (*range(5), *range(10, 15))}
    (held,) = pipeline.broker.stored_ranges(pipeline.session, [pipeline.stream])
    assert (held.start, held.end) == (0, 24)
    pipeline.send([flight(50)])
    assert len(pipeline.records("out", 11)) == 11
    pipeline.stop()
    assert pipeline.problem is None


async def _send_in_transactions(pipeline: BrokerPipeline, starts: Iterable[int], count: int) -> None:
    """Every other one is rolled back."""
    servers = pipeline.url.removeprefix("kafka://")
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=pipeline.stream) as foreign:
        for turn, start in enumerate(starts):
            await foreign.begin_transaction()
            for one in (flight(n) for n in range(start, start + count)):
                await foreign.send_and_wait(pipeline.stream, one.value, one.key, 0, one.timestamp, list(one.headers))
            await (foreign.abort_transaction() if turn % 2 else foreign.commit_transaction())
    async with open_broker(pipeline.url) as broker, asyncio.timeout(600):
        while (await broker.reader.describe(pipeline.stream))[0].end < 24:
            await asyncio.sleep(0.2)


def test_records_that_are_gone_stop_the_query(make_pipeline: MakePipeline) -> None:
    """If this fails, what retention deletes before the transform read it is lost without a word."""
    pipeline = make_pipeline(1)
    pipeline.send([flight(n) for n in range(10)])
    chosen = pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    pipeline.start(chosen)
    pipeline.records("out", 10)
    pipeline.stop()
    pipeline.send([flight(n) for n in range(10, 30)])
    asyncio.run(_delete_before(pipeline, 20))
    pipeline.start(chosen)
    assert "not available in kafka any more" in pipeline.wait_for_problem().lower()
    pipeline.stop()
    assert len(pipeline.records("out", 10)) == 10


def test_checkpoint_faults(make_pipeline: MakePipeline) -> None:
    """If this fails, a second query, a dead one, or a damaged checkpoint on Kafka is not reported, or doubles events; with a
    prefix, too."""
    pipeline = make_pipeline(1, "acme.")
    pipeline.send([flight(n) for n in range(1, 11)])
    chosen = pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    pipeline.start(chosen)
    pipeline.records("out", 10)
    pipeline.start(chosen)
    wait_for(lambda: any("in use by process" in s.standby for s in pipeline.states), "the second query stands by")
    pipeline.states.clear()
    interrupt_queries(pipeline.session)
    wait_for(lambda: any(s.problem for s in pipeline.states), "the dead query is reported")
    pipeline.send([flight(n) for n in range(11, 21)])
    assert Counter(read_id(r) for r in pipeline.records("out", 20)) == Counter(f"id-{n}" for n in range(1, 21))
    pipeline.stop()
    truncate(pipeline.folder / "checkpoints" / pipeline.pipe)
    pipeline.states.clear()
    pipeline.send([flight(n) for n in range(21, 31)])
    pipeline.start(chosen)
    assert "CheckpointDamaged" in pipeline.wait_for_problem()
    pipeline.stop()
    assert len(pipeline.records("out", 20)) == 20


def test_killed_in_the_middle(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """If this fails, a killed transform on Kafka loses events, writes more again than the batch at work, or reports to the ledger
    of less than it did."""
    pipeline = make_pipeline(1)
    total, batch = 3000, 200
    pipeline.send([flight(n) for n in range(total)])
    pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}", max_events=batch, interval="50ms")
    with ServiceProcess(tmp_path, pipeline.url) as service:
        service.start()
        TooLateError.check(len(pipeline.records("out", batch)), total)
        service.kill()
        process = service.start()
        counts = Counter(read_id(r) for r in pipeline.records("out", total))
        while len(counts) < total:
            counts = Counter(read_id(r) for r in pipeline.records("out", counts.total() + 1))
        process.terminate()
        assert process.wait(600) == 0
        assert numbers(pipeline.reports(), "passed") == set(range(total))
    assert counts.keys() == {f"id-{n}" for n in range(total)}
    assert counts.total() - total <= batch


def test_real_time_makes_new_events(make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a transform that returns no `event` does not run in real-time mode, or its events lack id or time."""
    monkeypatch.setattr("spark.jobs.streaming_plan.REAL_TIME_BATCH", "5 seconds")
    pipeline = make_pipeline(1)
    sql = "SELECT concat('new-', event.id) AS id, delay FROM {s}"
    begun = time.time_ns() // 1_000_000
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql=sql, mode="real-time"))
    pipeline.send([flight(n) for n in range(3)])
    made = pipeline.records("out", 3)
    pipeline.stop()
    assert {read_id(record) for record in made} == {f"new-id-{n}" for n in range(3)}
    assert all((read_arrival(record) or 0) >= begun for record in made)


def test_real_time_event_that_takes_all_memory(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """If this fails, one event ends a real-time query's process again and again: it plans no batch that could be searched."""
    pipeline = make_pipeline(1)
    poison, total = 1, 4
    pipeline.send([flight(n) for n in range(total)])
    sql = f"SELECT event, length(repeat('x', IF(delay = {poison}, 2000000000, 1))) AS n FROM {{s}}"
    pipeline.chosen(columns=COLUMNS, sql=sql, mode="real-time")
    with ServiceProcess(tmp_path, pipeline.url, "--memory", "500MiB", "--master", "local[3]") as service:
        while not (dead := asyncio.run(pipeline.read_now("dead"))):
            service.keep_running(9)
            time.sleep(0.2)
        assert reasons(dead) == {f"id-{poison}": "transform_error"}
        others = {f"id-{n}" for n in range(total) if n != poison}
        wait_for(lambda: {read_id(r) for r in asyncio.run(pipeline.read_now("out"))} == others, "all the others")
        assert service.is_running


def mode_of(pipeline: BrokerPipeline) -> tuple[str, str]:
    """As the metric shows it: the mode, and the reason against real-time mode."""
    samples = [s for metric in TRANSFORM_MODE.collect() for s in metric.samples if s.labels["pipe"] == pipeline.pipe]
    return next(((sample.labels["mode"], sample.labels["why"]) for sample in samples), ("", ""))


@pytest.mark.parametrize("real_time", [True, False])
def test_a_checkpoint_changes_its_mode(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, real_time: bool
) -> None:
    """If this fails, `mode: auto` loses, repeats or never counts events of a pipe that ran with a plan for each batch, or of one
    that goes back to that, and has other columns, after a crash between a commit and its dead letters. So does an upgrade, and
    the way back."""
    monkeypatch.setattr("spark.jobs.streaming_plan.REAL_TIME_BATCH", "5 seconds")
    pipeline = make_pipeline(1)
    sql = "SELECT event, delay FROM {s} WHERE delay % 10 <> 7"
    batches = pipeline.chosen(columns=COLUMNS, sql=sql, mode="micro-batch")
    pipeline.send([*(flight(n) for n in range(10)), event(100, b"no json")])
    pipeline.start(batches, per_batch=True)
    pipeline.records("out", 9)
    assert set(reasons(pipeline.records("dead", 1))) == {"id-100"}
    pipeline.stop()
    assert mode_of(pipeline) == ("micro-batch", "")

    live = pipeline.chosen(columns=COLUMNS, sql=sql, mode="auto" if real_time else "micro-batch")
    broken = [True]
    reject = BadRecords._reject

    def fail(bad: BadRecords, *batch: Any) -> None:
        if broken:
            raise Unavailable("the process ends here")
        reject(bad, *batch)

    pipeline.start(live, auto=True)
    wait_for(lambda: mode_of(pipeline) == ("real-time" if real_time else "micro-batch", ""), "the mode")
    pipeline.send([*(flight(n) for n in range(10, 20)), event(101, b"no json")])
    assert set(reasons(pipeline.records("dead", 2))) == {"id-100", "id-101"}
    monkeypatch.setattr(BadRecords, "_reject", fail)
    pipeline.send([*(flight(n) for n in range(20, 30)), flight(102, delay="late")])
    assert "the process ends here" in pipeline.wait_for_problem()
    pipeline.stop()
    assert len(pipeline.records("dead", 2)) == 2
    broken.clear()
    pipeline.states.clear()

    sql = "SELECT event, delay FROM {s} WHERE coalesce(try_cast(delay AS INT), 0) % 10 <> 7"
    batches = pipeline.chosen(columns="carrier STRING, delay STRING", sql=sql, mode="micro-batch")
    pipeline.start(batches, per_batch=True)
    pipeline.send([flight(n) for n in range(30, 40)])
    out = pipeline.records("out", 36)
    dead = Counter(read_id(record) for record in pipeline.records("dead", 3))
    pipeline.stop()
    assert pipeline.problem is None
    assert {read_id(record) for record in out} == {f"id-{n}" for n in range(40) if n % 10 != 7}
    assert dead == {"id-100": 1, "id-101": 1, "id-102": 1}
    reported = pipeline.reports()
    assert numbers(reported, "passed") == {n for n in range(40) if n % 10 != 7}
    assert numbers(reported, "filtered") == {7, 17, 27, 37}
    assert numbers(reported, "dead") == {100, 101, 102}


def test_sources_come_and_go(make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a source that is added, also one whose first events are gone, or that is removed, also while a batch with
    its events is planned and not done, stops a pipe on Kafka for good; or others lose their position."""
    pipeline = make_pipeline(1)
    s, old, new = pipeline.stream, f"{pipeline.stream}-old", f"{pipeline.stream}-new"
    asyncio.run(pipeline.create([old, new], 1))
    pipeline.send([flight(n) for n in range(10)])
    pipeline.send([flight(100 + n) for n in range(20)], stream=old)
    pipeline.send([flight(200 + n) for n in range(10)], stream=new)
    asyncio.run(_delete_before(pipeline, 10, old))
    expected: set[int] = set()

    def run(sources: list[str], numbers: Iterable[int]) -> None:
        start(sources)
        expected.update(numbers)
        out = pipeline.records("out", len(expected))
        pipeline.stop()
        assert sorted(read_id(r) or "" for r in out) == sorted(f"id-{n}" for n in expected), sources

    def start(sources: list[str]) -> None:
        sql = " UNION ALL ".join(f"SELECT event, delay FROM `{one}`" for one in sources)
        chosen = pipeline.chosen(columns=COLUMNS, sql=sql, mode="micro-batch", sources=sources)
        pipeline.states.clear()
        pipeline.start(chosen)

    run([s], range(10))
    run([s, new], range(200, 210))
    pipeline.send([flight(n) for n in range(10, 15)])
    run([s], range(10, 15))
    run([s, old], range(110, 120))
    pipeline.send([flight(n) for n in range(15, 20)])
    pipeline.send([flight(120)], stream=old)

    def end(*_: object) -> None:
        raise Unavailable("the process ends here")

    with monkeypatch.context() as ending:
        ending.setattr(KafkaSparkBroker, "write", end)
        start([s, old])
        pipeline.wait_for_problem()
        pipeline.stop()
    pipeline.send([flight(n) for n in range(20, 25)])
    run([s], range(15, 25))
    assert not asyncio.run(pipeline.read_now("dead"))


def test_an_open_window_outlives_another_source(make_pipeline: MakePipeline) -> None:
    """If this fails, a transform over several events does not run on Kafka: one on which it raises stops it for good, or a late
    one vanishes; or it forgets what it counted when a source is added."""
    pipeline = make_pipeline(1)
    s, added = pipeline.stream, f"{pipeline.stream}-added"
    asyncio.run(pipeline.create([added], 1))

    def at(number: int, minute: float, delay: int = 1) -> Record:
        start_of_all = NOW - NOW % 60_000
        return msgspec.structs.replace(flight(number, delay), timestamp=start_of_all + round(minute * 60_000))

    def start(*sources: str) -> None:
        every = " UNION ALL ".join(f"SELECT event_time, delay FROM `{one}`" for one in sources)
        sql = f"""SELECT string(window.start) AS id, window.start AS time, count(*) AS flights, sum(60 DIV delay) AS part
                  FROM ({every}) GROUP BY window(event_time, '1 minute')"""
        chosen = pipeline.chosen(columns=COLUMNS, sql=sql, sources=sources, watermark="1m", interval="50ms")
        pipeline.start(chosen)

    def flights(windows: int) -> list[int]:
        return [orjson.loads(record.value or b"")["flights"] for record in pipeline.records("out", windows)]

    start(s)
    pipeline.send([at(0, 0), at(1, 0.5)])
    wait_for(lambda: sum(report.read for report in pipeline.batches) >= 2, "a batch")
    pipeline.send([at(2, 10), at(3, 10.1, delay=0), at(4, 10.2)])
    assert reasons(pipeline.records("dead", 1)) == {"id-3": "transform_error"}
    assert flights(1) == [2]
    pipeline.stop()
    start(s, added)
    pipeline.send([at(5, 10.5), at(6, 20)], stream=added)
    pipeline.send([at(7, 20), at(8, 0.1)])
    assert flights(2) == [2, 3], "the window that was open"
    assert reasons(pipeline.records("dead", 2)) == {"id-3": "transform_error", "id-8": "late"}
    pipeline.stop()
    assert pipeline.problem is None


def test_partitions_that_are_added_to_a_real_time_pipe(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a partition that was added has no task slot, and its events wait for ever."""
    monkeypatch.setattr("spark.jobs.streaming_plan.REAL_TIME_BATCH", "5 seconds")
    pipeline = make_pipeline(1)
    pipeline.send([flight(n) for n in range(10)])
    pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}"), auto=True)
    pipeline.records("out", 10)
    assert mode_of(pipeline) == ("real-time", "")
    asyncio.run(_add_partitions(pipeline, 3))
    pipeline.send([flight(n) for n in range(10, 20)], 2)
    assert {read_id(r) for r in pipeline.records("out", 20)} == {f"id-{n}" for n in range(20)}
    wait_for(lambda: mode_of(pipeline) == ("micro-batch", "partitions"), "the end of real-time mode")
    pipeline.send([flight(n) for n in range(20, 30)], 1)
    assert {read_id(r) for r in pipeline.records("out", 30)} == {f"id-{n}" for n in range(30)}
    pipeline.stop()
    assert pipeline.problem is None
    assert numbers(pipeline.reports(), "passed") == set(range(30))


async def _add_partitions(pipeline: BrokerPipeline, total: int) -> None:
    async with open_broker(pipeline.url) as broker:
        await broker.admin.add_partitions(pipeline.stream, total)


async def _delete_before(pipeline: BrokerPipeline, offset: int, stream: str = "") -> None:
    from aiokafka import TopicPartition
    from aiokafka.admin import RecordsToDelete

    from tests.support.kafka import open_admin

    async with open_admin(pipeline.url.removeprefix("kafka://")) as admin:
        await admin.delete_records(
            {TopicPartition(stream or pipeline.stream, 0): RecordsToDelete(before_offset=offset)}
        )


def test_recreated_topic_stops_the_query(make_pipeline: MakePipeline) -> None:
    """If this fails, a topic that was made again is read from an offset that means other records."""
    pipeline = make_pipeline(1)
    pipeline.send([flight(n) for n in range(10)])
    chosen = pipeline.chosen(columns=COLUMNS, sql="SELECT event, delay FROM {s}")
    pipeline.start(chosen)
    pipeline.records("out", 10)
    pipeline.stop()
    asyncio.run(_make_again(pipeline))
    pipeline.send([flight(n) for n in range(100, 150)])
    pipeline.start(chosen)
    assert "created again" in pipeline.wait_for_problem()
    pipeline.stop()
    assert len(pipeline.records("out", 10)) == 10


async def _make_again(pipeline: BrokerPipeline) -> None:
    async with open_broker(pipeline.url) as broker:
        await broker.admin.delete_topic(pipeline.stream)
        async with asyncio.timeout(300):
            while pipeline.stream in await broker.admin.topics():
                await asyncio.sleep(0.1)
    await pipeline.create([pipeline.stream], 1)
