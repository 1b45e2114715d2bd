"""Removing old records: when, which, and by which time. Safe while others read and write.

Every minute one of the processes that have the folder open applies retention to all topics. Age counts from the time at which
the log stored a record, not from the event's time: a replay of last year's events must not vanish at once. Unread records of a
group are kept for twice as long, not for ever: a group that is away must not fill the disk. A transform has no group, because its
position is in Spark's checkpoint, so its unread records get no more than the plain retention. Bytes count per partition, read or
not, as Kafka's retention.bytes does. The newest row of a partition always stays. The file does not shrink: SQLite reuses freed
pages. A compacted topic loses no record by its age: `compaction`.

The time that judges ages cannot run away with a wrong clock: a clock that is days ahead would delete days of records early. It
follows the system's clock, but runs at most twice as fast as CLOCK_BOOTTIME while the log is in use. Its state is in
`retention.clock`. Without that file it begins at most a day after the newest stored record. After a reboot, or on another
machine, it advances by at most a day at once: the time without the log in use is not known. So it is late after the machine was
off, which keeps records for longer, and catches up. No other source of time is asked: it could be wrong in the same way.
"""

import asyncio
import fcntl
import os
import random
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from zlib import crc32

import msgspec
import structlog

from services.core.broker.errors import BrokerError, DataDamaged, StorageFull, UnknownTopic
from services.core.broker.log.clock import WallClock, boot_id, boot_ms
from services.core.broker.log.compaction import compact
from services.core.broker.log.data_folder import DataFolder, locked
from services.core.broker.log.groups import first_unread
from services.core.broker.log.row_format import MAX_OFFSET, row_position
from services.core.broker.log.sqlite_file import classified
from services.core.broker.log.topic_store import Head, TopicStore, first_row_from
from services.core.broker.log.topics import topic_names
from services.core.metrics import LOG_COMPACTED, LOG_NOT_COMPACTED, LOG_RETENTION_BEHIND

_DELETE_ROWS = 64
"""Per transaction, so that appends never wait long for the write lock."""
_PASS_S = 60.0
"""How long `retention_suspended` waits for a pass under way."""
_UNREAD_FACTOR = 2
"""Unread records of a group are kept this many times as long as others."""
_REASONS: dict[type[BrokerError], str] = {DataDamaged: "damaged", StorageFull: "storage_full"}

log = structlog.get_logger()


async def run_retention(folder: DataFolder, clock: WallClock, interval: float) -> None:
    """Every `interval` seconds apply each topic's retention, unless another process does. Runs until cancelled, and then ends
    a pass under way early: afterwards nothing uses the folder."""
    await asyncio.sleep(interval * random.random())  # noqa: S311 - spreads the processes of a fleet, no secret
    stop = threading.Event()
    while True:
        applying = asyncio.ensure_future(asyncio.to_thread(apply_retention_once, folder, clock, stop))
        try:
            await asyncio.shield(applying)
        finally:
            stop.set()
            await asyncio.wait({applying})
        stop.clear()
        await asyncio.sleep(interval)


def apply_retention_once(folder: DataFolder, clock: WallClock, stop: threading.Event | None = None) -> bool:
    """One pass; False when another process does one, or when it failed as a whole. What fails is logged and tried again at the
    next pass. stop: when it is set, the rest is left to the next pass."""
    try:
        fd = os.open(folder.root / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _enforce_all(folder, clock, stop or threading.Event())
        finally:
            os.close(fd)
    except BlockingIOError:
        return False
    except OSError as error:  # e.g. no file descriptor is left
        log.warning("retention_failed", folder=str(folder.root), error=str(error))
        return False
    return True


def retention_suspended(folder: DataFolder) -> AbstractContextManager[None]:
    """No process applies retention meanwhile. Blocking; waits a minute for a pass under way. Raises Unavailable, OSError."""
    refusal = f"{folder.root}: retention, or another backup, is at work. Try: again in a few minutes"
    return locked(folder.root / "keeper.lock", _PASS_S, refusal)


def _enforce_all(folder: DataFolder, clock: WallClock, stop: threading.Event) -> None:
    now_ms, system_ms = read_clock(folder, clock), clock.now_ms()
    for topic in topic_names(folder):
        if stop.is_set():
            return
        try:
            removed = enforce(folder, topic, now_ms, stop, system_ms=system_ms)
        except UnknownTopic:  # it was deleted meanwhile, or is not there yet
            continue
        except BrokerError as error:
            log.warning("retention_failed", topic=topic, error=str(error))
            continue
        if removed:
            log.info("retention_removed", topic=topic, records=sum(removed.values()))


def enforce(
    folder: DataFolder,
    topic: str,
    now_ms: int,
    stop: threading.Event | None = None,
    *,
    system_ms: int | None = None,
) -> dict[int, int]:
    """Apply the topic's retention, or compact it; gives the number of removed records of each partition that lost any.

    now_ms: the time of `read_clock`. stop: as in `apply_retention_once`. system_ms: of the system's clock; None: the same.
    Raises UnknownTopic, DataDamaged, Unavailable; of a compacted topic, all partitions that can be compacted are then.
    """
    removed: dict[int, int] = {}
    with closing(TopicStore.open(folder, topic)) as store, classified(topic):
        if store.meta.retention_ms is None and store.meta.retention_bytes is None and not store.meta.compact:
            return removed
        unread = first_unread(folder, topic, store.meta, store.groups())
        if store.meta.compact:
            return _compact_all(store, unread, now_ms, stop, system_ms)
        for partition, head in enumerate(store.heads()):
            start = _find_start(store, partition, head, unread[partition], now_ms)
            if start > head.start:
                removed[partition] = start - head.start
                remove_before(store, partition, start, stop)
    return removed


def _compact_all(
    store: TopicStore,
    unread: Sequence[int | None],
    now_ms: int,
    stop: threading.Event | None,
    system_ms: int | None,
) -> dict[int, int]:
    """Raises the error of the first partition that cannot be compacted, after the others."""
    removed: dict[int, int] = {}
    failed: list[BrokerError] = []
    for partition in range(store.meta.partitions):
        try:
            count = compact(store, partition, unread[partition], now_ms, stop, system_ms=system_ms)
        except BrokerError as error:
            LOG_NOT_COMPACTED.labels(store.topic, _REASONS.get(type(error), "unavailable")).inc()
            log.warning("partition_not_compacted", topic=store.topic, partition=partition, error=str(error))
            failed.append(error)
            continue
        if count:
            removed[partition] = count
            LOG_COMPACTED.labels(store.topic).inc(count)
    if failed:
        raise failed[0]
    return removed


def remove_before(store: TopicStore, partition: int, start: int, stop: threading.Event | None = None) -> None:
    """Remove all records below offset `start`. Readers see it at once; the rows are deleted in small transactions, by the next
    call that removes more where `stop` is set."""

    def advance() -> None:
        head = store.heads()[partition]
        store.set_partition(partition, max(head.start, min(start, head.next)), head.next)

    store.transact(advance, lambda _: {}, 0)
    while store.transact(lambda: _delete_some(store, partition, start), lambda _: {}, 0):
        if stop is not None and stop.is_set():
            return


def _find_start(store: TopicStore, partition: int, head: Head, unread: int | None, now_ms: int) -> int:
    """The first offset that retention keeps. unread: the first one that a group has still to read, if any."""
    start = head.start
    if (age := store.meta.retention_ms) is not None:
        old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - age)
        too_old = first_row_from(store.connection, partition, head, "stored_ms", now_ms - _UNREAD_FACTOR * age)
        start = max(start, too_old, old if unread is None else min(old, unread))
    if store.meta.retention_bytes is not None:
        least = head.total - store.meta.retention_bytes
        start = max(start, first_row_from(store.connection, partition, head, "total", least))
    last = store.connection.execute(
        "SELECT max(pos) FROM batches WHERE pos BETWEEN ? AND ?",
        (row_position(partition, 0), row_position(partition, MAX_OFFSET)),
    ).fetchone()
    return min(start, head.start if last is None or not isinstance(last[0], int) else last[0] & MAX_OFFSET)


