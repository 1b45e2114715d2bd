"""Where a planned batch ends in each shard: notes beside the checkpoint, that are written once and never changed.

A plan names the tasks of a batch, and where each of their shards begins. A task reads, and stores a note with its ends before it
hands out a record. So whoever computes the task again reads exactly the same records: after a crash, as a second attempt beside
the first, or in another process. The next plan begins where these notes end.

The plan is part of the offset in Spark's log, under `plan`, and the positions there are where its batch begins. Versions before
0.2 know no plans: for them the batch has not been read, and they read it again.
"""

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from services.core.broker.errors import NewerFormat
from services.core.broker.kinesis.bucket import Bucket, Store
from services.core.version import newer_format
from spark.sources.offsets import Offset, sync
from spark.sources.shards import ShardPosition

FOLDER = "ends"
"""Of all notes of a checkpoint; in it each source has its own folder."""
KEPT = 30
"""Plans whose notes are kept: Spark keeps the offsets of twenty batches, and removes older ones a little later."""
_VERSION = 1


class EndsMissing(Exception):
    """The folder of the notes is not where it was planned. Nothing was read."""


class EndsDamaged(Exception):
    """A note cannot be read, so nobody knows where its batch ended."""


class Plan(NamedTuple):
    """folder: of its notes, below the checkpoint. number: counts the plans of a source. token: no other plan has it.

    tasks: the shards of each, as (topic, number).
    """

    folder: str
    number: int
    token: str
    tasks: list[list[tuple[str, int]]]

    def note(self, task: int) -> str:
        """The name of a task's note."""
        return f"{self.number:010d}-{self.token}-{task}"

    @property
    def notes(self) -> list[str]:
        return [self.note(task) for task in range(len(self.tasks))]


class ShardEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task found in a shard: the fields of `ShardPosition`, with big numbers as text, and of the next `ShardStart`.

    records: so many. more: there may be more already. refused: reads of tasks that the service refused, in all batches so far.
    """

    topic: str
    shard: int
    next: str
    settled: int
    ended: bool = False
    retention: int = 0
    begun: str = "0"
    records: int = 0
    more: bool = False
    arrived: int = 0
    rate: float = 0.0
    next_read: int = 0
    refused: int = 0

    @property
    def position(self) -> ShardPosition:
        return ShardPosition(int(self.next), self.settled, self.ended, self.retention, int(self.begun))


class _Note(msgspec.Struct, frozen=True):
    version: int
    ends: list[ShardEnd]


def encode_note(ends: Sequence[ShardEnd]) -> bytes:
    return msgspec.json.encode(_Note(_VERSION, list(ends)))


def decode_note(name: str, content: bytes) -> list[ShardEnd]:
    """Raises EndsDamaged, NewerFormat."""
    try:
        note = msgspec.json.decode(content, type=_Note)
    except msgspec.DecodeError as error:
        raise EndsDamaged(
            f"the note {name} beside the checkpoint is damaged: {error}. Try: restoring the checkpoint from a backup"
        ) from error
    if note.version > _VERSION:
        raise NewerFormat(newer_format(f"the note {name}", note.version, _VERSION))
    return note.ends


def pack_plan(offset: Offset, plan: Plan) -> Offset:
    """The offset of a batch that begins at `offset`."""
    return {**offset, "plan": {"folder": plan.folder, "number": plan.number, "token": plan.token, "tasks": plan.tasks}}


def plan_of(offset: Offset) -> Plan | None:
    """None: the offset is an end itself, of the beginning or from an earlier version."""
    found = offset.get("plan")
    if found is None:
        return None
    tasks = [[(topic, number) for topic, number in task] for task in found["tasks"]]
    return Plan(found["folder"], found["number"], found["token"], tasks)


def next_plan(folder: str, before: Plan | None, tasks: list[list[tuple[str, int]]]) -> Plan:
    """A plan that was made before and never logged is not used again: each has its own token."""
    return Plan(folder, before.number + 1 if before is not None else 0, secrets.token_hex(4), tasks)


def share_tasks(shards: Iterable[tuple[tuple[str, int], int]], most: int, records: int) -> list[list[tuple[str, int]]]:
    """These shards in tasks of about `records` or more, at most `most` of them. shards: with the records expected in each.

    A shard is never divided, so that its order survives.
    """
    every = sorted(shards, key=lambda each: -each[1])
    count = max(1, min(most, len(every), sum(expected for _, expected in every) // max(1, records)))
    tasks: list[tuple[int, list[tuple[str, int]]]] = [(0, []) for _ in range(count)]
    for shard, expected in every:
        least = min(range(count), key=lambda task: (tasks[task][0], len(tasks[task][1])))
        tasks[least] = (tasks[least][0] + expected, [*tasks[least][1], shard])
    return [sorted(task) for _, task in tasks if task]


class EndNotes(Protocol):
    """The notes of one source of a query. Methods block."""

    def prepare(self) -> None:
        """Make the folder. Only where batches are planned: elsewhere a missing folder is another folder."""

    def fix(self, name: str, content: bytes) -> bytes:
        """Store the note, unless it is there. Returns what is stored, durably. Raises EndsMissing."""

    def find(self, name: str) -> bytes | None:
        """Raises EndsMissing."""

    def list(self) -> list[str]:
        """The names of all notes."""

    def remove(self, names: Iterable[str]) -> None:
        """Those that are there."""


class FolderNotes:
    """Notes in a folder of a file system that all processes of the query share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(".*"):  # by a process that was killed
            if left.stat().st_mtime < time.time() - 3600:
                left.unlink(missing_ok=True)
        for folder in (self._path, self._path.parent, self._path.parent.parent):
            sync(folder)

    def fix(self, name: str, content: bytes) -> bytes:
        new = self._path / f".{name}.{secrets.token_hex(4)}"
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise self._missing() from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(new, self._path / name)
        finally:
            new.unlink()
        sync(self._path)  # also of a note that another process stored just now
        return (self._path / name).read_bytes()

    def find(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError as error:
            if not self._path.is_dir():
                raise self._missing() from error
            return None

    def list(self) -> list[str]:
        found = self._path.iterdir() if self._path.is_dir() else ()
        return [path.name for path in found if not path.name.startswith(".")]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def _missing(self) -> EndsMissing:
        return EndsMissing(
            f"there is no folder {self._path} here, where the driver of the query has its checkpoint. Try: a checkpoint in an "
            "object store, or in a folder that all hosts of the cluster mount"
        )


class BucketNotes:
    """Notes in S3, or in another store with its API. There is no folder to prepare."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.fix, self.find, self.list, self.remove = bucket.create, bucket.get, bucket.list, bucket.remove

    def prepare(self) -> None:
        """Nothing: an object that cannot be stored says so."""


class Place(NamedTuple):
    """Where a query keeps its checkpoint: a URI, `file:///…` or `s3a://bucket/…`, and the store of the latter."""

    checkpoint: str
    store: Store = Store()


def open_notes(place: Place, folder: str) -> EndNotes:
    """Of a source, by its plans' folder. Raises EndsMissing for a place that cannot hold notes."""
    scheme, _, path = f"{place.checkpoint}/{folder}".partition("://")
    if scheme == "file" and path.startswith("/"):
        return FolderNotes(Path(path))
    bucket, _, prefix = path.partition("/")
    if scheme == "s3a" and bucket and prefix:
        return BucketNotes(Bucket(place.store, bucket, prefix))
    raise EndsMissing(
        f"the checkpoint {place.checkpoint!r} of a query over Kinesis is in no store that creates a file only once. "
        "Try: file:///path or s3a://bucket/path"
    )


def ends_of(plan: Plan, notes: EndNotes) -> dict[tuple[str, int], ShardEnd]:
    """The ends of a planned batch, by topic and shard, as far as its tasks have read. Raises EndsMissing, EndsDamaged."""
    found = {}
    for name in plan.notes:
        content = notes.find(name)
        for end in decode_note(name, content) if content is not None else ():
            found[end.topic, end.shard] = end
    return found


def old_notes(names: Iterable[str], number: int) -> list[str]:
    """Those that no offset of Spark's log needs any more, when the plan `number` is made."""
    return [
        name for name in names if name.partition("-")[0].isdecimal() and int(name.partition("-")[0]) <= number - KEPT
    ]


def position_after(begin: Mapping[int, ShardPosition], ends: Mapping[int, ShardEnd]) -> dict[int, ShardPosition]:
    """The positions of a topic after a batch. A shard without a note was not read."""
    return {number: ends[number].position if number in ends else known for number, known in begin.items()}
