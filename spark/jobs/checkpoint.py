"""The checkpoint folder of a pipe: used by one process, and known to be the right one before a query starts.

Spark keeps its progress there (offsets/, commits/, state/). Beside it `penstock.json` says whose checkpoint it is. Its id names
the query as a writer: a broker that stores a batch once identifies it by this id and the batch's number.

On a local disk a lock keeps other processes away. A folder on a network file system has claims, too, and an object store has
claims alone (`claims.py`). In an object store our notes are in a folder of the claim, `notes/8/`: a successor copies them once,
so what a replaced holder writes later is never read. ADR 0017 says who may write what, and when.
"""

import fcntl
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pyspark.sql import SparkSession

from services.core.broker.log.data_folder import network_mount
from services.core.folders import make_folder
from services.core.pipe_file.state_plan import StatePlan
from services.core.version import VERSION, newer_format
from spark.errors import shorten
from spark.java import JAVA_ERRORS, HadoopFolder
from spark.jobs.claims import CLAIMS, CheckpointInUse, Claim, Claims, FolderStore, beating
from spark.records import NO_BEGINS, Begins, Offsets
from spark.sources.offsets import sync, sync_batch

Note = TypeVar("Note")
IDENTITY_FILE = "penstock.json"
_NAME = re.compile(r"^[A-Za-z0-9_]+:")
"""Before the offset of a named source."""
_VERSION = 2
"""The newest format. 2: of a transform with state on Kinesis, whose batches end where notes say (`sources.ends`): Penstock 0.1
would read its last batch again, and count it twice in the state. With named sources, which 0.1 cannot read. With state in
files that commits name (`state_store.py`), which 0.1 does not look for. And of a transform that begins at a time: 0.1 would
compute the first batch again from the oldest record on."""
NAMED_VERSION = 2
_FIRST_VERSION = 1
_KIND_OF_2 = ", from Penstock 0.2 on"
"""Ends the kind in the file of format 2: Penstock 0.1 compares kinds, and knows no versions."""
LOCK_FILE = "penstock.lock"
_NOTES = "notes"
_CLAIM_FILE, _CLAIM_TOKEN = "spark.penstock.claim.file", "spark.penstock.claim.token"
"""Settings of a session: its queries write to a checkpoint only while this file has this line (CheckpointFiles.scala)."""


class CheckpointDamaged(Exception):
    """The checkpoint is not as the last run left it. Nothing was read or written."""