def _delete_some(store: TopicStore, partition: int, start: int) -> int:
    """Delete a few rows that are wholly below `start`; gives their number."""
    return len(
        store.connection.execute(
            "DELETE FROM batches WHERE pos IN (SELECT pos FROM batches WHERE pos BETWEEN ?1 AND ?2 AND pos + count <= ?2"
            " ORDER BY pos LIMIT ?3) RETURNING pos",
            (row_position(partition, 0), row_position(partition, start), _DELETE_ROWS),
        ).fetchall()
    )


_FIRST_JUMP_MS = 24 * 3_600_000
_LATE_MS = 3_600_000
"""From this difference on there is a warning, once in this time."""


class _State(msgspec.Struct, frozen=True):
    """The time at a moment of a boot. warned_ms: the moment of the last warning in that boot."""

    now_ms: int
    boot_ms: int
    boot_id: str
    warned_ms: int | None = msgspec.field(default=None, name="told_ms")


def read_clock(folder: DataFolder, clock: WallClock) -> int:
    """The time for retention, milliseconds since the epoch; never later than `clock`. Stores the time for the next call.

    For one process at a time. When it cannot be stored, the next call goes on from the time before.
    """
    system, boot, moment = clock.now_ms(), boot_id(), boot_ms()
    file = folder.root / "retention.clock"
    last = _read(file)
    warned = None
    if last is None:
        limit = _newest_stored(folder, system) + _FIRST_JUMP_MS
    elif last.boot_id == boot:
        limit = last.now_ms + 2 * max(0, moment - last.boot_ms)
        warned = last.warned_ms
    else:
        limit = last.now_ms + min(moment, _FIRST_JUMP_MS)
    now = min(system, limit)
    behind = system - now
    LOG_RETENTION_BEHIND.set(behind / 1000)
    if behind > _LATE_MS and (warned is None or moment - warned > _LATE_MS):
        warned = moment
        log.warning(
            "retention_clock_behind",
            folder=str(folder.root),
            hours=round(behind / 3_600_000, 1),
            hint="the system's clock is ahead of retention's time. Until that time has caught up, records are kept for longer. "
            "Try: nothing, if the machine was off for so long; else set the clock",
        )
    reached = now if last is None else max(now, min(last.now_ms, limit))
    _write(file, _State(reached, moment, boot, warned))
    return now


def _newest_stored(folder: DataFolder, otherwise: int) -> int:
    """The time at which the newest record of any topic was stored; `otherwise` when there is none."""
    newest = []
    for topic in topic_names(folder):
        with suppress(BrokerError), classified(topic), closing(TopicStore.open(folder, topic)) as store:
            newest += [head.stored_ms for head in store.heads() if head.stored_ms]
    return max(newest, default=otherwise)


def _read(file: Path) -> _State | None:
    """None when the file is missing or damaged."""
    try:
        crc, _, body = file.read_bytes().partition(b" ")
        return msgspec.json.decode(body, type=_State) if int(crc) == crc32(body) else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _write(file: Path, state: _State) -> None:
    """Not synced: after a power cut the time is only late."""
    body = msgspec.json.encode(state)
    draft = file.with_suffix(".clock-new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"%d %s" % (crc32(body), body))
        finally:
            os.close(fd)
        draft.rename(file)
    except OSError as error:
        log.warning("retention_clock_not_written", file=str(file), error=str(error))
