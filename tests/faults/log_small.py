"""A log so small that every byte of it can be damaged: pages of 512 bytes, two partitions, a few rows.

The oracle is `account`: it reads as a consumer does, goes on behind what is named as lost, and demands that every record is
either returned intact or named. What cannot be opened at all is held against what `verify` reports.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged
from services.core.broker.log import sqlite_file, topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import CommitRequest, GroupsFile
from services.core.broker.log.leases import Leases
from services.core.broker.log.repair import repair, verify_topic
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import Fence, TopicWriter
from services.core.broker.record import Record, TopicPartition

TOPIC = "orders"
PARTITIONS = 2
BATCH = 2
END = 6
"""Offsets of each partition: 0 to 5."""

Lost = set[tuple[int, int]]
"""Partition and offset of each record that was named as lost."""

BEHIND = -1

Values = Mapping[tuple[int, int], bytes]


def stored(partition: int, offset: int) -> bytes:
    """The value at this place. One batch is larger than a page."""
    return (b"%d:%d" % (partition, offset)).ljust(300 if offset // BATCH == 1 else 30, b".")


EVERYTHING: Values = {(p, n): stored(p, n) for p in range(PARTITIONS) for n in range(END)}


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where the machine has that: nothing here needs a disk that lasts."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="penstock-") as path:
        yield Path(path)


@contextmanager
def small_pages() -> Iterator[None]:
    """Files made meanwhile have SQLite's smallest pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_file, "PAGE_BYTES", 512)
        yield


def append(writer: TopicWriter, batch: int, *partitions: int) -> None:
    """Store one batch in each of these partitions, in one transaction of an exactly-once writer."""
    blocks = {}
    for partition in partitions:
        values = [stored(partition, n) for n in range(batch * BATCH, (batch + 1) * BATCH)]
        blocks[partition] = pack_all([Record(b"k", value, 1000 + batch) for value in values])
    writer.append(blocks, Fence("w", batch * PARTITIONS + max(partitions)))


def make_log(root: Path) -> dict[str, bytes]:
    """The files of a topic and of one group as a crash leaves them: some in the database, some in a write-ahead log that
    was begun anew over older frames."""
    with small_pages():
        folder = DataFolder.prepare(root)
        topics.create_topic(folder, TopicSpec(TOPIC, partitions=PARTITIONS))
        with TopicWriter(folder, TOPIC, WallClock()) as writer, closing(GroupsFile(folder)) as groups:
            append(writer, 0, 0, 1)
            append(writer, 1, 0, 1)
            writer.checkpoint()
            append(writer, 2, 0)
            append(writer, 2, 1)
            _commit(folder, groups)
            files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
            return {name: path.read_bytes() for name, path in files.items()}


COMMITTED = {0: 5, 1: 3}


def _commit(folder: DataFolder, groups: GroupsFile) -> None:
    zero = dict.fromkeys(range(PARTITIONS), 0)
    with closing(Leases(folder, 60_000)) as leases:
        groups.enter("g", TOPIC, b"0123456789abcdef", zero, zero)
        epochs = leases.heartbeat("g", "m", {TOPIC: PARTITIONS}, {}).acquired
        for step in (2, 1, 0):
            if step == 1:
                groups.connection.wal_checkpoint()
            for partition, offset in COMMITTED.items():
                source = TopicPartition(TOPIC, partition)
                groups.commit([CommitRequest("g", "m", {source: (epochs[source], offset - step)})])


class Copy:
    """A copy of some files (None: not there), put back before each trial."""

    def __init__(self, root: Path, files: Mapping[str, bytes | None]) -> None:
        self.folder = DataFolder.prepare(root)
        self._files = {str(root / name): data for name, data in files.items()}
        self._changed: set[str] = set()
        for path, data in self._files.items():
            _put(path, data)

    def damage(self, file: str, data: bytes | None) -> DataFolder:
        """All files as they were, except this one."""
        part = f"{self.folder.root}/{file.split('.')[0]}"
        changed = (*self._changed, part)
        for path, whole in self._files.items():
            if path.startswith(changed):
                _put(path, whole)
        self._changed = {part}
        _put(f"{self.folder.root}/{file}", data)
        return self.folder


