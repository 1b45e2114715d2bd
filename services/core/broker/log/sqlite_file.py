"""A SQLite file whose commits are durable and counted outside of it: the common part of topics and groups. Blocking.

Connection settings, tables, the description of a topic, locks, classified errors, durable transactions. One thread at a time.

Settings, and why. WAL: readers never wait for the writer. synchronous=FULL: a commit is synced before it is answered
(NORMAL is not, in WAL mode). mmap off: a truncated file is then an error, not a SIGBUS. Page 8 KiB: the least CPU and
wait per batch of 100 events of all sizes measured. wal_autocheckpoint=0: the writer checkpoints after it has answered.
"""

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import apsw
import msgspec

from services.core.broker.errors import (
    BrokerError,
    DataDamaged,
    NewerFormat,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
    UnknownTopic,
)
from services.core.broker.log.data_folder import TopicFiles
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.version import newer_format

FORMAT = 1
COMPACTED_FORMAT = 2
"""Of topics that are compacted: their rows may be sparse, which an older version would take for damage."""
BUSY_SECONDS = 5.0
PAGE_BYTES = 8192

TOPIC_TABLES = """
CREATE TABLE meta(id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE partitions(p INTEGER PRIMARY KEY, start INTEGER NOT NULL, floor INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE batches(pos INTEGER PRIMARY KEY, count INTEGER NOT NULL, max_ts INTEGER NOT NULL, top_ts INTEGER NOT NULL,
                     stored_ms INTEGER NOT NULL, total INTEGER NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE gaps(p INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, noted_ms INTEGER NOT NULL,
                  reason TEXT NOT NULL, PRIMARY KEY(p, first)) WITHOUT ROWID;
CREATE TABLE writers(writer TEXT PRIMARY KEY, epoch INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
"""

GROUPS_TABLE = "CREATE TABLE IF NOT EXISTS groups(grp TEXT PRIMARY KEY, crc INTEGER NOT NULL) WITHOUT ROWID"
"""Of a topic: the groups that have begun to read it. Made with the first of them."""


COMPACTION_TABLE = """
CREATE TABLE IF NOT EXISTS compaction(p INTEGER PRIMARY KEY, clean INTEGER NOT NULL, kept INTEGER NOT NULL, due_ms INTEGER,
                                      crc INTEGER NOT NULL)
"""
"""Of a compacted topic: how far each partition is compacted (`compaction.Progress`). Made with the first pass."""


class Meta(msgspec.Struct, frozen=True):
    """What a topic is. incarnation: differs when a topic is deleted and made again under the same name."""

    format: int
    topic: str
    incarnation: bytes
    partitions: int
    retention_ms: int | None
    retention_bytes: int | None
    created_ms: int
    deleted: bool = False
    compact: bool = False


def connect(path: Path, *, create: bool = False, durable: bool = True) -> apsw.Connection:
    """A connection with the settings above. durable=False (leases only): commits survive a crash, not a power cut."""
    if not create and path.stat().st_size == 0:  # SQLite would take it for new, and remove its write-ahead log
        raise DataDamaged(path.stem, (), f"{path.name} is empty")
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
    connection = apsw.Connection(str(path), flags=flags)
    try:
        connection.set_busy_handler(BusyHandler(path))
        if create:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.pragma("journal_mode", "wal")
        else:
            _keep_wal(connection)
            if connection.pragma("journal_mode") != "wal":  # one altered bit would make SQLite overlook the log
                raise DataDamaged(path.stem, (), "its head is altered: the journal mode is not WAL")
        connection.execute(
            f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}; PRAGMA mmap_size=0; PRAGMA cache_size=-2048;"
            "PRAGMA wal_autocheckpoint=0; PRAGMA cell_size_check=ON; PRAGMA trusted_schema=OFF"
        ).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_wal(connection: apsw.Connection) -> None:
    """The last one to close must not unlink the write-ahead log: it does so by name, and after a topic was deleted and
    made again the name may belong to the new one. With a size limit SQLite empties the log through its own handle."""
    flag = ctypes.c_int(1)
    connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(flag))
    connection.execute(f"PRAGMA journal_size_limit={64 << 20}").fetchall()


