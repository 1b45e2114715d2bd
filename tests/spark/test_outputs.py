"""A transform with several outputs: each result is written once, with the names of its outputs. Mistakes show before a start."""

import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.record import Record
from services.core.event import OUTPUTS, read_id
from services.core.undelivered import dead_letter
from services.core.yaml_source import BadConfiguration
from tests.spark.log_pipeline import LogPipeline, event, numbers, wait_for

OUTPUT_FILTERS = {"large": {"where": "100 DIV n < 20"}, "odd": {"where": "label"}}
LABELLED = "SELECT event, n, CASE WHEN n < 90 THEN n % 2 = 1 END AS label FROM s"


def rows(count: int) -> list[Record]:
    return [event(n, orjson.dumps({"n": n})) for n in range(count)]


def outputs_by_id(pipeline: LogPipeline) -> dict[int, str | None]:
    found = {}
    for record in pipeline.out:
        assert record.headers[-1][0] == OUTPUTS or record.header(OUTPUTS) is None
        names = record.header(OUTPUTS)
        found[int((read_id(record) or "").removeprefix("id-"))] = None if names is None else names.decode()
    assert len(found) == len(pipeline.out)
    return found


def expected(n: int) -> str:
    return ",".join(name for name, is_in in (("large", 100 // n < 20), ("odd", n < 90 and n % 2 == 1)) if is_in)


def test_results_have_the_names_of_their_outputs(pipeline: LogPipeline) -> None:
    """If this fails, a receiver gets events of another output; or a result that no one gets is stored, or not counted as
    filtered; or an event on which a filter fails stops the pipe."""
    pipeline.send(rows(100))
    chosen = pipeline.pipe(columns="n INT", sql=LABELLED, outputs=OUTPUT_FILTERS, outputs_of=["large", "odd"])
    pipeline.run(chosen, 100)
    assert outputs_by_id(pipeline) == {n: names for n in range(1, 100) if (names := expected(n))}
    assert [(read_id(one), one.header(dead_letter.REASON)) for one in pipeline.dead] == [("id-0", b"transform_error")]
    assert numbers(pipeline.reports, "filtered") == {n for n in range(1, 100) if not expected(n)} == {2, 4}
    assert numbers(pipeline.reports, "passed") == {n for n in range(1, 100) if expected(n)}

    # A destination that gets every result: now each is written, also one in no output.
    pipeline.send([event(100 + n, orjson.dumps({"n": n})) for n in range(1, 5)])
    chosen = pipeline.pipe(columns="n INT", sql=LABELLED, outputs=OUTPUT_FILTERS, outputs_of=["large", None])
    pipeline.run(chosen, 104)
    found = outputs_by_id(pipeline)
    assert [found[100 + n] for n in range(1, 5)] == ["odd", "", "odd", ""]


def test_outputs_of_a_transform_over_several_events(pipeline: LogPipeline) -> None:
    """If this fails, the outputs of aggregates are not filtered, or changing a filter loses the state."""
    sql = """SELECT date_format(window.start, 'HH:mm:ss') AS id, count(*) AS n FROM s GROUP BY window(event_time, '1 second')"""
    transform = {"sql": sql, "watermark": "1s", "outputs_of": ["many"]}
    chosen = pipeline.pipe(outputs={"many": {"where": "n > 500"}}, **transform)  # type: ignore[arg-type]
    pipeline.send(rows(1600)[::2])
    pipeline.start(chosen)
    wait_for(lambda: pipeline.read >= 800 or bool(pipeline.problem), "the first half")
    pipeline.stop()
    chosen = pipeline.pipe(outputs={"many": {"where": "n > 900"}, "every": {"where": "n > 0"}}, **transform)  # type: ignore[arg-type]
    pipeline.send(rows(1600)[1::2])
    pipeline.send([event(number, b"{}") for number in (3_000, 5_000)])
    pipeline.start(chosen)
    wait_for(lambda: len(pipeline.out) >= 3 or bool(pipeline.problem), "the counts")
    pipeline.stop()
    assert pipeline.problem is None, pipeline.problem
    found = {(orjson.loads(record.value or b"")["n"], record.header(OUTPUTS)) for record in pipeline.out}
    assert found == {(1000, b"every,many"), (600, b"every"), (1, b"every")}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("amount > 1", r"name `amount` cannot be resolved.*Try: the columns of the result: event, n, label$"),
        ("n >", "PARSE_SYNTAX_ERROR"),
        ("n", "is int, not a condition. Try: a comparison"),
        ("count(*) > 1", "must look at one row alone"),
        ("n > (SELECT max(n) FROM VALUES (1) AS t(n))", "must look at one row alone"),
        ("explode(array(true, false))", "must look at one row alone"),
        ("rand() < 0.5", "another answer when a batch is computed again after a crash: .rand"),
    ],
)
def test_a_filter_with_a_mistake(pipeline: LogPipeline, spark: SparkSession, where: str, said: str) -> None:
    """If this fails, a bad filter starts, and fails on events instead; or its place in the pipe file is not named."""
    bad = pipeline.pipe(columns="n INT", sql=LABELLED, outputs={"large": {"where": where}, "all": {}})
    with pytest.raises(BadConfiguration, match=said) as caught:
        pipeline.prepare(bad)
    (problem,) = caught.value.problems
    assert problem.key == "pipes.p.transform.outputs.large.where"
    assert problem.where.startswith(str(pipeline.folder / "pipes.yaml:"))
