"""A SQLite file whose commits are durable and counted outside of it: what topics and groups have in common.

Blocking; one thread at a time.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import apsw

from services.core.broker.errors import DataDamaged, OutcomeUnknown, Unavailable
from services.core.broker.log import schema
from services.core.broker.log.faults import FAULTS, classify
from services.core.broker.log.layout import TopicFiles
from services.core.broker.log.marks import Marks

T = TypeVar("T")


@contextmanager
def opened(files: TopicFiles, *, durable: bool = True) -> Iterator[tuple[int, apsw.Connection]]:
    """The shared lock and a connection, for the caller to keep; both are closed when the body raises.

    Raises Unavailable while `repair` holds the lock alone, and the broker's errors for SQLite's.
    """
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    connection = None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        connection = schema.connect(files.db, durable=durable)
        yield lock, connection
    except BaseException as error:
        if connection is not None:
            connection.close(True)
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise Unavailable(f"{files.topic!r} is being repaired") from None
        if isinstance(error, FAULTS):
            raise classify(error, files.topic) from error
        raise


class DurableFile:
    """An open file. `broken`: a commit's outcome is unknown; close it and open again, which verifies.

    A failed sync is never tried again: the kernel may have dropped the pages and would call the next one a success, and
    SQLite would then append behind frames that are not on the disk. `rewrite_wal` after opening makes sure that they are.
    """

    def __init__(self, files: TopicFiles, lock: int, connection: apsw.Connection, marks: Marks) -> None:
        self.files, self.connection, self.marks = files, connection, marks
        self.broken = False
        self._lock = lock
        self._inodes: tuple[int, int] | None = None

    def close(self) -> None:
        """Close everything. Never raises for a database that is already damaged."""
        try:
            self.connection.close()
        except apsw.Error:
            self.connection.close(True)
        finally:
            self.marks.close()
            os.close(self._lock)

    def rewrite_wal(self) -> None:
        """Write the write-ahead log again as it is, and sync it: what readers can see is on the disk from now on.

        A process before this one may have died after a sync failed, leaving frames in the page cache only. Under the
        write lock. Raises Unavailable when the disk still fails.
        """
        name = self.files.topic
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                fd = os.open(
                    self.files.wal, os.O_RDWR | os.O_CLOEXEC
                )  # SQLite holds no lock on this file: closing is safe
                try:
                    position = 0
                    while chunk := os.pread(fd, 1 << 20, position):
                        position += os.pwrite(fd, chunk, position)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            finally:
                self.connection.execute("ROLLBACK")
        except FileNotFoundError:
            return
        except FAULTS as error:
            raise classify(error, name) from error

    def transact(self, work: Callable[[], T], marks: Callable[[T], Mapping[int, int]], slots: int) -> T:
        """Run `work` in one write transaction, durable and marked when this returns.

        `marks` gives from its result the new high-water marks, of `slots` in all. Raises Unavailable, StorageFull
        (nothing was stored), OutcomeUnknown (`broken` is set), or what `work` raised (nothing was stored).
        """
        name = self.files.topic
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except apsw.Error as error:
            self.broken = not isinstance(error, apsw.BusyError)
            raise classify(error, name) from error
        try:
            result = work()
            ends = marks(result)
        except BaseException as error:
            self._roll_back()
            if isinstance(error, FAULTS):
                raise classify(error, name) from error
            raise
        self._commit()
        if ends:
            self._mark(ends, max(slots, max(ends) + 1))
        return result

    def _commit(self) -> None:
        name = self.files.topic
        try:
            self.connection.execute("COMMIT")
        except (apsw.FullError, apsw.BusyError) as error:  # refused before the commit frame was written
            self._roll_back()
            raise classify(error, name) from error
        except apsw.Error as error:
            self.broken = True
            raise OutcomeUnknown(f"{name}: the commit failed ({error}); it may or may not be stored") from error

    def _mark(self, ends: Mapping[int, int], slots: int) -> None:
        name = self.files.topic
        try:
            self.marks.raise_to(ends, slots)
            inodes = (self.files.db.stat().st_ino, self.files.wal.stat().st_ino)
        except (OSError, DataDamaged) as error:
            self.broken = True
            raise OutcomeUnknown(f"{name}: stored, but its high-water mark could not be written: {error}") from error
        self._inodes = self._inodes or inodes
        if inodes != self._inodes:
            self.broken = True
            raise OutcomeUnknown(f"{name}: its files were replaced while in use")

    def _roll_back(self) -> None:
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except apsw.Error:
            self.broken = True
