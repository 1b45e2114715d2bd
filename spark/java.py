"""The only file that uses private parts of pyspark and py4j: access to the Java side of Spark.

tests/spark/test_java.py fails when an upgrade changes one of them, and when another file uses one. Spark has no public Python way
to any of this. Kafka's own Java classes, which `jvm` gives access to, are public.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

JAVA_ERRORS = (Py4JError, PySparkException)
"""What a call into Java raises."""
_MISSING = "java.io.FileNotFoundException"
_EXISTS = "org.apache.hadoop.fs.FileAlreadyExistsException"
_MOST_CAUSES = 10
_OUT_OF_MEMORY = 3
"""Exit status of a Java that ran out of memory."""


def is_answer(error: BaseException) -> bool:
    """Whether Java, or our own code, raised this. Otherwise the connection to Java broke, and Java may be gone."""
    return not isinstance(error, OSError | EOFError | Py4JNetworkError)


def java_exceptions(error: BaseException) -> Iterator[Any]:
    """The Java exception behind an error and its causes, outermost first."""
    cause: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.getCause()


def jvm(session: SparkSession) -> Any:
    """The classes of Spark's Java, by their full names."""
    return session.sparkContext._jvm


def java_process(session: SparkSession) -> Any:
    """The process that runs Spark, as `subprocess.Popen`."""
    gateway: Any = session.sparkContext._gateway
    return gateway.proc


def why_ended(status: int) -> str:
    """The reason for the end of Spark's Java, by its exit status, for a person."""
    return "it ran out of memory" if status == _OUT_OF_MEMORY else f"status {status}"


def live_executors(session: SparkSession) -> frozenset[str]:
    """The ids of a cluster's live executors. An id is given once."""
    context: Any = session.sparkContext._jsc
    return frozenset(filter(None, context.sc().getExecutorIds().mkString(",").split(",")))


def has_stopped(session: SparkSession) -> bool:
    """Whether Spark has ended the application, by itself or because its master did."""
    context: Any = session.sparkContext._jsc
    return bool(context.sc().isStopped())


def ship_python(session: SparkSession, code: Path) -> None:
    """Give all executors this zip of Python packages. The driver goes on with the packages that it has."""
    session.sparkContext.addPyFile(str(code))
    added = [path for path in sys.path if Path(path).name == code.name]
    sys.path[:] = [path for path in sys.path if path not in added]  # files beside our modules cannot be opened in a zip


def clear_active_session(session: SparkSession) -> None:
    """Make Spark forget the active session of this thread, in which it looks for data sources."""
    jvm(session).org.apache.spark.sql.SparkSession.clearActiveSession()


def set_active_session(session: SparkSession) -> None:
    """Make this the session in which Spark looks for the format of a sink on this thread."""
    jvm(session).org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)


def check_is_query(session: SparkSession, sql: str) -> None:
    """Raise ParseException unless the text is a query. `session.sql` would run a command (DROP, INSERT) at once."""
    session._jsparkSession.sessionState().sqlParser().parseQuery(sql)


def analyzed_plan(frame: DataFrame) -> Any:
    """The root node of Spark's analysed plan, a Java object."""
    return frame._jdf.queryExecution().analyzed()


def optimized_plan(frame: DataFrame) -> Any:
    """The root node of Spark's optimised plan, a Java object. Of a streaming frame only where Spark does not check operations."""
    return frame._jdf.queryExecution().optimizedPlan()


def state_processor(node: Any) -> StatefulProcessor | None:
    """A copy of the object that a node of `transformWithState` runs, of an analysed plan. None where it is larger than 1 MB."""
    command = bytes(node.functionExpr().func().command().unsafeArray())
    function, _type = cloudpickle.loads(command)  # this process made it
    processor: StatefulProcessor | None = getattr(getattr(function, "__self__", None), "_stateful_processor", None)
    return processor


def check_streamable(frame: DataFrame) -> None:
    """Raise AnalysisException when Spark cannot run this streaming frame with its output appended."""
    sql = jvm(frame.sparkSession).org.apache.spark.sql
    append = sql.streaming.OutputMode.Append()
    sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(analyzed_plan(frame), append)


def is_observed(observation: Observation) -> bool:
    """Whether the observed values have arrived. `Observation.get` would wait for ever."""
    assert observation._jo is not None
    return bool(observation._jo.future().isCompleted())


def progress_since(query: StreamingQuery, batch: int) -> list[Any]:
    """The progress events of later batches, oldest first.

    `recentProgress` of pyspark would parse all events that Spark keeps; the origins in them make them long.
    """
    found: list[Any] = []
    kept = query._jsq.recentProgress()
    for at in range(len(kept) - 1, -1, -1):  # each element is a call into Java
        if kept[at].batchId() <= batch:
            break
        found.append(StreamingQueryProgress.fromJson(json.loads(kept[at].json())))
    return found[::-1]


