"""Reference data: read, joined with events, and read again while the pipe runs."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from structlog.testing import capture_logs

from services.core import metrics
from services.core.broker.record import Record
from services.core.control.pauses import Pause
from services.core.event import read_id
from services.core.ledger.accumulator import SetKey
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.table import Table
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.changes import digest_texts
from spark.brokers.log import LogSparkBroker
from spark.java import analyzed_plan, optimized_plan
from spark.jobs.checkpoint import open_checkpoint
from spark.jobs.micro_batch import TransformHandler
from spark.jobs.start_checks import check_suitability, refuse_plan
from spark.settings import SelectedPipes, TransformSettings
from spark.tables import ReferenceTable, TableRefresher, TableUnavailable
from spark.transforms.preparation import Prepared
from tests.spark.log_pipeline import LogPipeline, event, wait_for
from tests.spark.test_watermark import START, minute, send
from tests.support.postgres import PASSWORD, USER, Postgres

COLUMNS = "carrier STRING, delay INT"
NAMES = {"names": {"parquet": "names", "columns": "code STRING NOT NULL, name STRING", "refresh": "1s"}}
JOIN = "SELECT event, carrier, name FROM s LEFT JOIN names ON code = carrier"
WINDOWS = """SELECT concat(name, date_format(window.start, 'HH:mm')) AS id, count(*) AS flights
             FROM s JOIN names ON code = carrier GROUP BY name, window(event_time, '1 minute')"""
Refreshed = Callable[[SelectedPipes], dict[str, ReferenceTable]]


def put(folder: Path, **names: str | None) -> None:
    """Replace the folder of the table `names` at once, as far as a file system can. Without names: by a file without rows."""
    new = folder / ".names.new"
    new.mkdir()
    if not names:
        parquet.write_table(
            pa.table({"code": pa.array([], pa.string()), "name": pa.array([], pa.string())}), new / "0.parquet"
        )
    for number, (code, name) in enumerate(names.items()):
        table = pa.table({"code": [code], "name": pa.array([name], pa.string()), "unused": [number]})
        parquet.write_table(table, new / f"{number}.parquet")
    if (folder / "names").exists():
        (folder / "names").rename(folder / ".names.old")
    new.rename(folder / "names")
    shutil.rmtree(folder / ".names.old", ignore_errors=True)


@pytest.fixture
def refreshed(pipeline: LogPipeline, spark: SparkSession) -> Iterator[Refreshed]:
    """Starts a pipe with tables, which are read again and again. Returns them."""
    running: list[TableRefresher] = []

    def start(chosen: SelectedPipes) -> dict[str, ReferenceTable]:
        prepared = pipeline.prepare(chosen)
        job = pipeline.start_prepared(prepared)
        running.append(TableRefresher(spark, prepared.tables.values(), lambda _: job.holds_checkpoint))
        running[-1].start()
        wait_for(lambda: bool(pipeline.states) and not pipeline.states[-1].problem, "the first trigger")
        pipeline.states.clear()
        return dict(prepared.tables)

    yield start
    for refresher in running:
        refresher.stop()


def flew(number: int, carrier: str, at: float = 0) -> Record:
    """at: minutes after START."""
    record = event(number, orjson.dumps({"carrier": carrier, "delay": 1}))
    return msgspec.structs.replace(record, timestamp=START + round(at * 60_000))


def names_in(pipeline: LogPipeline) -> dict[str | None, str | None]:
    return {read_id(record): orjson.loads(record.value or b"")["name"] for record in pipeline.out}


def failures() -> float:
    return float(metrics.TABLE_FAILURES.labels("names")._value.get())


def test_a_row_by_row_join_follows_the_table(pipeline: LogPipeline, refreshed: Refreshed) -> None:
    """Broken: events are joined with old or half-written data, or a folder that is away stops the pipe."""
    put(pipeline.folder, UA="United", AA="American")
    table = refreshed(pipeline.pipe(columns=COLUMNS, sql=JOIN, known=NAMES))["names"]
    send(pipeline, flew(0, "UA"), flew(1, "XX"))
    put(pipeline.folder, UA="United Airlines", XX=None)
    wait_for(lambda: table.version == 2, "the new content")
    send(pipeline, flew(2, "UA"), flew(3, "AA"))
    before = failures()
    with capture_logs() as logs:
        shutil.rmtree(pipeline.folder / "names")
        wait_for(lambda: failures() >= before + 2, "two failures")
    assert [line["table"] for line in logs if line["event"] == "table_not_refreshed"] == ["names"]
    assert "does not exist" in table.problem
    send(pipeline, flew(4, "UA"))
    put(pipeline.folder, UA="Ünited")
    wait_for(lambda: table.version == 3, "the content after the failure")
    assert table.problem == ""
    send(pipeline, flew(5, "UA"))
    wait_for(lambda: len(pipeline.out) == 6, "all results")
    assert names_in(pipeline) == {
        "id-0": "United",
        "id-1": None,
        "id-2": "United Airlines",
        "id-3": None,
        "id-4": "United Airlines",
        "id-5": "Ünited",
    }
    assert pipeline.problem is None


def test_a_join_in_the_streaming_plan_follows_the_table(pipeline: LogPipeline, refreshed: Refreshed) -> None:
    """Broken: an aggregate joins with the content of its start for ever, or loses events when the content changes."""
    put(pipeline.folder, UA="a")
    chosen = pipeline.pipe(columns=COLUMNS, sql=WINDOWS, known=NAMES, watermark="1m", interval="50ms")
    table = refreshed(chosen)["names"]
    send(pipeline, flew(0, "UA", 0))
    send(pipeline, flew(1, "UA", 20))
    # Before the new content: what the next batch would close, Spark forgets when the query starts again, until the next event.
    wait_for(lambda: bool(pipeline.out), "the first window")
    pipeline.states.clear()
    put(pipeline.folder, UA="b")
    wait_for(lambda: table.version == 2, "the new content")
    found: set[str | None] = set()
    for number in range(2, 60):  # until a batch of the query that began again
        send(pipeline, flew(number, "UA", 20 * number))
        found = {(read_id(one) or "")[:1] for one in pipeline.out}
        if "b" in found:
            break
    pipeline.stop()
    assert found == {"a", "b"}
    sent = {minute(0)} | {minute(20 * n) for n in range(1, number + 1)}
    done = [(read_id(one) or "")[1:] for one in pipeline.out]
    assert len(done) == len(set(done)), "no window twice"
    assert set(done) <= sent
    assert len(done) >= number - 1, "only the last windows are open"
    assert pipeline.problem is None


WIDE = ", ".join(f"c{number} INT" for number in range(120))
"""More columns than Spark generates code for."""


@pytest.mark.parametrize(
    ("sql", "more"),
    [
        ("SELECT event, carrier, name FROM s JOIN names ON code = carrier", {}),
        ("SELECT event, carrier FROM s LEFT SEMI JOIN names ON code = carrier", {}),
        ("SELECT s.*, name FROM s JOIN names ON code = carrier", {"columns": f"{COLUMNS}, {WIDE}"}),
        ("SELECT event, carrier FROM s WHERE 1 = 0", {}),
        (WINDOWS, {"watermark": "1m", "interval": "50ms"}),
    ],
    ids=["join", "semi join", "wide", "never true", "windows"],
)
def test_events_without_any_result_are_counted(
    pipeline: LogPipeline, refreshed: Refreshed, sql: str, more: dict[str, Any]
) -> None:
    """Broken: an empty table or a filter that is never true stops the pipe, or its events are committed and reported nowhere."""
    put(pipeline.folder)
    refreshed(pipeline.pipe(**{"columns": COLUMNS, "sql": sql, "known": NAMES, **more}))
    send(pipeline, flew(0, "UA"), flew(1, "AA"))
    wait_for(lambda: pipeline.reported("filtered") == {0, 1} or bool(pipeline.problem), "the reports")
    pipeline.stop()
    assert pipeline.problem is None
    assert pipeline.read == 2
    assert not pipeline.out


def test_a_batch_that_nobody_counted_is_read_again(pipeline: LogPipeline, refreshed: Refreshed) -> None:
    """Broken: Spark says that a batch had no events, and they are reported nowhere."""
    put(pipeline.folder)
    most = ", ".join(f"max(c{number}) AS c{number}" for number in range(120))
    chosen = pipeline.pipe(
        columns=f"{COLUMNS}, {WIDE}",
        sql=WINDOWS.replace("count(*) AS flights", most),
        known=NAMES,
        watermark="1m",
        interval="50ms",
    )
    refreshed(chosen)
    pipeline.send([flew(0, "UA"), flew(1, "AA")])
    wait_for(lambda: pipeline.reported("filtered") == {0, 1}, "the reports")
    assert "Spark counted none of the events of batch" in (pipeline.problem or "")


def test_what_a_join_with_a_table_may_be(pipeline: LogPipeline, spark: SparkSession) -> None:
    """Broken: a join that needs all events of a stream starts, or a table's content counts as a change of the transform."""
    put(pipeline.folder, UA="United")
    sql = "SELECT s.event, name FROM names LEFT JOIN s ON code = carrier"
    chosen = pipeline.pipe(columns=COLUMNS, known=NAMES, sql=sql)
    prepared = pipeline.prepare(chosen)
    assert not prepared.row_by_row
    with pytest.raises(BadConfiguration, match="the stream on the left"):
        check_suitability(spark, TransformSettings(), LogSparkBroker(str(pipeline.log)), chosen, [prepared])
    chosen = pipeline.pipe(columns=COLUMNS, sql=WINDOWS, known=NAMES, watermark="1m")
    before = pipeline.prepare(chosen)
    check_suitability(spark, TransformSettings(), LogSparkBroker(str(pipeline.log)), chosen, [before])
    before.tables["names"].load(spark)
    after = pipeline.prepare(chosen)
    assert before.plan is not None
    assert before.plan == after.plan


