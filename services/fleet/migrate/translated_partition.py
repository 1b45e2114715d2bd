"""The copy of one partition at other offsets: what lacks is appended, and everything is found in it by reading."""

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from services.core.broker.contract import MAX_APPEND_BYTES, Broker
from services.core.broker.errors import OffsetOutOfRange, RecordRefused, RecordTooLarge
from services.core.broker.record import Batch, Record, estimate_size, split_by_size
from services.fleet.migrate.copying import APPEND_S, GIVE_UP, PAGE, CopyDiffers, OriginCount
from services.fleet.migrate.stream_source import StreamSource, removed, require_fresh, require_whole

_WINDOW = 4000
"""Records of a partition that are appended before they are looked for. They are in memory."""
_RECENT = 50_000
"""Records of a partition among which a second copy is known."""
_PAIRS, _PAIRS_STEP = 8, 4

OffsetPair = tuple[int, int]
"""(offset of the stream, offset of the copy). All records of the stream before the one are in the copy before the other; all
others are from there on, in order."""


class CopyFence(NamedTuple):
    """Of the copy. earlier: a fence that was read before the stream was asked for its end. read_at: when this one was read,
    monotonic."""

    offset: int
    earlier: int
    read_at: float


class TranslatedPartition:
    """begin: the offset of the stream from which it was read, None before the first read. found_end: the offset of the copy
    behind the last record that was found."""

    def __init__(
        self, source: StreamSource, target: Broker, partition: int, start: int, window_bytes: int, origins: OriginCount
    ) -> None:
        self._source, self._target, self._partition = source, target, partition
        self._window_bytes, self._origins = window_bytes, origins
        self._source_at, self._target_at = start, 0
        self._pending: deque[tuple[int, Record]] = deque()
        """Read from the stream, not found in the copy."""
        self._pending_bytes = 0
        self._recent: dict[int, None] = {}
        """Hashes of records that were found."""
        self.pairs: list[OffsetPair] = []
        self.begin: int | None = None
        self.found_end: int | None = None
        self.events = self.progress = 0

    @property
    def _name(self) -> str:
        return f"{self._source.stream}[{self._partition}]"

    async def find_copied(self, end: int, fence: CopyFence) -> None:
        """Find what is in the copy before the fence. Raises BrokerError kinds, and CopyDiffers for what is no part of the stream
        before `end`, and was in the copy before `end` was known. Behind that a second command may have copied more."""
        while self._target_at < fence.offset and await self._find_some(end, fence):
            pass
        if self._target_at and not self.events:
            raise CopyDiffers(
                f"{self._name}: the copy has another event than the stream, or retention has removed what was copied",
                GIVE_UP,
            )

    async def append(self, end: int, require: Callable[[], Awaitable[None]]) -> bool:
        """Append a window of what lacks before `end`. Gives whether something lacked: the next search finds it, or what was not
        stored. require: raises when nobody may append any more. Raises as `find_copied`."""
        await self._fill(_WINDOW, end, self._window_bytes)
        if not self._pending:
            return False
        for _, chunk in split_by_size([record for _, record in self._pending], MAX_APPEND_BYTES):
            await require()
            try:
                stored = await self._target.appender.append(
                    self._source.stream, self._partition, chunk, timeout=APPEND_S
                )
                for _, error in stored.failed:
                    raise error
            except (RecordTooLarge, RecordRefused) as error:
                text = f"{self._name}: the other broker does not accept an event: {error}"
                raise CopyDiffers(text, "penstock migrate STREAM --undo") from error
            self.progress += len(chunk)
        return True

    async def has_found(self, end: int) -> bool:
        """Whether all records of the stream before `end` were found. Does not read the copy. Raises as `find_copied`."""
        await self._fill(1, end)
        return self._is_found(end)

    def check_complete(self, end: int) -> None:
        """Raises CopyDiffers where it is known how many events the stream has, and other ones were found."""
        begin = end if self.begin is None else self.begin
        if self._source.is_contiguous and self.events != end - begin:
            raise CopyDiffers(f"{self._name}: {self.events} of {end - begin} events were found in the copy", GIVE_UP)

    def some_pairs(self) -> list[OffsetPair]:
        """The first one, and a few that are closer to each other towards the end: whoever begins at one of them reads at most a
        few times as much as lies behind the place that is wanted."""
        back = [_PAIRS_STEP**one for one in range(_PAIRS) if _PAIRS_STEP**one < len(self.pairs)]
        return [*self.pairs[:1], *(self.pairs[-one] for one in reversed(back))]

    async def _find_some(self, end: int, fence: CopyFence) -> bool:
        """Read a page of the copy, and find the next records of the stream in it. Gives whether there may be another one.

        What is before the first one was copied before retention removed it from the stream.
        """
        if self._is_found(end) and self._target_at >= fence.earlier:
            return False
        batch = await self._read_copy(self._target_at)
        if batch is None:
            require_fresh(
                fence.read_at, f"the copy of {self._name}", is_contiguous=self._target.features.contiguous_offsets
            )
            return False
        await self._fill(len(batch.records), end)
        if not self.pairs and self.begin is not None:
            self.pairs.append((self.begin, batch.offsets[0]))
        self._target_at = batch.offsets[-1] + 1
        found, last = list[Record](), -1
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            if self._is_found(end) and (found or offset >= fence.earlier):
                self._target_at = offset  # what follows may be no part of the copy
                break
            if self._pending and record == self._pending[0][1]:
                last = self._pending.popleft()[0]
                self._pending_bytes -= estimate_size([record])
                self._recent[hash(record)] = None
                self.found_end = offset + 1
                found.append(record)
            elif self._recent and hash(record) not in self._recent:
                raise CopyDiffers(
                    f"{self._name}: offset {offset} of the copy is another event than the stream's", GIVE_UP
                )
        self._origins.add((), found)
        self.events += len(found)
        self.progress += len(found)
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        if self.found_end is not None and last >= 0:
            self.pairs.append((last + 1, self.found_end))
        return True

    def _is_found(self, end: int) -> bool:
        """Whether all records of the stream before `end` were found."""
        return not self._pending and self._source_at >= end

    async def _fill(self, count: int, end: int, most_bytes: float = math.inf) -> None:
        """Have so many records of the stream at hand, or so many bytes, if there are as many before `end`."""
        while len(self._pending) < count and self._source_at < end and self._pending_bytes < most_bytes:
            records = await self._read_stream(end)
            self._origins.add([record for _, record in records], ())
            self._pending.extend(records)
            self._pending_bytes += estimate_size([record for _, record in records])
            self._source_at = records[-1][0] + 1 if records else end

    async def _read_stream(self, end: int) -> Sequence[tuple[int, Record]]:
        """From the oldest record, if retention has removed some before the first read."""
        while True:
            try:
                records = await self._source.read(self._partition, self._source_at, end)
            except OffsetOutOfRange as error:
                if self.begin is not None or error.start <= self._source_at:
                    raise removed(self._name, self._source_at) from error
                self._source_at = error.start
                continue
            if self.begin is None:
                self.begin = self._source_at
            return records

    async def _read_copy(self, offset: int) -> Batch | None:
        try:
            batch = await self._target.reader.read(self._source.stream, self._partition, offset, max_records=PAGE)
        except OffsetOutOfRange as error:  # nobody has run the command for longer than the retention
            text = f"{self._name}: retention has removed offset {offset} from the copy before it was compared"
            raise CopyDiffers(text, GIVE_UP) from error
        if batch is not None:
            require_whole(batch, offset, is_contiguous=self._target.features.contiguous_offsets)
        return batch
