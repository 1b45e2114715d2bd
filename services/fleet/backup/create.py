"""Makes a backup of a data folder while its fleet runs, or when it is stopped.

The backup appears whole or not at all: it is written under another name, synced, and renamed last.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.log.backup import copy_log
from services.core.broker.log.cut import take_cut
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.several.brokers import DEFAULT
from services.core.folders import make_folder, sync_folder
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import list_copies, original_of
from services.core.pipe_file.webhook import Secret
from services.core.times import format_time
from services.core.version import VERSION
from services.core.yaml_source import BadConfiguration
from services.fleet.backup.checkpoints import CheckpointState, copy_checkpoint, read_checkpoints
from services.fleet.backup.manifest import CHECKPOINTS, CONFIG, FORMAT, LOG, SCHEMAS, Manifest, seal
from services.fleet.backup.schemas import copy_schemas
from services.fleet.folder import SNAPSHOT, checkpoint_root
from services.fleet.problem import CommandFailed

DRAFT = ".draft"


class Source(NamedTuple):
    """What is copied. data: the data folder. broker: a URL. pipes: the pipe file, where the fleet left no snapshot of it."""

    data: Path
    broker: str
    pipes: Path


class Made(NamedTuple):
    """A finished backup. held_s: how long the writers of the log waited for the cut."""

    folder: Path
    manifest: Manifest
    held_s: float


class Show(NamedTuple):
    """Called with the number of all records, then with numbers of further ones."""

    total: Callable[[int], None]
    records: Callable[[int], None]


def create_backup(source: Source, into: Path, show: Show) -> Made:
    """Make a backup in the folder `into`, named by the moment that it shows. Blocking. Raises CommandFailed."""
    data, into = source.data.absolute(), into.absolute()
    if into.is_relative_to(data):
        raise CommandFailed(
            f"{into} is in the data folder that the backup is for", "a folder on another disk", status=2
        )
    try:
        with _only_one(into), _draft(into) as draft:
            manifest, held_s = _copy(source, draft, show)
            manifest = seal(draft, manifest)
            folder = into / manifest.cut.replace("-", "").replace(":", "")
            draft.rename(folder)
            sync_folder(into)
        return Made(folder, manifest, held_s)
    except DataDamaged as error:
        remedy = "penstock log verify, which names all damage; then penstock log repair, and again"
        raise CommandFailed(f"no backup was made: {error}", remedy) from error
    except BrokerError as error:
        raise CommandFailed(f"no backup was made: {error}") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CommandFailed(
            f"no backup was made: {where}{error.strerror or error}", f"freeing space in {into}, or another folder"
        ) from error


@contextmanager
def _only_one(into: Path) -> Iterator[None]:
    """One backup at a time in a folder; drafts of killed ones are removed."""
    make_folder(into, mode=0o700)
    lock = os.open(into / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(f"another backup is being made in {into}", "again when that one is finished") from None
        for left in into.glob(f".*{DRAFT}"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(lock)


@contextmanager
def _draft(into: Path) -> Iterator[Path]:
    draft = into / f".{os.getpid()}{DRAFT}"
    draft.mkdir(mode=0o700)
    try:
        yield draft
    finally:
        with suppress(OSError):
            shutil.rmtree(draft)


def _copy(source: Source, draft: Path, show: Show) -> tuple[Manifest, float]:
    kind, _, path = source.broker.partition("://")
    contents = _configuration(source)
    root = checkpoint_root(source.data.absolute(), contents)
    held_s, log, begun = 0.0, None, time.time_ns() // 1_000_000
    if kind == "log":
        with take_cut(_existing_log(Path(path)), lambda: _read_states(root)) as cut:
            held_s, states = cut.held_s, cut.beside or []
            _copy_checkpoints(states, draft)
            show.total(sum(sum(topic.ends) - sum(topic.starts) for topic in cut.topics))
            (draft / LOG).mkdir(mode=0o700)
            log = copy_log(cut, draft / LOG, show.records)
    else:
        states = _read_states(root)
        _copy_checkpoints(states, draft)
    schemas = copy_schemas(
        source.data.absolute() / SCHEMAS, draft / SCHEMAS
    )  # last: they have the schemas of all events
    pipes = original_of(source.pipes) or source.pipes.absolute()
    names = _copy_configuration(contents, draft)
    manifest = Manifest(
        format=FORMAT,
        penstock=VERSION,
        cut=format_time(begun if log is None else log.at_ms),
        finished=format_time(time.time_ns() // 1_000_000),
        data=str(source.data.absolute()),
        broker=kind,
        log=log,
        checkpoints=[state.entry for state in states],
        config=names.get(pipes),
        left_out=[*_elsewhere(kind, root), *_named_by(pipes, contents)],
        files=[],
        schemas=schemas,
    )
    return manifest, held_s


def _existing_log(path: Path) -> DataFolder:
    if not (path / "topics").is_dir():
        raise CommandFailed(f"{path} holds no log", "--data with the fleet's folder, or --broker", status=2)
    return DataFolder.prepare(path)


def _read_states(root: Path | str) -> list[CheckpointState]:
    return read_checkpoints(root) if isinstance(root, Path) else []


def _copy_checkpoints(states: list[CheckpointState], draft: Path) -> None:
    for state in states:
        copy_checkpoint(state, draft / CHECKPOINTS / state.pipe)


def _configuration(source: Source) -> dict[Path, Path]:
    """Where the content of each configuration file is, by its path: in the snapshot of the last start, else the pipe file."""
    snapshot = source.data.absolute() / SNAPSHOT
    if snapshot.is_dir():
        return {Path(path): copy for path, copy in list_copies(snapshot).items()}
    return {source.pipes.absolute(): source.pipes} if source.pipes.is_file() else {}


def _copy_configuration(contents: Mapping[Path, Path], draft: Path) -> dict[Path, str]:
    """Gives the name in the backup by the file's path. Files keep their places relative to each other."""
    if not contents:
        return {}
    top = Path(os.path.commonpath([path.parent for path in contents]))
    names = {path: Path(CONFIG) / path.relative_to(top) for path in contents}
    for path, name in names.items():
        make_folder((draft / name).parent, mode=0o700)
        shutil.copyfile(contents[path], draft / name)
    return {path: str(name) for path, name in names.items()}


def _elsewhere(kind: str, root: Path | str) -> list[str]:
    found = []
    if kind != "log":
        found.append(f"the topics: {kind} keeps them, and the positions of the groups")
    if isinstance(root, str):
        found.append(f"the checkpoints in {root}")
    return found


def _named_by(pipes: Path, contents: Mapping[Path, Path]) -> list[str]:
    """What the pipe file names and no backup has: streams on other brokers, and secrets."""
    found = ["the keys of senders (penstock keys), and certificates"]
    try:
        file = load_pipes(contents.get(pipes, pipes))
    except (BadConfiguration, OSError):
        return [*found, f"the secrets and brokers that {pipes.name} names; it could not be read"]
    streams = [f"the stream {name} on broker {one.home}" for name, one in file.streams.items() if one.home != DEFAULT]
    named = dict.fromkeys(_places(file))
    return [*streams, *(f"{place}, named in {pipes.name}" for place in named), *found]


def _places(value: object) -> Iterator[str]:
    """Each secret that the model names, at any depth."""
    if isinstance(value, Secret):
        yield f"the file {value.file}" if value.file is not None else f"the variable {value.env}"
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _places(getattr(value, name))
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _places(each)
