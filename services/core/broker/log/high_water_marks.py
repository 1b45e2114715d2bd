"""High-water marks: the next offset of each partition that was acknowledged, kept outside of SQLite.

One flipped bit in a write-ahead log makes SQLite drop every later commit at recovery, and its integrity check stays
green. So after each commit and before its answer the writer records the partition's next offset here; a database that
later ends before its mark has lost exactly the records between. No sync: after a crash of processes the page cache still
has the mark, and after a power cut an older mark is only less strict. The mark is never above a durable offset.

Layout: header (magic, incarnation, checksum), then 16 bytes per partition (next, checksum over partition and next).
"""

import fcntl
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from services.core.broker.errors import DataDamaged, NewerFormat
from services.core.broker.log.data_folder import TopicFiles
from services.core.version import newer_format

_HEADER = Struct("<8s16sI4x")
_SLOT = Struct("<QI4x")
_MAGIC = b"PSTKHWM1"
"""Its last character is the version of this format."""
_LOCK_SECONDS = 0.25


class HighWaterMarks:
    """The mark file of one topic, open. Safe between processes; within one process for one thread at a time."""

    def __init__(self, fd: int, topic: str, incarnation: bytes) -> None:
        self._fd, self._topic, self._incarnation = fd, topic, incarnation

    @classmethod
    def create(cls, path: Path, incarnation: bytes, marks: list[int]) -> None:
        """Write a new file, synced: its blocks exist from now on, so a full disk cannot stop later marks.

        One that is there is replaced at once: never are there no marks at all. The caller syncs the folder.
        """
        draft = path.with_name(f".{uuid.uuid4().hex}.draft")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, _header(incarnation) + b"".join([_slot(p, mark) for p, mark in enumerate(marks)]), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.rename(path)

    @classmethod
    def open(cls, path: Path, topic: str, incarnation: bytes) -> "HighWaterMarks":
        """Raises DataDamaged when the file is missing or belongs to another topic, NewerFormat."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataDamaged(topic, (), f"its high-water marks ({path.name}) are missing. {_TRY}") from None
        marks = cls(fd, topic, incarnation)
        try:
            header = os.pread(fd, _HEADER.size, 0)
            _check_version(header, topic)
            if header != _header(incarnation):
                raise DataDamaged(topic, (), f"the head of its high-water marks ({path.name}) is altered. {_TRY}")
        except BaseException:
            marks.close()
            raise
        return marks

    def read(self, partitions: int) -> list[int]:
        """The mark of each partition. Raises DataDamaged when one is unreadable."""
        for _ in range(5):  # a writer may be in the middle of its write
            data = os.pread(self._fd, _SLOT.size * partitions, _HEADER.size)
            marks = _parse(data, partitions)
            if marks is not None:
                return marks
            time.sleep(0.001)
        raise DataDamaged(self._topic, (), f"its high-water marks are altered. {_TRY}")

    def peek(self, partitions: int) -> list[int] | None:
        """The marks without waiting for a disk, for the event loop; None when they must be read in another thread."""
        buffer = bytearray(_SLOT.size * partitions)
        try:
            size = os.preadv(self._fd, [buffer], _HEADER.size, os.RWF_NOWAIT)
        except OSError:
            return None
        return _parse(bytes(buffer[:size]), partitions)

    def raise_to(self, ends: Mapping[int, int], partitions: int) -> None:
        """Raise the marks of these partitions; a mark that is higher stays. Called after the commit, before its answer.

        Another process in the middle of this is waited for, but not for ever: it may be frozen. Raises OSError.
        """
        locked = self._lock()
        try:
            marks = self.read(partitions)
            for partition, end in ends.items():
                marks[partition] = max(marks[partition], end)
            low, high = min(ends), max(ends)
            data = b"".join([_slot(p, marks[p]) for p in range(low, high + 1)])
            if os.pwrite(self._fd, data, _HEADER.size + low * _SLOT.size) != len(data):
                raise OSError("short write to the high-water marks")
        finally:
            if locked:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def extend(self, before: int, partitions: int) -> None:
        """Add partitions, marked 0, durably; before they exist in the database. Existing marks stay."""
        present = (os.fstat(self._fd).st_size - _HEADER.size) // _SLOT.size
        first = max(before, present)
        os.pwrite(
            self._fd, b"".join([_slot(p, 0) for p in range(first, partitions)]), _HEADER.size + first * _SLOT.size
        )
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Later calls fail: another file may get this descriptor."""
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _lock(self) -> bool:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0002)
            else:
                return True


class LooseMarks(NamedTuple):
    """The readable parts of a mark file: 0 for an unreadable mark, None for an unreadable incarnation."""

    marks: list[int]
    incarnation: bytes | None
    wrong: str | None


def read_loose(path: Path) -> LooseMarks:
    """Read a mark file, also a damaged one; `wrong` names the damage. For `verify`, and to find a lost database."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return LooseMarks([], None, f"{path.name} cannot be read: {error.strerror}")
    wrong = None
    _, incarnation, _ = _HEADER.unpack(data[: _HEADER.size].ljust(_HEADER.size, b"\0"))
    if data[: _HEADER.size] != _header(incarnation):
        incarnation, wrong = None, f"the head of {path.name} is altered"
    marks = []
    body = data[_HEADER.size :]
    for partition, (mark, crc) in enumerate(_SLOT.iter_unpack(body[: len(body) // _SLOT.size * _SLOT.size])):
        good = crc32(b"%d:%d" % (partition, mark)) == crc
        marks.append(mark if good else 0)
        if not good:
            wrong = f"the mark of partition {partition} in {path.name} is altered"
    return LooseMarks(marks, incarnation, wrong)


def require_no_loss(files: TopicFiles) -> None:
    """For a missing database. Raises DataDamaged, with its records, when there are marks of them."""
    if files.marks.exists():
        marks = read_loose(files.marks).marks
        lost = tuple((partition, 0, mark - 1) for partition, mark in enumerate(marks) if mark)
        if lost:
            raise DataDamaged(files.topic, lost, f"its database ({files.db.name}) is missing. {_TRY}")


_TRY = "Try: penstock log verify, then penstock log repair"


def _header(incarnation: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, incarnation, crc32(_MAGIC + incarnation))


def _check_version(header: bytes, topic: str) -> None:
    """Raise NewerFormat for the intact head of a later version: its magic number differs in the last character."""
    magic, incarnation, crc = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    is_intact = crc == crc32(magic + incarnation)
    if is_intact and magic != _MAGIC and magic.startswith(_MAGIC[:-1]):
        raise NewerFormat(newer_format(f"the file of high-water marks of {topic}", magic[-1:].decode("latin-1"), 1))


def _slot(partition: int, mark: int) -> bytes:
    return _SLOT.pack(mark, crc32(b"%d:%d" % (partition, mark)))


def _parse(data: bytes, partitions: int) -> list[int] | None:
    if len(data) < partitions * _SLOT.size:
        return None
    marks = []
    for partition, (mark, crc) in enumerate(_SLOT.iter_unpack(data)):
        if crc32(b"%d:%d" % (partition, mark)) != crc:
            return None
        marks.append(mark)
    return marks
