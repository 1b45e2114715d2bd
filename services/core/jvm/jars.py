"""Fetches jars without Maven: Spark's Kafka connector, Hadoop's client for S3, database drivers, and a Kafka server.

`jars.lock` names every jar with its SHA-256 (infra/dev/lock_jars.py writes it), so nothing is resolved at run time. Pyspark's own
Ivy downloads the jars once, into $PENSTOCK_JARS or ~/.cache/penstock/jars. A set gets its final name there when all its jars are
verified, so several processes may fetch at the same time. Each use of a set verifies every jar again (50 MB in 0.1 s).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from services.core.jvm.java import NO_PERF_FILE, find_java, trust_options
from services.core.temporary import temporary_folder

LOCK_FILE = Path(__file__).with_name("jars.lock")
SPARK_KAFKA = "spark-kafka"
SPARK_S3 = "spark-s3"
KAFKA_SERVER = "kafka-server"
DATABASES = "databases"
AVRO_IDL = "avro-idl"
"""For tests: Avro's own reader of IDL files."""
KAFKA_WRITERS = "kafka-writers"
"""For tests, beside KAFKA_SERVER and DATABASES: Kafka Connect's JSON converter, and Debezium's connector for PostgreSQL."""
FETCH_TIMEOUT_S = 300.0
FETCH_ATTEMPTS = 3
# Maven Central, without POMs: the lock names the dependencies, too.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="locked"/>
  <resolvers><ibiblio name="locked" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


class JarsUnavailable(RuntimeError):
    """The jars could not be fetched, or differ from the lock. The message has the reason and a remedy."""


def jar_set(name: str, *, lock_file: Path = LOCK_FILE) -> list[Path]:
    """The paths of all jars of a set of the lock (SPARK_KAFKA, DATABASES, …), in its order. Fetches a missing set.

    Blocks, for minutes when it fetches; safe in several processes. Raises JavaNotFound, and JarsUnavailable, also when a
    fetched file has changed.
    """
    jars = read_lock(lock_file)[name]
    digest = hashlib.sha256("\n".join(jar.sha256 for jar in jars).encode()).hexdigest()
    folder = cache_folder() / f"{name}-{digest[:12]}"
    if folder.is_dir():
        verify(jars, folder, f"Try: find out who changed {folder}, then remove it. It is fetched again.")
    else:
        _fetch(name, jars, folder)
    return [folder / jar.file_name for jar in jars]


def cache_folder() -> Path:
    """The folder of all sets: $PENSTOCK_JARS, or ~/.cache/penstock/jars."""
    given = os.environ.get("PENSTOCK_JARS")
    return Path(given) if given else Path.home() / ".cache" / "penstock" / "jars"


def run_ivy(arguments: list[str]) -> None:
    """Run the Ivy of pyspark. Blocks up to 300 s. Raises JarsUnavailable with the end of Ivy's output."""
    with temporary_folder("ivy") as scratch:
        java = [str(find_java().executable), NO_PERF_FILE, *trust_options(scratch)]
        command = [*java, "-jar", str(_ivy_jar()), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired as error:
            raise JarsUnavailable(f"Ivy did not finish within {FETCH_TIMEOUT_S:.0f} s. {_remedy()}") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip(" .\t")]
        raise JarsUnavailable(f"Ivy ended with status {done.returncode}. {_remedy()}\n" + "\n".join(lines[-12:]))


def _fetch(name: str, jars: list[Jar], folder: Path) -> None:
    print(f"Fetching the {len(jars)} jars of {name}, once, into {folder} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("fetch", folder.parent) as scratch:
        fetched = scratch / "jars"
        _download(jars, scratch, fetched)
        verify(jars, fetched, f"{_remedy()} Or find out what alters downloads on their way to this machine.")
        try:
            fetched.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its jars are verified, too
                raise


def _download(jars: list[Jar], scratch: Path, target: Path) -> None:
    settings, module = scratch / "settings.xml", scratch / "ivy.xml"
    settings.write_text(_SETTINGS, encoding="utf-8")
    module.write_text(ivy_module(jars), encoding="utf-8")
    arguments = ["-warn", "-settings", str(settings), "-cache", str(scratch / "cache"), "-ivy", str(module)]
    arguments += ["-retrieve", str(target / "[artifact]-[revision].[ext]")]
    for attempt in range(1, FETCH_ATTEMPTS + 1):
        try:
            run_ivy(arguments)
        except JarsUnavailable as error:
            if attempt == FETCH_ATTEMPTS:
                raise
            print(f"Attempt {attempt} of {FETCH_ATTEMPTS} failed: {str(error).splitlines()[0]}", file=sys.stderr)
        else:
            break


def ivy_module(jars: list[Jar]) -> str:
    """An Ivy file with exactly these jars."""
    lines = [
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)}"
        ' transitive="false"/>'
        for jar in jars
    ]
    head = '<ivy-module version="2.0"><info organisation="penstock" module="jars"/><dependencies>'
    return "\n".join([head, *lines, "</dependencies></ivy-module>"])


def verify(jars: list[Jar], folder: Path, remedy: str) -> None:
    """Compare each file with the lock. Raises JarsUnavailable for the first jar that is missing or different."""
    for jar in jars:
        path = folder / jar.file_name
        if not path.is_file():
            raise JarsUnavailable(f"{jar.file_name} is missing. {remedy}")
        found = sha256_of(path)
        if found != jar.sha256:
            raise JarsUnavailable(
                f"{jar.file_name} is not the file that {LOCK_FILE.name} names: SHA-256 {found}, not {jar.sha256}. {remedy}"
            )


def _ivy_jar() -> Path:
    # The import of pyspark would take a second.
    spec = importlib.util.find_spec("pyspark")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder, "jars").glob("ivy-*.jar")):
            return path
    raise JarsUnavailable("pyspark, whose Ivy fetches the jars, is not installed here. Try: make setup")


def _remedy() -> str:
    return (
        "Try: again with access to Maven Central; behind a proxy set JDK_JAVA_OPTIONS='-Dhttps.proxyHost=... "
        "-Dhttps.proxyPort=...', and SSL_CERT_FILE if it has a certificate authority of its own; or copy "
        f"the folder {cache_folder()} from a machine that has it."
    )


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock: Maven coordinates and the SHA-256 of the file, in hexadecimal."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def read_lock(path: Path = LOCK_FILE) -> dict[str, list[Jar]]:
    """The sets of jars by name. Lines: `[set]`, `group:artifact:version sha256`, `# comment`.

    Raises ValueError with the file and the number of the first other line.
    """
    sets: dict[str, list[Jar]] = {}
    jars: list[Jar] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("[") and text.endswith("]"):
            jars = sets.setdefault(text[1:-1], [])
            continue
        jar = _parse(text)
        if jars is None or jar is None:
            raise ValueError(f"{path}, line {number}: not `group:artifact:version sha256` below a `[set]`: {text!r}")
        jars.append(jar)
    return sets


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(text: str) -> Jar | None:
    coordinates, _, sha256 = text.partition(" ")
    match coordinates.split(":"):
        case [group, artifact, version] if len(sha256) == 64:
            return Jar(group, artifact, version, sha256)
    return None


def main() -> int:
    """Fetch every missing set. `make jars` calls this."""
    try:
        for name in read_lock():
            jar_set(name)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
