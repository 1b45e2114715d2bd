"""Where the positions of groups are in a copy that has other offsets and is complete.

The stream and its copy are read from a pair on (`OffsetPair`), and the records of the stream are looked for in order. An offset
that is too low delivers events again; one that is too high skips events. So wherever something is not known any more, the offset
is lower.

Retention goes on meanwhile: nobody may have run the command for days. Then the beginning of either is gone. Records that the
stream has no more are in the copy behind the pair. Of a copy whose pair is gone, the oldest record is taken.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence

from services.core.broker.contract import Broker
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.record import Batch, Record
from services.fleet.migrate.copying import PAGE, CopyDiffers
from services.fleet.migrate.stream_source import StreamSource, require_fresh, require_whole
from services.fleet.migrate.translated_partition import OffsetPair


class OffsetTranslator:
    """ends, copy_ends: where the stream and its copy ended when it was handed over. Offsets of the stream have `source_bases`;
    those of the copy are the target's own. `begin` before the first use. All methods raise BrokerError kinds, and may be
    repeated."""

    def __init__(
        self,
        stream: str,
        source: Broker,
        target: Broker,
        source_bases: Mapping[int, int],
        ends: Mapping[int, int],
        copy_ends: Mapping[int, int],
        pairs: Mapping[int, Sequence[OffsetPair]],
    ) -> None:
        self._source, self._target = StreamSource(stream, source, source_bases), target
        self._ends, self._copy_ends, self._pairs = ends, copy_ends, pairs
        self._fenced = float("-inf")

    async def begin(self) -> None:
        """Put a fence into both: a record that was acknowledged, maybe by another process, may not be readable yet."""
        await self._source.fence()
        await self._target.reader.fence(self._source.stream)
        self._fenced = time.monotonic()

    async def translate(self, partition: int, offset: int) -> int:
        """The offset in the copy from which on it has every record of the stream from `offset` on."""
        copy_end, end = self._copy_ends[partition], self._ends[partition]
        if offset >= end:
            return copy_end
        pairs = self._pairs.get(partition, ())
        number = bisect_right(pairs, offset, key=lambda pair: pair[0]) - 1
        if number < 0:
            return await self._oldest(partition)
        wanted, at = pairs[number]
        try:
            return await self._translate_from(partition, offset, wanted, at)
        except OffsetOutOfRange:
            return await self._oldest(partition)

    async def _translate_from(self, partition: int, offset: int, wanted: int, at: int) -> int:
        """As `translate`, from the pair (wanted, at) on. Raises OffsetOutOfRange when the copy has lost the pair."""
        copy_end, end = self._copy_ends[partition], self._ends[partition]
        pending: deque[tuple[int, Record]] = deque()
        known, has_read = copy_end, False
        while at < copy_end and (batch := await self._read_copy(partition, at)) is not None:
            records = [pair for pair in zip(batch.offsets, batch.records, strict=True) if pair[0] < copy_end]
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
                return copy_end if has_read else known
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
        is_contiguous = self._target.features.contiguous_offsets
        if batch is None:
            require_fresh(self._fenced, f"the copy of {self._source.stream}[{partition}]", is_contiguous=is_contiguous)
        else:
            require_whole(batch, at, is_contiguous=is_contiguous)
        return batch

    async def _oldest(self, partition: int) -> int:
        stored = (await self._target.reader.describe(self._source.stream))[partition]
        copy_end = self._copy_ends[partition]
        return min(stored.start, copy_end) if stored.start < stored.end else copy_end
