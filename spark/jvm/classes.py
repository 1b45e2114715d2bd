"""Our own classes for Spark's Java: the Scala files beside this one, as one jar that is compiled once on each machine. Those in
`kafka/`, the login of Kafka's clients, are another jar: they need the jars of the connector and of AWS's SDK.

The compiler is the one in pyspark's jars: of the version that Spark was built with, without a download, and content with a JRE.
The jar is among the fetched ones ($PENSTOCK_JARS or ~/.cache/penstock/jars). Its name has a digest of the sources and of all that
the result depends on, so another version of either compiles its own. ADR 0006 says why there are such classes at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from services.core.jvm.jars import SPARK_KAFKA, SPARK_S3, JarsUnavailable, cache_folder, jar_set
from services.core.jvm.java import NO_PERF_FILE, find_java
from services.core.temporary import temporary_folder

EXTENSIONS = "penstock.Functions"
"""For Spark's setting `spark.sql.extensions`: it registers the functions below in each session."""
LAGS = "penstock_lags"
MOMENT = "penstock_moment"
ORIGINS = "penstock_origins"
_SOURCES = Path(__file__).parent
_COMPILE_TIMEOUT_S = 300.0
_OPTIONS = ("-usejavacp", "-deprecation", "-Xlint", "-Werror")


def classes_jar() -> Path:
    """The jar with all our classes. Blocks for up to half a minute when it has to compile: one process of a machine does it.

    Raises JavaNotFound, JarsUnavailable, OSError.
    """
    return compiled_jar("penstock-classes", sorted(_SOURCES.glob("*.scala")))


def kafka_login_jar() -> Path:
    """The jar of the login of Kafka's clients. Blocks and raises as `classes_jar`, and fetches the jars that it needs."""
    beside = (*jar_set(SPARK_KAFKA), *jar_set(SPARK_S3))
    return compiled_jar("penstock-kafka-login", sorted((_SOURCES / "kafka").glob("*.scala")), beside=beside)


def compiled_jar(name: str, sources: list[Path], *, beside: tuple[Path, ...] = ()) -> Path:
    """A jar of some Scala files. beside: jars that they need and pyspark does not have. Blocks and raises as `classes_jar`."""
    jar = cache_folder() / f"{name}-{_digest(sources, beside)}.jar"
    if not jar.is_file():
        jar.parent.mkdir(parents=True, exist_ok=True)
        with jar.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not jar.is_file():
                _compile(sources, jar, beside)
    return jar


def _digest(sources: list[Path], beside: tuple[Path, ...]) -> str:
    parts = [importlib.metadata.version("pyspark"), *_OPTIONS, *(path.name for path in beside)]
    for source in sources:
        parts += [source.name, source.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _compile(sources: list[Path], jar: Path, beside: tuple[Path, ...]) -> None:
    """A jar under this name is complete: it gets the name when it is on the disk."""
    print(f"Compiling Penstock's classes for Spark, once, into {jar} ...", file=sys.stderr)
    with temporary_folder("compile", jar.parent) as scratch:
        made = scratch / "classes.jar"
        java = [str(find_java().executable), NO_PERF_FILE, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        path = os.pathsep.join([f"{pyspark_jars()}{os.sep}*", *map(str, beside)])
        command = [*java, f"-Djava.io.tmpdir={scratch}", "-cp", path, "scala.tools.nsc.Main"]
        command += [*_OPTIONS, "-d", str(made), *map(str, sources)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired as error:
            raise JarsUnavailable(
                f"the classes for Spark were not compiled within {_COMPILE_TIMEOUT_S:.0f} s. {_REMEDY}"
            ) from error
        if done.returncode != 0 or not made.is_file():
            raise JarsUnavailable(
                f"the classes for Spark were not compiled (status {done.returncode}). {_REMEDY}\n"
                + "\n".join((done.stdout + done.stderr).splitlines()[-12:])
            )
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.rename(jar)


_REMEDY = (
    "Try: again on a machine with 1 GB of free memory, and with the pyspark that Penstock names; or copy the jar from a machine "
    "that has it."
)


def pyspark_jars() -> Path:
    """The folder of pyspark's jars. Raises JarsUnavailable."""
    # The import of pyspark would take a second.
    spec = importlib.util.find_spec("pyspark")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        return Path(folder, "jars")
    raise JarsUnavailable("pyspark, which has the compiler, is not installed here. Try: make setup")


if __name__ == "__main__":
    print(classes_jar(), kafka_login_jar(), sep="\n")
