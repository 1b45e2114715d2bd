"""Reading one topic: rows in offset order, each checked against its checksum and its neighbour.

`TopicReader` blocks; one thread at a time. `Readers` is for the event loop. Missing or altered records are never passed over:
`read` gives the intact records before them, and the next `read` from there raises DataDamaged with their exact range. Ranges that
`repair` has recorded as lost are passed over.

No record above the high-water mark is returned: it may not be on the disk yet. A consumer that commits it would miss the record
that gets its offset after a power cut. Records of a dead writer are synced and marked first (`TopicStore.sync_and_mark`).
"""

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import NamedTuple, NoReturn, TypeVar

from services.core.broker.contract import Lag, PartitionRange, Start
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.log.clock import boot_ms
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import MAX_OFFSET, Row, read_row, row_position
from services.core.broker.log.sqlite_file import FAULTS, classified, classify, is_damage, read_meta
from services.core.broker.log.topic_store import COLUMNS, Head, OpenTopic, TopicStore, first_row_since, next_intact
from services.core.broker.log.topics import register_group
from services.core.broker.record import Record

READ_BYTES = 1 << 20
"""One read returns at most about this much data, and at least one row."""
_ROWS = 16


class ReadResult(NamedTuple):
    """Records of one partition, in order, and their offsets. next: where the next read goes on. There may be no record at all
    before it: compaction removed them, or they are recorded as lost."""

    offsets: Sequence[int]
    records: list[Record]
    next: int

    def below(self, end: int) -> "ReadResult":
        """Without the records from offset `end` on."""
        if self.next <= end:
            return self
        count = bisect_left(self.offsets, end)
        return ReadResult(self.offsets[:count], self.records[:count], end)


