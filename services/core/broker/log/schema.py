"""The SQLite side of a topic file: tables, connection settings, the guarded description of the topic.

Settings, and why. WAL: readers never wait for the writer. synchronous=FULL: a commit is synced before it is answered
(NORMAL is not, in WAL mode). mmap off: a truncated file is then an error, not a SIGBUS. Page 8 KiB: the least CPU and
wait per batch of 100 events of all sizes measured. wal_autocheckpoint=0: the writer checkpoints after it has answered.
"""

import ctypes
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import apsw
import msgspec

from services.core.broker.errors import DataDamaged, UnknownTopic

FORMAT = 1
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
        connection.set_busy_handler(_Patience())
        if create:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.pragma("journal_mode", "wal")
        else:
            _keep_wal(connection)
            if connection.pragma("journal_mode") != "wal":  # one altered bit would make SQLite overlook the log
                raise DataDamaged(path.stem, (), "its head is altered: it does not say that there is a write-ahead log")
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


class _Patience:
    """Waits for another process's transaction: half a millisecond at a time, because one lasts about as long as a sync.

    SQLite's own handler soon sleeps 25 to 100 ms at a time.
    """

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, tries: int) -> bool:
        now = time.monotonic()
        if tries == 0:
            self._since = now
        time.sleep(0.0005 if tries < 100 else 0.005)
        return now - self._since < BUSY_SECONDS


def guard(*fields: object) -> int:
    """A checksum over small fields of one row."""
    return crc32(repr(fields).encode())


def write_meta(connection: apsw.Connection, meta: Meta) -> None:
    """Store the description; the caller has a transaction open."""
    body = msgspec.msgpack.encode(meta)
    connection.execute("INSERT OR REPLACE INTO meta VALUES(1, ?, ?)", (body, crc32(body)))


def read_meta(connection: apsw.Connection, topic: str) -> Meta:
    """The topic's description. Raises UnknownTopic when it was deleted, DataDamaged when it cannot be trusted."""
    row = connection.execute("SELECT body, crc FROM meta WHERE id=1").fetchone()
    if row is None or not isinstance(row[0], bytes) or crc32(row[0]) != row[1]:
        raise DataDamaged(topic, (), "its description (table meta) is missing or altered")
    fields = msgspec.msgpack.decode(row[0])
    if fields.get("format", 0) > FORMAT:
        raise DataDamaged(
            topic,
            (),
            f"written by a newer version (format {fields['format']}, this one reads {FORMAT}). Try: upgrading",
        )
    meta = msgspec.convert(fields, Meta)
    if meta.deleted:
        raise UnknownTopic(f"topic {topic!r} was deleted")
    return meta
