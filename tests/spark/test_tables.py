"""Reference data: read, joined with events, and read again while the pipe runs."""

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
from services.core.event import read_id
from services.core.pipe_table import Table
from services.core.yaml_source import BadConfiguration
from spark.brokers.log import LogSparkBroker
from spark.java import analyzed_plan, optimized_plan
from spark.jobs.start_checks import check_suitability
from spark.settings import SelectedPipes, TransformSettings
from spark.tables import ReferenceTable, TableRefresher, TableUnavailable
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
    """Replace the folder of the table `names` at once, as far as a file system can."""
    new = folder / ".names.new"
    new.mkdir()
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
        for table in prepared.tables.values():
            table.load(spark)
        running.append(TableRefresher(spark, prepared.tables.values()))
        running[-1].start()
        pipeline.start_prepared(prepared)
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
    pipeline.states.clear()
    put(pipeline.folder, UA="b")
    wait_for(lambda: table.version == 2, "the new content")
    send(pipeline, flew(1, "UA", 20))
    wait_for(lambda: bool(pipeline.out), "the first window")
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
        parsed = StructType.fromDDL(ddl)
        assert isinstance(parsed, StructType)
        definition = Table(columns=ddl, parquet="names", **more)
        ReferenceTable("names", definition, parsed, pipeline.folder).load(spark)

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

    def table_of(**more: str) -> ReferenceTable:
        definition = Table.model_validate({"columns": "sku STRING, price DECIMAL(10,2)", "jdbc": jdbc | more})
        columns = StructType.fromDDL(definition.columns)
        assert isinstance(columns, StructType)
        return ReferenceTable("prices", definition, columns, tmp_path)

    table = table_of()
    assert table.load(spark)
    assert not table.load(spark), "the rows are the same"
    postgres.execute("UPDATE prices SET price = 10 WHERE sku = 2")
    assert table.load(spark)
    frame = table.frame(spark)
    assert sorted((row.sku, str(row.price)) for row in frame.collect()) == [("1", "9.50"), ("2", "10.00")]
    seen = [repr(table), repr(table.definition), str(analyzed_plan(frame)), str(optimized_plan(frame))]
    with pytest.raises(TableUnavailable, match='column "nothing" does not exist') as broken:
        table_of(query="SELECT nothing").load(spark)
    with pytest.raises(TableUnavailable, match="refused") as away:
        table_of(url="jdbc:postgresql://127.0.0.1:1/postgres").load(spark)
    secret.write_text("wrong-" + PASSWORD)
    with pytest.raises(TableUnavailable, match="password authentication failed for user") as caught:
        table.load(spark)
    seen += [repr(one) for each in (broken, away, caught) for one in (each.value, each.value.__cause__)]
    seen += capfd.readouterr()
    assert not [text for text in seen if PASSWORD in text or "s3cret" in text]
    assert table.rows == 2, "the last content stays"
