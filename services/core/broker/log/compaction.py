"""Compaction of topics: it removes records that a newer one of the same key has replaced. Blocking.

The keeper (`retention`) runs it each minute, one process at a time. The promises:

- The newest record of each key stays, and so does every record without a key. The order and the offsets of what stays do not
  change.
- A record is removed only when it is older than the topic's retention, and when every group has read it or it is older than twice
  that. So a group sees of a compacted topic what it would see of any other topic.
- A **tombstone** (a record without value) removes the older records of its key. It stays for the retention after they are gone:
  who began to read before that, and reads faster than the retention, sees it. That is counted from the system's time to the
  retention's, which is never later: the retention's may run twice as fast while it catches up, and would halve it.
- The last row of a partition stays as it is, so the end never moves back.

A pass reads the part of a partition that is not compacted yet (**dirty**), at most _MAX_KEYS keys at once, and remembers the
newest offset of each key. Then it goes over the rows from the beginning. Neighbours become one row that spans the offsets of
all of them (`row_format`). Each such change is one durable transaction: rows before it are compacted, rows behind it are as
they were, and a reader sees either state. A pass that was cut short, by a kill or the stop, begins again at the beginning and
finds less to do.

A pass begins when the dirty part is half as large as the compacted part, at the latest when a record in it is older than twice
the retention, or when tombstones are due.
"""

import threading
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from services.core.broker.errors import DataDamaged, Unavailable
from services.core.broker.log.row_format import (
    BLOCK_BYTES,
    MAX_OFFSET,
    Block,
    Row,
    make_row,
    pack_span,
    read_row,
    row_position,
)
from services.core.broker.log.sqlite_file import COMPACTION_TABLE, FAULTS, checksum, fetch, is_damage
from services.core.broker.log.topic_store import (
    COLUMNS,
    Head,
    TopicStore,
    behind_accepted,
    first_row_from,
    next_intact,
)

_MAX_KEYS = 100_000
"""Keys of one pass, about 20 MB: the keeper may be any service."""
_PAGE_ROWS = 16
_MERGED_ROWS = 64
"""Rows that become one at most, so that an append never waits long for the write lock."""
_CHECKPOINT_BYTES = 4 << 20
_DIRTY_SHARE = 2
_LATEST = 2
"""A dirty record is compacted at the latest at this many times the retention."""
_UNREAD_FACTOR = 2
"""A record that a group has still to read is kept for this many times the retention, as in `retention`."""


class Progress(NamedTuple):
    """How far a partition is compacted. clean: the offset behind the compacted part. kept: bytes of that part.

    due_ms: when the first of its tombstones may go; None: it has none. Without a stored one, or with an altered one, a pass
    begins from the beginning.
    """

    clean: int = 0
    kept: int = 0
    due_ms: int | None = None


def compact(
    store: TopicStore,
    partition: int,
    unread: int | None,
    now_ms: int,
    stop: threading.Event | None = None,
    *,
    system_ms: int | None = None,
) -> int:
    """Compact one partition; gives the number of removed records. unread: the first offset that a group has still to read.

    now_ms: the retention's time. system_ms: the system's; None: the same. For one process at a time. stop: when it is set, the
    rest is left to the next pass. Raises DataDamaged, Unavailable, StorageFull, OutcomeUnknown; what was done until then is
    durable.
    """
    head = store.heads()[partition]
    age = store.meta.retention_ms or 0
    progress = _read_progress(store, partition)
    limit = _find_limit(store, partition, head, unread, now_ms, age)
    is_due = progress.due_ms is not None and progress.due_ms <= now_ms
    if not is_due and not _is_dirty(store, partition, head, progress, limit, now_ms - _LATEST * age):
        return 0
    newest, end = _find_newest(store, partition, max(head.start, progress.clean), max(limit, progress.clean))
    work = _Pass(store, partition, newest, now_ms, age, max(now_ms, system_ms or 0))
    for rows in _runs(store, partition, head.start, end):
        if stop is not None and stop.is_set():
            return work.removed
        work.rewrite(rows)
    _write_progress(store, partition, Progress(end, work.kept, work.due_ms))
    return work.removed


