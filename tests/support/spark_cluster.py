"""A Spark standalone cluster on loopback, from the pyspark package: a master and workers, each a Java of its own.

Executors are processes of their own, too, children of their workers.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pyspark

from services.core.jvm.child import start_child, stop_child
from services.core.jvm.java import NO_PERF_FILE, archive_options, java_env
from spark.session import class_archive
from tests.support.ports import free_port

READY_S = 600.0
_HOME = Path(pyspark.__file__).parent
_SMALL = ("-Xmx96m", "-XX:+UseSerialGC", NO_PERF_FILE)
_QUICK = "-XX:TieredStopAtLevel=1"
"""Of all processes: in an executor of a test the full compiler costs as much as all else. (With Java's serial collector executors
would not start: Spark finds their heap too small.)"""
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class SparkCluster:
    """One master and `workers` workers on free loopback ports, in `folder`. The processes die with this one. Methods block."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        cores: int = 1,
        memory_mb: int = 600,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """cores, memory_mb: that each worker gives to executors. They limit Spark's book-keeping only.

        environment: more variables of all these processes.
        """
        self._environment = dict(environment or {})
        self.folder = folder.absolute()
        self._count, self._cores, self._memory = workers, cores, memory_mb
        self.port, self._ui_port = free_port(), free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Until all workers are registered."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start_master()
        for number in range(self._count):
            self.start_worker(number)
        self.wait_for_workers(self._count)

    def stop(self) -> None:
        """At once."""
        for number in list(self._workers):
            self.kill_worker(number)
        if self._master is not None:
            self.kill_master()

    def start_master(self) -> None:
        """It knows its applications and workers from before: the files of the former one are there."""
        recovery = [
            "-Dspark.deploy.recoveryMode=FILESYSTEM",
            f"-Dspark.deploy.recoveryDirectory={self.folder / 'state'}",
        ]
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self._ui_port)]
        self._master = self._start("master", [*recovery, "-Dspark.worker.timeout=15"], "master.Master", arguments)
        self._wait(lambda: "I have been elected leader" in self.log("master"), "a master")

    def kill_master(self) -> None:
        assert self._master is not None
        stop_child(self._master, grace_s=0)
        self._master = None
        self.log_file("master").unlink()

    def end_application(self, name: str) -> None:
        """As the button of the master's page does."""
        body = urlencode({"id": name, "terminate": "true"}).encode()
        with urlopen(f"http://127.0.0.1:{self._ui_port}/app/kill/", body, timeout=30) as answer:
            answer.read()

    def applications(self) -> list[str]:
        """The ids of all that were registered with this master, in this order."""
        return re.findall(r"Registered app \S+ with ID (\S+)", self.log("master"))

    def start_worker(self, number: int) -> None:
        arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--cores", str(self._cores)]
        arguments += ["--memory", f"{self._memory}m", "--work-dir", str(self.folder / f"work-{number}"), self.url]
        self._workers[number] = self._start(f"worker-{number}", [], "worker.Worker", arguments)

    def kill_worker(self, number: int) -> None:
        """With its executors: as if its host was gone."""
        worker = self._workers.pop(number)
        family = _tree(worker.pid)
        stop_child(worker, grace_s=0)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_for_workers(self, count: int) -> None:
        """Until so many registered with this master. A busy worker registers twice."""

        def registered() -> int:
            return len(set(re.findall(r"Registering worker (\S+)", self.log("master"))))

        self._wait(lambda: registered() >= count, f"{count} workers")

    def executors(self) -> list[psutil.Process]:
        """Of all applications."""
        found = []
        for worker in self._workers.values():
            for process in _tree(worker.pid):
                with suppress(psutil.NoSuchProcess):
                    if _EXECUTOR in process.cmdline():
                        found.append(process)
        return found

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        path = self.log_file(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, name: str, options: list[str], main: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        own = self.folder / "tmp"
        own.mkdir(exist_ok=True)
        environment = java_env()
        settings = {
            "JAVA_HOME": environment["JAVA_HOME"],
            "PENSTOCK_JAVA": environment.get("PENSTOCK_JAVA", ""),
            "SPARK_HOME": str(_HOME),
            "SPARK_SCALA_VERSION": "2.13",  # as bin/load-spark-env.sh does
            "SPARK_LOCAL_DIRS": str(own),
            "TMPDIR": str(own),
            "PATH": environment["PATH"],
            "JDK_JAVA_OPTIONS": " ".join([_QUICK, *archive_options(class_archive())]),  # executors have it from workers
            **self._environment,
        }
        java = [str(Path(environment["JAVA_HOME"]) / "bin" / "java"), *_SMALL, f"-Djava.io.tmpdir={own}", *options]
        command = [*java, "-cp", _class_path(), f"org.apache.spark.deploy.{main}", *arguments]
        clean = ["/usr/bin/env", "-i", *(f"{key}={value}" for key, value in settings.items() if value), *command]
        return start_child(clean, log=self.log_file(name))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + READY_S
        while not condition():
            assert time.monotonic() < end, f"in vain waited for {what}: {self.log('master')[-2000:]}"
            time.sleep(0.1)


def _class_path() -> str:
    """As Spark's launcher makes it for drivers and executors: an archive of classes is good for one order of the jars."""
    (first,) = (_HOME / "jars").glob("slf4j-api-*.jar")
    return f"{_HOME / 'conf'}:{first}:{_HOME / 'jars'}/*"


def freeze(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
