"""The data folder of a fleet: its lock, its tokens, and the state file by which `penstock status` finds the fleet."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from services.core.broker.errors import BadDataFolder
from services.core.broker.log.data_folder import refuse_network
from services.core.folders import make_folder
from services.core.pipe_file.snapshot import list_copies
from services.core.security.bearer import make_token
from services.core.version import newer_format
from services.core.yaml_source import BadConfiguration, load_yaml
from services.fleet.problem import CommandFailed

STATE_FILE = "fleet.json"
_VERSION = 1
TOKEN_FILE = "control.token"  # noqa: S105
OBSERVER_TOKEN_FILE = "observer.token"  # noqa: S105
SNAPSHOT = "snapshot"
"""The folder in the data folder with the configuration of the last start (`core.pipe_file.snapshot`)."""
TABLES_FOLDER = "tables"
"""In the data folder: the files of the table service. They can be built again from the streams, so no backup has them."""


RESTORED_FILE = "restored.json"
"""Written by a restore; the first start reads and renames it."""
UNFINISHED_RESTORE = "restore.unfinished"
"""A folder in a data folder whose restore was interrupted."""


class Restored(msgspec.Struct, frozen=True):
    """A data folder was restored from a backup. cut: the moment that the backup shows, RFC 3339. at: of the restore, ms."""

    backup: str
    cut: str
    at: int


class ProcessState(msgspec.Struct, frozen=True):
    """One process. pid: None while it does not run."""

    name: str
    service: str
    pid: int | None
    management: str
    restarts: int
    log: str


class FleetState(msgspec.Struct, frozen=True):
    """The state file of a running fleet. keys: the API keys that ingest reads, an absolute path; None: senders need no key.

    penstock: the version of the supervisor; "" before 0.2. allow_networks: as in `UpSettings`. version: of this format.
    """

    pid: int
    management: str
    broker: str
    pipes: str
    listen: str
    observer: str
    processes: list[ProcessState]
    keys: str | None = None
    registry: str = ""
    """The address of the registry; empty: none runs."""
    penstock: str = ""
    allow_networks: str = ""
    version: int = _VERSION


class _Head(msgspec.Struct):
    penstock: str = ""
    version: int = _VERSION


@contextmanager
def lock_folder(data: Path, *, restores: bool = False) -> Iterator[None]:
    """Create the folder and lock it for this process. The lock ends with the process, also after a crash. Blocking.

    Raises CommandFailed when another fleet holds the lock, the folder cannot be created, it is on a network file system, or its
    restore did not finish (restores: this process restores it).
    """
    try:
        for folder in (data, data / "logs"):
            make_folder(folder)
        refuse_network(data)
        lock = os.open(data / "fleet.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except BadDataFolder as error:
        raise CommandFailed(str(error), status=2) from error
    except OSError as error:
        raise CommandFailed(
            f"the data folder {data} cannot be used: {error.strerror}", "--data with another folder", status=2
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        state = read_state(data)
        who = f" (process {state.pid})" if state else ""
        raise CommandFailed(
            f"another fleet{who} runs on the data folder {data}", "stop that one, or --data with another folder"
        ) from None
    if not restores and (data / UNFINISHED_RESTORE).exists():
        os.close(lock)
        raise CommandFailed(
            f"a restore into {data} did not finish", "deleting that folder, then penstock backup restore"
        )
    try:
        yield
    finally:
        for name in (STATE_FILE, TOKEN_FILE):
            (data / name).unlink(missing_ok=True)
        os.close(lock)


def write_state(data: Path, state: FleetState) -> None:
    """Replace the state file atomically. Blocking."""
    new = data / f"{STATE_FILE}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    new.replace(data / STATE_FILE)


def describe_loss(cut: str) -> list[str]:
    """What is gone after a restore of a log, for a person. cut: as in `Restored`."""
    return [
        f"This log was restored as it was at {cut}.",
        f"Events that were accepted after {cut} are lost, unless their senders send them again.",
        "Their number is not in the loss table: docs/backup.md says how to find it.",
        f"Events that were delivered after {cut} are delivered again, by the same ids.",
    ]


def take_restored(data: Path) -> Restored | None:
    """The note of a restore, at the first start after it; None later, and without one. Blocking. Raises OSError."""
    note = data / RESTORED_FILE
    try:
        found = msgspec.json.decode(note.read_bytes(), type=Restored)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        found = None
    note.rename(note.with_name("restored.told.json"))
    return found


def write_token(data: Path, token: str) -> None:
    """Write the token that allows to resize this fleet; only the owner can read the file. Blocking. Raises OSError."""
    _replace_private(data / TOKEN_FILE, token)


def keep_observer_token(data: Path) -> None:
    """Create the file with the observer's token if it is missing; only the owner can read it. Blocking. Raises OSError."""
    if not (data / OBSERVER_TOKEN_FILE).exists():
        _replace_private(data / OBSERVER_TOKEN_FILE, make_token() + "\n")


def _replace_private(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def read_state(data: Path) -> FleetState | None:
    """The last state of the fleet on this folder; None when it stopped in good order or the file is not readable. Blocking.

    A fleet that was killed leaves its file behind: `services/fleet/access.py` finds a fleet that runs. Raises CommandFailed when
    a newer version wrote it.
    """
    try:
        content = (data / STATE_FILE).read_bytes()
        head = msgspec.json.decode(content, type=_Head)
        if head.version > _VERSION:
            raise CommandFailed(newer_format(str(data / STATE_FILE), head.version, _VERSION, head.penstock), status=2)
        return msgspec.json.decode(content, type=FleetState)
    except (OSError, msgspec.DecodeError):
        return None


def checkpoint_root(data: Path, contents: Mapping[Path, Path]) -> Path | str:
    """The folder of the transforms' checkpoints; a text for S3. The setting is in the environment or the settings file.

    contents: where the content of each configuration file is, by its path. Blocking.
    """
    named: Any = os.environ.get("PENSTOCK_TRANSFORM_CHECKPOINTS")
    for path, copy in contents.items():
        if named is None and path.suffix in (".yaml", ".yml"):
            with suppress(BadConfiguration):
                section = load_yaml(copy).data
                section = section.get("transform") if isinstance(section, dict) else None
                named = section.get("checkpoints") if isinstance(section, dict) else None
    if not isinstance(named, str) or not named:
        return data / "checkpoints"
    return named if urlsplit(named).scheme else Path(named).absolute()


def find_checkpoints(data: Path) -> Path | str:
    """As `checkpoint_root`, by the configuration files of the last start on this data folder. Blocking. Raises OSError."""
    snapshot = data / SNAPSHOT
    copies = list_copies(snapshot) if snapshot.is_dir() else {}
    return checkpoint_root(data, {Path(path): copy for path, copy in copies.items()})
