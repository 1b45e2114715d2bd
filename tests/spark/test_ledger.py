"""What a pipe tells the ledger: every event in the set of what became of it, whatever crashed."""

from typing import Any

import msgspec
import orjson
import pytest
from pyspark.sql import DataFrame

from services.core.broker.errors import Unavailable
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN, Origin
from services.core.ledger.report import unpack_numbers
from spark.brokers.endpoint import BatchName
from spark.brokers.log import LogEndpoint
from spark.observed import BatchReport
from spark.reporter import PipeReporter
from spark.written import Wanted, Written
from tests.spark.river import River, event, numbers, wait_for

COLUMNS = "delay INT"


def flight(number: int, delay: int | str | None = None) -> Record:
    return event(number, orjson.dumps({"delay": number if delay is None else delay}))


def test_sets_add_up(river: River) -> None:
    """If this fails, the ledger invents losses of a pipe that filters, rejects and fails on some, or hides them."""
    bad = {
        1,
        *range(50, 400, 50),
    }  # and the first of a batch, with which the origins of others travel: here, and a culprit
    river.send([flight(n, delay=0 if n in (2, 17, 333) else "x" if n in bad else n) for n in range(1, 400)])
    foreign = [
        Record(b"k", b'{"delay": 3}', 1, ((ce, value),)) for ce, value in (("ce_id", b"a"), (ORIGIN, b"no: such"))
    ]
    river.send(foreign)
    river.run(
        river.pipe(
            columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM s WHERE delay % 3 <> 1", max_events=100
        ),
        401,
    )
    dead = {2, 17, 333} | bad
    filtered = {n for n in range(1, 400) if n % 3 == 1} - dead
    assert river.told("dead") == dead
    assert river.told("filtered") == filtered
    assert river.told("passed") == set(range(1, 400)) - dead - filtered
    assert {(told.incarnation, told.partition) for report in river.reports for told in report.sets} == {("run", 0)}
    last = river.reports[-1]
    assert last.closed
    assert {(report.node, report.pipe, report.instance) for report in river.reports} == {
        ("transform", "p", last.instance)
    }
    lags = {(lag.kind, lag.count) for report in river.reports for lag in report.lags}
    assert {kind for kind, _ in lags} == {"lag_in", "lag_out", "process_time"}


