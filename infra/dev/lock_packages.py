"""Resolves the packages and rewrites infra/lock: every package, its version, and the SHA-256 of each file of that release.

.venv/bin/python infra/dev/lock_packages.py            # after a change of pyproject.toml: versions that fit stay
.venv/bin/python infra/dev/lock_packages.py --upgrade  # the newest that fit

build.txt: what builds packages; services.txt: what services run on; java.txt: the Java for who has none; emulator.txt: what the
Kinesis demo needs beside them; dev.txt: the rest of what checks and tests need. No package is in two of them. They are valid for
every Python that the project supports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "lock"
SETS = {  # each leaves out the packages of the earlier ones
    "build": ["--group", "build"],
    "services": [],
    "java": ["--extra", "java"],
    "emulator": ["--extra", "emulator"],
    "dev": ["--extra", "dev"],
}
_NAME = re.compile(r"([a-z0-9][a-z0-9._-]*)==(\S+)(?: ; (.+?))?(?: \\)?")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class Locked(NamedTuple):
    """One package. marker: where it is needed, or empty. hashes: SHA-256 of the files of this release."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def read_lock(path: Path) -> Iterator[Locked]:
    """The packages of one file. Raises ValueError for a line that is none of its form."""
    for text in re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8")).splitlines():
        if not text or text.startswith("#"):
            continue
        head, *_ = text.partition("--hash")
        found = _NAME.fullmatch(head.strip())
        hashes = tuple(_HASH.findall(text))
        if found is None or not hashes:
            raise ValueError(f"{path}: not `name==version` with hashes: {text[:80]!r}")
        yield Locked(found[1], found[2], found[3] or "", hashes)


def _resolve(options: list[str], scratch: Path, held: list[Path]) -> list[Locked]:
    output = scratch / "resolved.txt"
    output.unlink(missing_ok=True)
    source = [] if "--group" in options else ["pyproject.toml"]
    command = [
        sys.executable,
        "-m",
        "uv",
        "--quiet",
        "pip",
        "compile",
        *source,
        *options,
        "--universal",
        "--generate-hashes",
    ]
    command += ["--python-version", "3.11", "--no-header", "--no-annotate", "--output-file", str(output)]
    for path in held:
        command += ["--constraint", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603
    return list(read_lock(output))


def _write(path: Path, packages: list[Locked]) -> None:
    lines = ["# Written by infra/dev/lock_packages.py."]
    for one in packages:
        head = f"{one.name}=={one.version}" + (f" ; {one.marker}" if one.marker else "")
        lines.append(" \\\n    ".join([head, *(f"--hash=sha256:{sha256}" for sha256 in one.hashes)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    known: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        pinned = scratch / "pinned.txt"
        before = (
            []
            if "--upgrade" in sys.argv[1:]
            else [one for path in sorted(FOLDER.glob("*.txt")) for one in read_lock(path)]
        )
        pinned.write_text("".join(f"{one.name}=={one.version}\n" for one in before), encoding="utf-8")
        extras = [option for name in ("java", "emulator", "dev") for option in SETS[name]]
        everything = _resolve(["pyproject.toml", *extras, *SETS["build"]], scratch, [pinned])
        pinned.write_text("".join(f"{one.name}=={one.version}\n" for one in everything), encoding="utf-8")
        for name, options in SETS.items():
            found = _resolve(options, scratch, [pinned])
            _write(FOLDER / f"{name}.txt", [one for one in found if one.name not in known])
            known |= {one.name: one.version for one in found}


if __name__ == "__main__":
    main()
