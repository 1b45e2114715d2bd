"""What a stream holds of the last minutes: how many events of which types, how large, how many in a stored entry."""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.core.broker.contract import Admin
from services.core.broker.record import Batch, Record

ENTRIES_PER_PARTITION = 5_000
_PAGE = 500
_FRAME_BYTES = 64
"""About what the envelope of a record takes beside key, value and headers."""


@dataclass(slots=True)
class Sort:
    """Events of one type. bytes: with key and headers."""

    events: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Sample:
    """seconds: the time that the sample stands for. events_per_entry: how many Kinesis stores as one; 1 elsewhere."""

    seconds: float
    sorts: dict[str, Sort] = field(default_factory=dict)
    entries: int = 0

    @property
    def events(self) -> int:
        """All of them."""
        return sum(sort.events for sort in self.sorts.values())

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(sort.bytes for sort in self.sorts.values())

    @property
    def events_per_entry(self) -> float:
        """1 when nothing is known of it."""
        return max(1.0, self.events / self.entries) if self.entries else 1.0


async def take_sample(admin: Admin, topic: str, minutes: float, *, aggregated: bool) -> Sample:
    """What arrived in the last minutes, at most `ENTRIES_PER_PARTITION` events of each partition, scaled to the time they took.

    aggregated: offsets are Kinesis', so they tell which events were stored as one. Raises BrokerError kinds.
    """
    begin = time.time() - 60 * minutes
    starts = await admin.offsets_at(topic, datetime.fromtimestamp(begin, UTC))
    whole = Sample(60 * minutes)
    for partition, offset in starts.items():
        part = await _read(admin, topic, partition, offset, begin, aggregated=aggregated)
        share = whole.seconds / part.seconds
        whole.entries += round(part.entries * share)
        for name, sort in part.sorts.items():
            known = whole.sorts.setdefault(name, Sort())
            known.events += round(sort.events * share)
            known.bytes += round(sort.bytes * share)
    return whole


async def _read(admin: Admin, topic: str, partition: int, offset: int, begin: float, *, aggregated: bool) -> Sample:
    sample, newest = Sample(1.0), begin
    entries: set[int] = set()
    while sample.events < ENTRIES_PER_PARTITION:
        batch = await admin.read(topic, partition, offset, max_records=_PAGE)
        if batch is None:
            newest = time.time()
            break
        if batch.damage is None:
            _add(sample, batch)
            entries.update(one >> 20 for one in batch.offsets if aggregated)
            newest = max(newest, batch.records[-1].timestamp / 1000)
        offset = batch.offsets[-1] + 1
    sample.seconds = max(1.0, newest - begin)
    sample.entries = len(entries)
    return sample


def _add(sample: Sample, batch: Batch) -> None:
    for record in batch.records:
        sort = sample.sorts.setdefault(type_of(record), Sort())
        sort.events += 1
        sort.bytes += _FRAME_BYTES + len(record.key or b"") + len(record.value or b"")
        sort.bytes += sum(len(name) + len(value) for name, value in record.headers)


def type_of(record: Record) -> str:
    """The CloudEvents type, `(none)` without one."""
    kind = record.header("ce_type")
    return kind.decode("utf-8", "replace") if kind else "(none)"


def namespace_of(kind: str) -> str:
    """A type up to its last dot: com.shop.order of com.shop.order.paid."""
    return kind.rpartition(".")[0] or kind
