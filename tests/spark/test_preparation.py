"""Mistakes in a transform are found before the first event, at their place in the pipe file."""

import re

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from services.core.pipe_file.columns import MEANT, TYPES
from services.core.yaml_source import BadConfiguration
from spark.brokers.log import LogSparkBroker
from spark.jobs.start_checks import check_suitability
from spark.settings import TransformSettings
from tests.spark.log_pipeline import LogPipeline
from tests.unit.core.test_columns import MISTAKES, RIGHT

COLUMNS = "carrier STRING, delay INT"


def mistakes(pipeline: LogPipeline, **pipe: object) -> str:
    with pytest.raises(BadConfiguration) as caught:
        pipeline.prepare(pipeline.pipe(**{"columns": COLUMNS} | pipe))  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert problem.where.startswith(str(pipeline.folder / "pipes.yaml:"))
    return f"{problem.key}: {problem.message}"


SHAPES = {"ARRAY": "ARRAY<INT>", "MAP": "MAP<STRING, INT>", "STRUCT": "STRUCT<a: INT>", "INTERVAL": "INTERVAL DAY"}


def test_spark_agrees_on_columns(pipeline: LogPipeline) -> None:
    """If this fails, `penstock check` refuses columns that Spark takes, or advises a type that Spark refuses."""
    for kind in {*TYPES, *(meant.replace("…", "INT") for meant in MEANT.values())}:
        with_length = f"{kind}(3)" if "CHAR" in kind else f"{kind}(4326)" if kind.startswith("GEO") else kind
        StructType.fromDDL(f"a {SHAPES.get(kind, with_length.replace('STRUCT<INT>', 'STRUCT<a: INT>'))}")
    for right in RIGHT:
        StructType.fromDDL(right)
    for ddl, (said, *_) in MISTAKES.items():
        assert mistakes(pipeline, columns=ddl, sql="SELECT event, value FROM s") == f"streams.s.columns: {said}"


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "SELECT event, carier FROM s",
            "name `carier` cannot be resolved. Did you mean one of the following? [`carrier`",
        ),
        ("SELEC event FROM s", "PARSE_SYNTAX_ERROR"),
        ("DROP VIEW s", "PARSE_SYNTAX_ERROR"),
        ("SELECT carrier FROM s", "returns neither `event` nor `id`"),
        ("SELECT event FROM s", "returns no payload"),
        ("SELECT carrier AS event, delay FROM s", "that is not the one it got"),
        ("SELECT delay AS id, carrier FROM s", "returns `id` as int"),
        ("SELECT carrier AS id, delay AS time, delay FROM s", "returns `time` as int"),
        ("SELECT event, delay AS value FROM s", "returns `value` as int"),
        ("SELECT event, delay, carrier AS delay FROM s", "two columns of one name"),
        ("SELECT event, rand() AS luck FROM s", "another result when a batch is computed again after a crash: rand("),
        ("SELECT event, value FROM s LIMIT 5", "would leave out events by chance: LIMIT"),
        ("SELECT DISTINCT event, value FROM s", "would leave out events by chance: DISTINCT"),
        (
            "WITH x AS (SELECT 1 AS n)\nSELECT event, value\nFROM t",
            "sql: this pipe has no source or table `t`; it has s (line 3 of the SQL, character 6)",
        ),
        (
            f"SELECT event, {', '.join(f'delay AS {name * 80}' for name in 'abcd')} FROM s\nORDER BY e",
            "… (line 2 of the SQL, character 10)",
        ),
    ],
)
def test_bad_sql(pipeline: LogPipeline, sql: str, said: str) -> None:
    """If this fails, a bad transform starts, and fails on events instead."""
    found = mistakes(pipeline, sql=sql)
    assert found.startswith("pipes.p.transform.sql: ")
    assert said in found


@pytest.mark.parametrize(
    ("sql", "transform", "said"),
    [
        ("SELECT event, delay FROM s", {}, "name `delay` cannot be resolved.* Try: columns: … in streams.s$"),
        (
            "SELECT event, delay FROM s",
            {"columns": COLUMNS.replace("delay", "d")},
            "did you mean.*`d`, .*line 1 of the SQL, character 15[)]$",
        ),
        (
            "SELECT '' AS id, count(*) AS n FROM s GROUP BY window(event_time, '1 minute')",
            {},
            "event_time exists only with watermark. Try: watermark: 1m$",
        ),
        ("SELECT window.start AS id, value FROM s", {}, "exists only with watermark"),
        ("SELECT window.start AS id, value FROM s", {"watermark": "1m"}, "Try: columns: … in streams.s$"),
    ],
)
def test_a_missing_column_has_a_remedy(pipeline: LogPipeline, sql: str, transform: dict[str, str], said: str) -> None:
    """If this fails, a new user gets Spark's words alone for a key that is missing in the pipe file."""
    assert re.search(said, mistakes(pipeline, **{"columns": None, "sql": sql} | transform), re.IGNORECASE)


def test_bad_python(pipeline: LogPipeline) -> None:
    """If this fails, an import error in a transform is a stack trace without a place."""
    (pipeline.folder / "bad.py").write_text("import nothing_of_the_kind\n")
    (pipeline.folder / "odd.py").write_text("def none(frame):\n    return None\n")
    assert "cannot be imported: ModuleNotFoundError" in mistakes(pipeline, python="bad.py:f")
    assert "has no function 'f'" in mistakes(pipeline, python="odd.py:f")
    assert "returned NoneType, not a DataFrame" in mistakes(pipeline, python="odd.py:none")
    assert "names no function" in mistakes(pipeline, python="odd.py")


