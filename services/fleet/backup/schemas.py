"""Copies the registry's folder of schemas while a registry may append to it.

Its objects are created whole and never change (ADR 0022), and entry n exists only when all entries before it do. So the entries
up to the last one that was there at first are the log of one moment. A segment repeats entries, and is made after them: the list
of segments is older than that of the entries, so the copy has all entries of each of its segments.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from services.core.folders import make_folder
from services.fleet.problem import CommandFailed

_ENTRIES, _SEGMENTS = "log", "segments"
_HEAD = re.compile(rb"penstock-registry \d+ sha256=([0-9a-f]{64})")


def copy_schemas(source: Path, target: Path) -> int:
    """Copy the store. Returns the number of entries; 0: there is no store. Blocking. Raises CommandFailed, OSError."""
    segments = _objects(source / _SEGMENTS)
    entries = _objects(source / _ENTRIES)
    for folder, paths in ((_ENTRIES, entries), (_SEGMENTS, segments)):
        for path in paths:
            make_folder(target / folder, mode=0o700)
            shutil.copyfile(path, target / folder / path.name)
    for problem in check_schemas(target, len(entries)):
        raise CommandFailed(
            f"no backup was made, because the schemas in {source} are damaged: {problem}",
            "docs/runbooks/PenstockSchemasDamaged.md; then again",
        )
    return len(entries)


def check_schemas(folder: Path, count: int) -> Iterator[str]:
    """One text for each damage: an object whose content does not match the hash in its first line, or a gap. Blocking."""
    entries = _objects(folder / _ENTRIES)
    if [path.name for path in entries] != [f"{number:012d}" for number in range(1, count + 1)]:
        yield f"{folder.name}/{_ENTRIES} has a gap: entries 1 to {count} are not all there"
    for path in [*entries, *_objects(folder / _SEGMENTS)]:
        head, _, body = path.read_bytes().partition(b"\n")
        known = _HEAD.fullmatch(head)
        if known is None or hashlib.sha256(body).hexdigest().encode() != known[1]:
            yield f"{folder.name}/{path.parent.name}/{path.name} is altered: the hash in its first line does not fit"


def _objects(folder: Path) -> list[Path]:
    """In the order of their numbers, without what a killed registry left."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []
