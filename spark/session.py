"""One Spark session for all pipes of the process, tuned for small batches several times a second."""

import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from services.core.jvm.jars import DATABASES, SPARK_KAFKA, SPARK_S3, jar_set
from services.core.jvm.java import NO_PERF_FILE, archive_name, archive_options, java_env
from spark.cluster.executor_pod import write_template
from spark.cluster.master import PACKAGES, DriverAddress, Executors, MasterKind, cluster_settings, kind_of, write_code
from spark.java import clear_active_session, set_active_session, ship_python
from spark.jvm.classes import EXTENSIONS, classes_jar, kafka_login_jar
from spark.object_store import ObjectStore, store_settings
from spark.sources.source import BrokerSource

_LOG4J = Path(__file__).with_name("log4j2.properties")

KEEP_COUNTING = tuple(
    f"org.apache.spark.sql.catalyst.optimizer.{rule}" for rule in ("PropagateEmptyRelation", "PruneFilters")
)
"""Rules of Spark's optimiser that are off. Where a result is known to be empty (a table without rows, `WHERE 1 = 0`), they take
the sources out of the plan, and with them what counts the events: these would be committed and reported nowhere."""

# A reason for each. The others have Spark's defaults.
_SETTINGS = {
    "spark.ui.enabled": "false",  # a port and a second of start-up that nobody uses: the metrics are on our own port
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",  # a pipe with a backlog does not delay the others
    "spark.locality.wait": "0",
    "spark.cleaner.periodicGC.interval": "5min",
    "spark.ui.retainedJobs": "20",  # kept in memory even without the UI
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "10",
    "spark.sql.streaming.ui.enabled": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",  # a value that does not fit is an error, never a silent null
    "spark.sql.caseSensitive": "false",
    "spark.sql.variant.allowDuplicateKeys": "true",  # the last one counts, as in the rules of topics of others elsewhere
    "spark.sql.adaptive.enabled": "false",  # plans a batch again while it runs: 7 to 9 % dearer (bench/README.md)
    "spark.sql.optimizer.enableJsonExpressionOptimization": "false",  # would parse fewer columns and miss a bad one
    "spark.sql.optimizer.excludedRules": ",".join(KEEP_COUNTING),
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",  # without kafka: only its V2 sink is observed
    "spark.sql.ui.explainMode": "simple",  # each batch's plan is described for the UI, which is off
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.streaming.checkpointFileManagerClass": "penstock.CheckpointFiles",  # ADR 0017
    "spark.sql.extensions": EXTENSIONS,
    "spark.sql.streaming.stopTimeout": "10s",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.numRecentProgressUpdates": "50",
    "spark.sql.streaming.noDataProgressEventInterval": "60000",
    "spark.python.authenticate.socketTimeout": "60s",  # a machine under load needs longer than 15 s to start a Python
    "spark.python.worker.faulthandler.enabled": "true",  # a worker that crashes prints its stack
}
_JAVA_OPTIONS = (
    "-Djdk.lang.Process.launchMechanism=VFORK",
    "-Xss16m",  # Spark matches long error texts with a recursive pattern; at 1 MB that overflows and hides the error
    "-XX:+ExitOnOutOfMemoryError",  # else threads end one by one, and the rest does nothing for ever
    "-Duser.timezone=UTC",
    f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
    NO_PERF_FILE,
)
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_MOST_COLLECTORS = 4
"""Threads that free memory: a heap of some GB needs no more."""
_SILENCED = ("SQLQueryContextLogger", "py4j.clientserver")
"""Loggers that print plans and stacks of errors that we log in one line."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a cluster's executors reach this process, and what they are."""

    driver: DriverAddress
    executors: Executors


