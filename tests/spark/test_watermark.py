"""Transforms over several events: what they compute, and that what comes too late for them is kept."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from services.core.broker.errors import Unavailable
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import delete_topic
from services.core.broker.record import Record
from services.core.event import ARRIVAL, read_id
from services.core.times import format_time
from services.core.undelivered import dead_letter
from services.core.undelivered.causes import normalise
from services.core.yaml_source import BadConfiguration
from spark.batch_report import BatchReport, Origins
from spark.brokers.log import LogSparkBroker
from spark.jobs.attempts import Attempts, Stopping
from spark.jobs.checkpoint import CheckpointDamaged
from spark.jobs.culprits import FailureStreak, ranges_of, within
from spark.jobs.dead_letters import Rejected, write_dead_letters
from spark.jobs.query import Query
from spark.jobs.replay import SKIPPED_FILE, read_skipped, reject_culprits, reject_process_killers
from spark.jobs.start_checks import check_suitability
from spark.records import RecordOffset
from spark.settings import TransformSettings
from tests.spark.log_pipeline import NOW, LogPipeline, event, wait_for

COUNTS = """SELECT date_format(window.start, 'HH:mm') AS id, window.start AS time, count(*) AS flights, sum(60 DIV delay) AS part
            FROM s GROUP BY window(event_time, '1 minute')"""
START = NOW - NOW % 60_000


def flight(number: int, minute: float, delay: int | str = 1) -> Record:
    """An event at so many minutes after START."""
    record = event(number, orjson.dumps({"delay": delay}), key=b"k")
    return msgspec.structs.replace(record, timestamp=START + round(minute * 60_000))


def minute(number: int) -> str:
    return datetime.fromtimestamp(START / 1000 + 60 * number, UTC).strftime("%H:%M")


def counts(pipeline: LogPipeline) -> dict[str | None, int]:
    return {read_id(record): orjson.loads(record.value or b"")["flights"] for record in pipeline.out}


def letters(pipeline: LogPipeline) -> Counter[tuple[str | None, str]]:
    return Counter((read_id(r), (r.header(dead_letter.REASON) or b"").decode()) for r in pipeline.dead)


def send(pipeline: LogPipeline, *records: Record) -> None:
    """Send, and wait until Spark has noted the batch."""
    before = pipeline.read
    pipeline.send(records)
    wait_for(
        lambda: pipeline.read >= before + len(records) or bool(pipeline.problem), f"{len(records)} more events read"
    )
    assert pipeline.problem is None, pipeline.problem


def test_late_events_are_kept(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an event behind the watermark vanishes, stops the pipe, or is forgotten when a crash comes first."""
    chosen = pipeline.pipe(columns="delay INT", sql=COUNTS, watermark="1m", interval="50ms")
    pipeline.start(chosen)
    send(pipeline, flight(0, 0), flight(1, 0.5), flight(2, 1))
    send(pipeline, flight(3, 10))
    send(pipeline, flight(4, 20))
    wait_for(lambda: len(pipeline.out) >= 3, "closed windows")
    assert counts(pipeline) == {minute(0): 2, minute(1): 1, minute(10): 1}
    send(pipeline, flight(5, 0.1), flight(6, 20.5))
    wait_for(lambda: bool(pipeline.dead), "the late event in the dead letters")
    assert letters(pipeline) == {("id-5", "late"): 1}
    detail = (pipeline.dead[0].header(dead_letter.DETAIL) or b"").decode()
    times = format_time(START + 6_000), format_time(START + 19 * 60_000)
    assert f"may hold it: event time {times[0]} is before the watermark {times[1]} of batch " in detail
    assert normalise(detail).endswith("event time # is before the watermark # of batch #")

    failed: list[str] = []

    def fail_once(
        query: Query, found: Sequence[Rejected], name: str, epoch: int, report: BatchReport, *, counted: bool
    ) -> Origins:
        if not failed:
            failed.append(name)
            raise Unavailable("just now not")
        return write_dead_letters(query, found, name, epoch, report, counted=counted)

    monkeypatch.setattr("spark.jobs.dead_letters.write_dead_letters", fail_once)
    pipeline.send([flight(7, 0.2), flight(8, 20.6)])
    wait_for(lambda: ("id-7", "late") in letters(pipeline), "the other late event, after a failure in between")
    wait_for(lambda: pipeline.problem is not None, "the failure is reported")
    wait_for(lambda: pipeline.states[-1].problem is None, "the query runs again")
    pipeline.states.clear()
    send(pipeline, flight(9, 30))
    wait_for(lambda: minute(20) in counts(pipeline), "another closed window")
    pipeline.stop()
    assert failed
    assert counts(pipeline) == {minute(0): 2, minute(1): 1, minute(10): 1, minute(20): 3}
    assert letters(pipeline) == {("id-5", "late"): 1, ("id-7", "late"): 1}