@pytest.mark.parametrize("floats", ["price DOUBLE", "price STRUCT<at: ARRAY<FLOAT>>"])
def test_a_table_with_nan_is_unchanged(spark: SparkSession, tmp_path: Path, floats: str) -> None:
    """Broken: NaN is not equal to itself, so a query with state starts again at each refresh."""
    column = pa.array([float("nan"), 1.5, None])
    if "STRUCT" in floats:
        column = pa.array([{"at": [float("nan"), None]}, None, {"at": []}], pa.struct([("at", pa.list_(pa.float32()))]))
    parquet.write_table(pa.table({"price": column}), tmp_path / "0.parquet")
    table = table_of(floats, tmp_path, parquet="0.parquet")
    assert table.load(spark)
    os.utime(tmp_path / "0.parquet", (1, 1))  # else it is not read
    assert not table.load(spark)
    parquet.write_table(pa.table({"price": column.slice(0, 2)}), tmp_path / "0.parquet")
    assert table.load(spark)


def table_of(ddl: str, folder: Path, **more: Any) -> ReferenceTable:
    columns = StructType.fromDDL(ddl)
    assert isinstance(columns, StructType)
    return ReferenceTable("names", Table.model_validate({"columns": ddl, **more}), columns, folder)


@pytest.mark.parametrize("later", [{"UA": "a", "AA": "b"}, {}], ids=["more rows", "no rows"])
def test_a_repeated_batch_is_reported_as_it_is_stored(
    pipeline: LogPipeline, spark: SparkSession, later: dict[str, str]
) -> None:
    """Broken: a batch that is computed again with another content is reported as if that were stored: a false loss."""
    put(pipeline.folder, UA="a")
    sql = "SELECT event, name FROM s JOIN names ON code = carrier"
    with pipeline.query(pipeline.pipe(columns=COLUMNS, sql=sql, known=NAMES)) as query:
        query.attempts.open(query.checkpoint)
        (table,) = query.prepared.tables.values()
        pipeline.send([flew(0, "UA"), flew(1, "AA")])
        raw = query.broker.read_ranges(spark, query.broker.stored_ranges(spark, ["s"]))
        for names in ({"UA": "a"}, later):  # the second time in another process, after a crash before the commit
            put(pipeline.folder, **names)
            table.load(spark)
            report = TransformHandler(query).process(raw, 0)
            found = {one: set(report.sets.numbers(SetKey(one, "run", 0, None))) for one in ("passed", "filtered")}
            assert found == {"passed": {0}, "filtered": {1}}
            assert report.written == 1
    assert names_in(pipeline) == {"id-0": "a"}