_EVERY_ADDRESS = ("0.0.0.0", "[::]")  # noqa: S104
_LOCAL_SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def open_session(
    *,
    master: str,
    memory: int,
    kafka: bool,
    kafka_login: bool = False,
    aws: bool = False,
    databases: bool = False,
    scratch: Path,
    cluster: Cluster | None = None,
    parallelism: int | None = None,
    ui: str = "",
    compiler: str = "auto",
    store: ObjectStore | None = None,
    archive_to: Path | None = None,
    on_phase: Callable[[str], object] = lambda _: None,
) -> SparkSession:
    """Start Java and Spark: seconds. Blocking. kafka: with the connector's jars, kafka_login: with our classes for its login,
    aws: with AWS's SDK, databases: with drivers of databases; jars may have to be fetched. The first start on a machine compiles
    our classes, too.

    scratch: an existing folder for all temporary files of Java, of Spark and of its Python workers. cluster: None for a local
    master. parallelism: the partitions of a shuffle; None: one for each task slot. ui: host:port of Spark's web pages; empty:
    none. compiler: `java_compiler` of the settings. store: of checkpoints or tables, with its jars. archive_to:
    Java writes its classes there at its end. on_phase: called with what the start is doing, for a person.
    Raises JavaNotFound, JarsUnavailable, and Spark's error when a cluster's master
    cannot be reached.
    """
    os.environ.update(java_env())
    os.environ["TMPDIR"] = str(scratch)
    os.environ["SPARK_LAUNCHER_OPTS"] = " ".join((NO_PERF_FILE, *_QUICK))  # it only prints the command of the other one
    os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] = _SETTINGS["spark.python.authenticate.socketTimeout"].removesuffix(
        "s"
    )  # here
    for name in _SILENCED:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Spark's Python workers run this interpreter and import this project.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    local_python = str(write_python(scratch))
    os.environ["PYSPARK_DRIVER_PYTHON"] = local_python
    os.environ["PYSPARK_PYTHON"] = local_python if cluster is None else cluster.executors.python
    builder = SparkSession.builder.master(master).appName("penstock")
    of_master = _LOCAL_SETTINGS
    if cluster is not None:
        of_master = cluster_settings(kind_of(master), cluster.driver, cluster.executors)
        if kind_of(master) is MasterKind.KUBERNETES:
            template = scratch / "executor.json"
            write_template(template)
            of_master["spark.kubernetes.executor.podTemplateFile"] = str(template)
    of_master = of_master | _state_settings(memory if cluster is None else cluster.executors.memory)
    of_store = {} if store is None else store_settings(store)
    for name, value in (_SETTINGS | of_master | of_store | _ui_settings(ui)).items():
        builder = builder.config(name, value)
    builder = builder.config("spark.driver.memory", f"{memory >> 20}m")
    builder = builder.config("spark.driver.maxResultSize", f"{max(memory >> 22, 16)}m")
    temporary = (
        f'"-Djava.io.tmpdir={scratch}"'  # Spark's own folders are below it, too; quoted: the path may have blanks
    )
    archive = archive_options(class_archive())
    if archive_to is not None:
        archive = [f"-XX:ArchiveClassesAtExit={archive_to}", "-Xlog:disable"]
    java_options = [*_JAVA_OPTIONS, *java_for_size(compiler), temporary, *archive]
    builder = builder.config("spark.driver.extraJavaOptions", " ".join(java_options))
    tasks = slots(master) if cluster is None else cluster.executors.most_slots
    builder = builder.config("spark.sql.shuffle.partitions", str(parallelism or max(1, tasks or 1)))
    if parallelism is not None:
        builder = builder.config("spark.default.parallelism", str(parallelism))
    on_phase("jars are fetched or verified")
    jars = [classes_jar(), *(jar_set(SPARK_KAFKA) if kafka else [])]
    jars += [kafka_login_jar()] if kafka_login else []
    jars += jar_set(SPARK_S3) if aws or store is not None else []
    jars += jar_set(DATABASES) if databases else []
    builder = builder.config("spark.jars", ",".join(map(str, jars)))
    on_phase("Java and Spark start")
    session = builder.getOrCreate()
    if cluster is not None:
        code = scratch / "penstock.zip"
        write_code(code)
        ship_python(session, code)
    session.dataSource.register(BrokerSource)
    _ = session.streams  # starts the registry of state stores: without it a batch with user-written state fails
    return session


def write_python(scratch: Path) -> Path:
    """A command that runs this Python with our $PYTHONPATH and no other. Spark puts its own copy of pyspark in front: a zip
    without compiled files, which costs each of its Python processes 0.6 CPU-seconds."""
    command = scratch / "python"
    path = shlex.quote(os.environ["PYTHONPATH"])
    command.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    command.chmod(0o700)
    return command if os.access(command, os.X_OK) else Path(sys.executable)  # not where the folder is mounted noexec


def _ui_settings(ui: str) -> dict[str, str]:
    """Spark binds its pages to the host in $SPARK_LOCAL_IP, and to every address without it. Without `spark.driver.host` this is
    the driver's host, too: on a cluster `check_master` refuses that. $SPARK_PUBLIC_DNS is the host of the link."""
    if not ui:
        return {}
    host, _, port = ui.rpartition(":")
    os.environ["SPARK_LOCAL_IP"] = host.strip("[]")
    if host not in _EVERY_ADDRESS:
        os.environ["SPARK_PUBLIC_DNS"] = host
    return {"spark.ui.enabled": "true", "spark.sql.streaming.ui.enabled": "true", "spark.ui.port": port}


def java_for_size(compiler: str) -> tuple[str, ...]:
    """Java's compiler and collector. The full compiler saves a quarter of the CPU of a backlog, once it has compiled for a minute
    beside the work; on one core that minute would be the pipes' own."""
    cores = len(os.sched_getaffinity(0))
    if compiler == "quick" or (compiler == "auto" and cores == 1):
        return _QUICK
    return ("-XX:+UseParallelGC", f"-XX:ParallelGCThreads={min(cores, _MOST_COLLECTORS)}")


def _state_settings(memory: int) -> dict[str, str]:
    """Of RocksDB, where a query keeps its state there (`jobs/state_store.py`). memory: of the heap of each process with tasks."""
    rocksdb = "spark.sql.streaming.stateStore.rocksdb"
    return {
        f"{rocksdb}.changelogCheckpointing.enabled": "true",  # a batch stores its changes; whole copies follow beside the batches
        f"{rocksdb}.boundedMemoryUsage": "true",  # for all pipes of the process; the rest is on its disk
        f"{rocksdb}.maxMemoryUsageMB": str(max(memory >> 22, 64)),
    }


def class_archive() -> Path:
    """Where an archive of Spark's classes is looked for. With it Spark starts in half the time, and with 3.5 CPU-seconds less.
    `make classes` writes it (160 MB)."""
    return Path(pyspark.__file__).with_name(archive_name(f"spark-{pyspark.__version__}"))


def own_session(session: SparkSession) -> SparkSession:
    """Another session on the same Spark, for this thread, with its own views and settings."""
    own = session.newSession()
    clear_active_session(own)  # else Spark finds our format in the other session, and refuses it here
    own.dataSource.register(BrokerSource)
    set_active_session(own)
    return own


def slots(master: str) -> int | None:
    """The number of tasks that a local master runs at once; None when only the cluster knows."""
    if master == "local":
        return 1
    if not master.startswith("local["):
        return None
    count = master[len("local[") : -1].split(",")[0]
    return os.cpu_count() or 1 if count == "*" else int(count)
