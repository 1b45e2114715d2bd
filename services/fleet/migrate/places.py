"""Where the positions of groups are in a copy that has other offsets and is complete.

The stream and its copy are read from a mark on (`Mark`), and the records of the stream are looked for in order. A place that is
too early delivers events again; one that is too late skips events. So wherever something is not known any more, the place is
earlier.

Retention goes on meanwhile: nobody may have run the command for days. Then the beginning of either is gone. Records that the
stream has no more are in the copy behind the mark. Of a copy whose mark is gone, the oldest record is the place.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence

from services.core.broker.contract import Broker
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.record import Batch, Record
from services.fleet.migrate.copying import CopyDiffers
from services.fleet.migrate.partition_copy import Mark
from services.fleet.migrate.stream_source import PAGE, StreamSource, require_fresh, require_whole


class CopyPlaces:
    """ends, there: where the stream and its copy ended when it was handed over. Offsets of the stream have `source_bases`; those
    of the copy are the target's own. `begin` before the first use. All methods raise BrokerError kinds, and may be repeated."""

    def __init__(
        self,
        stream: str,
        source: Broker,
        target: Broker,
        source_bases: Mapping[int, int],
        ends: Mapping[int, int],
        there: Mapping[int, int],
        marks: Mapping[int, Sequence[Mark]],
    ) -> None:
        self._source, self._target = StreamSource(stream, source, source_bases), target
        self._ends, self._there, self._marks = ends, there, marks
        self._fenced = float("-inf")

    async def begin(self) -> None:
        """Put a fence into both: a record that was acknowledged, maybe by another process, may not be readable yet."""
        await self._source.fence()
        await self._target.reader.fence(self._source.stream)
        self._fenced = time.monotonic()

    async def find(self, partition: int, offset: int) -> int:
        """The offset in the copy from which on it has every record of the stream from `offset` on."""
        there, end = self._there[partition], self._ends[partition]
        if offset >= end:
            return there
        marks = self._marks.get(partition, ())
        number = bisect_right(marks, offset, key=lambda mark: mark[0]) - 1
        if number < 0:
            return await self._oldest(partition)
        wanted, at = marks[number]
        try:
            return await self._find_from(partition, offset, wanted, at)
        except OffsetOutOfRange:
            return await self._oldest(partition)

    async def _find_from(self, partition: int, offset: int, wanted: int, at: int) -> int:
        """As `find`, from the mark (wanted, at) on. Raises OffsetOutOfRange when the copy has lost the mark."""
        there, end = self._there[partition], self._ends[partition]
        pending: deque[tuple[int, Record]] = deque()
        known, has_read = there, False
        while at < there and (batch := await self._read_copy(partition, at)) is not None:
            records = [pair for pair in zip(batch.offsets, batch.records, strict=True) if pair[0] < there]
            if not records:
                break
            known = min(known, records[0][0])
            while len(pending) < len(records) and wanted < end:
                some = await self._read_stream(partition, wanted, end, offset)
                if some is None:
                    return known
                pending.extend(some)
                has_read = has_read or bool(some)
                wanted = some[-1][0] + 1 if some else end
            if not pending:  # the stream has none from `offset` on, or retention has removed all of them
                return there if has_read else known
            for found, record in records:
                if pending and record == pending[0][1] and pending.popleft()[0] >= offset:
                    return found
            at = records[-1][0] + 1
        return known

    async def _read_stream(
        self, partition: int, wanted: int, end: int, offset: int
    ) -> Sequence[tuple[int, Record]] | None:
        """Some records of the stream, from the oldest on if some are gone. None: records from `offset` on are gone or damaged."""
        try:
            return await self._source.read(partition, wanted, end)
        except OffsetOutOfRange as error:
            if not wanted < error.start <= offset:
                return None
            return await self._read_stream(partition, error.start, end, offset)
        except CopyDiffers:
            return None

    async def _read_copy(self, partition: int, at: int) -> Batch | None:
        batch = await self._target.reader.read(self._source.stream, partition, at, max_records=PAGE)
        is_dense = self._target.features.contiguous_offsets
        if batch is None:
            require_fresh(self._fenced, f"the copy of {self._source.stream}[{partition}]", is_dense=is_dense)
        else:
            require_whole(batch, at, is_dense=is_dense)
        return batch

    async def _oldest(self, partition: int) -> int:
        held = (await self._target.reader.describe(self._source.stream))[partition]
        there = self._there[partition]
        return min(held.start, there) if held.start < held.end else there