@pytest.mark.parametrize("time", ["event.time", "event_time"])
def test_a_filter_on_times_in_the_future(pipeline: LogPipeline, time: str) -> None:
    """If this fails, the advice of docs/transforms.md is wrong: one sender's wrong clock makes all other events late, also with
    a condition on `event.time`. Spark applies one on `event_time` after the watermark, so it does not help."""
    sql = COUNTS.replace("GROUP BY", f"WHERE {time} < event.arrival + INTERVAL 5 MINUTES GROUP BY")
    pipeline.start(pipeline.pipe(columns="delay INT", sql=sql, watermark="1m", interval="50ms"))

    def in_time(number: int, minute: float) -> Record:
        one = flight(number, minute)
        headers = tuple((name, value) for name, value in one.headers if name != ARRIVAL)
        return msgspec.structs.replace(one, headers=(*headers, (ARRIVAL, b"%d" % one.timestamp)))

    send(pipeline, in_time(0, 0), flight(1, 600))
    send(pipeline, in_time(2, 0.5))
    send(pipeline, in_time(3, 10))
    send(pipeline, in_time(4, 10.1))
    wait_for(lambda: bool(pipeline.out), "a closed window")
    if time == "event.time":
        pipeline.stop()
        assert counts(pipeline) == {minute(0): 2}
        assert not pipeline.dead
    else:
        wait_for(lambda: len(pipeline.dead) == 3, "all events after the one in the future")
        assert letters(pipeline) == {(f"id-{number}", "late"): 1 for number in (2, 3, 4)}


def test_results_of_a_batch_are_in_the_order_of_their_times(pipeline: LogPipeline) -> None:
    """If this fails, a destination with `order: key` gets the newest minute of a device before the older ones."""
    sql = COUNTS.replace("SELECT", "SELECT 'k' AS key,")
    pipeline.start(pipeline.pipe(columns="delay INT", sql=sql, watermark="1m", interval="50ms"))
    send(pipeline, *(flight(number, number) for number in reversed(range(10))))
    send(pipeline, flight(10, 20))
    wait_for(lambda: len(pipeline.out) >= 10, "closed windows")
    assert [read_id(record) for record in pipeline.out] == [minute(number) for number in range(10)]


