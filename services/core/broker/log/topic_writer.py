"""Appending to one topic: all waiting appends are one transaction with one sync.

Blocking; one thread at a time. Several processes may append to a topic: SQLite's write lock orders them, and a change of
`data_version` shows that another one wrote; only then the ends are read again.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from services.core.broker.errors import DataDamaged, StorageFull, UnknownTopic
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import BLOCK_BYTES, Packed, Row, make_row, merge, row_position
from services.core.broker.log.sqlite_file import checksum, classified, read_meta
from services.core.broker.log.topic_store import COLUMNS, Head, OpenTopic, TopicStore

CHECKPOINT_BYTES = 4 << 20
"""Moved from the write-ahead log to the database each time this much was appended, after the answers went out."""
_RESERVE, _RESERVE_SHARE = 16 << 20, 16
"""Bytes of the disk, or this part of a small one, that appends leave free."""
_TRANSACTION_OVERHEAD = 16 << 10
_INSERT_ROWS = 32
_INSERT = tuple(
    f"INSERT INTO batches({COLUMNS}) VALUES " + ",".join(["(?,?,?,?,?,?,?,?)"] * rows)  # noqa: S608 - constants only
    for rows in range(_INSERT_ROWS + 1)
)


class Fence(NamedTuple):
    """Write only if this writer's newest epoch is older; remembers the epoch in the same transaction."""

    writer: str
    epoch: int


class TopicWriter(OpenTopic):
    """One topic, open for appending. Opening verifies that nothing acknowledged is missing (DataDamaged names it)."""

    def __init__(self, folder: DataFolder, topic: str, clock: WallClock, *, rewrite: bool = False) -> None:
        """rewrite: do `rewrite_wal` first; for those that append for long, and after a failure."""
        self._clock = clock
        super().__init__(TopicStore.open(folder, topic))
        self._heads: list[Head] = []
        self._version: object = None
        self._unsaved = 0
        try:
            with classified(topic):
                if rewrite:
                    self._store.rewrite_wal()
                self._store.check_tail()
        except BaseException:
            self._store.close()
            raise

    @property
    def broken(self) -> bool:
        """Whether a commit failed: close this writer and open another, which verifies."""
        return self._store.broken

    def append(self, blocks: Mapping[int, Sequence[Packed]], fence: Fence | None = None) -> dict[int, list[int]] | None:
        """Store the blocks of each partition in order, durable on return; gives the first offset of each block.

        None, and nothing stored, when the fence's epoch was written before. Raises UnknownTopic (also for a partition
        that does not exist), DataDamaged, Unavailable, StorageFull (nothing stored), OutcomeUnknown.
        """
        size = sum([len(block.data) for part in blocks.values() for block in part])
        self._require_room(size)
        done = self._store.transact(
            lambda: self._insert(blocks, fence),
            lambda done: {} if done is None else done.ends,
            self._store.meta.partitions,
        )
        if done is None:
            return None
        for partition, head in done.heads.items():
            self._heads[partition] = head
        self._unsaved += size + _TRANSACTION_OVERHEAD
        return done.firsts

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the write-ahead log has become long."""
        return self._unsaved >= CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database; between transactions, after their answers."""
        self._unsaved = 0
        self._store.checkpoint()

    def _insert(self, blocks: Mapping[int, Sequence[Packed]], fence: Fence | None) -> "_Done | None":
        self._refresh()
        if fence is not None and not self._advance(fence):
            return None
        rows: list[Row] = []
        firsts: dict[int, list[int]] = {}
        heads: dict[int, Head] = {}
        now = self._clock.now_ms()
        for partition, part in blocks.items():
            if not 0 <= partition < len(self._heads):
                raise UnknownTopic(f"{self._store.topic} has {len(self._heads)} partitions, none numbered {partition}")
            firsts[partition], heads[partition] = _lay_out(rows, partition, self._heads[partition], part, now)
        for start in range(0, len(rows), _INSERT_ROWS):
            some = rows[start : start + _INSERT_ROWS]
            self._store.connection.execute(_INSERT[len(some)], [value for row in some for value in row])
        return _Done(firsts, heads)

    def _refresh(self) -> None:
        """Read the ends again if another connection wrote since, and make sure that they did not go back."""
        store = self._store
        version = store.connection.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return
        try:
            store.meta = read_meta(store.connection, store.topic)
        except UnknownTopic:
            store.broken = True
            raise
        heads = store.heads()
        marks = store.marks.read(len(heads))
        pairs = enumerate(zip(heads, marks, strict=True))
        lost = tuple((p, head.next, mark - 1) for p, (head, mark) in pairs if head.next < mark)
        if lost:
            store.broken = True
            raise DataDamaged(store.topic, lost, "acknowledged records are missing")
        self._heads, self._version = heads, version

    def _advance(self, fence: Fence) -> bool:
        stored = self._store.writer_epoch(fence.writer)
        if stored is not None and fence.epoch <= stored:
            return False
        self._store.connection.execute(
            "INSERT OR REPLACE INTO writers VALUES(?,?,?)", (fence.writer, fence.epoch, checksum(*fence))
        )
        return True

    def _require_room(self, size: int) -> None:
        """Keep the last of the disk for commits and leases, so that consumers go on while appends are refused."""
        disk = os.statvfs(self._store.files.db.parent)
        free = disk.f_bavail * disk.f_frsize
        reserve = min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)
        if free < reserve + 2 * size:
            raise StorageFull(
                f"{self._store.topic}: disk full ({free:,} bytes left), nothing was stored. Try: freeing space"
            )


class _Done(NamedTuple):
    firsts: dict[int, list[int]]
    heads: dict[int, Head]

    @property
    def ends(self) -> dict[int, int]:
        return {partition: head.next for partition, head in self.heads.items()}


def _lay_out(rows: list[Row], partition: int, head: Head, part: Sequence[Packed], now: int) -> tuple[list[int], Head]:
    """Add the rows of one partition's blocks; gives each block's first offset and the new head."""
    firsts = []
    start, end, top_ts, stored_ms, total = head
    stored_ms = max(stored_ms, now)
    pending: list[Packed] = []
    size = 0
    for index, block in enumerate(part):
        firsts.append(end + sum([p.length for p in pending]))
        pending.append(block)
        size += len(block.data)
        if index + 1 == len(part) or size + len(part[index + 1].data) > BLOCK_BYTES:
            whole = merge(pending)
            top_ts = max(top_ts, whole.max_ts)
            total += size
            rows.append(make_row(row_position(partition, end), whole, top_ts, stored_ms, total))
            end += whole.length
            pending, size = [], 0
    return firsts, Head(start, end, top_ts, stored_ms, total)
