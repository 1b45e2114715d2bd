"""The expressions that every event passes are compiled by Spark: one that is not takes all others of its projection along."""

import re
import time
from typing import Any

import pytest
from msgspec.structs import replace
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from services.core import event as names
from spark.batch_report import age, began, count_by_lag
from spark.brokers.kafka import for_sink, restored_time
from spark.java import jvm
from spark.records import RAW
from spark.transforms.output import OutShape
from spark.transforms.view import FAILED_CHECK, SourceView
from tests.spark.log_pipeline import NOW, LogPipeline, event, wait_for

_COLUMNS = StructType().add("id", "string").add("user", "string").add("price", "double")
_MAX_BYTES = 100_000
_KEY, _VALUE = b"k" * 100, '{"id": "1", "user": "u", "price": 2.5}'


def _records(spark: SparkSession, headers: list[tuple[str, bytes | None]] | None, value: str = _VALUE) -> DataFrame:
    row = (bytearray(_KEY), bytearray(value.encode()), "events", 0, "0" * 19, None, headers)
    return spark.createDataFrame([row], RAW).withColumn("timestamp", f.timestamp_millis(f.lit(77)))


def _restored(raw: DataFrame) -> DataFrame:
    """As it comes from Kafka."""
    return raw.withColumns(restored_time())


def _out(raw: DataFrame) -> DataFrame:
    view = SourceView(_COLUMNS)
    checked = view.check(raw).observe("in", f.count(f.lit(1)).alias("events"), f.count(FAILED_CHECK).alias("bad"))
    result = view.good(checked).where("price > 1").selectExpr("event", "user", "price * 2 AS price")
    return OutShape(result.schema, declared=_COLUMNS.names, max_bytes=_MAX_BYTES).apply(result)


def _plan_of(frame: DataFrame) -> str:
    conf, length = frame.sparkSession.conf, "spark.sql.maxPlanStringLength"
    before = conf.get(length)
    conf.set(length, str(1 << 20))
    try:
        plan: Any = frame._jdf.queryExecution().executedPlan()
        return str(plan.toString())
    finally:
        assert before is not None
        conf.set(length, before)


def test_the_projection_of_the_output_is_not_interpreted(spark: SparkSession) -> None:
    """Otherwise each event costs 10 us more of CPU: a seventh of all that a transform costs."""
    out = for_sink(_out(_restored(_records(spark, [(names.ID, b"1"), (names.TIME, b"5")]))))
    text = _plan_of(out)
    steps = re.findall(r"^[ +:-]*(\*\(\d+\) )?(?:Project|Filter) [\[(]", text, re.MULTILINE)
    assert steps[0], text
    assert "lambdafunction" not in text
    assert text.count("StructsToJsonEvaluator") == 1, "the payload is made more than once"
    assert text.count("from_json") == 1, "the payload is parsed more than once"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], [(names.TIME, b"77")]),
        ([("a", b"1")], [("a", b"1"), (names.TIME, b"77")]),
        ([(names.TIME, b"5")], [(names.TIME, b"77")]),
        ([("a", None), (names.TIME, b"5"), ("b", b"\xff")], [("a", None), ("b", b"\xff"), (names.TIME, b"77")]),
    ],
)
def test_event_time_is_the_last_header(
    spark: SparkSession, headers: list[tuple[str, bytes | None]], expected: list[tuple[str, bytes | None]]
) -> None:
    """Kafka's sink sets no timestamps: without this header, or with an old one in front of it, an event's time is lost."""
    row = for_sink(_records(spark, headers).select("key", "value", "timestamp", "headers")).first()
    assert row is not None
    assert [tuple(header) for header in row.headers] == expected


