"""The copy of a stream to or from Kinesis: the same records in the same order in the same partitions, at other offsets.

On Kinesis an offset is a sequence number of the service, so a copy cannot have the offsets of the stream. And a put of unknown
outcome may be stored again, at any later time. So the copy may hold records twice; it is right when the stream's records are
found in it in order, and everything between them was copied before. Each page that is found makes an `OffsetPair`. By these pairs
the positions of groups are translated (`OffsetTranslator`).

What is in the copy is found by reading it: there is no other state to keep or to lose. The ends of both are fences
(`Reader.fence`): on Kinesis a record that was acknowledged may not be readable yet. Before each window of records is appended,
the copy is read to its end, and the state is read again: another command may have handed the copy over.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable
from services.core.control.homes import ANY_PARTITION
from services.fleet.migrate.copying import GIVE_UP, Complete, CopyDiffers, OriginCount, gather_few
from services.fleet.migrate.stream_source import StreamSource
from services.fleet.migrate.translated_partition import CopyFence, OffsetPair, TranslatedPartition

_WINDOW_BYTES, _LEAST_WINDOW_BYTES = 64 << 20, 1 << 20
"""Of all partitions together, and of each one at least."""
_LARGEST_CONTIGUOUS = 1 << 64
"""Offsets of Kinesis are higher."""


class TranslatedCopy:
    """From `source` to `target`. starts: the offsets of the stream at which the copy began. Offsets of the stream have
    `source_bases`; those of the copy are the target's own. require: raises when this command may not write to the copy any more:
    somebody has handed it over, or given it up."""

    def __init__(
        self,
        stream: str,
        source: Broker,
        target: Broker,
        source_bases: Mapping[int, int],
        starts: Mapping[int, int],
        require: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream, self._target, self._starts, self._require = stream, target, starts, require
        self.origins = OriginCount()
        self._source = StreamSource(stream, source, source_bases)
        window = max(_WINDOW_BYTES // max(1, len(starts)), _LEAST_WINDOW_BYTES)
        self._partitions = {
            partition: TranslatedPartition(self._source, target, partition, start, window, self.origins)
            for partition, start in starts.items()
        }

    @property
    def events(self) -> int:
        """Those that were found in the copy, and are the same."""
        return sum(one.events for one in self._partitions.values())

    @property
    def progress(self) -> int:
        """Grows with each page that is copied or found."""
        return sum(one.progress for one in self._partitions.values())

    async def total(self) -> int:
        """How many events the stream has. Where offsets do not count records, nobody knows more than those that were found."""
        if not self._source.is_contiguous:
            return self.events
        ends, begins = await self._source.fence(), {**self._starts, **self.begins}
        return sum(end - begins.get(partition, end) for partition, end in ends.items())

    @property
    def begins(self) -> dict[int, int]:
        """The offset of the stream at which the copy begins, by partition, where it was read: retention may have removed some of
        the beginning before."""
        return {number: one.begin for number, one in self._partitions.items() if one.begin is not None}

    @property
    def pairs(self) -> dict[int, Sequence[OffsetPair]]:
        """All that are known, ascending, by partition."""
        return {number: one.pairs for number, one in self._partitions.items()}

    async def follow(self) -> float:
        """As `ExactCopy.follow`."""
        began = time.monotonic()
        earlier = await self._target_fence()
        await self._advance(await self._fence(), earlier)
        return time.monotonic() - began

    async def complete(self) -> Complete | None:
        """The rest, when nothing more is acknowledged. Raises as `follow`.

        Usually `follow` has found everything meanwhile. Then the copy is not read again: each read of a shard of Kinesis takes a
        fifth of a second, in which writers are held.
        """
        ends = await self._fence()
        if not await self._has_found(ends):
            earlier = await self._target_fence()
            ends = await self._fence()
            await self._advance(ends, earlier)
        for number, one in self._partitions.items():
            one.check_complete(ends[number])
        behind = {number: one.found_end for number, one in self._partitions.items()}
        if None in behind.values():  # no record: whoever begins at a fence begins before all that is stored later
            fences = await self._target_fence()
            behind = {number: fences[number] if at is None else at for number, at in behind.items()}
        pairs = {number: one.some_pairs() for number, one in self._partitions.items()}
        ended = {number: at for number, at in behind.items() if at is not None}
        return Complete(ends, self._bases(ends), ended, pairs)

    async def _has_found(self, ends: Mapping[int, int]) -> bool:
        """Whether all records of the stream before `ends` were found in the copy."""
        return all(await gather_few([partial(one.has_found, ends[number]) for number, one in self._partitions.items()]))

    def _bases(self, ends: Mapping[int, int]) -> dict[int, int]:
        """What is added on the target, so that no offset of the stream names two events, and offsets of a partition increase."""
        if self._target.features.contiguous_offsets:
            return dict(ends)
        highest = max(ends.values(), default=0)
        return {} if highest < _LARGEST_CONTIGUOUS else {ANY_PARTITION: highest}

    async def _advance(self, ends: Mapping[int, int], earlier: Mapping[int, int]) -> None:
        """Find what is in the copy, append a window of what lacks, and search again, until nothing before `ends` lacks. earlier:
        as in `CopyFence`."""
        fences, has_appended = earlier, False
        while True:
            read_at, before = time.monotonic(), self.events
            searches = [
                partial(one.find_copied, ends[number], CopyFence(fences[number], earlier[number], read_at))
                for number, one in self._partitions.items()
            ]
            await gather_few(searches)
            if has_appended and self.events == before:
                raise Unavailable(f"{self._stream}: the copy is not seen")
            appends = [partial(one.append, ends[number], self._require) for number, one in self._partitions.items()]
            if not any(await gather_few(appends)):
                return
            fences, has_appended = await self._target_fence(), True

    async def _fence(self) -> dict[int, int]:
        return self._same_partitions(await self._source.fence(), "was split, merged or has grown")

    async def _target_fence(self) -> dict[int, int]:
        return self._same_partitions(await self._target.reader.fence(self._stream), "was changed on the other broker")

    def _same_partitions(self, ends: dict[int, int], what: str) -> dict[int, int]:
        if ends.keys() != self._partitions.keys():
            raise CopyDiffers(f"{self._stream} {what} meanwhile: it has {sorted(ends)}", GIVE_UP)
        return ends