def test_what_is_lost_before_the_transform_is_not_told(river: River, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an event that vanishes between reading and transforming counts as filtered: nobody misses it."""
    read = LogEndpoint.read_stream

    def lose(*arguments: Any, **named: Any) -> DataFrame:
        return read(*arguments, **named).where("NOT contains(decode(value, 'UTF-8'), 'lost')")

    monkeypatch.setattr(LogEndpoint, "read_stream", lose)
    lost = {*range(1, 15), 17, 99}
    river.send([event(n, b"lost" if n in lost else b"%d" % (n % 3)) for n in range(1, 100)])
    river.run(river.pipe(sql="SELECT event, value FROM s WHERE value > '0'"), 99 - len(lost))
    kept = set(range(1, 100)) - lost
    assert river.told("filtered") == {n for n in kept if n % 3 == 0}
    assert river.told("passed") == {n for n in kept if n % 3}


def test_batch_that_could_not_be_told_is_told_again_and_not_written_again(
    river: River, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, a report that was not stored, or not known to be, is lost; or a batch is written at each try, which on Kafka
    means that every event of it comes as often, for as long as the telemetry topic is away."""
    tell, write = PipeReporter.tell, LogEndpoint.write
    failed: list[BatchReport] = []
    written: list[int] = []

    def count(endpoint: LogEndpoint, frame: DataFrame, topic: str, batch: BatchName, wanted: Wanted) -> Written:
        written.append(batch.epoch)
        return write(endpoint, frame, topic, batch, wanted)

    def fail_twice(reporter: PipeReporter, done: BatchReport) -> None:
        if len(failed) == 1:
            tell(reporter, done)
        if len(failed) < 2:
            failed.append(done)
            raise Unavailable("just now not")
        tell(reporter, done)

    monkeypatch.setattr(PipeReporter, "tell", fail_twice)
    monkeypatch.setattr(LogEndpoint, "write", count)
    river.send([flight(n) for n in range(60)])
    river.start(river.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s WHERE delay > 9", max_events=20))
    wait_for(lambda: river.read >= 60, "all events read")
    river.stop()
    assert len(failed) == 2
    assert failed[0] is failed[1]
    assert sorted(written) == sorted(set(written))
    assert river.problem is not None
    assert river.states[-1].problem is None
    assert river.told("passed") == set(range(10, 60))
    assert river.told("filtered") == set(range(10))
    assert len(river.out) == 50


def test_duplicates_are_told(river: River) -> None:
    """If this fails, each duplicate that a pipe leaves out counts as lost."""
    again = [msgspec.structs.replace(flight(n), headers=((ID, b"id-1"), (ORIGIN, b"run:0:%d" % n))) for n in (50, 51)]
    river.send([flight(1), again[0], flight(2)])
    chosen = river.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h")
    river.start(chosen)
    wait_for(lambda: river.read >= 2, "the first batch")
    river.send([again[1], flight(3), event(4, b"no json")])
    wait_for(lambda: bool(river.dead), "the second batch")
    river.stop()
    assert river.problem is None
    assert river.told("passed") == {1, 2, 3}
    assert river.told("filtered") == {50, 51}
    assert river.told("dead") == {4}


def test_new_events_have_origins(river: River) -> None:
    """If this fails, nobody can say which of the events that a transform made were lost behind it."""
    river.send([flight(n) for n in range(30)])
    sql = """SELECT concat(event.id, '-', leg) AS id, event.time AS time, leg
             FROM s LATERAL VIEW explode(array(1, 2)) AS leg"""
    chosen = river.pipe(columns=COLUMNS, sql=sql, max_events=10)
    river.run(chosen, 30)
    origins = {Origin.unpack(record.header(ORIGIN) or b"") for record in river.out}
    assert len(origins) == len(river.out) == 60
    accepted = [told for report in river.reports for told in report.sets if told.outcome == "accepted"]
    found = {
        Origin(told.incarnation, told.partition, number) for told in accepted for number in unpack_numbers(told.numbers)
    }
    assert found == origins
    arrivals = {int(record.header(ARRIVAL) or b"") // 60_000 for record in river.out}
    assert {told.minute for told in accepted} == arrivals
    assert river.told("filtered") == set(range(30))
    newest = max(int(path.name) for path in (river.folder / "checkpoints/p/commits").iterdir() if path.name.isdigit())
    for name in (f"{newest}", f".{newest}.crc"):
        (river.folder / "checkpoints/p/commits" / name).unlink()
    before = river.reports
    river.run(chosen, 40)
    assert numbers(river.reports, "accepted") == numbers(before, "accepted")
    assert len(river.reports) > len(before) + 1
    assert len(river.out) == 60


def test_aggregate_tells_what_it_read(river: River, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, what a transform over several events took in counts as lost, after a crash at the latest."""
    tell = PipeReporter.tell
    failed: list[BatchReport] = []

    def fail_once(reporter: PipeReporter, done: BatchReport) -> None:
        if done.read and not failed:
            failed.append(done)
            raise Unavailable("just now not")
        tell(reporter, done)

    monkeypatch.setattr(PipeReporter, "tell", fail_once)
    sql = """SELECT date_format(window.start, 'HH:mm') AS id, window.start AS time, count(*) AS flights
             FROM s GROUP BY window(event_time, '1 minute')"""
    river.send([flight(n) for n in range(20)])
    river.start(river.pipe(columns=COLUMNS, sql=sql, watermark="1m", interval="50ms"))
    wait_for(lambda: river.told("filtered") == set(range(20)), "what was read is told, though at first it was not")
    river.send([flight(20), event(21, b"no json")])
    wait_for(lambda: river.told("filtered") == set(range(21)), "the next batch")
    wait_for(lambda: river.told("dead") == {21}, "the rejected one")
    river.stop()
    assert failed
    assert not river.told("passed")