@pytest.mark.parametrize(
    ("headers", "kept", "millis"),
    [
        ([("a", None), (names.TIME, b"5")], [("a", None)], 5),
        ([(names.TIME, b"5"), ("b", b"1")], [(names.TIME, b"5"), ("b", b"1")], 77),
        ([(names.TIME, b"soon")], [(names.TIME, b"soon")], 77),
        ([(names.TIME, None)], [(names.TIME, None)], 77),
        ([], [], 77),
        (None, None, 77),
    ],
)
def test_the_time_of_a_record_is_in_its_last_header(
    spark: SparkSession,
    headers: list[tuple[str, bytes | None]] | None,
    kept: list[tuple[str, bytes | None]] | None,
    millis: int,
) -> None:
    """Otherwise watermarks, dead letters and lag are by the time at which Kafka stored the event, or its header is delivered."""
    row = _restored(_records(spark, headers)).select("headers", f.unix_millis("timestamp").alias("millis")).first()
    assert row is not None
    assert (None if row.headers is None else [tuple(header) for header in row.headers]) == kept
    assert row.millis == millis


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_headers_count_against_the_limit_of_a_record(spark: SparkSession, more: int, fits: bool) -> None:
    """A record that the broker refuses would end the query again and again; so the transform fails on it, as on a culprit."""
    headers: list[tuple[str, bytes | None]] = [(names.ID, b"1"), ("a", None), ("bc", b"\xff" * 50_000)]
    counted = 4 * len(names.ID + "a" + "bc") + 50_001
    room = _MAX_BYTES - counted - len(_KEY) - len('{"user":"","price":5.0}')
    user = "u" * (room + more)
    out = _out(_records(spark, headers, f'{{"id": "1", "user": "{user}", "price": 2.5}}'))
    if fits:
        assert len(out.collect()) == 1
    else:
        with pytest.raises(PySparkException, match=f"larger than {_MAX_BYTES} bytes"):
            out.collect()


def test_no_batch_compiles_code_of_its_own(spark: SparkSession) -> None:
    """Otherwise each batch compiles code for some hundred events, because the time of the batch is written in it."""
    seen = (began(), count_by_lag(age(f.col("timestamp"))).alias("lags"))
    frame = _records(spark, [(names.ID, b"1")]).observe("seen", *seen).select(f.col("topic").alias("id"), "value")
    made = OutShape(frame.schema, declared=["value"], max_bytes=_MAX_BYTES).apply(frame)

    def run() -> int:
        time.sleep(0.002)  # another moment
        made.write.format("noop").mode("overwrite").save()
        return _compiled(spark)

    first = run()
    assert run() == first
    assert run() == first


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT event, upper(user) AS user FROM s",
        "SELECT concat(event.id, '-new') AS id, event.key AS key, upper(user) AS user FROM s",
        "SELECT string(window.start) AS id, count(*) AS events FROM s GROUP BY window(event_time, '1 minute')",
    ],
    ids=["events", "new events", "counts"],
)
def test_the_batches_of_a_pipe_share_their_code(pipeline: LogPipeline, sql: str) -> None:
    """Otherwise a pipe whose batches are small has Spark compile in each of them. Those of the first two are planned
    one by one."""
    watermark = {"watermark": "1m"} if "event_time" in sql else {}
    chosen = pipeline.pipe(columns="user STRING", sql=sql, max_events=10, **watermark)

    def run(until: int) -> int:
        several = (event(n, b'{"user": "u%d"}' % n) for n in range(pipeline.read, until))
        pipeline.send(replace(one, timestamp=NOW) for one in several)  # so the watermark stays
        wait_for(lambda: pipeline.read >= until or bool(pipeline.problem), f"{until} events read")
        assert pipeline.problem is None, pipeline.problem
        assert sum(report.read > 0 for report in pipeline.batches) >= until // 10, "larger batches"
        return _compiled(pipeline.session)

    pipeline.start(chosen)
    assert run(30) == run(80)


def _compiled(spark: SparkSession) -> int:
    """The number of classes that Spark has compiled."""
    metrics = jvm(spark).org.apache.spark.metrics.source.CodegenMetrics
    return int(metrics.METRIC_COMPILATION_TIME().getCount())
