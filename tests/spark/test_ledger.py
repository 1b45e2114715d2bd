"""A pipe's reports to the ledger: every event is in the set of its outcome, whatever crashed."""

from typing import Any

import msgspec
import orjson
import pytest
from pyspark.sql import DataFrame

from services.core.broker.errors import Unavailable
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN, Origin
from services.core.ledger.report import unpack_numbers
from spark.batch_report import BatchReport
from spark.brokers.contract import BatchName, Written
from spark.brokers.log import LogSparkBroker
from spark.reporter import PipeReporter
from tests.spark.log_pipeline import LogPipeline, event, numbers, wait_for

COLUMNS = "delay INT"


def flight(number: int, delay: int | str | None = None) -> Record:
    return event(number, orjson.dumps({"delay": number if delay is None else delay}))


def test_sets_add_up(pipeline: LogPipeline) -> None:
    """If this fails, the ledger invents losses of a pipe that filters, rejects and fails on some, or hides them."""
    bad = {1, *range(50, 400, 50)}
    pipeline.send([flight(n, delay=0 if n in (2, 17, 333) else "x" if n in bad else n) for n in range(1, 400)])
    foreign = [
        Record(b"k", b'{"delay": 3}', 1, ((ce, value),)) for ce, value in (("ce_id", b"a"), (ORIGIN, b"no: such"))
    ]
    pipeline.send(foreign)
    pipeline.run(
        pipeline.pipe(
            columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM s WHERE delay % 3 <> 1", max_events=100
        ),
        401,
    )
    dead = {2, 17, 333} | bad
    filtered = {n for n in range(1, 400) if n % 3 == 1} - dead
    assert pipeline.reported("dead") == dead
    assert pipeline.reported("filtered") == filtered
    assert pipeline.reported("passed") == set(range(1, 400)) - dead - filtered
    assert {(reported.incarnation, reported.partition) for report in pipeline.reports for reported in report.sets} == {
        ("run", 0)
    }
    last = pipeline.reports[-1]
    assert last.closed
    assert {(report.node, report.pipe, report.instance) for report in pipeline.reports} == {
        ("transform", "p", last.instance)
    }
    lags = {(lag.kind, lag.count) for report in pipeline.reports for lag in report.lags}
    assert {kind for kind, _ in lags} == {"lag_in", "lag_out", "process_time"}