def test_a_changed_column_of_a_table_changes_the_state(pipeline: LogPipeline) -> None:
    """Broken: another type of a table's column is taken for the same state; or a column that nobody reads counts."""
    sql = WINDOWS.replace("count(*) AS flights", "max(price) AS price")

    def plan(price: str, unused: str) -> Prepared:
        ddl = f"code STRING, name STRING, price {price}, unused {unused}"
        known = {"names": {"parquet": "names", "columns": ddl}}
        return pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql=sql, known=known, watermark="1m"))

    former, same, other = plan("DECIMAL(10,2)", "INT"), plan("DECIMAL(10,2)", "STRING"), plan("DOUBLE", "INT")
    assert former.plan is not None
    assert refuse_plan(same, former.plan) is None
    assert "the column names.price was DECIMAL(10,2), now DOUBLE" in (refuse_plan(other, former.plan) or "")
    assert len({one.state for one in (former, same, other)}) == 3, "equal texts are not compared further"
    file, path = load_pipes(pipeline.folder / "pipes.yaml"), pipeline.folder / "pipes.yaml"
    assert other.plan is not None
    assert digest_texts(file, path, ["p"]) == {"p": other.plan.text}
    assert other.plan.text != former.plan.text


def test_a_table_is_read_where_its_pipe_runs(pipeline: LogPipeline, spark: SparkSession) -> None:
    """Broken: a driver that stands by reads tables, holds executors for that, and begins with an old content."""
    put(pipeline.folder, UA="United")
    prepared = pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql=JOIN, known=NAMES))
    (table,), asked = prepared.tables.values(), list[str]()

    def in_use(one: ReferenceTable) -> bool:
        asked.append(one.name)
        return job.holds_checkpoint

    refresher = TableRefresher(spark, [table], in_use)
    with open_checkpoint(spark, pipeline.checkpoints, "p"):
        job = pipeline.start_prepared(prepared)
        refresher.start()
        wait_for(lambda: any(state.standby for state in pipeline.states), "the job on standby")
        asked.clear()
        wait_for(lambda: len(asked) > 2, "looks of the refresher")
        assert table.version == 0
    pipeline.send([flew(0, "UA")])
    wait_for(lambda: bool(pipeline.out), "the result")
    job.set_pause(Pause("paused", "operator", "ann", 0))
    wait_for(lambda: not table.is_read, "a table that is not in use")
    put(pipeline.folder, UA="Ünited")
    pipeline.send([flew(1, "UA")])
    job.set_pause(None)
    wait_for(lambda: len(pipeline.out) == 2, "the result after the pause")
    refresher.stop()
    assert names_in(pipeline) == {"id-0": "United", "id-1": "Ünited"}


