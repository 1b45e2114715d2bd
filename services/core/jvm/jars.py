"""Fetches the jars that Spark's Kafka connector and a Kafka server consist of, without Maven.

`jars.lock` (see `jar_lock`) names every jar exactly, so nothing is resolved at run time. The Ivy inside pyspark's own
jars downloads them, once, into $PENSTOCK_JARS or ~/.cache/penstock/jars. A set appears there under its
final name only when all of it is there and verified, so several processes may fetch at the same time. Whoever takes a set from
there compares every jar with the lock again: 50 MB, a tenth of a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import quoteattr

from services.core.jvm.jar_lock import LOCK_FILE, Jar, read_lock, sha256_of
from services.core.jvm.java import find_java
from services.core.jvm.trust_store import trust_options

SPARK_KAFKA = "spark-kafka"
KAFKA_SERVER = "kafka-server"
FETCH_TIMEOUT_S = 300.0
FETCH_ATTEMPTS = 3
# Ivy's own default repository, asked for the jars alone: the lock has already resolved what their POMs say.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="locked"/>
  <resolvers><ibiblio name="locked" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


class JarsUnavailable(RuntimeError):
    """The jars could not be had, or are not the ones in the lock. The message says why and what to try."""


def spark_kafka_jars() -> list[Path]:
    """The jars for Spark's `spark.jars` so that it can read and write Kafka. Blocks, minutes if they must be fetched.

    Raises JarsUnavailable, JavaNotFound.
    """
    return jar_set(SPARK_KAFKA)


def kafka_server_jars() -> list[Path]:
    """The class path of a Kafka server. Blocks, minutes if they must be fetched. Raises JarsUnavailable, JavaNotFound."""
    return jar_set(KAFKA_SERVER)


def jar_set(name: str, *, lock_file: Path = LOCK_FILE) -> list[Path]:
    """Paths of all jars of one set of the lock, in its order, each as the lock has it; fetches a set that is missing.

    Blocks; safe in several processes. Raises JarsUnavailable, also when a file that was fetched before is another one now.
    """
    jars = read_lock(lock_file)[name]
    digest = hashlib.sha256("\n".join(jar.sha256 for jar in jars).encode()).hexdigest()
    folder = cache_folder() / f"{name}-{digest[:12]}"
    if folder.is_dir():
        verify(jars, folder, f"Try: find out who changed {folder}, then remove it; it is fetched again.")
    else:
        _fetch(name, jars, folder)
    return [folder / jar.file_name for jar in jars]


def cache_folder() -> Path:
    """Where jars are kept: $PENSTOCK_JARS, or ~/.cache/penstock/jars."""
    given = os.environ.get("PENSTOCK_JARS")
    return Path(given) if given else Path.home() / ".cache" / "penstock" / "jars"


def run_ivy(arguments: list[str]) -> None:
    """Run the Ivy of pyspark. Blocks up to 300 s. Raises JarsUnavailable with the end of what Ivy said."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(find_java()), *trust_options(Path(scratch)), "-jar", str(_ivy_jar()), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired as error:
            raise JarsUnavailable(f"Ivy did not finish within {FETCH_TIMEOUT_S:.0f} s. {_remedy()}") from error
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip(" .\t")]
        raise JarsUnavailable(f"Ivy ended with status {done.returncode}. {_remedy()}\n" + "\n".join(said[-12:]))


def _fetch(name: str, jars: list[Jar], folder: Path) -> None:
    print(f"Fetching the {len(jars)} jars of {name}, once, into {folder} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        fetched = Path(scratch) / "jars"
        _download(jars, Path(scratch), fetched)
        verify(jars, fetched, f"{_remedy()} Or find out what alters downloads on their way to this machine.")
        try:
            fetched.rename(folder)
        except OSError:
            if not folder.is_dir():  # it is one when another process was faster, and then its jars are as good
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
    """An Ivy file that asks for exactly these jars."""
    lines = [
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)}"
        ' transitive="false"/>'
        for jar in jars
    ]
    head = '<ivy-module version="2.0"><info organisation="penstock" module="jars"/><dependencies>'
    return "\n".join([head, *lines, "</dependencies></ivy-module>"])


def verify(jars: list[Jar], folder: Path, remedy: str) -> None:
    """Compare each file with the lock. Raises JarsUnavailable naming the first jar that is missing or different."""
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
    # Found without importing pyspark, which costs a second.
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


def main() -> int:
    """Fetch every set that is not here yet. `make jars` calls this."""
    try:
        for name in read_lock():
            jar_set(name)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
