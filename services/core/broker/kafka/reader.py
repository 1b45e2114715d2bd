"""Reading without a group, and finding damage after a failed read. Not for throughput."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

from services.core.broker.contract import MAX_POLL_BYTES
from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.leaders import (
    EARLIEST,
    REMEDY,
    Ids,
    ends,
    fetch,
    leaders_of,
    list_offsets,
    partitions_of,
)
from services.core.broker.kafka.record_batch import (
    BATCH_FRAMING,
    MAX_BATCH_BYTES,
    MAX_RECORD_BYTES,
    Unreadable,
    drop_aborted,
    end_of,
    find_unreadable,
    first_offset,
    make_batch,
    readable_rows,
)
from services.core.broker.record import Batch, Damage, Record, TopicPartition

ErrorFactory = Callable[[], BrokerError]

_READ_BYTES = 2 * MAX_BATCH_BYTES
"""A damaged batch of ours, and the whole one behind it."""
_AT_ONCE = 4
_MAX_RAW = MAX_RECORD_BYTES - BATCH_FRAMING
"""Leaves room for the other fields of a dead letter."""


class Damaged(NamedTuple):
    """first: the first offset that cannot be read. is_next: no readable record is before it. fault: makes the error to raise.

    replacement: the batch to return in its place, when reading can go on behind it; else None.
    """

    first: int
    is_next: bool
    fault: ErrorFactory
    replacement: Batch | None


async def find_gaps(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], ids: Ids | None = None
) -> dict[TopicPartition, ErrorFactory]:
    """The positions outside of the stored range, with the error to raise for each. ids: as in `leaders_of`."""
    first = await list_offsets(cluster, dict.fromkeys(wanted, EARLIEST), ids)
    end = await ends(cluster, wanted, ids)
    return {
        source: partial(OffsetOutOfRange, *source, offset, first[source], end[source])
        for source, offset in wanted.items()
        if not first[source] <= offset <= end[source]
    }


async def find_damage(
    cluster: Cluster, positions: Mapping[TopicPartition, int], ids: Ids | None = None
) -> dict[TopicPartition, Damaged]:
    """Read two megabytes at each position, of `_AT_ONCE` partitions at a time. Gives the positions with an unreadable batch.

    A partition that cannot be asked holds up no other one. Raises UnknownTopic or Unavailable when nothing was found, and one
    could not be asked.
    """
    turn = asyncio.Semaphore(_AT_ONCE)

    async def examine(source: TopicPartition, offset: int) -> Damaged | BrokerError | None:
        async with turn:
            try:
                return await _find_damage_in(cluster, source, offset, ids)
            except BrokerError as error:
                return error

    results = await asyncio.gather(*(examine(source, offset) for source, offset in positions.items()))
    examined = dict(zip(positions, results, strict=True))
    found = {source: one for source, one in examined.items() if isinstance(one, Damaged)}
    failed = [one for one in results if isinstance(one, BrokerError)]
    if failed and not found:
        raise failed[0]
    return found


async def _find_damage_in(cluster: Cluster, source: TopicPartition, offset: int, ids: Ids | None) -> Damaged | None:
    leader = (await leaders_of(cluster, [source], ids))[source]
    try:
        data = (await fetch(cluster, source, leader, offset, max_bytes=_READ_BYTES)).data
    except DataDamaged as error:
        return Damaged(offset, True, partial(DataDamaged, error.topic, error.ranges, error.detail), None)
    unreadable = find_unreadable(data, offset)
    if unreadable is None:
        return None
    resume = None
    if unreadable.is_next and unreadable.passable:
        resume = unreadable.resume or await _confirm(cluster, source, leader, unreadable.claimed_end, ids)
    replacement = None if resume is None else _make_replacement(source, unreadable, resume - 1)
    return Damaged(unreadable.first, unreadable.is_next, _fault(source, unreadable), replacement)


async def _confirm(
    cluster: Cluster, source: TopicPartition, leader: int, claimed_end: int | None, ids: Ids | None
) -> int | None:
    """The claimed end, if the partition ends there or an intact batch begins there; else None."""
    if claimed_end is None:
        return None
    end = (await ends(cluster, [source], ids))[source]
    if claimed_end < end:
        behind = (await fetch(cluster, source, leader, claimed_end, max_bytes=1)).data
        if not behind:
            raise Unavailable(f"{source.topic}[{source.partition}]: nothing could be read at {claimed_end}")
        return claimed_end if first_offset(behind) == claimed_end else None
    return claimed_end if claimed_end == end else None


def _make_replacement(source: TopicPartition, unreadable: Unreadable, last: int) -> Batch:
    raw, detail = unreadable.raw, unreadable.detail
    if len(raw) > _MAX_RAW:
        detail += f"; of {len(raw)} bytes the first {_MAX_RAW} are kept"
    record = Record(None, raw[:_MAX_RAW], time.time_ns() // 1_000_000)
    return Batch(*source, [last], [record], Damage(unreadable.first, last, detail))


def _fault(source: TopicPartition, unreadable: Unreadable) -> ErrorFactory:
    last = max(unreadable.first, (unreadable.resume or unreadable.claimed_end or 0) - 1)
    ranges = ((source.partition, unreadable.first, last),)
    return partial(DataDamaged, source.topic, ranges, f"{unreadable.detail}. {REMEDY}")


async def read_at(
    cluster: Cluster, source: TopicPartition, offset: int, max_records: int, *, timed: bool = True
) -> Batch | None:
    """The contract's `Reader.read`. timed: as in `make_batch`."""
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
        await _raise_gap(cluster, source, offset)  # retention may have removed it meanwhile
        raise
    if rows := list(islice(readable_rows(drop_aborted(*fetched), offset), max_records)):
        return make_batch(source, rows, timed=timed)
    damaged = (await find_damage(cluster, {source: offset})).get(source)
    if damaged is not None and damaged.replacement is not None:
        return damaged.replacement
    if damaged is not None:
        raise damaged.fault()
    if not fetched.data:
        raise Unavailable(f"{source.topic}[{source.partition}]: nothing could be read at {offset}, the end is {end}")
    behind = end_of(fetched.data, offset)  # only marks of transactions, and rolled-back records
    return await read_at(cluster, source, behind, max_records, timed=timed) if offset < behind < end else None


async def _raise_gap(cluster: Cluster, source: TopicPartition, offset: int) -> None:
    gaps = await find_gaps(cluster, {source: offset})
    if source in gaps:
        raise gaps[source]()