def test_what_is_lost_before_the_transform_is_not_reported(
    pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, an event that vanishes between reading and transforming counts as filtered: nobody misses it."""
    read = LogSparkBroker.read_stream

    def lose(*arguments: Any, **named: Any) -> DataFrame:
        return read(*arguments, **named).where("NOT contains(decode(value, 'UTF-8'), 'lost')")

    monkeypatch.setattr(LogSparkBroker, "read_stream", lose)
    lost = {*range(1, 15), 17, 99}
    pipeline.send([event(n, b"lost" if n in lost else b"%d" % (n % 3)) for n in range(1, 100)])
    pipeline.run(pipeline.pipe(sql="SELECT event, value FROM s WHERE value > '0'"), 99 - len(lost))
    kept = set(range(1, 100)) - lost
    assert pipeline.reported("filtered") == {n for n in kept if n % 3 == 0}
    assert pipeline.reported("passed") == {n for n in kept if n % 3}


def test_batch_that_could_not_be_reported_is_reported_again_and_not_written_again(
    pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a report that was not stored, or not known to be, is lost; or a batch is written at each try, which on Kafka
    means that every event of it comes as often, for as long as the telemetry topic is away."""
    append_report, write = PipeReporter.report, LogSparkBroker.write
    failed: list[BatchReport] = []
    written: list[int] = []

    def count(endpoint: LogSparkBroker, frame: DataFrame, topic: str, batch: BatchName, *others: Any) -> Written:
        done = write(endpoint, frame, topic, batch, *others)
        written.append(batch.epoch)  # not before: Spark may begin a batch anew
        return done

    def fail_twice(reporter: PipeReporter, done: BatchReport) -> None:
        if len(failed) == 1:
            append_report(reporter, done)
        if len(failed) < 2:
            failed.append(done)
            raise Unavailable("just now not")
        append_report(reporter, done)

    monkeypatch.setattr(PipeReporter, "report", fail_twice)
    monkeypatch.setattr(LogSparkBroker, "write", count)
    pipeline.send([flight(n) for n in range(60)])
    pipeline.start(pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s WHERE delay > 9", max_events=20))
    wait_for(lambda: pipeline.read >= 60, "all events read")
    pipeline.stop()
    assert len(failed) == 2
    assert failed[0] is failed[1]
    assert sorted(written) == sorted(set(written))
    assert pipeline.problem is not None
    assert pipeline.states[-1].problem is None
    assert pipeline.reported("passed") == set(range(10, 60))
    assert pipeline.reported("filtered") == set(range(10))
    assert len(pipeline.out) == 50


def test_duplicates_are_reported(pipeline: LogPipeline) -> None:
    """If this fails, each duplicate that a pipe leaves out counts as lost."""
    again = [msgspec.structs.replace(flight(n), headers=((ID, b"id-1"), (ORIGIN, b"run:0:%d" % n))) for n in (50, 51)]
    pipeline.send([flight(1), again[0], flight(2)])
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h")
    pipeline.start(chosen)
    wait_for(lambda: pipeline.read >= 2, "the first batch")
    pipeline.send([again[1], flight(3), event(4, b"no json")])
    wait_for(lambda: bool(pipeline.dead), "the second batch")
    pipeline.stop()
    assert pipeline.problem is None
    assert pipeline.reported("passed") == {1, 2, 3}
    assert pipeline.reported("filtered") == {50, 51}
    assert pipeline.reported("dead") == {4}


def test_new_events_have_origins(pipeline: LogPipeline) -> None:
    """If this fails, nobody can say which of the events that a transform made were lost behind it."""
    pipeline.send([flight(n) for n in range(30)])
    sql = """SELECT concat(event.id, '-', leg) AS id, event.time AS time, leg
             FROM s LATERAL VIEW explode(array(1, 2)) AS leg"""
    chosen = pipeline.pipe(columns=COLUMNS, sql=sql, max_events=10)
    pipeline.run(chosen, 30)
    origins = {Origin.unpack(record.header(ORIGIN) or b"") for record in pipeline.out}
    assert len(origins) == len(pipeline.out) == 60
    accepted = [each for report in pipeline.reports for each in report.sets if each.outcome == "accepted"]
    found = {
        Origin(each.incarnation, each.partition, number) for each in accepted for number in unpack_numbers(each.numbers)
    }
    assert found == origins
    arrivals = {int(record.header(ARRIVAL) or b"") // 60_000 for record in pipeline.out}
    assert {reported.minute for reported in accepted} == arrivals
    assert pipeline.reported("filtered") == set(range(30))
    newest = max(
        int(path.name) for path in (pipeline.folder / "checkpoints/p/commits").iterdir() if path.name.isdigit()
    )
    for name in (f"{newest}", f".{newest}.crc"):
        (pipeline.folder / "checkpoints/p/commits" / name).unlink()
    before = pipeline.reports
    pipeline.run(chosen, 40)
    assert numbers(pipeline.reports, "accepted") == numbers(before, "accepted")
    assert len(pipeline.reports) > len(before) + 1
    assert len(pipeline.out) == 60


def test_aggregate_reports_what_it_read(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, what a transform over several events took in counts as lost, after a crash at the latest."""
    append_report = PipeReporter.report
    failed: list[BatchReport] = []

    def fail_once(reporter: PipeReporter, done: BatchReport) -> None:
        if done.read and not failed:
            failed.append(done)
            raise Unavailable("just now not")
        append_report(reporter, done)

    monkeypatch.setattr(PipeReporter, "report", fail_once)
    sql = """SELECT date_format(window.start, 'HH:mm') AS id, window.start AS time, count(*) AS flights
             FROM s GROUP BY window(event_time, '1 minute')"""
    pipeline.send([flight(n) for n in range(20)])
    pipeline.start(pipeline.pipe(columns=COLUMNS, sql=sql, watermark="1m", interval="50ms"))
    wait_for(
        lambda: pipeline.reported("filtered") == set(range(20)),
        "the read events are reported, though at first they were not",
    )
    pipeline.send([flight(20), event(21, b"no json")])
    wait_for(lambda: pipeline.reported("filtered") == set(range(21)), "the next batch")
    wait_for(lambda: pipeline.reported("dead") == {21}, "the rejected one")
    pipeline.stop()
    assert failed
    assert not pipeline.reported("passed")
