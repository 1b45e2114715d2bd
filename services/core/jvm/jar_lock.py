"""The lock of jars: `jars.lock` beside this file names every jar that is fetched, with its SHA-256.

infra/dev/lock_jars.py writes it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = Path(__file__).with_name("jars.lock")


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock: Maven coordinates and the SHA-256 of the file, in hexadecimal."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The name it is kept under."""
        return f"{self.artifact}-{self.version}.jar"


def read_lock(path: Path = LOCK_FILE) -> dict[str, list[Jar]]:
    """The sets of jars by name. Lines: `[set]`, `group:artifact:version sha256`, `# comment`.

    Raises ValueError naming file and line of the first line that is none of these.
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