def test_a_table_in_python(pipeline: LogPipeline, refreshed: Refreshed) -> None:
    """Broken: a Python function does not get its tables, or in another order than the pipe file says."""
    (pipeline.folder / "joined.py").write_text(
        "def joined(s, names):\n    return s.join(names, s.carrier == names.code, 'left').select('event', 'name')\n"
    )
    put(pipeline.folder, UA="United")
    refreshed(pipeline.pipe(columns=COLUMNS, python="joined.py:joined", known=NAMES))
    send(pipeline, flew(0, "UA"))
    wait_for(lambda: bool(pipeline.out), "the result")
    assert names_in(pipeline) == {"id-0": "United"}


def test_what_is_refused(pipeline: LogPipeline, spark: SparkSession) -> None:
    """Broken: a table takes all memory, or a value that does not fit becomes NULL."""
    put(pipeline.folder, UA="1", AA="x")

    def read(ddl: str, **more: Any) -> None:
        table_of(ddl, pipeline.folder, parquet="names", **more).load(spark)

    read("code STRING, name STRING", max_rows=2)
    refusals: list[tuple[str, dict[str, int], str]] = [
        ("code STRING", {"max_rows": 1}, "table 'names' cannot be read: it has more than 1 rows. Try: a smaller query"),
        ("code STRING, name INT", {}, "CAST_INVALID_INPUT"),
        ("code STRING, nam STRING", {}, "`nam` cannot be resolved"),
    ]
    for ddl, more, said in refusals:
        with pytest.raises(TableUnavailable, match=said):
            read(ddl, **more)
    put(pipeline.folder, UA=None)
    with pytest.raises(TableUnavailable, match="column 'name' is NOT NULL in the pipe file and has NULL"):
        read("name STRING NOT NULL")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    # Not in pytest's folder: only its owner may enter that, and the server is another user.
    with TemporaryDirectory(prefix="penstock-postgres-") as folder:
        server = Postgres(Path(folder))
        server.start()
        yield server
        server.stop()