class ClockWentBack(Exception):
    """The machine's clock was set back. Nothing was read or written; the batch is retried."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a checkpoint. id: created with it. topics: identity of each source topic.

    kind: how the transform runs, which decides what else is in the folder. ran: a batch was stored. state: `Prepared.state`;
    empty in checkpoints of earlier versions, too. named: whether Spark keeps the offsets of each source under its name, so that
    sources may be added, removed and reordered; else in their order, as earlier versions did. removed: streams that were sources
    once, and are none now. plan: what the state consists of; None in checkpoints of earlier versions, too. begins: the position
    before the first batch after a reset to a time, by topic and partition; what was added since begins at its oldest record.
    version: of the format of the whole folder, Spark's files included. penstock: the version that wrote it; "" before 0.2.
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
    plan: StatePlan | None = None
    begins: dict[str, dict[int, int]] = {}


class _Head(msgspec.Struct):
    version: int = _FIRST_VERSION
    penstock: str = ""


class Checkpoint:
    """One pipe's checkpoint. Made by `open_checkpoint`. Its files are read and written through Spark's file systems."""

    def __init__(self, session: SparkSession, path: str, claim: Claim | None = None) -> None:
        """claim: of this process, where claims are needed; None: to read only, or on a local disk."""
        self.path, self._session, self._claim = path, session, claim
        self._local = Path(path.removeprefix("file://")) if path.startswith("file://") else None
        self._files = HadoopFolder(session, path)
        self._writing = threading.Lock()

    def check_claim(self) -> None:
        """Before what only the process that runs the pipe may do. Raises CheckpointInUse once another one runs it; the store's
        errors.
        """
        if self._claim is not None:
            self._claim.check()

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over, as far as this one has noticed. Asks nobody."""
        return self._claim is not None and self._claim.is_lost

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
        found = self.read_note(IDENTITY_FILE, Identity)
        return found and msgspec.structs.replace(found, kind=found.kind.removesuffix(_KIND_OF_2))

    def write_identity(self, identity: Identity) -> None:
        kind = identity.kind + (_KIND_OF_2 if identity.version > _FIRST_VERSION else "")
        self.write_note(IDENTITY_FILE, msgspec.structs.replace(identity, kind=kind, penstock=VERSION))

    def read_note(self, name: str, kind: type[Note]) -> Note | None:
        """A small file of ours beside Spark's; None before `write_note`. Raises CheckpointDamaged."""
        place = self._place(name)
        if not self._files.exists(place):
            return None
        try:
            return msgspec.json.decode(self._files.read(place), type=kind)
        except msgspec.DecodeError as error:
            raise self.damaged(f"{name} cannot be read: {error}") from error

    def write_note(self, name: str, value: object) -> None:
        """Replace it, durably. Thread-safe. Raises CheckpointInUse, where no one would read it."""
        content = msgspec.json.encode(value)
        if self._local is None:
            self._files.write(self._place(name), content)
            return
        self.check_claim()
        new = self._local / f".{name}.new"
        with self._writing:  # both queries of a pipe write penstock.json
            new.write_bytes(content)
            sync(new)
            new.replace(self._local / name)
            sync(self._local)

    def _place(self, name: str) -> str:
        """Of a note. Without a claim: that of the newest holder."""
        if self._local is not None:
            return name
        number = _newest_notes(self._files) if self._claim is None else self._claim.number
        return f"{_NOTES}/{number}/{name}" if number else name

    def newest(self, folder: str) -> int | None:
        """The highest batch number in `offsets` or `commits`."""
        return max((int(name) for name in self._files.list(folder) if name.isdigit()), default=None)

    def has_batch(self, folder: str, batch: int) -> bool:
        """Whether the file of this batch is in `offsets` or `commits`."""
        return self._files.exists(f"{folder}/{batch}")

    def has_metadata(self) -> bool:
        """Whether Spark's own identity of the query is there."""
        return self._files.exists("metadata")

    def has_state(self) -> bool:
        """Whether Spark has kept state here. A version before 0.2 noted nowhere that it does."""
        return bool(self._files.list("state"))

    def make_durable(self, batch: int) -> None:
        """Sync the files of this batch (`sync_batch`). Local folders only: object stores do it themselves."""
        if self._local is not None:
            sync_batch(self._local, batch)

    def begins(self) -> Begins:
        """For `SparkBroker.read_stream`. Raises CheckpointDamaged."""
        identity = self.read_identity()
        if identity is None or self.newest("commits") is not None:
            return NO_BEGINS
        return {topic: (identity.topics[topic], offsets) for topic, offsets in identity.begins.items()}

    def offsets(self, batch: int | None, parse: Callable[[str, str], Offsets]) -> Offsets:
        """The planned end of this batch; None: the position before the first one. A partition that is not in it begins at its
        oldest record. parse: `SparkBroker.parse_offsets`.
        """
        if batch is None:
            identity = self.read_identity()
            begins = {} if identity is None else identity.begins
            return {(topic, part): offset for topic, parts in begins.items() for part, offset in parts.items()}
        lines = [_NAME.sub("", line) for line in self._lines(f"offsets/{batch}")[2:]]
        return {place: offset for line in lines if line != "-" for place, offset in parse(line, self.path).items()}

    def source_offset(self, batch: int) -> str | None:
        """The planned end of this batch, as Spark wrote it; None for a query with several sources, or with names for them."""
        _, _, *lines = self._lines(f"offsets/{batch}")
        return lines[0] if len(lines) == 1 and not _NAME.match(lines[0]) and lines[0] != "-" else None

    def replace_source_offset(self, batch: int, offset: str) -> None:
        """Of a batch that is done, while no query runs. Durably. Raises CheckpointInUse."""
        name = f"offsets/{batch}"
        content = "\n".join([*self._lines(name)[:2], offset]).encode()
        self.check_claim()
        if self._local is None:
            self._files.write(name, content)
            return
        path = self._local / name
        path.with_name(f".{batch}.crc").unlink(missing_ok=True)  # Spark's sum of the former content
        new = path.with_name(f".{batch}.new")
        new.write_bytes(content)
        sync(new)
        new.replace(path)
        sync(path.parent)

    def source_names(self, batch: int) -> list[str]:
        """Of the sources of this planned batch, in their order; "" for a source without a name."""
        found = [_NAME.match(line) for line in self._lines(f"offsets/{batch}")[2:]]
        return ["" if name is None else name[0].removesuffix(":") for name in found]

    def committed_offsets(self, parse: Callable[[str, str], Offsets]) -> Offsets:
        """The end of the last finished batch; before the first one as of `offsets`."""
        return self.offsets(self.newest("commits"), parse)

    def settings(self, batch: int) -> dict[str, str]:
        """Spark's settings that this batch was planned with, as far as they must stay the same."""
        found: dict[str, str] = self._metadata(batch).get("conf", {})
        return found

    def has_named_state(self, batch: int) -> bool:
        """Whether the commit of this batch names the files of state that count (`state_store.py`)."""
        return self._lines(f"commits/{batch}")[0] == "v2"

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
        return Checkpoint(self._session, f"{self.path}/{name}", self._claim)

    def _lines(self, name: str) -> list[str]:
        return self._files.read(name).decode().splitlines()

    def _metadata(self, batch: int) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self._lines(f"offsets/{batch}")[1])
        return fields


