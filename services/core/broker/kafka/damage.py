"""After a read failed: which partition cannot be read on, and exactly why."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.offsets import EARLIEST, ends, fetch_batches, leaders_of, list_offsets
from services.core.broker.record import TopicPartition

Fault = Callable[[], BrokerError]


class Damage(NamedTuple):
    """first: the first offset that cannot be read."""

    first: int
    fault: Fault


async def find_gaps(cluster: Cluster, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, Fault]:
    """Those of the positions that lie outside of what is stored, with the error to raise for each."""
    first = await list_offsets(cluster, dict.fromkeys(wanted, EARLIEST))
    end = await ends(cluster, wanted)
    return {
        source: _gap(source, offset, first[source], end[source])
        for source, offset in wanted.items()
        if not first[source] <= offset <= end[source]
    }


def _gap(source: TopicPartition, wanted: int, first: int, end: int) -> Fault:
    return lambda: OffsetOutOfRange(source.topic, source.partition, wanted, first, end)


async def find_damage(cluster: Cluster, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Damage]:
    """Read on at each position, a megabyte at most; those with a batch that cannot be decoded."""
    found: dict[TopicPartition, Damage] = {}
    leaders = await leaders_of(cluster, positions)
    for source, offset in positions.items():
        batches = await fetch_batches(cluster, source, leaders[source], offset)
        first = last = offset
        try:
            while batches.has_next():
                batch = batches.next_batch()
                first, last = batch.base_offset, batch.next_offset - 1
                if not batch.validate_crc():
                    raise ValueError("checksum mismatch")
                for _ in batch:
                    pass
        except Exception as error:
            found[source] = _damage(source, max(first, offset), last, f"{type(error).__name__}: {error}")
    return found


def _damage(source: TopicPartition, first: int, last: int, detail: str) -> Damage:
    return Damage(first, lambda: DataDamaged(source.topic, ((source.partition, first, last),), detail))