def fetch(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
    """All rows of a query, each a tuple of its columns."""
    return connection.execute(sql, bindings).fetchall()


class BusyHandler:
    """Waits for another process's transaction: half a millisecond at a time, because one lasts about as long as a sync.

    SQLite's own handler soon sleeps 25 to 100 ms at a time. After `seconds` the statement fails with a BusyError that names
    the process.
    """

    def __init__(self, path: Path, seconds: float = BUSY_SECONDS) -> None:
        self._path, self._seconds, self._since = path, seconds, 0.0

    def __call__(self, tries: int) -> bool:
        now = time.monotonic()
        if tries == 0:
            self._since = now
        time.sleep(0.0005 if tries < 100 else 0.005)
        if now - self._since < self._seconds:
            return True
        raise apsw.BusyError(f"its write lock is not free. {_describe_holder(self._path)}")


_WRITE_LOCK = 120
"""The byte of the -shm file that a writer locks: https://www.sqlite.org/walformat.html#wal_locks"""
_READS = 5


def find_lock_holder(path: Path) -> int | None:
    """The process that holds the file's write lock. None: nobody, or the system does not say (it is not Linux).

    It opens no file of SQLite's: to close one would give up the locks that this process itself has on it. While other locks come
    and go, a list of them may lack one that stays, so it is read again.
    """
    try:
        inode = str(path.with_name(f"{path.name}-shm").stat().st_ino)
        for _ in range(_READS):
            for line in Path("/proc/locks").read_text().splitlines():
                _, kind, _, access, pid, file, first, last = line.split()[-8:]
                is_write_lock = (
                    kind == "POSIX" and access == "WRITE" and last != "EOF" and int(first) <= _WRITE_LOCK <= int(last)
                )
                if is_write_lock and file.split(":")[-1] == inode:
                    return int(pid)
    except (OSError, ValueError):
        pass
    return None


def _describe_holder(path: Path) -> str:
    pid = find_lock_holder(path)
    if not pid:  # 0 is a process that this container does not see
        return "Is another process frozen? Try: penstock status"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = ""
    if state in ("T", "t"):
        return f"Process {pid} holds it and is stopped. Try: kill -CONT {pid}; if it does not go on, kill -9 {pid}"
    return f"Process {pid} holds it. Is its disk slow? If it hangs, try: kill -9 {pid}"


def checksum(*fields: object) -> int:
    """A checksum over small fields of one row."""
    return crc32(repr(fields).encode())


def write_meta(connection: apsw.Connection, meta: Meta) -> None:
    """Store the description; the caller has a transaction open."""
    body = msgspec.msgpack.encode(meta)
    connection.execute("INSERT OR REPLACE INTO meta VALUES(1, ?, ?)", (body, crc32(body)))


def read_meta(connection: apsw.Connection, topic: str) -> Meta:
    """The topic's description. Raises UnknownTopic when it was deleted, DataDamaged when it cannot be trusted, NewerFormat."""
    row = connection.execute("SELECT body, crc FROM meta WHERE id=1").fetchone()
    if row is None or not isinstance(row[0], bytes) or crc32(row[0]) != row[1]:
        raise DataDamaged(topic, (), "its description (table meta) is missing or altered")
    fields = msgspec.msgpack.decode(row[0])
    if fields.get("format", 0) > COMPACTED_FORMAT:
        raise NewerFormat(newer_format(f"{topic} in the embedded log", fields["format"], COMPACTED_FORMAT))
    meta = msgspec.convert(fields, Meta)
    if meta.deleted:
        raise UnknownTopic(f"topic {topic!r} was deleted")
    return meta


FAULTS = (apsw.Error, OSError, UnicodeDecodeError)
"""What a statement raises. The last: damage made text of a number or of bytes."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def classify(error: Exception, topic: str) -> BrokerError:
    """The error of an operation that stored nothing (a read, or a transaction that was rolled back)."""
    if isinstance(error, BrokerError):
        return error
    if is_damage(error):
        return DataDamaged(topic, (), f"{error}. Try: penstock log verify, then penstock log repair")
    if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno in _FULL):
        return StorageFull(f"{topic}: disk full, nothing was stored. Try: freeing space; appends go on by themselves")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"{topic}: {error}")
    return Unavailable(f"{topic}: {type(error).__name__}: {error}")


@contextmanager
def classified(topic: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors of a read into the broker's."""
    try:
        yield
    except FAULTS as error:
        raise classify(error, topic) from error


def is_damage(error: Exception) -> bool:
    """Whether SQLite found its own structure damaged: malformed, without its tables, or too short.

    Our statements are fixed and right, so an SQL error means an altered schema.
    """
    if isinstance(
        error, apsw.CorruptError | apsw.NotADBError | apsw.SQLError | apsw.SchemaChangeError | UnicodeDecodeError
    ):
        return True
    return isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHORT_READ


T = TypeVar("T")


@contextmanager
def shared_lock(files: TopicFiles) -> Iterator[None]:
    """While it is held, `repair` does not replace the file. Raises Unavailable while `repair` does so."""
    lock = _lock_shared(files)
    try:
        yield
    finally:
        os.close(lock)


def _lock_shared(files: TopicFiles) -> int:
    lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Unavailable(f"{files.topic!r} is being repaired") from None
    return lock


@contextmanager
def opened(files: TopicFiles, *, durable: bool = True) -> Iterator[tuple[int, apsw.Connection]]:
    """The shared lock and a connection, for the caller to keep; both are closed when the body raises.

    Raises Unavailable while `repair` holds the lock alone, and the broker's errors for SQLite's.
    """
    connection = None
    lock = _lock_shared(files)
    try:
        connection = connect(files.db, durable=durable)
        yield lock, connection
    except BaseException as error:
        if connection is not None:
            connection.close(True)
        os.close(lock)
        if isinstance(error, FAULTS):
            raise classify(error, files.topic) from error
        raise


class DurableFile:
    """An open file. `broken`: a commit's outcome is unknown; close it and open again, which verifies.

    A failed sync is never tried again: the kernel may have dropped the pages and would call the next one a success, and
    SQLite would then append behind frames that are not on the disk. `rewrite_wal` after opening makes sure that they are.
    """

    def __init__(self, files: TopicFiles, lock: int, connection: apsw.Connection, marks: HighWaterMarks) -> None:
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
        """Write the write-ahead log again as it is, and sync it: all that readers can see is on the disk from now on.

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

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database, as far as no reader needs it."""
        try:
            self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.BusyError, apsw.LockedError, apsw.FullError):
            return  # another process does it, or there is no room now: the next one will
        except apsw.Error:
            self.broken = True

    def transact(self, work: Callable[[], T], marks: Callable[[T], Mapping[int, int]], slots: int) -> T:
        """Run `work` in one write transaction, durable and marked when this returns.

        `marks` gives from its result the new high-water marks, of `slots` in all. Raises Unavailable, StorageFull
        (nothing was stored), OutcomeUnknown (`broken` is set), or the error of `work` (nothing was stored).
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