class TopicReader(OpenTopic):
    """One topic, open for reading."""

    def __init__(self, folder: DataFolder, topic: str) -> None:
        super().__init__(TopicStore.open(folder, topic))

    @property
    def store(self) -> TopicStore:
        return self._store

    def refresh(self) -> int:
        """Read the topic's description again; gives the number of partitions. Raises UnknownTopic when it was deleted."""
        store = self._store
        with classified(store.topic):
            if not store.files.db.exists():
                raise UnknownTopic(f"topic {store.topic!r} was deleted")
            store.meta = read_meta(store.connection, store.topic)
        return store.meta.partitions

    def ranges(self) -> dict[int, PartitionRange]:
        return {p: PartitionRange(head.start, head.next) for p, head in enumerate(self.heads())}

    def heads(self) -> list[Head]:
        """The head of each partition now. `next` is at least the mark, so that a read finds a lost end."""
        self.refresh()
        store = self._store
        with classified(store.topic):
            with store.snapshot():
                heads = store.heads()
            marks = store.marks.read(len(heads))
            if any(head.next > mark for head, mark in zip(heads, marks, strict=True)):
                store.sync_and_mark()
            return [head._replace(next=max(head.next, mark)) for head, mark in zip(heads, marks, strict=True)]

    def read(self, partition: int, offset: int, max_records: int) -> ReadResult | None:
        """Records from `offset` on, whole rows: there may be more than asked, or none of several offsets. None at the end.

        Raises OffsetOutOfRange, DataDamaged, Unavailable, UnknownTopic.
        """
        run, mark = self._read(partition, offset, max_records)
        if run is not None and run.records and run.offsets[0] >= mark:
            with classified(self._store.topic):
                self._store.sync_and_mark()
            run, mark = self._read(partition, offset, max_records)
        return None if run is None else run.below(max(mark, offset))

    def _read(self, partition: int, offset: int, max_records: int) -> tuple[ReadResult | None, int]:
        """The records stored from `offset` on, and the partition's mark."""
        topic = self._store.topic
        marks = self._store.marks.read(
            self._store.meta.partitions
        )  # before the snapshot, which then has all records below them
        if partition >= len(marks):
            raise UnknownTopic(f"{topic} has {len(marks)} partitions, none numbered {partition}")
        try:
            with self._store.snapshot():
                run = self._read_rows(partition, offset, max_records)
                run = run or self._read_behind_gap(partition, offset, max_records, marks[partition])
                return run, marks[partition]
        except FAULTS as error:
            if is_damage(error):
                self._raise_damage(partition, offset, marks[partition], str(error))
            raise classify(error, topic) from error

    def offsets_at(self, start: Start) -> dict[int, int]:
        """The offset of each partition at which a read from `start` begins; the end when no record is that new."""
        heads = self.heads()
        with classified(self._store.topic), self._store.snapshot():
            if start == "earliest":
                return {p: head.start for p, head in enumerate(heads)}
            if start == "latest":
                return {p: head.next for p, head in enumerate(heads)}
            assert isinstance(start, datetime)
            if start.tzinfo is None:
                raise ValueError("a start date needs a time zone")
            wanted = int(start.timestamp() * 1000)
            return {p: self._offset_at(p, head, wanted) for p, head in enumerate(heads)}

    def stored_at(self, partition: int, offset: int) -> int | None:
        """When the first record from `offset` on was stored, ms; None at the end or when it cannot be read."""
        with classified(self._store.topic):
            for row in self._rows(partition, offset, _ROWS):
                block = read_row(row)
                if block is None:
                    return None
                if bisect_left(block.offsets, offset) < len(block.records):
                    return row.stored_ms
        return None

    def last_epoch(self, writer: str) -> int | None:
        """The newest epoch that an exactly-once writer stored, None before the first."""
        with classified(self._store.topic):
            return self._store.writer_epoch(writer)

    def _offset_at(self, partition: int, head: Head, wanted: int) -> int:
        row = first_row_since(self._store.connection, partition, head, wanted)
        if row is None:
            return head.next
        block = read_row(row)
        for found, record in () if block is None else zip(block.offsets, block.records, strict=True):
            if record.timestamp >= wanted:
                return max(head.start, found)
        return max(head.start, row.first)

    def _rows(self, partition: int, offset: int, limit: int) -> Iterator[Row]:
        """Rows from the one that may hold `offset`."""
        cursor = self._store.connection.execute(
            f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN "  # noqa: S608
            "coalesce((SELECT max(pos) FROM batches WHERE pos BETWEEN ?1 AND ?2), ?2) AND ?3 ORDER BY pos LIMIT ?4",
            (row_position(partition, 0), row_position(partition, offset), row_position(partition, MAX_OFFSET), limit),
        )
        return (Row(*row) for row in cursor)

    def _read_rows(self, partition: int, offset: int, max_records: int) -> ReadResult | None:
        """Intact consecutive rows from the one that holds `offset`; None when that one is missing or altered."""
        if offset < self._store.start_of(partition):
            return None
        found: list[Record] = []
        runs: list[Sequence[int]] = []
        expected, size = offset, 0
        for row in self._rows(partition, offset, _ROWS):
            if not row.first <= expected < row.end or (runs and row.first != expected):
                break
            block = read_row(row)
            if block is None:
                break
            skipped = bisect_left(block.offsets, expected) if expected > row.first else 0
            found += block.records[skipped:] if skipped else block.records
            runs.append(block.offsets[skipped:] if skipped else block.offsets)
            expected = row.end
            size += len(row.data)
            if len(found) >= max_records or size >= READ_BYTES:
                break
        return ReadResult(_join(runs), found, expected) if runs else None

    def _read_behind_gap(self, partition: int, offset: int, max_records: int, mark: int) -> ReadResult | None:
        """When no row can be read at `offset`: None at the end, the records behind a range recorded as lost, or an error."""
        topic = self._store.topic
        head = self._store.heads()[partition]
        end = max(head.next, mark)
        if not head.start <= offset <= end:
            raise OffsetOutOfRange(topic, partition, offset, head.start, head.next)
        if offset == end:
            return None
        gap = self._store.connection.execute(
            "SELECT last FROM gaps WHERE p=? AND first<=? AND last>=?", (partition, offset, offset)
        ).fetchone()
        if gap is None:
            self._raise_damage(partition, offset, end, "stored records are missing or altered")
        after = gap[0] + 1
        run = self._read_rows(partition, after, max_records) or self._read_behind_gap(
            partition, after, max_records, mark
        )
        return run or ReadResult((), [], after)

    def _raise_damage(self, partition: int, offset: int, end: int, detail: str) -> NoReturn:
        """Raises with the unreadable range at `offset`; without one when all acknowledged records are before it."""
        behind = next_intact(self._store.connection, partition, offset, end)
        lost = ((partition, offset, behind - 1),) if behind > offset else ()
        raise DataDamaged(self._store.topic, lost, f"{detail}. Try: penstock log verify, then penstock log repair")


def _join(runs: list[Sequence[int]]) -> Sequence[int]:
    """The offsets of consecutive rows. A range, which takes no memory, where no row is sparse."""
    if all(type(run) is range for run in runs):
        return range(runs[0][0], runs[-1][-1] + 1)
    return [offset for run in runs for offset in run]


