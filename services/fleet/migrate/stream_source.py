"""Reads a stream whose copy has other offsets, without a gap."""

import time
from collections.abc import Mapping, Sequence

from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable
from services.core.broker.record import Batch, Record
from services.core.broker.several.brokers import shifted_errors
from services.core.control.homes import base_of
from services.fleet.migrate.copying import GIVE_UP, PAGE, CopyDiffers

FENCE_S = 1800.0
"""For so long after a fence `None` says that nothing is before it. Kinesis guards its fences for twice as long."""


class StreamSource:
    """Offsets have the bases of the stream there. `fence` before the first read."""

    def __init__(self, stream: str, broker: Broker, bases: Mapping[int, int]) -> None:
        self.stream, self._broker, self._bases = stream, broker, bases
        self._fenced = float("-inf")

    @property
    def is_contiguous(self) -> bool:
        """Whether offsets count records."""
        return self._broker.features.contiguous_offsets

    async def fence(self) -> dict[int, int]:
        """As `Reader.fence`. Raises BrokerError kinds."""
        found = await self._broker.reader.fence(self.stream)
        self._fenced = time.monotonic()
        return {partition: offset + base_of(self._bases, partition) for partition, offset in found.items()}

    async def read(self, partition: int, offset: int, end: int) -> Sequence[tuple[int, Record]]:
        """Some records from `offset` on, before `end`; none at the end. end: at most the last fence.

        Raises OffsetOutOfRange, with the offsets of the stream, where retention has removed `offset`; CopyDiffers where records
        are damaged or missing; Unavailable when it is not certain that there are none, and then the caller puts a fence again.
        """
        if offset >= end:
            return ()
        base = base_of(self._bases, partition)
        with shifted_errors(base):
            batch = await self._broker.reader.read(self.stream, partition, offset - base, max_records=PAGE)
        if batch is None:
            require_fresh(self._fenced, f"{self.stream}[{partition}]", is_contiguous=self.is_contiguous)
            return ()
        require_whole(batch, offset - base, is_contiguous=self.is_contiguous)
        pairs = zip(batch.offsets, batch.records, strict=True)
        return [(one + base, record) for one, record in pairs if one + base < end]


def require_fresh(fenced: float, name: str, *, is_contiguous: bool) -> None:
    """A read before the last fence has found nothing. Raises Unavailable where that may be untrue: offsets that count records say
    that there are some, and a former fence is guarded no more."""
    if is_contiguous or time.monotonic() > fenced + FENCE_S:
        raise Unavailable(f"{name}: what is before its end is not seen")


def require_whole(batch: Batch, at: int, *, is_contiguous: bool) -> None:
    """Raises CopyDiffers for a batch that is damaged, or lacks records from offset `at` on."""
    if batch.damage is not None or (is_contiguous and list(batch.offsets) != list(range(at, at + len(batch.records)))):
        raise CopyDiffers(
            f"{batch.topic}[{batch.partition}]: records from offset {at} on are damaged, or not all there",
            "'When a partition stops' in docs/operating.md",
        )


def removed(name: str, offset: int) -> CopyDiffers:
    """The error of a copy that cannot go on. name: of the stream and the partition."""
    return CopyDiffers(f"{name}: retention has removed offset {offset} before it was copied and compared", GIVE_UP)