def test_poisoned_event_of_an_aggregate(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one event on which an aggregate raises stops it for good, the list of left-out events grows for ever,
    a stop waits for a long search, or a failing broker starts one."""
    chosen = pipeline.pipe(columns="delay INT", sql=COUNTS, watermark="1m", interval="50ms")
    pipeline.start(chosen)
    send(pipeline, flight(0, 0))
    pipeline.send([flight(1, 0.1, delay=0), flight(2, 0.2), flight(3, 0.3, delay="no number")])
    wait_for(lambda: len(pipeline.dead) >= 2, "both in the dead letters")
    send(pipeline, flight(4, 10))
    send(pipeline, flight(5, 20))
    wait_for(lambda: minute(0) in counts(pipeline), "a closed window")
    pipeline.stop()
    assert counts(pipeline)[minute(0)] == 2
    assert letters(pipeline) == {("id-1", "transform_error"): 1, ("id-3", "schema_mismatch"): 1}
    with pipeline.query(chosen) as query:
        assert query.checkpoint.read_note(SKIPPED_FILE, list[object])
        assert read_skipped(query) == []
        assert query.checkpoint.read_note(SKIPPED_FILE, list[object]) == []
        pipeline.send([flight(6, 20.1)])
        query.stopping.set()
        with pytest.raises(Stopping):
            reject_culprits(query, FailureStreak(query.checkpoint))
    searched: list[Query] = []

    def search(query: Query, _streak: FailureStreak) -> int:
        searched.append(query)
        return 0

    monkeypatch.setattr("spark.jobs.streaming_plan.reject_culprits", search)
    pipeline.states.clear()
    pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.states), "the query runs")
    delete_topic(DataFolder.prepare(pipeline.log), "s")
    wait_for(lambda: pipeline.problem is not None, "the query says that its source is away")
    pipeline.stop()
    assert not searched


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ({"sql": COUNTS.replace("event_time", "event.time")}, "watermark: 10m"),
        ({"sql": COUNTS, "watermark": "1m", "deduplicate_within": "1m"}, "deduplicate_within needs"),
        ({"python": "own.py:own"}, "sets a watermark over at"),
    ],
)
def test_what_could_drop_events_is_refused(
    pipeline: LogPipeline, spark: SparkSession, transform: dict[str, str], said: str
) -> None:
    """If this fails, a pipe starts whose late events would vanish without our knowing."""
    (pipeline.folder / "own.py").write_text(OWN)
    chosen = pipeline.pipe(columns="delay INT", sources=["s"], **transform)
    prepared = pipeline.prepare(chosen)
    with pytest.raises(BadConfiguration, match=said):
        check_suitability(spark, TransformSettings(), LogSparkBroker(str(pipeline.log)), chosen, [prepared])


OWN = """
from pyspark.sql import functions as f

def own(frame):
    timed = frame.withColumn("at", f.col("event.time")).withWatermark("at", "1 minute")
    return timed.groupBy(f.window("at", "1 minute")).agg(f.count("*").alias("n")).select(
        f.col("window.start").cast("string").alias("id"), "n")
"""


def test_event_of_an_aggregate_that_ends_the_process(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, one event that takes all memory of an aggregate ends the process again and again."""
    chosen = pipeline.pipe(columns="delay INT", sql=COUNTS, watermark="1m", interval="50ms")
    with monkeypatch.context() as left:
        left.setattr("spark.jobs.streaming_plan.reject_culprits", lambda _query, _streak: 0)
        pipeline.send([flight(n, n / 100, delay=int(n != 1)) for n in range(8)])
        pipeline.start(chosen)
        wait_for(lambda: pipeline.problem is not None, "a batch that is begun and not done")
        pipeline.stop()
    pipeline.states.clear()

    def end_process(_prepared: object, _endpoint: object, raw: DataFrame, places: Sequence[RecordOffset]) -> None:
        if raw.where(within(ranges_of(places))).where("CAST(value AS STRING) LIKE '%:0}'").count():
            raise ConnectionResetError("the process is gone")

    monkeypatch.setattr("spark.jobs.query.try_transform", end_process)
    with pipeline.query(chosen) as query:
        for _processes in range(12):
            attempts = Attempts(query.prepared.version)
            attempts.open(query.checkpoint)
            with suppress(ConnectionResetError):
                reject_process_killers(replace(query, attempts=attempts), FailureStreak(query.checkpoint))
                if attempts.current is not None and attempts.current.parts == ():
                    break
                attempts.record_working()  # the query itself ends this one
        assert [letters(pipeline), len(read_skipped(query))] == [{("id-1", "transform_error"): 1}, 1]
    monkeypatch.undo()
    pipeline.start(chosen)
    send(pipeline, flight(50, 10))
    send(pipeline, flight(51, 20))
    wait_for(lambda: minute(0) in counts(pipeline), "a closed window")
    pipeline.stop()
    assert counts(pipeline)[minute(0)] == 7


def test_another_transform_does_not_go_on_with_the_state(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, a changed aggregate goes on with what the former one counted, without a word, or fails in Spark's."""
    chosen = pipeline.pipe(columns="delay INT", sql=COUNTS, watermark="1m", interval="50ms")
    pipeline.start(chosen)
    send(pipeline, flight(0, 0), flight(1, 0.5))
    pipeline.stop()
    settings, broker = TransformSettings(data=pipeline.folder), LogSparkBroker(str(pipeline.log))
    other = COUNTS.replace("1 minute", "30 seconds")
    for changed in ({"sql": other, "columns": "delay INT"}, {"sql": COUNTS, "columns": "delay LONG"}):
        edited = pipeline.pipe(watermark="1m", interval="50ms", **changed)
        prepared = pipeline.prepare(edited)
        with pytest.raises(
            BadConfiguration, match=r"pipes\.p\.transform\.sql: the checkpoint has the state .* Try: the former"
        ):
            check_suitability(spark, settings, broker, edited, [prepared])
        with pytest.raises(CheckpointDamaged, match="results would be made of both"), pipeline.query(edited):
            raise AssertionError("must not be adopted")
    same = pipeline.pipe(columns="delay INT", sql=COUNTS, watermark="2m", interval="70ms", max_events=10)
    check_suitability(spark, settings, broker, same, [pipeline.prepare(same)])
    pipeline.start(same)
    send(pipeline, flight(2, 10))
    send(pipeline, flight(3, 20))
    wait_for(lambda: minute(0) in counts(pipeline), "a closed window")
    pipeline.stop()
    assert counts(pipeline)[minute(0)] == 2


def test_the_watermark_follows_what_passes_the_where(pipeline: LogPipeline) -> None:
    """If this fails, the documents say something else of the watermark than what Spark does."""
    sql = COUNTS.replace("FROM s", "FROM s WHERE delay < 100")
    pipeline.start(pipeline.pipe(columns="delay INT", sql=sql, watermark="1m", interval="50ms"))
    send(pipeline, flight(0, 0), flight(1, 0.5))
    send(pipeline, flight(2, 30, delay=100))
    send(pipeline, flight(3, 31, delay=100))
    send(pipeline, flight(4, 0.7))
    assert not pipeline.out
    assert not pipeline.dead
    send(pipeline, flight(5, 30))
    send(pipeline, flight(6, 31))
    wait_for(lambda: minute(0) in counts(pipeline), "a closed window")
    pipeline.stop()
    assert counts(pipeline)[minute(0)] == 3
    assert not pipeline.dead


def test_a_mended_function_is_another_transform(pipeline: LogPipeline) -> None:
    """If this fails, a Python aggregate that was changed in its file goes on with the state of the former one."""
    chosen = pipeline.pipe(columns="delay INT", python="grouped.py:grouped", watermark="1m")
    file = pipeline.folder / "grouped.py"
    file.write_text(GROUPED)
    before = pipeline.prepare(chosen).state
    assert before == pipeline.prepare(chosen).state != ""
    file.write_text(GROUPED.replace("1 minute", "2 minutes"))
    assert pipeline.prepare(chosen).state != before


GROUPED = """
from pyspark.sql import functions as f

def grouped(frame):
    counted = frame.groupBy(f.window("event_time", "1 minute")).agg(f.count("*").alias("n"))
    return counted.select(f.col("window.start").cast("string").alias("id"), "n")
"""
