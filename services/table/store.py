"""The local file of one table: the newest event of each key, and the positions behind the events that it has. Blocking.

SQLite, WAL, synchronous=NORMAL: a power cut may lose the last transactions, never half of one, and the stream has their events.
Rows and positions change in one transaction. Each row has a checksum. A file that is damaged, or of another version, is dropped
and built again from the stream (`Rebuild`).

One writer, in a thread; reads are on another connection, in the event loop: a row of a warm file takes microseconds, and a
thread for each would take ten times as long.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import apsw
import msgspec

FORMAT = 1
_TABLES = """
CREATE TABLE meta(id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE positions(p INTEGER PRIMARY KEY, next INTEGER NOT NULL, fresh_ms INTEGER NOT NULL);
CREATE TABLE rows(key BLOB PRIMARY KEY, value BLOB NOT NULL, media TEXT, p INTEGER NOT NULL, o INTEGER NOT NULL,
                  crc INTEGER NOT NULL) WITHOUT ROWID;
"""
_SETTINGS = (
    "PRAGMA synchronous=NORMAL; PRAGMA mmap_size=0; PRAGMA cache_size=-%d; PRAGMA cell_size_check=ON;"
    "PRAGMA wal_autocheckpoint=2000; PRAGMA journal_size_limit=67108864; PRAGMA trusted_schema=OFF"
)
_DAMAGE = (apsw.CorruptError, apsw.NotADBError, apsw.SQLError)
_WRITE_CACHE_KB, _READ_CACHE_KB = 16_384, 32_768
_UPSERT = "INSERT OR REPLACE INTO rows VALUES(?,?,?,?,?,?)"
_SELECT = "SELECT key, value, media, p, o, crc FROM rows WHERE "
_POINT = _SELECT + "key=?"


class Rebuild(Exception):
    """The file cannot be used, or no longer belongs to the stream. reason: a word for the metric. The text is for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Meta(msgspec.Struct, frozen=True):
    """incarnation: of the topic; differs when it is deleted and created again."""

    format: int
    stream: str
    incarnation: str


class Position(NamedTuple):
    """Of a partition. next: the offset behind the last record that was read. fresh_ms: when that was the end of the partition, or
    when the reading from the beginning began, ms since the epoch."""

    next: int
    fresh_ms: int


class Row(NamedTuple):
    """The newest event of a key. media: None for JSON."""

    key: bytes
    value: bytes
    media: str | None
    partition: int
    offset: int


class Change(NamedTuple):
    """An event of the stream. value: None for a tombstone."""

    key: bytes
    value: bytes | None
    media: str | None
    offset: int


class Store:
    """An open file of one table."""

    def __init__(self, path: Path, meta: Meta) -> None:
        """Open the file, or make a new one. Raises Rebuild when there is one that cannot be used."""
        self.path, self.meta = path, meta
        try:
            self._writer = _connect(path, _WRITE_CACHE_KB)
            if not list(self._writer.execute("SELECT 1 FROM sqlite_master LIMIT 1")):
                self._create()
            self._check()
            self._reader = _connect(path, _READ_CACHE_KB)
            self._may_begin = False
        except Rebuild:
            self._writer.close(True)
            raise
        except (*_DAMAGE, msgspec.MsgspecError) as error:
            raise _damaged(path, error) from error

    @staticmethod
    def remove(path: Path) -> None:
        """Remove the file, so that the next `Store` makes a new one."""
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)

    def positions(self) -> dict[int, Position]:
        """By partition. Raises Rebuild."""
        with _checked(self.path):
            rows: list[Any] = self._reader.execute("SELECT p, next, fresh_ms FROM positions").fetchall()
        return {p: Position(offset, fresh) for p, offset, fresh in rows}

    def apply(self, partition: int, changes: Iterable[Change], position: Position) -> None:
        """Store the changes, in order, and the position behind them, in one transaction. For the writer's thread."""
        newest: dict[bytes, Change] = {change.key: change for change in changes}
        upserts = [
            (key, value, media, partition, offset, _checksum(key, value, media, partition, offset))
            for key, value, media, offset in newest.values()
            if value is not None
        ]
        deletes = [(change.key,) for change in newest.values() if change.value is None]
        with _checked(self.path), self._writer:
            self._writer.executemany(_UPSERT, upserts)
            self._writer.executemany("DELETE FROM rows WHERE key=?", deletes)
            self._writer.execute("INSERT OR REPLACE INTO positions VALUES(?,?,?)", (partition, *position))

    def mark_fresh(self, positions: Mapping[int, Position]) -> None:
        """Store positions that changed only in time. For the writer's thread."""
        with _checked(self.path), self._writer:
            rows = [(p, *position) for p, position in positions.items()]
            self._writer.executemany("INSERT OR REPLACE INTO positions VALUES(?,?,?)", rows)

    def end_read_transaction(self, *, allow_next: bool) -> None:
        """End the transaction of point reads, if one is open. allow_next: whether the next point read may begin another one.

        Point reads share a transaction, because to begin and end one takes longer than a warm read. While rows are written there
        must be no such transaction: it would hide the new rows, and would keep SQLite from emptying its WAL.
        """
        if self._reader.in_transaction:
            self._reader.execute("COMMIT")
        self._may_begin = allow_next

    def get(self, key: bytes) -> Row | None:
        """The row of a key. Raises Rebuild."""
        try:
            if self._may_begin:
                self._may_begin = False
                self._reader.execute("BEGIN")
            row = self._reader.execute(_POINT, (key,)).fetchone()
        except _DAMAGE as error:
            raise _damaged(self.path, error) from error
        return None if row is None else self._intact(row)

    def scan(self, prefix: bytes, after: bytes | None, limit: int, max_bytes: int) -> list[Row]:
        """Rows whose keys begin with `prefix` and are greater than `after`, in the order of their bytes: at most `limit`, and, if
        there are more than one, about `max_bytes`. Raises Rebuild."""
        condition, bindings = "key >= ?1", [max(prefix, after or b"")]
        if after is not None and after >= prefix:
            condition = "key > ?1"
        if (end := _behind(prefix)) is not None:
            condition += " AND key < ?2"
            bindings.append(end)
        found: list[Row] = []
        size = 0
        with _checked(self.path):
            for row in self._reader.execute(f"{_SELECT}{condition} ORDER BY key LIMIT {limit}", bindings):
                found.append(self._intact(row))
                size += len(found[-1].key) + len(found[-1].value)
                if size >= max_bytes:
                    break
        return found

    def count(self) -> int:
        """The number of keys. Reads the whole index: for the writer's thread, rarely."""
        with _checked(self.path):
            rows: list[Any] = self._writer.execute("SELECT count(*) FROM rows").fetchall()
        count: int = rows[0][0]
        return count

    def copy_to(self, path: Path) -> None:
        """A copy of the file as of one moment. For a thread; others read and write meanwhile."""
        with _checked(self.path):
            connection = _connect(self.path, _WRITE_CACHE_KB)
            try:
                connection.execute("VACUUM INTO ?", (str(path),))
            finally:
                connection.close()

    def close(self) -> None:
        for connection in (self._reader, self._writer):
            connection.close(True)

    def _create(self) -> None:
        with self._writer:
            self._writer.execute(_TABLES)
            self._writer.execute("INSERT INTO meta VALUES(1, ?)", (msgspec.json.encode(self.meta),))

    def _check(self) -> None:
        rows: list[Any] = self._writer.execute("SELECT body FROM meta").fetchall()
        found = msgspec.json.decode(rows[0][0], type=Meta) if rows else None
        if found is None or found.format != FORMAT or found.stream != self.meta.stream:
            raise Rebuild("another_format", f"{self.path} has another format, or is of another stream")
        if found.incarnation != self.meta.incarnation:
            raise Rebuild("topic_created_again", f"topic {self.meta.stream} was deleted and created again")

    def _intact(self, row: tuple[bytes, bytes, str | None, int, int, int]) -> Row:
        key, value, media, partition, offset, crc = row
        try:
            if crc == _checksum(key, value, media, partition, offset):
                return Row(key, value, media, partition, offset)
        except TypeError:
            pass
        raise Rebuild("damaged_file", f"a row of {self.path} is altered")


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Turn SQLite's signs of damage into Rebuild."""
    try:
        yield
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Rebuild:
    return Rebuild("damaged_file", f"{path} is damaged ({error})")


def _connect(path: Path, cache_kb: int) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5000)
    connection.execute("PRAGMA page_size=8192")
    connection.pragma("journal_mode", "wal")
    connection.execute(_SETTINGS % cache_kb).fetchall()
    return connection


def _checksum(key: bytes, value: bytes, media: str | None, partition: int, offset: int) -> int:
    return crc32(value, crc32(key, crc32(f"{partition}:{offset}:{media}:{len(key)}".encode())))


def _behind(prefix: bytes) -> bytes | None:
    """The least key that is greater than all with this prefix; None: there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None
