"""The checkpoint folder of a pipe: held by one process at a time, and known to be the right one before a query starts.

Spark keeps its progress there (offsets/, commits/, state/); beside it lies `penstock.json`, which says whose it is. Its
id names the query as a writer: a broker that stores a batch once does so by this id and the batch's number.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.folders import make_folder
from spark.durable import sync, sync_batch
from spark.errors import shorten
from spark.place import Position

Note = TypeVar("Note")
IDENTITY_FILE = "penstock.json"
REMEDY = (
    "Try: restoring it from a backup that is not older than the output, or moving it away, which reads the sources from "
    "their start again (receivers then see events twice, by the same ids)"
)


class CheckpointDamaged(Exception):
    """The checkpoint is not what the last run left. Nothing was read or written."""


class ClockWentBack(Exception):
    """The machine's clock was set back. Nothing was read or written; it is tried again."""


class CheckpointInUse(Exception):
    """Another process runs a query on this checkpoint."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose checkpoint it is. id: made with it. topics: identity of each source topic. kind: how the transform runs,
    which decides what else lies there. ran: a batch was stored. state: as `Prepared.state`; empty in those of earlier versions,
    too."""

    id: str
    pipe: str
    topics: dict[str, str]
    transform: str
    kind: str
    ran: bool = False
    state: str = ""


class Checkpoint:
    """One pipe's checkpoint. Made by `open_checkpoint`. Its files are read and written through Spark's file systems."""

    def __init__(self, session: SparkSession, place: str) -> None:
        self.place, self._session = place, session
        self._local = Path(place.removeprefix("file://")) if place.startswith("file://") else None
        jvm: Any = session.sparkContext._jvm
        self._path = jvm.org.apache.hadoop.fs.Path
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._path(place).getFileSystem(configuration)
        self._io = jvm.org.apache.commons.io.IOUtils

    def read_identity(self) -> Identity | None:
        """None when the folder is new. Raises CheckpointDamaged."""
        return self.read_note(IDENTITY_FILE, Identity)

    def write_identity(self, identity: Identity) -> None:
        """Replace it, durably."""
        self.write_note(IDENTITY_FILE, identity)

    def _exists(self, name: str) -> bool:
        return bool(self._files.exists(self._path(f"{self.place}/{name}")))

    def _read(self, name: str) -> bytes:
        stream = self._files.open(self._path(f"{self.place}/{name}"))
        try:
            return bytes(self._io.toByteArray(stream))
        finally:
            stream.close()

    def _write(self, name: str, content: bytes) -> None:
        if self._local is not None:
            new = self._local / f".{name}.new"
            new.write_bytes(content)
            sync(new)
            new.replace(self._local / name)
            sync(self._local)
            return
        stream = self._files.create(self._path(f"{self.place}/{name}"), True)  # object stores put a file whole or not
        try:
            stream.write(content)
        finally:
            stream.close()

    def newest(self, folder: str) -> int | None:
        """The highest batch number in `offsets` or `commits`."""
        path = self._path(f"{self.place}/{folder}")
        if not self._files.exists(path):
            return None
        names = [str(status.getPath().getName()) for status in self._files.listStatus(path)]
        return max((int(name) for name in names if name.isdigit()), default=None)

    def make_durable(self, batch: int) -> None:
        """Sync what is noted about this batch (`durable.sync_batch`). Local folders only: object stores do it themselves."""
        if self._local is not None:
            sync_batch(self._local, batch)

    def position(self, batch: int | None, parse: Callable[[str], Position]) -> Position:
        """What this batch ended with, or is to end with; empty before the first one. parse: one source's line."""
        lines = [] if batch is None else self._read(f"offsets/{batch}").decode().splitlines()[2:]
        return {place: offset for line in lines if line != "-" for place, offset in parse(line).items()}

    def done_up_to(self, parse: Callable[[str], Position]) -> Position:
        """What the last finished batch ended with; empty before the first one."""
        return self.position(self.newest("commits"), parse)

    def read_note(self, name: str, kind: type[Note]) -> Note | None:
        """A small file of ours beside Spark's; None before `write_note`. Raises CheckpointDamaged."""
        if not self._exists(name):
            return None
        try:
            return msgspec.json.decode(self._read(name), type=kind)
        except msgspec.DecodeError as error:
            raise CheckpointDamaged(f"checkpoint {self.place}: {name} cannot be read: {error}. {REMEDY}") from error

    def write_note(self, name: str, value: object) -> None:
        """Replace it, durably."""
        self._write(name, msgspec.json.encode(value))

    def check_readable(self) -> None:
        """Raise CheckpointDamaged unless what Spark noted last can be read."""
        for folder in ("offsets", "commits"):
            batch = self.newest(folder)
            if batch is None:
                continue
            try:
                first, *lines = self._read(f"{folder}/{batch}").decode().splitlines()
                if not first.startswith("v") or not lines:
                    raise ValueError("it has no content")
                for line in lines:
                    if line != "-":
                        msgspec.json.decode(line)
            except (Py4JError, PySparkException, ValueError) as error:
                raise CheckpointDamaged(
                    f"checkpoint {self.place}: {folder}/{batch} cannot be read: {shorten(error)}. {REMEDY}"
                ) from error

    def watermark(self, batch: int) -> int:
        """What this batch began with, in ms of event time; 0 without one."""
        return int(self._times(batch)["batchWatermarkMs"])

    def began(self, batch: int) -> int:
        """When this batch was planned, in ms: the same whenever it is computed."""
        return int(self._times(batch)["batchTimestampMs"])

    def _times(self, batch: int) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self._read(f"offsets/{batch}").decode().splitlines()[1])
        return fields

    def check_clock(self, batch: int) -> None:
        """Raise ClockWentBack when this batch's time is older than what its watermark says: Spark would drop all of it."""
        fields = self._times(batch)
        late = fields["batchWatermarkMs"] - fields["batchTimestampMs"]
        if late > 0:
            raise ClockWentBack(
                f"the clock went back by more than deduplicate_within; batch {batch} waits {late / 1000:.0f} s"
            )

    def beside(self, name: str) -> "Checkpoint":
        """The checkpoint of another query of the same pipe."""
        return Checkpoint(self._session, f"{self.place}/{name}")

    def has_metadata(self) -> bool:
        """Whether Spark's own identity of the query is there."""
        return self._exists("metadata")


def peek_checkpoint(session: SparkSession, root: str, pipe: str) -> Checkpoint:
    """The pipe's checkpoint for looking only: another one may hold it."""
    return Checkpoint(session, f"{root}/{pipe}" if "://" in root else f"file://{root}/{pipe}")


@contextmanager
def open_checkpoint(session: SparkSession, root: str, pipe: str) -> Iterator[Checkpoint]:
    """Hold the pipe's folder under `root`, made if need be. Raises CheckpointInUse.

    A local folder is held by a lock that goes with the process. In an object store only Spark's own check is left: of two
    queries, the one that is later in noting a batch fails.
    """
    checkpoint = peek_checkpoint(session, root, pipe)
    if "://" in root:
        yield checkpoint
        return
    place = Path(root) / pipe
    make_folder(place)
    lock = os.open(f"{place}/penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise CheckpointInUse(
                f"checkpoint {place} is in use by process {holder}. Try: ending that one; two queries would do each event twice"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield checkpoint
    finally:
        os.close(lock)
