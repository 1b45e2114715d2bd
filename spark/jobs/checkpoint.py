"""The checkpoint folder of a pipe: locked by one process, and known to be the right one before a query starts.

Spark keeps its progress there (offsets/, commits/, state/). Beside it `penstock.json` says whose checkpoint it is. Its id names
the query as a writer: a broker that stores a batch once identifies it by this id and the batch's number.
"""

import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pyspark.sql import SparkSession

from services.core.folders import make_folder
from services.core.version import VERSION, newer_format
from spark.errors import shorten
from spark.java import JAVA_ERRORS, HadoopFolder
from spark.records import Offsets
from spark.sources.offsets import sync, sync_batch

Note = TypeVar("Note")
IDENTITY_FILE = "penstock.json"
_NAME = re.compile(r"^[A-Za-z0-9_]+:")
"""Before the offset of a named source."""
_VERSION = 2
"""The newest format. 2: of a transform with state on Kinesis, whose batches end where notes say (`sources.ends`): Penstock 0.1
would read its last batch again, and count it twice in the state. And with named sources, which 0.1 cannot read."""
NAMED_VERSION = 2
_FIRST_VERSION = 1


class CheckpointDamaged(Exception):
    """The checkpoint is not as the last run left it. Nothing was read or written."""


class ClockWentBack(Exception):
    """The machine's clock was set back. Nothing was read or written; the batch is retried."""


class CheckpointInUse(Exception):
    """Another process runs a query on this checkpoint."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a checkpoint. id: created with it. topics: identity of each source topic.

    kind: how the transform runs, which decides what else is in the folder. ran: a batch was stored. state: `Prepared.state`;
    empty in checkpoints of earlier versions, too. named: whether Spark keeps the offsets of each source under its name, so that
    sources may be added, removed and reordered; else in their order, as earlier versions did. removed: streams that were sources
    once, and are none now. version: of the format of the whole folder, Spark's files included. penstock:
    the version that wrote it; "" before 0.2.
    """

    id: str
    pipe: str
    topics: dict[str, str]
    transform: str
    kind: str
    ran: bool = False
    state: str = ""
    version: int = _FIRST_VERSION
    penstock: str = ""
    named: bool = False
    removed: list[str] = []


class _Head(msgspec.Struct):
    version: int = _FIRST_VERSION
    penstock: str = ""