class _Pass:
    """One pass over a partition. newest: the newest offset by the digest of the key, of the dirty part. since: from when on (ms)
    tombstones count that are alone now."""

    def __init__(
        self, store: TopicStore, partition: int, newest: dict[bytes, int], now_ms: int, age: int, since: int
    ) -> None:
        self._store, self._partition, self._newest, self._now, self._age = store, partition, newest, now_ms, age
        self._since = since
        self.removed, self.kept = 0, 0
        self.due_ms: int | None = None
        self._unsaved = 0

    def rewrite(self, rows: list[Row]) -> None:
        """Replace these consecutive rows by one, in one transaction, unless nothing changes."""
        block = self._keep(rows)
        first, length = rows[0].first, rows[-1].end - rows[0].first
        packed = pack_span(first, length, block)
        self.kept += len(packed.data)
        if len(rows) == 1 and packed.data == rows[0].data:
            return
        last = rows[-1]
        row = make_row(rows[0].pos, packed, last.top_ts, last.stored_ms, last.total)
        self._store.transact(lambda: self._replace(rows, row), lambda _: {}, 0)
        self._unsaved += len(row.data)
        if self._unsaved >= _CHECKPOINT_BYTES:
            self._unsaved = 0
            self._store.checkpoint()

    def _keep(self, rows: list[Row]) -> Block:
        offsets: list[int] = []
        records = []
        cleaned: dict[int, int] = {}
        for row in rows:
            block = _intact(self._store, self._partition, row)
            for offset, record in zip(block.offsets, block.records, strict=True):
                if record.key is not None:
                    if self._newest.get(_digest(record.key), -1) > offset:
                        continue
                    if record.value is None:
                        since = block.cleaned.get(offset, self._since)
                        if self._now - since >= self._age and offset in block.cleaned:
                            continue
                        cleaned[offset] = since
                        due = since + self._age
                        self.due_ms = due if self.due_ms is None else min(self.due_ms, due)
                offsets.append(offset)
                records.append(record)
            self.removed += len(block.records)
        self.removed -= len(records)
        return Block(offsets, records, cleaned)

    def _replace(self, rows: list[Row], row: Row) -> None:
        connection = self._store.connection
        connection.execute("DELETE FROM batches WHERE pos BETWEEN ? AND ?", (rows[0].pos, rows[-1].pos))
        if connection.changes() != len(rows):
            raise Unavailable(f"{self._store.topic}: its rows changed during their compaction")
        connection.execute(f"INSERT INTO batches({COLUMNS}) VALUES(?,?,?,?,?,?,?,?)", row)


def _find_limit(store: TopicStore, partition: int, head: Head, unread: int | None, now_ms: int, age: int) -> int:
    """The offset of a row: rows before it are wholly old and read. At most the last row of the partition, which stays."""
    old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - age)
    too_old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - _UNREAD_FACTOR * age)
    limit = old if unread is None else min(old, max(too_old, unread))
    bounds = row_position(partition, 0), row_position(partition, limit)
    ((last,),) = fetch(store.connection, "SELECT max(pos) FROM batches WHERE pos BETWEEN ? AND ?", bounds)
    return head.start if last is None else last & MAX_OFFSET


def _is_dirty(store: TopicStore, partition: int, head: Head, progress: Progress, limit: int, latest_ms: int) -> bool:
    """Whether enough is dirty for a pass. latest_ms: rows that were stored until then do not wait."""
    if limit <= progress.clean:
        return False
    bounds = row_position(partition, max(progress.clean, head.start)), row_position(partition, limit)
    sql = "SELECT min(stored_ms), sum(length(data)) FROM batches WHERE pos >= ? AND pos < ?"
    ((oldest, size),) = fetch(store.connection, sql, bounds)
    return size is not None and (size * _DIRTY_SHARE >= progress.kept or oldest <= latest_ms)


