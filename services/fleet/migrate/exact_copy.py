"""The copy of a stream on another broker: the same records at the same offsets, in the same partitions.

The end of the copy says how far it is: there is no other state to keep or to lose. So a copy that was killed goes on, and no
record is there twice. An append whose answer was lost may arrive later; then the next one does not have the offset that it should
have, and the copy is given up (CopyDiffers). It is compared record by record before anything depends on it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from services.core.broker.contract import MAX_APPEND_BYTES, Broker
from services.core.broker.errors import OffsetOutOfRange, OutcomeUnknown, Unavailable
from services.core.broker.record import Record, split_by_size
from services.fleet.migrate.copying import APPEND_S, GIVE_UP, PAGE, Complete, CopyDiffers, OriginCount, gather_few
from services.fleet.migrate.stream_source import removed

_DOUBTS, _AGAIN_S = 5, 0.5
_MOST_TURNS = 20
"""At the hand-over, each of a second or more."""


class ExactCopy:
    """From `source` to `target`. The bases are added to the offsets there, by partition; all other offsets here have them."""

    def __init__(
        self,
        stream: str,
        source: Broker,
        target: Broker,
        source_bases: Mapping[int, int],
        target_bases: Mapping[int, int],
    ) -> None:
        self._stream, self._source, self._target = stream, source, target
        self._source_bases, self._target_bases = source_bases, target_bases
        self._compared: dict[int, int] = {}
        self._turns = 0
        self.events = 0
        """Those that were compared, and are the same."""
        self.progress = 0
        """Grows with each page that is copied or compared."""
        self.origins = OriginCount()

    async def total(self) -> int:
        """How many events the stream has."""
        return sum((await self.ends()).values()) - sum(self._target_bases.values())

    async def follow(self) -> float:
        """Copy what is stored now, and compare it. Gives for how many seconds writers would have to be held for this. Raises
        BrokerError kinds (call it again), and CopyDiffers."""
        began = time.monotonic()
        await self.advance()
        await self.compare()
        return time.monotonic() - began

    async def complete(self) -> Complete | None:
        """The rest, when nothing more is acknowledged. None: an append came late, and the next call finds it, or that the writers
        have gone on. Raises as `follow`."""
        await self.advance()
        ends, copied = await self.ends(), await self.copied()
        if ends != copied:
            self._turns += any(copied[one] > end for one, end in ends.items())
            if self._turns > _MOST_TURNS:
                raise CopyDiffers(f"{self._stream}: the copy has more events than the stream", GIVE_UP)
            return None
        await self.compare()
        return Complete(ends)

    async def ends(self) -> dict[int, int]:
        """The ends of the stream now."""
        found = await self._source.reader.describe(self._stream)
        return {partition: stored.end + self._source_bases.get(partition, 0) for partition, stored in found.items()}

    async def copied(self) -> dict[int, int]:
        """The ends of the copy now."""
        found = await self._target.reader.describe(self._stream)
        return {partition: stored.end + self._target_bases.get(partition, 0) for partition, stored in found.items()}

    async def advance(self) -> int:
        """Copy what is stored now. Gives the number of records. Raises BrokerError kinds (call it again), and CopyDiffers."""
        ends, copied = await asyncio.gather(self.ends(), self.copied())
        if ends.keys() != copied.keys():
            raise CopyDiffers(
                f"{self._stream} has {len(ends)} partitions, and its copy {len(copied)}: it grew meanwhile", GIVE_UP
            )
        return sum(await gather_few([partial(self._advance, one, copied[one], ends[one]) for one in ends]))

    async def _advance(self, partition: int, offset: int, end: int) -> int:
        count = 0
        while offset < end:
            records = await self._read(self._source, self._source_bases, partition, offset, min(PAGE, end - offset))
            for _, chunk in split_by_size(records, MAX_APPEND_BYTES):
                first = await self._append(partition, offset, chunk)
                if first != offset:
                    raise CopyDiffers(
                        f"{self._stream}[{partition}]: the copy of offset {offset} is at {first}: somebody else writes there, or "
                        "an earlier append arrived late",
                        GIVE_UP,
                    )
                offset += len(chunk)
                count += len(chunk)
                self.progress += len(chunk)
        return count

    async def _append(self, partition: int, offset: int, chunk: Sequence[Record]) -> int:
        """Gives the first offset. An append in doubt is repeated as it is, unless it is seen to be stored: Kafka's appender knows
        it by its records, and stores it once. Raises BrokerError kinds."""
        for left in range(_DOUBTS, -1, -1):
            try:
                stored = await self._target.appender.append(self._stream, partition, chunk, timeout=APPEND_S)
            except OutcomeUnknown:
                if not left:
                    raise
            else:
                for _, error in stored.failed:
                    raise error
                if stored.first >= 0:
                    return stored.first + self._target_bases.get(partition, 0)
            await asyncio.sleep(_AGAIN_S)
            if (await self.copied())[partition] == offset + len(chunk):
                return offset
        raise Unavailable(f"{self._stream}[{partition}]: the copy of offset {offset} is not seen")

    async def compare(self) -> None:
        """Compare what was copied since the last call with the stream. Raises CopyDiffers, and BrokerError kinds."""
        stored, copied = await asyncio.gather(self._source.reader.describe(self._stream), self.copied())
        starts = {one: stored[one].start + self._source_bases.get(one, 0) for one in copied}
        await gather_few([partial(self._compare, one, starts[one], end) for one, end in copied.items()])

    async def _compare(self, partition: int, start: int, end: int) -> None:
        start = max(self._compared.get(partition, self._target_bases.get(partition, 0)), start)
        while start < end:
            count = min(PAGE, end - start)
            wanted = await self._read(self._source, self._source_bases, partition, start, count)
            found = await self._read(self._target, self._target_bases, partition, start, len(wanted))
            for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
                if one != other:
                    raise CopyDiffers(
                        f"{self._stream}[{partition}]: offset {start + number} is another event in the copy", GIVE_UP
                    )
            both = min(len(wanted), len(found))
            self.origins.add(wanted[:both], found[:both])
            self.events += both
            self.progress += both
            start += both
            self._compared[partition] = start
        self._compared[partition] = max(start, end)

    async def _read(
        self, broker: Broker, bases: Mapping[int, int], partition: int, offset: int, count: int
    ) -> Sequence[Record]:
        """At least one record from `offset` on. Raises CopyDiffers where offsets are missing or damaged."""
        at = offset - bases.get(partition, 0)
        try:
            batch = await broker.reader.read(self._stream, partition, at, max_records=count)
        except OffsetOutOfRange as error:
            raise removed(f"{self._stream}[{partition}]", offset) from error
        if batch is None:
            raise Unavailable(f"{self._stream}[{partition}]: offset {at} is not there yet")
        if batch.damage is not None or list(batch.offsets) != list(range(at, at + len(batch.records))):
            raise CopyDiffers(
                f"{self._stream}[{partition}]: records from offset {offset} on are damaged, or not all there. A copy with the "
                "same offsets is not possible",
                "'When a partition stops' in docs/operating.md",
            )
        return batch.records