class Checkpoint:
    """One pipe's checkpoint. Made by `open_checkpoint`. Its files are read and written through Spark's file systems."""

    def __init__(self, session: SparkSession, path: str) -> None:
        self.path, self._session = path, session
        self._local = Path(path.removeprefix("file://")) if path.startswith("file://") else None
        self._files = HadoopFolder(session, path)
        self._writing = threading.Lock()

    def damaged(self, problem: str) -> CheckpointDamaged:
        """The error to raise."""
        return CheckpointDamaged(
            f"checkpoint {self.path}: {problem}. Try: restoring it from a backup that is not older than the output, or penstock "
            f"group reset {self.path.rpartition('/')[2]} --to-earliest (receivers get all results again, with the same ids)"
        )

    def read_identity(self) -> Identity | None:
        """None when the folder is new. Raises CheckpointDamaged, also for the checkpoint of a newer version."""
        head = self.read_note(IDENTITY_FILE, _Head)
        if head is not None and head.version > _VERSION:
            raise CheckpointDamaged(newer_format(f"checkpoint {self.path}", head.version, _VERSION, head.penstock))
        return self.read_note(IDENTITY_FILE, Identity)

    def write_identity(self, identity: Identity) -> None:
        self.write_note(IDENTITY_FILE, msgspec.structs.replace(identity, penstock=VERSION))

    def read_note(self, name: str, kind: type[Note]) -> Note | None:
        """A small file of ours beside Spark's; None before `write_note`. Raises CheckpointDamaged."""
        if not self._files.exists(name):
            return None
        try:
            return msgspec.json.decode(self._files.read(name), type=kind)
        except msgspec.DecodeError as error:
            raise self.damaged(f"{name} cannot be read: {error}") from error

    def write_note(self, name: str, value: object) -> None:
        """Replace it, durably. Thread-safe."""
        content = msgspec.json.encode(value)
        if self._local is None:
            self._files.write(name, content)
            return
        new = self._local / f".{name}.new"
        with self._writing:  # both queries of a pipe write penstock.json
            new.write_bytes(content)
            sync(new)
            new.replace(self._local / name)
            sync(self._local)

    def newest(self, folder: str) -> int | None:
        """The highest batch number in `offsets` or `commits`."""
        return max((int(name) for name in self._files.list(folder) if name.isdigit()), default=None)

    def has_batch(self, folder: str, batch: int) -> bool:
        """Whether the file of this batch is in `offsets` or `commits`."""
        return self._files.exists(f"{folder}/{batch}")

    def has_metadata(self) -> bool:
        """Whether Spark's own identity of the query is there."""
        return self._files.exists("metadata")

    def make_durable(self, batch: int) -> None:
        """Sync the files of this batch (`sync_batch`). Local folders only: object stores do it themselves."""
        if self._local is not None:
            sync_batch(self._local, batch)

    def offsets(self, batch: int | None, parse: Callable[[str, str], Offsets]) -> Offsets:
        """The planned end of this batch; empty before the first one. parse: `SparkBroker.parse_offsets`."""
        lines = [] if batch is None else [_NAME.sub("", line) for line in self._lines(f"offsets/{batch}")[2:]]
        return {place: offset for line in lines if line != "-" for place, offset in parse(line, self.path).items()}

    def source_names(self, batch: int) -> list[str]:
        """Of the sources of this planned batch, in their order; "" for a source without a name."""
        found = [_NAME.match(line) for line in self._lines(f"offsets/{batch}")[2:]]
        return ["" if name is None else name[0].removesuffix(":") for name in found]

    def committed_offsets(self, parse: Callable[[str, str], Offsets]) -> Offsets:
        """The end of the last finished batch; empty before the first one."""
        return self.offsets(self.newest("commits"), parse)

    def watermark(self, batch: int) -> int:
        """The watermark at the start of this batch, in ms of event time; 0 without one."""
        return int(self._metadata(batch)["batchWatermarkMs"])

    def planned_at(self, batch: int) -> int:
        """When this batch was planned, in ms: the same whenever it is computed."""
        return int(self._metadata(batch)["batchTimestampMs"])

    def check_clock(self, batch: int) -> None:
        """Raise ClockWentBack when this batch's time is before its watermark: Spark would drop all of it."""
        late = self.watermark(batch) - self.planned_at(batch)
        if late > 0:
            raise ClockWentBack(
                f"the clock went back by more than deduplicate_within; batch {batch} waits {late / 1000:.0f} s"
            )

    def check_readable(self) -> None:
        """Raise CheckpointDamaged unless Spark's last files can be read."""
        for folder in ("offsets", "commits"):
            batch = self.newest(folder)
            if batch is None:
                continue
            try:
                first, *lines = self._lines(f"{folder}/{batch}")
                if not first.startswith("v") or not lines:
                    raise ValueError("it has no content")
                for line in lines:
                    if (content := _NAME.sub("", line)) != "-":
                        msgspec.json.decode(content)
            except (*JAVA_ERRORS, ValueError) as error:
                raise self.damaged(f"{folder}/{batch} cannot be read: {shorten(error)}") from error

    def beside(self, name: str) -> "Checkpoint":
        """The checkpoint of another query of the same pipe."""
        return Checkpoint(self._session, f"{self.path}/{name}")

    def _lines(self, name: str) -> list[str]:
        return self._files.read(name).decode().splitlines()

    def _metadata(self, batch: int) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self._lines(f"offsets/{batch}")[1])
        return fields


def peek_checkpoint(session: SparkSession, root: str, pipe: str) -> Checkpoint:
    """The pipe's checkpoint, read-only: another process may have locked it."""
    return Checkpoint(session, f"{root}/{pipe}" if "://" in root else f"file://{root}/{pipe}")


@contextmanager
def open_checkpoint(session: SparkSession, root: str, pipe: str) -> Iterator[Checkpoint]:
    """Lock the pipe's folder under `root`, which is created if missing. Raises CheckpointInUse.

    The lock of a local folder ends with the process. In an object store only Spark's own check is left: of two queries, the one
    that commits a batch later fails.
    """
    checkpoint = peek_checkpoint(session, root, pipe)
    if "://" in root:
        yield checkpoint
        return
    path = Path(root) / pipe
    make_folder(path)
    lock = os.open(f"{path}/penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise CheckpointInUse(
                f"checkpoint {path} is in use by process {holder}, and two queries would do each event twice"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield checkpoint
    finally:
        os.close(lock)