def _find_newest(store: TopicStore, partition: int, start: int, limit: int) -> tuple[dict[bytes, int], int]:
    """The newest offset of each key in the rows from `start` on, and the offset behind the last of these rows."""
    newest: dict[bytes, int] = {}
    end = start
    for row in _rows(store, partition, start, limit):
        block = _intact(store, partition, row)
        for offset, record in zip(block.offsets, block.records, strict=True):
            if record.key is not None:
                newest[_digest(record.key)] = offset
        end = row.end
        if len(newest) >= _MAX_KEYS:
            break
    return newest, end


def _runs(store: TopicStore, partition: int, start: int, end: int) -> Iterator[list[Row]]:
    """The rows of a partition in order, as runs of neighbours that together are no larger than a row should be. A range that a
    repair has recorded as lost is between two runs: no row spans it."""
    run: list[Row] = []
    size = 0
    for row in _rows(store, partition, start, end):
        is_full = size + len(row.data) > BLOCK_BYTES or len(run) == _MERGED_ROWS
        if run and (is_full or run[-1].end != row.first):
            yield run
            run, size = [], 0
        run.append(row)
        size += len(row.data)
    if run:
        yield run


def _rows(store: TopicStore, partition: int, start: int, end: int) -> Iterator[Row]:
    """The rows that begin at offsets `start <= offset < end`. Between two pages they may be replaced by what they yielded.

    Raises DataDamaged where one is missing, unless a repair has recorded it as lost: a row that spanned it would hide the loss.
    """
    accepted = fetch(store.connection, "SELECT first, last FROM gaps WHERE p=? ORDER BY first", (partition,))
    at = row_position(partition, start)
    expected, count = behind_accepted(accepted, start), _PAGE_ROWS
    while True:
        try:
            page = fetch(
                store.connection,
                f"SELECT {COLUMNS} FROM batches WHERE pos >= ? AND pos < ? ORDER BY pos LIMIT {count}",  # noqa: S608
                (at, row_position(partition, end)),
            )
        except FAULTS as error:
            if not is_damage(error):
                raise
            if count == 1:
                behind = next_intact(store.connection, partition, expected, end)
                raise _damaged(store, partition, expected, behind - 1) from error
            count = 1  # to name the row
            continue
        for row in map(Row._make, page):
            if row.first > expected:
                raise _damaged(store, partition, expected, row.first - 1)
            yield row
            at = row_position(partition, row.end)
            expected = behind_accepted(accepted, row.end)
        if len(page) < count:
            return


def _intact(store: TopicStore, partition: int, row: Row) -> Block:
    block = read_row(row)
    if block is None:
        raise _damaged(store, partition, row.first, max(row.first, row.end - 1))
    return block


def _damaged(store: TopicStore, partition: int, first: int, last: int) -> DataDamaged:
    lost = ((partition, first, last),)
    return DataDamaged(store.topic, lost, "it is not compacted. Try: penstock log verify, then penstock log repair")


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


def _read_progress(store: TopicStore, partition: int) -> Progress:
    if not fetch(store.connection, "SELECT 1 FROM sqlite_master WHERE type='table' AND name='compaction'"):
        return Progress()
    rows = fetch(store.connection, "SELECT clean, kept, due_ms, crc FROM compaction WHERE p=?", (partition,))
    if not rows or checksum(partition, *rows[0][:3]) != rows[0][3]:
        return Progress()
    return Progress(*rows[0][:3])


def _write_progress(store: TopicStore, partition: int, progress: Progress) -> None:
    def write() -> None:
        store.connection.execute(COMPACTION_TABLE)
        row = (partition, *progress, checksum(partition, *progress))
        store.connection.execute("INSERT OR REPLACE INTO compaction VALUES(?,?,?,?,?)", row)

    store.transact(write, lambda _: {}, 0)