def _put(path: str, data: bytes | None) -> None:
    """Without pathlib, which takes as long as the file system."""
    if data is not None:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(data)
    elif os.path.exists(path):  # noqa: PTH110
        os.unlink(path)  # noqa: PTH108


def read(folder: DataFolder) -> tuple[dict[tuple[int, int], bytes], Lost, bool]:
    """What a consumer gets, what it is told is lost, and whether it can read at all."""
    found: dict[tuple[int, int], bytes] = {}
    lost: Lost = set()
    try:
        with TopicReader(folder, TOPIC) as reader:
            for partition, held in reader.ranges().items():
                offset: int | None = held.start
                while offset is not None:
                    offset = _read_on(reader, partition, offset, found, lost)
    except DataDamaged:  # not of one place: those are dealt with by `_read_on`
        return found, lost, False
    return found, lost, True


def _read_on(
    reader: TopicReader, partition: int, offset: int, found: dict[tuple[int, int], bytes], lost: Lost
) -> int | None:
    try:
        run = reader.read(partition, offset, 100)
    except DataDamaged as error:
        if not error.ranges and offset >= END:
            lost.add((partition, BEHIND))  # nothing acknowledged is missing, and yet it says that the end is damaged
            return None
        if not error.ranges:
            raise
        ((where, first, last),) = error.ranges
        assert (where, first) == (partition, offset), "another place was named than the one that cannot be read"
        lost.update((partition, n) for n in range(first, last + 1))
        return last + 1
    if run is None:
        return None
    values = {n: record.value or b"" for n, record in zip(run.offsets, run.records, strict=True)}
    found.update({(partition, n): value for n, value in values.items()})
    lost.update((partition, n) for n in range(offset, run.next) if n not in values)
    return run.next


def account(folder: DataFolder, expected: Values = EVERYTHING) -> str:
    """ "harmless": all records come. "loud": each one comes intact or is named as lost. Anything else fails."""
    found, lost, opened = read(folder)
    for place, value in found.items():
        assert expected.get(place) == value, f"{place} is not what was stored"
    if opened:
        assert not lost & found.keys(), "named as lost, and returned"
        named = {(partition, n) for partition, n in lost if n != BEHIND}
        assert named | found.keys() == expected.keys(), "missing, and nobody said so"
        return "loud" if lost else "harmless"
    report = verify_topic(folder, TOPIC)
    assert not report.is_sound, "the reader complains, verify does not"
    assert sum(part.records for part in report.partitions) + report.lost_records == len(expected)
    named = {(p.partition, n) for p in report.partitions for first, last in p.lost for n in range(first, last + 1)}
    assert not named & found.keys()
    return "loud"


def check_repair(folder: DataFolder) -> None:
    """A repair returns what is intact and names the rest, exactly as `verify` said before."""
    report = verify_topic(folder, TOPIC)
    named = {(p.partition, n) for p in report.partitions for first, last in p.lost for n in range(first, last + 1)}
    repair(folder.root)
    found, skipped, opened = read(folder)
    after = verify_topic(folder, TOPIC)
    noted = {(p.partition, n) for p in after.partitions for first, last in p.accepted for n in range(first, last + 1)}
    assert opened
    assert skipped == noted == named
    assert found == {place: value for place, value in EVERYTHING.items() if place not in named}


def check_append(folder: DataFolder, expected: Values = EVERYTHING) -> None:
    """The topic takes a record behind all others, or it says that it is damaged: it never gives an offset twice."""
    try:
        with TopicWriter(folder, TOPIC, WallClock()) as writer:
            assert writer.append({0: pack_all([Record(b"k", b"new", 2000)])}) == {0: [END]}
    except DataDamaged:
        return
    account(folder, {**expected, (0, END): b"new"})


def check_group(folder: DataFolder) -> str:
    """ "harmless": the group is where it was. "loud": it is told. It neither skips nor goes back in silence."""
    try:
        with closing(GroupsFile(folder)) as file:
            found = {partition: progress.processed for partition, progress in file.progress("g", TOPIC).items()}
    except DataDamaged:
        return "loud"
    assert found == COMMITTED
    return "harmless"


Check = Callable[[DataFolder], str]
