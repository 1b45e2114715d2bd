"""What a shard holds now: its first and its last record. The service tells neither, so both are looked for."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from services.core.broker.contract import PartitionRange
from services.core.broker.kinesis.offsets import offset_of
from services.core.broker.kinesis.runs import read_run
from services.core.broker.kinesis.shard_iterator import OLDEST, BadSequence, Entry, ShardSource, at_time

_LOOK_BACK_MS = (10_000, 600_000, 6 * 3_600_000)
_GLANCE_BACK_MS = (10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000)
_MOST_ENTRIES = 10_000


async def stored_range(source: ShardSource) -> PartitionRange:
    """Offsets; 0 to 0 when it is empty. Reads from ever longer ago to the end, until something is there: for operators.

    Raises UnknownTopic (of a shard too), Throttled, Unavailable.
    """
    first = await _first(source)
    if first is None:
        return PartitionRange(0, 0)
    last = await _last(source)
    return PartitionRange(offset_of(first["SequenceNumber"]), read_run(first if last is None else last).next)


async def next_at_least(source: ShardSource) -> int:
    """An offset that no later entry is below; 0 when it is empty. An entry from each of ever longer ago, until there is one.

    Raises as `stored_range`.
    """
    now = int(time.time() * 1000)
    for where in (*(at_time(now - back) for back in _GLANCE_BACK_MS), OLDEST):
        first = await _first(source, where)
        if first is not None:
            return read_run(first).next
    return 0


async def _first(source: ShardSource, where: Mapping[str, Any] = OLDEST) -> Entry | None:
    with suppress(BadSequence):  # a time that is still to come, by the service's clock
        async for answer in source.read_on(where, 1):
            if answer.entries:
                return answer.entries[0]
    return None


async def _last(source: ShardSource) -> Entry | None:
    now = int(time.time() * 1000)
    for where in (*(at_time(now - back) for back in _LOOK_BACK_MS), OLDEST):
        last: Entry | None = None
        with suppress(BadSequence):
            async for answer in source.read_on(where, _MOST_ENTRIES):
                if answer.entries:
                    last = answer.entries[-1]
        if last is not None:
            return last
    return None
