"""Follows one stream into its table: reads each partition to its end, again and again, and wakes those who wait for it.

What goes wrong is never silent. A topic that was created again, a position that the topic does not have, a damaged file, or an
absence for longer than tombstones are kept: the table is built again from the beginning, with a line in the log and a count. A
damaged record of the stream cannot be read again: the partition stops there, the table is not ready and says so, until an
operator repairs the stream. Where the broker knows the end of the damage (`Batch.damage`), it is counted and passed over.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import apsw
import msgspec
import structlog

from services.core import metrics
from services.core.backoff import Backoff
from services.core.broker.contract import Broker, PartitionRange
from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Batch, Record
from services.core.event import CONTENT_TYPE
from services.core.offset_token import mark_of
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Turns
from services.core.times import now_ms
from services.table.store import FORMAT, Change, Meta, Position, Rebuild, Store

log = structlog.get_logger()

IDLE_S = 0.015
READ_RECORDS = 2000
CHECK_EVERY_S = 1.0
RECENT_BYTES = 4 << 20
_MAX_WAITERS = 2000
_BASE_WAIT, _MAX_WAIT = 0.1, 5.0
_JSON = msgspec.json.Decoder(msgspec.Raw).decode
_OCTETS = "application/octet-stream"
Result = TypeVar("Result")
Begin = Callable[[Path, Meta, Mapping[int, PartitionRange], int, Callable[[], None]], Awaitable[None]]


class Applied(NamedTuple):
    """A piece of a partition that is in the table: `start <= offset < next`."""

    partition: int
    start: int
    next: int
    changes: Sequence[Change]
    size: int


class Follower:
    """One stream. max_age_ms: how long its tombstones are kept. thread: for what blocks. begin: puts the file of another replica
    in place of one that is not there, once; see `SnapshotSource.begin`."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        max_age_ms: int,
        folder: Path,
        thread: ThreadPoolExecutor,
        begin: Begin | None = None,
    ) -> None:
        self.stream = stream
        self.max_age_ms = max_age_ms
        self.store: Store | None = None
        """None until the table is open, and while it is built again after damage."""
        self.topic = ""
        """The mark of the topic in tokens, while the table is open."""
        self.nexts: dict[int, int] = {}
        """By partition, the offset behind what is in the table."""
        self.ends: dict[int, int] = {}
        """By partition, the end of the stream when it was last asked."""
        self.fresh: dict[int, int] = {}
        """By partition, when (ms) the table was last at the end, or began to be built. Changed by `_mark`."""
        self.fresh_ms = 0
        """The time up to which the table has everything."""
        self.reached: set[int] = set()
        """The partitions of which the table was at the end, since it was opened or built again."""
        self.built = 0
        """How many times the table was built again."""
        self.trouble: str | None = None
        self.turns = Turns(f"following {stream}")
        self._broker, self._path, self._thread = broker, folder / f"{stream}.db", thread
        self._recent: deque[Applied] = deque()
        self._recent_bytes = self._saved = 0
        self._waiters: list[tuple[Mapping[int, int], asyncio.Future[None]]] = []
        self._changed, self._wanted = asyncio.Event(), asyncio.Event()
        self._checked_at = float("-inf")
        self._rebuild: Rebuild | None = None
        self._asking = asyncio.Lock()
        self._begin = begin
        metrics.TABLE_RECORDS.labels(stream)  # 0, not nothing: an alert compares it

    # For readers.

    def why_not_ready(self, behind_ms: int) -> str | None:
        """Why the table does not have the newest events; None: it has those that are older than `behind_ms`."""
        if self.store is None or len(self.reached) < max(1, len(self.ends)):
            return f"{self.stream}: {self.trouble or 'reading the stream'}"
        late = now_ms() - self.fresh_ms
        return (
            f"{self.stream}: {late / 1000:.0f} s behind. {self.trouble or ''}".rstrip(" .")
            if late > behind_ms
            else None
        )

    def has(self, ends: Mapping[int, int]) -> bool:
        """Whether the table has these offsets, by partition."""
        nexts = self.nexts
        return all(nexts.get(partition, 0) > offset for partition, offset in ends.items())

    def reach(self, ends: Mapping[int, int]) -> asyncio.Future[None] | None:
        """Done when the table has these offsets. None: too many wait. Cancel it to give up."""
        self._waiters = [one for one in self._waiters if not one[1].done()]
        if len(self._waiters) >= _MAX_WAITERS:
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.has(ends):  # since the caller looked: on a quiet stream nothing would wake it
            future.set_result(None)
        else:
            self._waiters.append((ends, future))
            self._wanted.set()
        return future

    def recent(self, partition: int, offset: int) -> Applied | None:
        """The piece that holds this offset, or begins at it, when it is still in memory."""
        found = (one for one in self._recent if one.partition == partition and one.start <= offset < one.next)
        return next(found, None)

    async def read(self, partition: int, offset: int) -> Applied | None:
        """A piece of the stream from this offset on, as far as the table has it. None: there is none. Raises BrokerError
        kinds."""
        limit = self.nexts.get(partition, 0)
        if offset >= limit:
            return None
        batch = await self._broker.reader.read(self.stream, partition, offset, max_records=500)
        if batch is None or batch.offsets[0] >= limit:
            return Applied(partition, offset, limit, (), 0)
        changes = [change for change in to_changes(self.stream, batch) if change.offset < limit]
        return Applied(partition, offset, min(limit, batch.offsets[-1] + 1), changes, 0)

    async def wait_change(self, seconds: float) -> None:
        """Wait until the table changes, at most so long."""
        await wait_for_stop(self._changed, seconds)

    async def is_present(self) -> bool:
        """Whether the broker has no other topic of this name by now. Callers wait for each other. Raises BrokerError kinds."""
        async with self._asking:
            found = await self._broker.admin.incarnation(self.stream)
        if mark_of(found) == self.topic:
            return True
        self._checked_at = float("-inf")
        return False

    def damaged(self, rebuild: Rebuild) -> None:
        """A reader has found the file damaged: build it again."""
        self._rebuild = rebuild

    # The loop.

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow until `stopping`. The broker's failures are waited out."""
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while not stopping.is_set():
            try:
                await self._follow(stopping, retry)
            except Rebuild as rebuild:
                await self._begin_again(rebuild)
            except (BrokerError, OSError, apsw.Error) as error:  # the last: e.g. no room for the table's file
                self._explain(error, is_new=retry.fail())
                await retry.wait(stopping)
            self._measure()
            self.turns.next()

    async def close(self) -> None:
        """Close the file, after `run`."""
        store, self.store, self.topic = self.store, None, ""  # at once: readers must not meet a closed file
        if store is not None:
            await self._blocking(store.close)

    async def _follow(self, stopping: asyncio.Event, retry: Backoff) -> None:
        if self.store is None:
            await self._open()
        while not stopping.is_set():
            if self._rebuild is not None:
                raise self._rebuild
            moved = await self._round(stopping)
            retry.reset()
            self.trouble = None
            self.turns.next()
            if not moved:
                await wait_for_stop(self._wanted, IDLE_S)  # who waits for a token knows that there is more
            self._wanted.clear()

    async def _open(self) -> None:
        meta = Meta(FORMAT, self.stream, await self._broker.admin.incarnation(self.stream))
        if self._begin is not None and await self._blocking(self._path.exists):
            self._begin = None  # only a new replica begins with a copy
        if (begin := self._begin) is not None:
            self.trouble = "fetching the table of another replica"
            stored = await self._broker.reader.describe(self.stream)
            self._begin = None  # not before: a broker that does not answer must not cost the copy
            await begin(self._path, meta, stored, self.max_age_ms, self.turns.next)
            self.trouble = None
        store = await self._blocking(lambda: Store(self._path, meta))
        positions = await self._blocking(store.positions)
        self.store, self.topic = store, mark_of(meta.incarnation)
        self.nexts = {p: position.next for p, position in positions.items()}
        self._mark({p: position.fresh_ms for p, position in positions.items()})
        metrics.TABLE_KEYS.labels(self.stream).set(await self._blocking(store.count))
        log.info("table_opened", stream=self.stream, file=str(self._path), positions=self.nexts)

    async def _round(self, stopping: asyncio.Event) -> bool:
        """Read each partition to its present end. Gives whether there was anything."""
        await self._check_incarnation()
        asked = now_ms()
        stored = await self._broker.reader.describe(self.stream)
        self.ends = {p: one.end for p, one in stored.items()}
        moved = False
        for partition, one in stored.items():
            start = self.nexts.get(partition)
            if start is None:
                start = self.nexts[partition] = one.start
                self._mark({**self.fresh, partition: asked})
            if not one.start <= start <= one.end:
                self._checked_at = float("-inf")
                await self._check_incarnation()  # the usual cause, which has a name of its own
                detail = f"{self.stream}[{partition}] holds {one.start} to {one.end}, and the table is at {start}"
                raise Rebuild("position_out_of_range", detail)
            while self.nexts[partition] < one.end and not stopping.is_set():
                await self._read(partition, one.end)
                moved = True
            if self.nexts[partition] >= one.end:
                self._reach(partition, asked)
        if asked - self._saved > self.max_age_ms / 10 or asked - self._saved > 60_000:
            await self._save(asked)
        self._measure()
        return moved

    def _measure(self) -> None:
        """Also while the broker does not answer: how far a table is behind that stands still must grow."""
        if self.fresh:
            metrics.TABLE_BEHIND.labels(self.stream).set(max(0, now_ms() - self.fresh_ms) / 1000)

    def _mark(self, fresh: dict[int, int]) -> None:
        self.fresh, self.fresh_ms = fresh, min(fresh.values(), default=0)

    def _reach(self, partition: int, asked: int) -> None:
        """The table has all that the partition held at `asked`. Raises Rebuild when a tombstone may be missing."""
        away = asked - self.fresh[partition]
        if away >= self.max_age_ms:
            detail = (
                f"the table was behind {self.stream}[{partition}] for {away / 1000:.0f} s, and tombstones are kept for "
                f"{self.max_age_ms / 1000:.0f} s. Try: a longer retention of the stream"
            )
            raise Rebuild("away_too_long", detail)
        self._mark({**self.fresh, partition: asked})
        self.reached.add(partition)

    async def _check_incarnation(self) -> None:
        """A topic of the same name that was created later has other events at these offsets."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._checked_at < CHECK_EVERY_S or self.store is None:
            return
        if await self._broker.admin.incarnation(self.stream) != self.store.meta.incarnation:
            raise Rebuild("topic_created_again", f"topic {self.stream} was deleted and created again")
        self._checked_at = loop.time()

    async def _read(self, partition: int, end: int) -> None:
        start = self.nexts[partition]
        batch = await self._broker.reader.read(self.stream, partition, start, max_records=READ_RECORDS)
        self.turns.next()
        if batch is None:  # nothing is left behind compaction up to the end
            await self._apply(Applied(partition, start, end, (), 0))
            return
        changes = to_changes(self.stream, batch)
        size = sum([len(change.value or b"") + len(change.key) + 100 for change in changes])
        await self._apply(Applied(partition, start, batch.offsets[-1] + 1, changes, size))
        metrics.TABLE_RECORDS.labels(self.stream).inc(len(batch.records))

    async def _apply(self, piece: Applied) -> None:
        position = Position(piece.next, self.fresh[piece.partition])
        await self._write(lambda one: one.apply(piece.partition, piece.changes, position))
        self.nexts[piece.partition] = piece.next
        self._measure()
        self._recent.append(piece)
        self._recent_bytes += piece.size
        while (self._recent_bytes > RECENT_BYTES and len(self._recent) > 1) or len(self._recent) > 1000:
            self._recent_bytes -= self._recent.popleft().size
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        waiting = []
        for ends, future in self._waiters:
            if future.done():
                continue
            if self.has(ends):
                future.set_result(None)
            else:
                waiting.append((ends, future))
        self._waiters = waiting

    async def _save(self, asked: int) -> None:
        """Keep the times at which the table was at the end, also when nothing comes."""
        store = self.store
        assert store is not None
        positions = {p: Position(offset, self.fresh[p]) for p, offset in self.nexts.items()}
        await self._write(lambda one: one.mark_fresh(positions))
        metrics.TABLE_KEYS.labels(self.stream).set(await self._blocking(store.count))
        self._saved = asked

    async def _begin_again(self, rebuild: Rebuild) -> None:
        metrics.TABLE_REBUILDS.labels(self.stream, rebuild.reason).inc()
        metrics.TABLE_REBUILT.labels(self.stream, rebuild.reason).set(now_ms() / 1000)
        hint = "the table is built again from the beginning of the stream; it answers with 503 meanwhile"
        log.error("table_rebuilt", stream=self.stream, reason=rebuild.reason, detail=str(rebuild), hint=hint)
        await self.close()
        self._rebuild, self.trouble = None, f"built again: {rebuild}"
        self.nexts, self.ends, self.reached = {}, {}, set()
        self._mark({})
        self.built += 1
        self._recent.clear()
        self._recent_bytes = 0
        self._checked_at = float("-inf")
        await self._blocking(lambda: Store.remove(self._path))
        self._wake()

    def _explain(self, error: BrokerError | OSError | apsw.Error, *, is_new: bool) -> None:
        """Raises Rebuild when the position is gone."""
        if isinstance(error, OffsetOutOfRange):
            self._rebuild = Rebuild("position_out_of_range", str(error))
            return
        self.trouble = str(error)
        if isinstance(error, DataDamaged):
            metrics.TABLE_READ_FAILURES.labels(self.stream, "damaged_record").inc()
        else:
            kind = "unknown_topic" if isinstance(error, UnknownTopic) else "broker"
            kind = "table_file" if isinstance(error, apsw.Error) else kind
            metrics.TABLE_READ_FAILURES.labels(self.stream, kind).inc()
        if is_new or isinstance(error, DataDamaged):
            log.error(
                "table_waits",
                stream=self.stream,
                error=str(error),
                hint="the stream is read again. Meanwhile the table falls behind",
            )

    async def _write(self, work: Callable[[Store], None]) -> None:
        store = self.store
        assert store is not None
        store.end_read_transaction(allow_next=False)
        await self._blocking(lambda: work(store))
        store.end_read_transaction(allow_next=True)

    async def _blocking(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def to_changes(stream: str, batch: Batch) -> list[Change]:
    """The changes of a batch. Records that are no rows are counted and passed over."""
    if batch.damage is not None:
        count = batch.damage.last - batch.damage.first + 1
        metrics.TABLE_SKIPPED.labels(stream, "damaged").inc(count)
        hint = "the table may have an older event of their keys. Try: send the newest event of each key again"
        log.error(
            "table_records_damaged", stream=stream, partition=batch.partition, damage=str(batch.damage), hint=hint
        )
        return []
    found = [
        Change(record.key, record.value, _media(record), offset)
        for offset, record in zip(batch.offsets, batch.records, strict=True)
        if record.key
    ]
    if len(found) < len(batch.records):
        metrics.TABLE_SKIPPED.labels(stream, "no_key").inc(len(batch.records) - len(found))
    return found


def _media(record: Record) -> str | None:
    """The media type of a value; None for JSON."""
    if record.value is None:
        return None
    media = record.header(CONTENT_TYPE)
    if media is not None:
        text = media.decode("latin-1")
        return text if text.isprintable() and text.isascii() else _OCTETS
    try:
        _JSON(record.value)
        record.value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _OCTETS
    return None
