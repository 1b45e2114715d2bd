"""The copy of a stream on another broker: the same records at the same offsets, in the same partitions.

The end of the copy says how far it is: there is no other state to keep or to lose. So a copy that was killed goes on, and no
record is there twice. An append whose answer was lost may arrive later; then the next one does not have the offset that it should
have, and the copy is given up (CopyDiffers). It is compared record by record before anything depends on it.
"""

import asyncio
from collections.abc import Mapping, Sequence

from pyroaring import BitMap64

from services.core import event
from services.core.broker.contract import MAX_APPEND_BYTES, Broker
from services.core.broker.errors import Unavailable
from services.core.broker.record import Record, split_by_size
from services.fleet.problem import CommandFailed

_PAGE = 1000
_APPEND_S = 8.0
_GIVE_UP = "penstock migrate STREAM --undo, then the same migration again"


class CopyDiffers(CommandFailed):
    """The copy is not the same as the stream. Nothing depends on it yet."""


class StreamCopy:
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
        self.events = 0
        """Those that were compared, and are the same."""
        self.origins = OriginCount()

    async def ends(self) -> dict[int, int]:
        """The ends of the stream now."""
        found = await self._source.reader.describe(self._stream)
        return {partition: held.end + self._source_bases.get(partition, 0) for partition, held in found.items()}

    async def copied(self) -> dict[int, int]:
        """The ends of the copy now."""
        found = await self._target.reader.describe(self._stream)
        return {partition: held.end + self._target_bases.get(partition, 0) for partition, held in found.items()}

    async def advance(self) -> int:
        """Copy what is stored now. Gives the number of records. Raises BrokerError kinds (call it again), and CopyDiffers."""
        ends, copied = await self.ends(), await self.copied()
        if ends.keys() != copied.keys():
            raise CopyDiffers(
                f"{self._stream} has {len(ends)} partitions, and its copy {len(copied)}: it grew meanwhile", _GIVE_UP
            )
        return sum(await asyncio.gather(*(self._advance(one, copied[one], ends[one]) for one in ends)))

    async def _advance(self, partition: int, offset: int, end: int) -> int:
        count = 0
        while offset < end:
            records = await self._read(self._source, self._source_bases, partition, offset, min(_PAGE, end - offset))
            for _, chunk in split_by_size(records, MAX_APPEND_BYTES):
                stored = await self._target.appender.append(self._stream, partition, chunk, timeout=_APPEND_S)
                for _, error in stored.failed:
                    raise error
                first = stored.first + self._target_bases.get(partition, 0)
                if first != offset:
                    raise CopyDiffers(
                        f"{self._stream}[{partition}]: the copy of offset {offset} is at {first}: somebody else writes there, or "
                        "an earlier append arrived late",
                        _GIVE_UP,
                    )
                offset += len(chunk)
                count += len(chunk)
        return count

    async def compare(self) -> None:
        """Compare what was copied since the last call with the stream. Raises CopyDiffers, and BrokerError kinds."""
        for partition, end in (await self.copied()).items():
            held = (await self._source.reader.describe(self._stream))[partition]
            start = max(
                self._compared.get(partition, self._target_bases.get(partition, 0)),
                held.start + self._source_bases.get(partition, 0),
            )
            while start < end:
                count = min(_PAGE, end - start)
                wanted = await self._read(self._source, self._source_bases, partition, start, count)
                found = await self._read(self._target, self._target_bases, partition, start, len(wanted))
                for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
                    if one != other:
                        raise CopyDiffers(
                            f"{self._stream}[{partition}]: offset {start + number} is another event in the copy",
                            _GIVE_UP,
                        )
                both = min(len(wanted), len(found))
                self.origins.add(wanted[:both], found[:both])
                self.events += both
                start += both
            self._compared[partition] = max(start, end)

    async def _read(
        self, broker: Broker, bases: Mapping[int, int], partition: int, offset: int, count: int
    ) -> Sequence[Record]:
        """At least one record from `offset` on. Raises CopyDiffers where offsets are missing or damaged."""
        at = offset - bases.get(partition, 0)
        batch = await broker.reader.read(self._stream, partition, at, max_records=count)
        if batch is None:
            raise Unavailable(f"{self._stream}[{partition}]: offset {at} is not there yet")
        if batch.damage is not None or list(batch.offsets) != list(range(at, at + len(batch.records))):
            raise CopyDiffers(
                f"{self._stream}[{partition}]: records from offset {offset} on are damaged, or not all there. A copy with the "
                "same offsets is not possible",
                "penstock log verify, and 'When a partition stops' in docs/operating.md",
            )
        return batch.records


class OriginCount:
    """The sets of origins of the stream and of its copy, as far as both were read."""

    def __init__(self) -> None:
        self._there: tuple[dict[str, BitMap64], dict[str, BitMap64]] = ({}, {})
        self.without = 0
        """Records without an origin."""

    def add(self, stream: Sequence[Record], copy: Sequence[Record]) -> None:
        for records, sets in zip((stream, copy), self._there, strict=True):
            for record in records:
                packed = record.header(event.ORIGIN)
                if packed is None:
                    self.without += records is stream
                    continue
                run, _, number = packed.decode("ascii", "replace").rpartition(":")
                if number.isdigit():
                    sets.setdefault(run, BitMap64()).add(int(number))

    def counts(self) -> tuple[int, int]:
        """Origins of the stream, and those of them that the copy lacks."""
        stream, copy = self._there
        missing = sum(len(numbers - copy.get(run, BitMap64())) for run, numbers in stream.items())
        return sum(map(len, stream.values())), missing
