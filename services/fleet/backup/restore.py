"""Checks a backup, and restores one into an empty data folder.

Every byte is compared with the manifest's hash while it is copied. The parts get their names last, when all of them are
durable; `penstock up` refuses a folder whose restore did not finish.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.core.audit import RESTORE, Entry
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.log import blocking
from services.core.broker.log.backup import adopt_log, check_topic
from services.core.broker.log.data_folder import DataFolder, refuse_network
from services.core.broker.record import Record
from services.core.folders import make_folder, sync_folder
from services.core.pipe_file.topic_names import AUDIT
from services.fleet.backup.checkpoints import renew_incarnations
from services.fleet.backup.manifest import (
    CHECKPOINTS,
    CONFIG,
    LOG,
    MANIFEST,
    MANIFEST_HASH,
    SCHEMAS,
    FileCopy,
    Manifest,
    hash_file,
    list_files,
    read_manifest,
    sync_file,
    write_file,
)
from services.fleet.backup.schemas import check_schemas
from services.fleet.folder import RESTORED_FILE, UNFINISHED_RESTORE, Restored, lock_folder
from services.fleet.problem import CommandFailed

_CHUNK = 1 << 20
_HARMLESS = frozenset(("lost+found", "fleet.lock", "logs"))
"""In an empty file system, or left by a restore that failed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """problems: one text for each difference between the backup and its manifest."""

    manifest: Manifest
    problems: list[str]


def check_backup(folder: Path, show: Callable[[int], None]) -> Checked:
    """Compare every file with its hash, and every record of the log with its checksum and the counts. Changes nothing.

    show: called with each number of bytes. Blocking. Raises CommandFailed when the folder is no finished backup.
    """
    manifest, problems = read_manifest(folder), []
    for file in manifest.files:
        try:
            if hash_file(folder / file.path, show) != (file.bytes, file.sha256):
                problems.append(f"{file.path} is altered: it is not the file that was backed up")
        except OSError as error:
            problems.append(f"{file.path} cannot be read: {error.strerror}")
    known = {file.path for file in manifest.files} | {MANIFEST, MANIFEST_HASH}
    problems += [f"{path} is not in the manifest" for path in map(str, list_files(folder)) if path not in known]
    for topic in manifest.log.topics if manifest.log is not None else ():
        path = folder / LOG / f"{topic.topic}.db"
        if path.exists():
            problems += check_topic(path, topic, lambda _records: None)
    problems += check_schemas(folder / SCHEMAS, manifest.schemas)
    return Checked(manifest, problems)


def restore_backup(folder: Path, data: Path, who: str, show: Callable[[int], None]) -> Manifest:
    """Restore into `data`, which must be empty or missing. who: for the audit. Blocking. Raises CommandFailed."""
    manifest = read_manifest(folder)
    data = data.absolute()
    _require_empty(data)
    try:
        with lock_folder(data, restores=True), _unfinished(data) as draft:
            for file in manifest.files:
                _copy_file(folder, file, draft, show)
            renewed: dict[str, str] = {}
            if manifest.log is not None:
                log = DataFolder.prepare(draft / LOG)
                renewed = adopt_log(log, manifest.log)
                _record(draft / LOG, folder, manifest, who)
                note = Restored(str(folder.absolute()), manifest.cut, time.time_ns() // 1_000_000)
                write_file(draft / RESTORED_FILE, msgspec.json.encode(note))
            for checkpoint in manifest.checkpoints:
                renew_incarnations(draft / CHECKPOINTS / checkpoint.pipe, renewed)
            _publish(draft, data)
    except BrokerError as error:
        raise CommandFailed(f"{data} was not restored: {error}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CommandFailed(f"{data} was not restored: {where}{error.strerror or error}", "another folder") from error
    return manifest


def _require_empty(data: Path) -> None:
    try:
        held = sorted(path.name for path in [*data.iterdir(), *data.glob("logs/*")] if path.name not in _HARMLESS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CommandFailed(
            f"{data} cannot be read: {error.strerror}", "--data with an empty folder", status=2
        ) from error
    if UNFINISHED_RESTORE in held:
        raise CommandFailed(f"a restore into {data} did not finish", "deleting that folder, then the same command")
    if held:
        names = ", ".join(held[:3]) + (", …" if len(held) > 3 else "")
        what = f"{data} is not empty ({names}); a restore replaces nothing"
        raise CommandFailed(what, "--data with an empty or a new folder", status=2)


@contextmanager
def _unfinished(data: Path) -> Iterator[Path]:
    """A folder for the parts. It is removed when the restore fails; after a kill it stays, and marks the data folder."""
    draft = data / UNFINISHED_RESTORE
    refuse_network(data)
    draft.mkdir(mode=0o700)
    sync_folder(data)
    try:
        yield draft
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(draft)
        raise


def _copy_file(folder: Path, file: FileCopy, draft: Path, show: Callable[[int], None]) -> None:
    """Raises CommandFailed unless the copied bytes have the manifest's hash."""
    parts = Path(file.path).parts
    if parts[0] not in (LOG, CHECKPOINTS, CONFIG, SCHEMAS) or ".." in parts:
        raise CommandFailed(f"the manifest names a file outside of the backup: {file.path}", "another backup")
    to = draft.joinpath(LOG, "topics", *parts[1:]) if parts[0] == LOG else draft.joinpath(*parts)
    make_folder(to.parent, mode=0o700)
    found, size = hashlib.sha256(), 0
    with (folder / file.path).open("rb") as source, to.open("wb") as target:
        while chunk := source.read(_CHUNK):
            found.update(chunk)
            target.write(chunk)
            size += len(chunk)
            show(len(chunk))
    if (size, found.hexdigest()) != (file.bytes, file.sha256):
        raise CommandFailed(f"{file.path} in {folder} is altered; nothing was restored", "another backup")


def _record(log: Path, folder: Path, manifest: Manifest, who: str) -> None:
    """An entry in the restored audit: from here on, offsets behind the backup are given again."""
    at = time.time_ns() // 1_000_000
    entry = Entry(RESTORE, at, who, {"backup": folder.name, "cut": manifest.cut}, AUDIT, 0, [], 0)
    with suppress(UnknownTopic):
        blocking.append(log, AUDIT, {0: [Record(None, msgspec.json.encode(entry), at)]})


def _publish(draft: Path, data: Path) -> None:
    """Sync everything, then give each part its name; the draft's folder goes last."""
    for path in list_files(draft):
        sync_file(draft / path)
    for each in [draft, *(path for path in draft.rglob("*") if path.is_dir())]:
        sync_folder(each)
    for part in sorted(draft.iterdir()):
        part.rename(data / part.name)
    sync_folder(data)
    draft.rmdir()
    sync_folder(data)
