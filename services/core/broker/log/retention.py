"""Removing old records. Blocking; safe while others read and write.

Age counts from when the log stored a record, not from the event's own time: a replay of last year's events must not
vanish at once. What a group has still to read is kept for twice as long; nobody who is away holds a disk for ever. Bytes
count per partition, as Kafka's retention.bytes does, whoever has read them. The newest row of a partition always stays. The
file does not shrink: SQLite reuses the freed pages, so it stays at the size of its fullest moment.
"""

from services.core.broker.log.faults import classified
from services.core.broker.log.frames import MAX_OFFSET, place
from services.core.broker.log.groups import first_unread
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.search import first_row_from
from services.core.broker.log.store import Head, Store

_DELETE_ROWS = 64
"""Per transaction, so that appends never wait long for the write lock."""


_UNREAD_FACTOR = 2
"""How many times as long as other records those are kept that a group has still to read."""


def enforce(folder: DataFolder, topic: str, now_ms: int) -> dict[int, int]:
    """Apply the topic's retention; gives how many records left each partition, where any did.

    now_ms: the time to judge ages by (`retention_clock`). Raises UnknownTopic, DataDamaged, Unavailable.
    """
    store = Store.open(folder, topic)
    removed = {}
    try:
        if store.meta.retention_ms is None and store.meta.retention_bytes is None:
            return {}
        with classified(topic):
            unread = first_unread(folder, topic, store.meta, store.groups())
            for partition, head in enumerate(store.heads()):
                start = _keep_from(store, partition, head, unread[partition], now_ms)
                if start > head.start:
                    removed[partition] = start - head.start
                    cut(store, partition, start)
    finally:
        store.close()
    return removed


def cut(store: Store, partition: int, start: int) -> None:
    """Remove all records below offset `start`, which readers see at once; their rows follow in small transactions."""

    def advance() -> None:
        head = store.heads()[partition]
        store.set_partition(partition, max(head.start, min(start, head.next)), head.next)

    store.transact(advance, lambda _: {}, 0)
    while store.transact(lambda: _delete_some(store, partition, start), lambda _: {}, 0):
        pass


def _keep_from(store: Store, partition: int, head: Head, unread: int | None, now_ms: int) -> int:
    """The offset that retention keeps first. unread: the first that a group has still to read, if any."""
    start = head.start
    if (age := store.meta.retention_ms) is not None:
        old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - age)
        too_old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - _UNREAD_FACTOR * age)
        start = max(start, too_old, old if unread is None else min(old, unread))
    if store.meta.retention_bytes is not None:
        least = head.total - store.meta.retention_bytes
        start = max(start, first_row_from(store.connection, partition, head, "total", least))
    last = store.connection.execute(
        "SELECT max(pos) FROM batches WHERE pos BETWEEN ? AND ?", (place(partition, 0), place(partition, MAX_OFFSET))
    ).fetchone()
    return min(start, head.start if last is None or not isinstance(last[0], int) else last[0] & MAX_OFFSET)


def _delete_some(store: Store, partition: int, start: int) -> int:
    """Delete a few rows that lie wholly below `start`; how many."""
    return len(
        store.connection.execute(
            "DELETE FROM batches WHERE pos IN (SELECT pos FROM batches WHERE pos BETWEEN ?1 AND ?2 AND pos + count <= ?2"
            " ORDER BY pos LIMIT ?3) RETURNING pos",
            (place(partition, 0), place(partition, start), _DELETE_ROWS),
        ).fetchall()
    )