@pytest.mark.parametrize(
    ("sql", "row_by_row"),
    [
        ("WITH x AS (SELECT * FROM s WHERE delay > 1) SELECT event, explode(array(1, 2)) AS n FROM x", True),
        ("SELECT event, name FROM s LEFT JOIN VALUES ('UA', 'United') AS t(code, name) ON code = carrier", True),
        ("SELECT event, name FROM VALUES ('UA', 'United') AS t(code, name) LEFT JOIN s ON code = carrier", False),
        ("SELECT event, delay FROM s WHERE delay > (SELECT avg(delay) FROM s)", False),
        ("SELECT carrier AS id, count(*) AS n FROM s GROUP BY carrier", False),
        (
            "WITH x AS (SELECT * FROM s), y AS (SELECT * FROM x) SELECT carrier AS id, count(*) AS n FROM y GROUP BY carrier",
            False,
        ),
        ("WITH t AS (SELECT max(a) AS m FROM VALUES (1) AS v(a)) SELECT event, delay FROM s CROSS JOIN t", True),
        ("SELECT event, row_number() OVER (ORDER BY delay) AS n FROM s", False),
    ],
)
def test_row_by_row_is_recognised(pipeline: LogPipeline, sql: str, row_by_row: bool) -> None:
    """If this fails, a transform over several events is computed on each micro-batch alone, and is wrong."""
    assert pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql=sql)).row_by_row is row_by_row


@pytest.mark.parametrize(
    ("sql", "shows"),
    [
        ("SELECT event, to_json(event) AS all FROM s", True),
        ("SELECT event, md5(CAST(e AS STRING)) AS sum FROM (SELECT event, event AS e FROM s)", True),
        ("SELECT event, event.id, value FROM s WHERE event IS NOT NULL", False),
        ("SELECT event, to_json(named_struct('id', event.id)) AS some FROM (SELECT event FROM s)", False),
    ],
)
def test_functions_of_the_whole_event_are_found(pipeline: LogPipeline, sql: str, shows: bool) -> None:
    """If this fails, a pipe without a mode writes another payload in real-time mode, where `event` has one more field."""
    assert pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql=sql)).shows_event is shows


def test_what_a_stream_cannot_do(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, an impossible query, or real-time mode on the log, starts and fails for ever."""
    endpoint = LogSparkBroker(str(pipeline.log))
    asked = {
        "not supported": {"sql": "SELECT carrier AS id, count(*) AS n FROM s GROUP BY carrier"},
        "real-time mode needs Kafka": {"sql": "SELECT event, value FROM s", "mode": "real-time"},
    }
    for said, transform in asked.items():
        chosen = pipeline.pipe(columns=COLUMNS, **transform)
        with pytest.raises(BadConfiguration, match=said):
            check_suitability(spark, TransformSettings(), endpoint, chosen, [pipeline.prepare(chosen)])


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        (
            "SELECT carrier AS id, delay FROM s WHERE delay > (SELECT avg(delay) FROM s)",
            "GROUP BY or an aggregate function",
        ),
        ("SELECT event, row_number() OVER (ORDER BY delay) AS n FROM s", "a window function (OVER)"),
        ("SELECT event, delay FROM s ORDER BY delay", "ORDER BY"),
        ("SELECT s.event, s.delay FROM s JOIN u ON s.carrier = u.carrier", "a JOIN of streams"),
        (
            "SELECT event, name FROM VALUES ('UA', 'United') AS t(code, name) LEFT JOIN s ON code = carrier",
            "an outer JOIN that keeps rows without an event",
        ),
    ],
)
def test_what_works_on_several_events_is_named(pipeline: LogPipeline, sql: str, named: str) -> None:
    """If this fails, real-time mode refuses a long query, and nobody knows which of its parts is in the way."""
    found = mistakes(pipeline, sources=["s", "u"], sql=sql, mode="real-time")
    assert f"works on several events ({named}), which real-time mode cannot. Try: mode: micro-batch" in found


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("WITH x AS (SELECT * FROM s WHERE delay > 1) SELECT event, explode(array(1, 2)) AS n FROM x", ""),
        ("SELECT event, 1 AS n FROM s UNION ALL SELECT event, 2 FROM s", "reads a source more than once"),
        ("WITH x AS (SELECT event FROM s) SELECT *, 1 AS n FROM x UNION ALL SELECT *, 2 FROM x", "more than once"),
        (
            "SELECT event, name FROM s LEFT JOIN VALUES ('UA', 'United') AS t(code, name) ON code = carrier",
            "joins tables",
        ),
    ],
)
def test_what_real_time_mode_cannot_do(pipeline: LogPipeline, sql: str, said: str) -> None:
    """If this fails, a query starts in real-time mode that Spark ends after each batch, again and again."""
    obstacle = pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql=sql)).obstacle
    assert said in obstacle
    assert bool(said) is bool(obstacle)
    if said:
        assert f"{obstacle}. Try: mode: micro-batch" in mistakes(pipeline, columns=COLUMNS, sql=sql, mode="real-time")
