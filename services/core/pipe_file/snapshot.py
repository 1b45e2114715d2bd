"""The configuration files of a fleet as they were when it started. Its services read these, also after a restart.

`penstock up` copies the files into a folder and passes the folder in PENSTOCK_SNAPSHOT. The services get the original paths as
well: messages name them, and files that are not copied (secrets, API keys) are read there as they are now.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from services.core.version import newer_format

SNAPSHOT_VARIABLE = "PENSTOCK_SNAPSHOT"
_INDEX = "files.json"
_BROKER = "broker"
_VERSION, _NUMBER = "", "1"
"""The key of the version of this format in the index, beside the absolute paths; and the version."""

Contents = Mapping[str, bytes]
"""Content by absolute path."""


def read_contents(files: Iterable[Path]) -> Contents:
    """The files as they are now. Blocking. Raises OSError."""
    return {str(file.absolute()): file.read_bytes() for file in files}


def write_snapshot(folder: Path, contents: Contents, broker: str = "") -> None:
    """Replace the snapshot in `folder`; readable by its owner alone. broker: the URL of the fleet's. Blocking. Raises OSError."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700, parents=True)
    names = {path: f"{number}-{Path(path).name}" for number, path in enumerate(contents)}
    for path, name in names.items():
        (new / name).write_bytes(contents[path])
    (new / _INDEX).write_bytes(msgspec.json.encode({_VERSION: _NUMBER, **names}))
    (new / _BROKER).write_text(broker, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    new.replace(folder)


def read_broker(folder: Path) -> str | None:
    """The broker's URL in a snapshot; "" when it is not known, None when there is no snapshot. Blocking."""
    try:
        return (folder / _BROKER).read_text(encoding="utf-8")
    except OSError:
        return "" if (folder / _INDEX).exists() else None


def list_copies(folder: Path) -> dict[str, Path]:
    """The copy of each file in a snapshot, by the absolute path of the file. Blocking. Raises OSError."""
    names: dict[str, str] = msgspec.json.decode((folder / _INDEX).read_bytes())
    return {path: folder / name for path, name in names.items() if path != _VERSION}


def copy_in(folder: Path, file: Path) -> Path:
    """The file's copy in the snapshot; the file itself when it has none. Blocking. Raises OSError, also for a newer format."""
    names: dict[str, str] = msgspec.json.decode((folder / _INDEX).read_bytes())
    if (found := names.get(_VERSION, _NUMBER)) != _NUMBER:
        raise OSError(errno.EPROTO, newer_format(f"the snapshot {folder}", found, int(_NUMBER)))
    name = names.get(str(file.absolute()))
    return file if name is None else folder / name


def original_of(copy: Path) -> Path | None:
    """The file of which this one in a snapshot is the copy; None when it is not in a snapshot. Blocking."""
    try:
        names: dict[str, str] = msgspec.json.decode((copy.parent / _INDEX).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return next((Path(path) for path, name in names.items() if name == copy.name), None)


def source_of(file: Path) -> Path:
    """Where this process reads a configuration file: in its snapshot; the file itself without a snapshot, or when it was not
    copied.

    Blocking. Raises OSError when the snapshot cannot be read.
    """
    folder = os.environ.get(SNAPSHOT_VARIABLE)
    return copy_in(Path(folder), file) if folder else file
