"""The private parts of pyspark and py4j that the project uses: they are where they were, and in one file."""

import os
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

import spark as package
from spark import java
from spark.java import HadoopFolder
from spark.session import class_archive, java_for_size

PRIVATE = re.compile(r"\b_(jvm|jdf|jsparkSession|jo|jsq|jsc|gateway|origin)\b|\bjava_exception\b|\bpy4j\.protocol\b")


def test_one_file_uses_private_parts() -> None:
    """If this fails, an upgrade of pyspark breaks code that nobody looks at: use `spark.java`, and test it below."""
    folder = Path(package.__path__[0])
    users = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if PRIVATE.search(p.read_text())}
    assert users - {"errors.py"} == {"java.py"}
    assert "_origin" not in (folder / "errors.py").read_text()


def test_versions() -> None:
    """If this fails, pyspark was upgraded: check each function of `spark.java` with the new version, then change this."""
    assert version("pyspark") == "4.2.0"
    assert version("py4j").startswith("0.10.9")


def test_session(spark: SparkSession) -> None:
    """If this fails, the service does not notice that Java ends, or finds no Java classes; or a Java without memory lives on."""
    assert java.java_process(spark).poll() is None
    arguments = java.jvm(spark).java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    assert "-XX:+ExitOnOutOfMemoryError" in list(arguments)
    assert java.jvm(spark).java.lang.Math.abs(-3) == 3
    other = spark.newSession()
    java.set_active_session(other)
    java.clear_active_session(spark)
    java.set_active_session(spark)


def test_class_archive(spark: SparkSession) -> None:
    """If this fails, each start of Spark takes twice as long."""
    if not class_archive().exists() and "CI" not in os.environ:
        pytest.skip("`make test` writes the archive")
    assert str(class_archive()) in Path(f"/proc/{java.java_process(spark).pid}/maps").read_text()


def test_python_workers_run_compiled_code(spark: SparkSession) -> None:
    """If this fails, each of Spark's Python processes compiles pyspark anew."""
    found = spark.range(1).mapInArrow(_where, "path STRING").first()
    assert found is not None
    assert found.path == pyspark.__file__


def _where(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.RecordBatch.from_pydict({"path": [pyspark.__file__]})


def test_plans(spark: SparkSession) -> None:
    """If this fails, a transform that is a command runs at once, or its kind is not known."""
    java.check_is_query(spark, "SELECT 1")
    with pytest.raises(ParseException):
        java.check_is_query(spark, "DROP TABLE t SELECT")
    with pytest.raises(ParseException):
        java.check_is_query(spark, "DROP TABLE t")
    assert java.analyzed_plan(spark.range(3).where("id > 1")).nodeName() == "Filter"
    stream = spark.readStream.format("rate").load()
    java.check_streamable(stream.select("value"))
    with pytest.raises(AnalysisException):
        java.check_streamable(stream.groupBy("value").count())


class Nothing(StatefulProcessor):
    """Keeps no state, and returns nothing."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:  # noqa: N802, N803
        return iter(())

    def close(self) -> None:
        pass


def test_state_processor(spark: SparkSession) -> None:
    """If this fails, the mistakes of a transform with state of its own show in its first batch."""
    frame = spark.range(3).groupBy("id").transformWithState(Nothing(), "id STRING", "Append", "None")
    node = java.analyzed_plan(frame)
    assert node.nodeName() == "TransformWithStateInPySpark"
    assert isinstance(java.state_processor(node), Nothing)


def test_observation(spark: SparkSession) -> None:
    """If this fails, a batch waits for ever for its counts, or reads them too early."""
    seen = Observation()
    frame = spark.range(3).observe(seen, f.count(f.lit(1)).alias("rows"))
    assert not java.is_observed(seen)
    frame.collect()
    while not java.is_observed(seen):
        pass
    assert seen.get == {"rows": 3}


def test_progress(spark: SparkSession, tmp_path: Path) -> None:
    """If this fails, batches of a query in the plan are reported twice or never."""
    writer = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load().writeStream.format("noop")
    query = writer.option("checkpointLocation", f"file://{tmp_path}").start()
    try:
        while len(java.progress_since(query, -1)) < 3:
            query.awaitTermination(1)
        found = [progress["batchId"] for progress in java.progress_since(query, 0) if progress["batchId"] < 3]
        assert found[0] == 1
        assert found == sorted(found)
    finally:
        query.stop()


def test_files(spark: SparkSession, tmp_path: Path) -> None:
    """If this fails, no checkpoint can be read."""
    folder = HadoopFolder(spark, f"file://{tmp_path}")
    assert not folder.exists("a")
    assert folder.list("offsets") == []
    folder.write("offsets/7", b"x\x00y")
    assert folder.exists("offsets/7")
    assert folder.read("offsets/7") == b"x\x00y"
    assert "7" in folder.list("offsets")


def test_errors(spark: SparkSession) -> None:
    """If this fails, the log does not name the Java exceptions of a failure, or the end of Java counts as an event's fault."""
    with pytest.raises(Py4JJavaError) as unchanged:
        java.jvm(spark).java.util.ArrayList().get(3)
    with pytest.raises(ParseException) as captured:
        spark.sql("SELEC")
    for caught, name in (
        (unchanged, "java.lang.IndexOutOfBoundsException"),
        (captured, "org.apache.spark.sql.catalyst.parser.ParseException"),
    ):
        assert isinstance(caught.value, java.JAVA_ERRORS)
        assert java.is_answer(caught.value)
        assert next(java.java_exceptions(caught.value)).getClass().getName() == name
    assert not java.is_answer(Py4JNetworkError())


@pytest.mark.parametrize(
    ("compiler", "cores", "full"),
    [("auto", 1, False), ("auto", 2, True), ("full", 1, True), ("quick", 8, False)],
)
def test_java_has_its_full_compiler_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, compiler: str, cores: int, full: bool
) -> None:
    """Without it a backlog costs a quarter more. On one core the compiler would take the pipes' time for minutes."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert ("-XX:TieredStopAtLevel=1" not in java_for_size(compiler)) is full
