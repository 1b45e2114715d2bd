"""A backup: a folder with copied files, and a manifest that names each of them with its hash and counts.

<name>/manifest.json       written last; a folder without it is no backup
<name>/manifest.sha256     the hash of the manifest, as sha256sum writes it
<name>/log/<topic>.db      the records of a topic of the embedded log
<name>/checkpoints/<pipe>/ the checkpoint of a transform
<name>/schemas/            the entries of the registry, and its segments
<name>/config/             the pipe file, the settings file and Python files, in their order of folders
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from services.core.broker.log.backup import LogCopy
from services.core.folders import sync_folder
from services.core.version import newer_format
from services.fleet.problem import CommandFailed

FORMAT = 1
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"
LOG, CHECKPOINTS, CONFIG, SCHEMAS = "log", "checkpoints", "config", "schemas"
_CHUNK = 1 << 20


class FileCopy(msgspec.Struct, frozen=True):
    """One file of a backup. path: relative to its folder."""

    path: str
    bytes: int
    sha256: str


class CheckpointCopy(msgspec.Struct, frozen=True):
    """The checkpoint of a pipe. planned, done: the numbers of its newest batches; None before the first."""

    pipe: str
    planned: int | None
    done: int | None


class Manifest(msgspec.Struct, frozen=True):
    """What a backup holds. cut: the moment that it shows, RFC 3339. penstock: the version that made it. broker: log, kafka or
    kinesis.

    log: None when the broker is not the embedded log. config: the pipe file, relative; None without one. left_out: what an
    operator keeps elsewhere, one text each.
    """

    format: int
    penstock: str
    cut: str
    finished: str
    data: str
    broker: str
    log: LogCopy | None
    checkpoints: list[CheckpointCopy]
    config: str | None
    left_out: list[str]
    files: list[FileCopy]
    schemas: int = 0
    """Entries of the registry's log. Backups of version 0.1 have none."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class _Head(msgspec.Struct):
    format: int
    penstock: str = ""


def hash_file(path: Path, show: Callable[[int], None] = lambda _bytes: None) -> tuple[int, str]:
    """Size and SHA-256. show: called with each number of bytes read. Blocking. Raises OSError."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            size += len(chunk)
            show(len(chunk))
    return size, found.hexdigest()


def list_files(folder: Path) -> list[Path]:
    """Every file below the folder, relative to it, in order."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Sync every file of the folder, hash it, and write the manifest with the hashes, durably. Blocking. Raises OSError."""
    found = []
    for path in list_files(folder):
        sync_file(folder / path)
        found.append(FileCopy(str(path), *hash_file(folder / path)))
    manifest = msgspec.structs.replace(manifest, files=found)
    content = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
    write_file(folder / MANIFEST, content)
    write_file(folder / MANIFEST_HASH, f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode())
    for each in sorted(_folders(folder), reverse=True):
        sync_folder(each)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup, compared with its hash. Blocking. Raises CommandFailed."""
    other = "penstock backup verify, with the folder of a finished backup"
    try:
        content = (folder / MANIFEST).read_bytes()
        known = (folder / MANIFEST_HASH).read_text().split()[:1]
    except FileNotFoundError as error:
        what = f"{folder} is no backup, or one that was not finished: it has no {Path(error.filename).name}"
        raise CommandFailed(what, other) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"the manifest in {folder} cannot be read: {error}", other) from error
    if known != [hashlib.sha256(content).hexdigest()]:
        raise CommandFailed(
            f"{folder / MANIFEST} is altered: its hash is not the one in {MANIFEST_HASH}", "another backup"
        )
    head = msgspec.json.decode(content, type=_Head)
    if head.format > FORMAT:
        raise CommandFailed(newer_format(f"the backup {folder}", head.format, FORMAT, head.penstock))
    return msgspec.json.decode(content, type=Manifest)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, synced. Blocking. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make a file's content durable. Blocking. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_dir())
