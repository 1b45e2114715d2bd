"""Reading a partition without a group: a raw fetch at an offset, as operators need it. Not for throughput."""

from itertools import islice

from services.core.broker.contract import MAX_POLL_BYTES
from services.core.broker.errors import BrokerError, Unavailable, UnknownTopic
from services.core.broker.kafka.batches import make_batch
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.damage import find_damage, find_gaps
from services.core.broker.kafka.offsets import ends, fetch, leaders_of, partitions_of
from services.core.broker.kafka.scan import drop_aborted, end_of, readable_rows
from services.core.broker.record import Batch, TopicPartition


async def look(cluster: Cluster, source: TopicPartition, offset: int, max_records: int) -> Batch | None:
    """The contract's `Admin.read`."""
    if source not in await partitions_of(cluster, [source.topic]):
        raise UnknownTopic(f"{source.topic} has no partition {source.partition}")
    await _raise_gap(cluster, source, offset)
    end = (await ends(cluster, [source]))[source]
    if offset >= end:
        return None
    leader = (await leaders_of(cluster, [source]))[source]
    try:
        fetched = await fetch(cluster, source, leader, offset, max_bytes=MAX_POLL_BYTES)
    except BrokerError:
        await _raise_gap(cluster, source, offset)  # retention may have passed meanwhile
        raise
    if rows := list(islice(readable_rows(drop_aborted(*fetched), offset), max_records)):
        return make_batch(source, rows)
    damaged = (await find_damage(cluster, {source: offset})).get(source)
    if damaged is not None and damaged.passed is not None:
        return damaged.passed
    if damaged is not None:
        raise damaged.fault()
    if not fetched.data:
        raise Unavailable(f"{source.topic}[{source.partition}]: nothing could be read at {offset}, the end is {end}")
    behind = end_of(fetched.data, offset)  # these were marks of transactions, and what was rolled back: no records
    return await look(cluster, source, behind, max_records) if offset < behind < end else None


async def _raise_gap(cluster: Cluster, source: TopicPartition, offset: int) -> None:
    gaps = await find_gaps(cluster, {source: offset})
    if source in gaps:
        raise gaps[source]()