def test_a_table_of_a_database(
    postgres: Postgres, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Broken: a database is not read, or its password is in a plan, an error or a log."""
    postgres.execute(
        "CREATE TABLE prices (sku int, price numeric(10,2))", "INSERT INTO prices VALUES (1, 9.50), (2, NULL)"
    )
    secret = tmp_path / "database.secret"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    jdbc = {
        "url": postgres.url,
        "query": "SELECT sku, price FROM prices",
        "user": USER,
        "password": {"file": secret.name},
    }

    def prices(**more: str) -> ReferenceTable:
        return table_of("sku STRING, price DECIMAL(10,2)", tmp_path, jdbc=jdbc | more)

    table = prices()
    assert table.load(spark)
    assert not table.load(spark), "the rows are the same"
    postgres.execute("UPDATE prices SET price = 10 WHERE sku = 2")
    assert table.load(spark)
    frame = table.frame(spark)
    assert sorted((row.sku, str(row.price)) for row in frame.collect()) == [("1", "9.50"), ("2", "10.00")]
    seen = [repr(table), repr(table.definition), str(analyzed_plan(frame)), str(optimized_plan(frame))]
    with pytest.raises(TableUnavailable, match='column "nothing" does not exist') as broken:
        prices(query="SELECT nothing").load(spark)
    with pytest.raises(TableUnavailable, match="refused") as away:
        prices(url="jdbc:postgresql://127.0.0.1:1/postgres").load(spark)
    secret.write_text("wrong-" + PASSWORD)
    with pytest.raises(TableUnavailable, match="password authentication failed for user") as caught:
        table.load(spark)
    seen += [repr(one) for each in (broken, away, caught) for one in (each.value, each.value.__cause__)]
    seen += capfd.readouterr()
    assert not [text for text in seen if PASSWORD in text or "s3cret" in text]
    assert table.rows == 2, "the last content stays"


def test_a_running_pipe_follows_a_table_of_a_database(
    postgres: Postgres, pipeline: LogPipeline, refreshed: Refreshed
) -> None:
    """Broken: a pipe joins with the rows that a database had at its start, until somebody restarts the transform; or it stops
    when the database refuses its password."""
    postgres.execute("CREATE TABLE carriers (code text, name text)", "INSERT INTO carriers VALUES ('UA', 'United')")
    secret = pipeline.folder / "database.secret"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    jdbc = {
        "url": postgres.url,
        "query": "SELECT code, name FROM carriers",
        "user": USER,
        "password": {"file": secret.name},
    }
    known = {"names": {"jdbc": jdbc, "columns": NAMES["names"]["columns"], "refresh": "1s"}}
    table = refreshed(pipeline.pipe(columns=COLUMNS, sql=JOIN, known=known))["names"]
    send(pipeline, flew(0, "UA"), flew(1, "AA"))
    postgres.execute("UPDATE carriers SET name = 'Ünited'", "INSERT INTO carriers VALUES ('AA', 'American')")
    wait_for(lambda: table.version == 2, "the new rows")
    send(pipeline, flew(2, "UA"), flew(3, "AA"))
    before = failures()
    secret.write_text("former")
    wait_for(lambda: failures() > before, "a failure")
    send(pipeline, flew(4, "UA"))
    wait_for(lambda: len(pipeline.out) == 5, "all results")
    assert names_in(pipeline) == {
        "id-0": "United",
        "id-1": None,
        "id-2": "Ünited",
        "id-3": "American",
        "id-4": "Ünited",
    }
    assert pipeline.problem is None