def lag_behind(reader: TopicReader, nexts: Mapping[int, int], now_ms: int) -> dict[int, Lag]:
    """The lag for the next unprocessed offset of each partition. Records that retention or compaction removed count too."""
    found = {}
    heads = reader.heads()
    for partition, offset in nexts.items():
        if partition >= len(heads):
            continue
        records = max(0, heads[partition].next - offset)
        stored = reader.stored_at(partition, max(offset, heads[partition].start)) if records else None
        found[partition] = Lag(records, 0 if stored is None else max(0, now_ms - stored), stored)
    return found


T = TypeVar("T")

THREADS = 2


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reader: TopicReader | None = None


class Readers:
    """Topics open for reading in this process. A reader that failed is closed; the next use opens the topic again."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._slots: dict[str, _Slot] = {}
        self._counts = PartitionCounts(self._look_up)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="log-read")

    async def use(self, topic: str, work: Callable[[TopicReader], T]) -> T:
        """Run `work` with the topic's reader on a thread. Cancelling does not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._use, topic, work)

    async def run(self, work: Callable[[], T]) -> T:
        """Run something else that blocks on these threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def register_group(self, topic: str, group: str) -> None:
        """`topics.register_group`."""
        await self.run(lambda: register_group(self._folder, topic, group))

    async def partition_count(self, topic: str) -> int:
        """The number of partitions, about a second old at most. Raises UnknownTopic."""
        return await self._counts.get(topic)

    def forget(self, topic: str) -> None:
        """Read the number of partitions again at the next use."""
        self._counts.forget(topic)

    def _look_up(self, topic: str) -> "asyncio.Future[int]":
        return asyncio.get_running_loop().run_in_executor(self._threads, self._use, topic, TopicReader.refresh)

    def peek(self, topic: str) -> list[int] | None:
        """The topic's high-water marks without waiting; None when they must be read from the disk."""
        slot = self._slots.get(topic)
        reader = None if slot is None else slot.reader
        return None if reader is None else reader.store.marks.peek(reader.store.meta.partitions)

    async def close(self) -> None:
        """Close every reader, after its present work."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._close)
        self._threads.shutdown(wait=False)

    def _use(self, topic: str, work: Callable[[TopicReader], T]) -> T:
        slot = self._slots.setdefault(topic, _Slot())
        with slot.lock:
            was_open = slot.reader is not None
            try:
                return self._try(slot, topic, work)
            except UnknownTopic:
                if not was_open:
                    raise
            return self._try(slot, topic, work)  # deleted since it was opened, and perhaps made again

    def _try(self, slot: _Slot, topic: str, work: Callable[[TopicReader], T]) -> T:
        if slot.reader is None:
            slot.reader = TopicReader(self._folder, topic)
        try:
            return work(slot.reader)
        except (DataDamaged, Unavailable, UnknownTopic):
            reader, slot.reader = slot.reader, None
            reader.close()
            raise

    def _close(self) -> None:
        for slot in self._slots.values():
            with slot.lock:
                if slot.reader is not None:
                    slot.reader.close()
                    slot.reader = None


_FRESH_MS = 1000

LookUp = Callable[[str], "asyncio.Future[int]"]


class PartitionCounts:
    """The number of partitions of each topic, at most a second old plus the time of one look-up.

    An append needs the count before it is queued. So waiting callers go on in the order in which they came.
    """

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._known: dict[str, _Count] = {}

    async def get(self, topic: str) -> int:
        """The count. Raises the look-up's error: UnknownTopic, DataDamaged, Unavailable."""
        known, now = self._known.get(topic), boot_ms()
        if known is None or (
            known.count is not None and now > known.look_again + _FRESH_MS
        ):  # it was not used for long
            known = self._known[topic] = _Count()
            self._start(topic, known)
        if known.count is None:
            return await known.wait()
        if now > known.look_again:
            known.look_again = now + _FRESH_MS
            self._start(topic, known)
        return known.count

    def forget(self, topic: str) -> None:
        """Look it up at the next call."""
        self._known.pop(topic, None)

    def _start(self, topic: str, known: "_Count") -> None:
        def settle(done: "asyncio.Future[int]") -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None and self._known.get(topic) is known:
                del self._known[topic]
            known.settle(error or done.result())

        self._look_up(topic).add_done_callback(settle)


class _Count:
    """One topic's count, None until all waiting callers have gone on."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.look_again = boot_ms() + _FRESH_MS
        self._waiters: list[asyncio.Future[int]] = []

    async def wait(self) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def settle(self, outcome: int | BaseException) -> None:
        """Wake the waiting callers. A caller that comes before they ran waits behind them."""
        if self.count is not None:
            self.count = outcome if isinstance(outcome, int) else self.count
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if isinstance(outcome, int):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)
        if waiters:
            asyncio.get_running_loop().call_soon(self.settle, outcome)
        elif isinstance(outcome, int):
            self.count = outcome