def hadoop_setting(session: SparkSession, name: str) -> str:
    """A setting of Hadoop's, as Spark was started with; empty without one."""
    return str(session.sparkContext._jsc.hadoopConfiguration().get(name) or "")


class Executor(NamedTuple):
    """An executor at work. name: Spark's number. began: when it registered, by this host's clock. tasks: that it runs now.

    busy: seconds of its tasks that ended, added up: the cores that it used, without those of Python workers.
    """

    name: str
    began: float
    tasks: int
    busy: float


def list_executors(session: SparkSession) -> list[Executor]:
    """The executors that are alive, the first ones first; of a local master none."""
    spark: Any = session.sparkContext._jsc
    found = spark.sc().statusStore().executorList(True)
    every = (found.apply(index) for index in range(found.size()))
    executors = (
        Executor(str(one.id()), one.addTime().getTime() / 1000, one.activeTasks(), one.totalDuration() / 1000)
        for one in every
        if str(one.id()) != "driver"
    )
    return sorted(executors, key=lambda one: int(one.name))


def order_executors(session: SparkSession, number: int) -> bool:
    """Ask the master for this number of executors. Those above it stay. Returns whether the master took the order."""
    spark: Any = session.sparkContext._jsc
    maps = getattr(getattr(jvm(session).scala.collection.immutable, "Map$"), "MODULE$")
    return bool(spark.sc().requestTotalExecutors(number, 0, maps.empty()))


def leave_executor(session: SparkSession, name: str, *, is_replaced: bool) -> bool:
    """Let an executor end its tasks and then end. is_replaced: another one comes in its place; else one fewer is ordered.

    Returns whether Spark knows it.
    """
    spark: Any = session.sparkContext._jsc
    scala = jvm(session)
    reason = scala.org.apache.spark.scheduler.ExecutorDecommissionInfo(
        "Penstock resizes the group", scala.scala.Option.empty()
    )
    return bool(spark.sc().schedulerBackend().decommissionExecutor(name, reason, not is_replaced, False))


def task_totals(session: SparkSession) -> Callable[[], str]:
    """Counts the tasks of this Spark from now on. The function returns the text of `TaskTotals.scala`."""
    totals = jvm(session).penstock.TaskTotals()
    context: Any = session.sparkContext._jsc
    context.sc().addSparkListener(totals)
    return lambda: str(totals.toText())


def session_id(session: SparkSession) -> str:
    """Of Spark's session: several Python objects may stand for one."""
    return str(session._jsparkSession.sessionUUID())


def list_files(session: SparkSession, path: str) -> list[tuple[str, int, int]]:
    """Path, bytes and time of change of the file, or of each file in the folder, sorted. path: a URI. Raises Spark's errors."""
    at = jvm(session).org.apache.hadoop.fs.Path(path)
    files = at.getFileSystem(session._jsparkSession.sessionState().newHadoopConf()).listFiles(at, True)
    found = []
    while files.hasNext():
        status = files.next()
        found.append((str(status.getPath()), int(status.getLen()), int(status.getModificationTime())))
    return sorted(found)


class HadoopFolder:
    """A folder in a file system that Spark knows. path: a URI. A file of an object store is stored whole or not at all."""

    def __init__(self, session: SparkSession, path: str) -> None:
        classes = jvm(session)
        self._path, self._class, self._io = (
            path,
            classes.org.apache.hadoop.fs.Path,
            classes.org.apache.commons.io.IOUtils,
        )
        self._once = classes.penstock.Once
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._class(path).getFileSystem(configuration)

    def _at(self, name: str) -> Any:
        return self._class(f"{self._path}/{name}" if name else self._path)

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._at(name)))

    def list(self, name: str = "") -> list[str]:
        """The names in this folder (""), or in one below; empty when there is none."""
        path = self._at(name)
        found = self._files.listStatus(path) if self._files.exists(path) else []
        return [str(status.getPath().getName()) for status in found]

    def read(self, name: str) -> bytes:
        stream = self._files.open(self._at(name))
        try:
            return bytes(self._io.toByteArray(stream))
        finally:
            stream.close()

    def find(self, name: str) -> bytes | None:
        """As `read`; None when there is no such file."""
        try:
            return self.read(name)
        except Py4JJavaError as error:
            if any(each.getClass().getName() == _MISSING for each in java_exceptions(error)):
                return None
            raise

    def write(self, name: str, content: bytes) -> None:
        stream = self._files.create(self._at(name), True)
        try:
            stream.write(content)
        finally:
            stream.close()

    def create(self, name: str, content: bytes) -> bool:
        """Create a file, once, whoever tries (`penstock.Once`); False when it is there with another content."""
        try:
            self._once.create(self._files, self._at(name), content)
        except Py4JJavaError as error:
            if any(each.getClass().getName() == _EXISTS for each in java_exceptions(error)):
                return False
            raise
        return True

    def delete(self, name: str) -> None:
        """A file or a folder, whether it is there or not."""
        self._files.delete(self._at(name), True)