def peek_checkpoint(session: SparkSession, root: str, pipe: str) -> Checkpoint:
    """The pipe's checkpoint, read-only: another process may hold it."""
    return Checkpoint(session, _uri(root, pipe))


def _uri(root: str, pipe: str) -> str:
    return f"{root}/{pipe}" if "://" in root else f"file://{root}/{pipe}"


def claims_on(session: SparkSession, root: str, pipe: str) -> Claims | None:
    """To be kept from one `open_checkpoint` to the next: it knows for how long another holder is silent. None on a local disk."""
    if "://" in root:
        return Claims(HadoopFolder(session, f"{_uri(root, pipe)}/{CLAIMS}"))
    return None if network_mount(Path(root)) is None else Claims(FolderStore(Path(root, pipe, CLAIMS)))


@contextmanager
def open_checkpoint(session: SparkSession, root: str, pipe: str, claims: Claims | None = None) -> Iterator[Checkpoint]:
    """Use the pipe's checkpoint under `root` alone; a local folder is created. claims: as of `claims_on`. Raises CheckpointInUse.

    Queries of this session write to checkpoints only while it uses this one. The lock of a folder ends with the process;
    the claim ends with this block, or when another process takes over (`Checkpoint.check_claim`).
    """
    if "://" not in root:
        with _lock(Path(root, pipe)) as token:
            if claims is None:
                _guard_files(session, f"file://{root}/{pipe}/{LOCK_FILE}", token)
                yield peek_checkpoint(session, root, pipe)
            else:
                with _claim(session, root, pipe, claims) as checkpoint:
                    yield checkpoint
        return
    with _claim(
        session, root, pipe, claims or Claims(HadoopFolder(session, f"{_uri(root, pipe)}/{CLAIMS}"))
    ) as checkpoint:
        yield checkpoint


@contextmanager
def _lock(folder: Path) -> Iterator[str]:
    """Lock a local folder. Gives the token that the lock file has from now on."""
    make_folder(folder)
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise CheckpointInUse(
                f"checkpoint {folder} is in use by process {holder}, and two queries would process each event twice"
            ) from None
        token = uuid.uuid4().hex
        os.ftruncate(lock, 0)
        os.pwrite(
            lock, f"{os.getpid():<31}\n{token}\n".encode(), 0
        )  # Java without its Python reads that it is replaced
        yield token
    finally:
        os.close(lock)


@contextmanager
def _claim(session: SparkSession, root: str, pipe: str, claims: Claims) -> Iterator[Checkpoint]:
    uri = _uri(root, pipe)
    try:
        claim = claims.acquire(above=lambda: _highest_notes(HadoopFolder(session, uri)))
    except CheckpointInUse as error:
        raise CheckpointInUse(f"checkpoint {uri} is in use: {error}") from None
    with beating(claim, pipe):
        if "://" in root:
            _take_over_notes(HadoopFolder(session, uri), claim.number)
        _guard_files(session, f"{uri}/{CLAIMS}/{claim.mark}", claim.token)
        yield Checkpoint(session, uri, claim)


def _guard_files(session: SparkSession, file: str, token: str) -> None:
    session.conf.set(_CLAIM_FILE, file)
    session.conf.set(_CLAIM_TOKEN, token)


def _note_folders(files: HadoopFolder) -> list[int]:
    return [int(name) for name in files.list(_NOTES) if name.isdigit()]


def _highest_notes(files: HadoopFolder) -> int:
    """Also of a holder that did not complete them; 0 in a folder. The holder of a lower claim would not find them."""
    return max(_note_folders(files), default=0)


def _newest_notes(files: HadoopFolder, before: int | None = None) -> int:
    """The claim with the newest complete notes; 0 without one: a version before 0.2 left them beside Spark's files."""
    numbers = sorted(_note_folders(files), reverse=True)
    complete = (number for number in numbers if files.exists(f"{_NOTES}/{number}/{IDENTITY_FILE}"))
    return next((number for number in complete if before is None or number < before), 0)


def _take_over_notes(files: HadoopFolder, number: int) -> None:
    """Copy the notes of the last holder; its identity last, which makes ours complete. Then remove all earlier ones."""
    last = _newest_notes(files, before=number)
    source = f"{_NOTES}/{last}" if last else ""
    names = sorted(
        (name for name in files.list(source) if name.endswith(".json")), key=lambda name: (name == IDENTITY_FILE, name)
    )
    for name in names:
        files.write(f"{_NOTES}/{number}/{name}", files.read(f"{source}/{name}" if source else name))
    for earlier in files.list(_NOTES):
        if earlier.isdigit() and int(earlier) < number and names:
            files.delete(f"{_NOTES}/{earlier}")
