"""What operators decided about events that were not delivered: entries of `penstock.audit`, one partition, kept for ever.

Written when what was decided is durable, by the command line, and by expel for what a pipe file drops.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pipes import AUDIT

REDRIVE, DISCARD = "redrive", "discard"
"""Of dead letters."""
DROP = "drop"
"""Of events that waited for a destination which the pipe file has removed: where they lie in the retry or parked topic."""

Range = tuple[int, int]


class Entry(msgspec.Struct, frozen=True):
    """One batch of one action in one partition. at: ms. ranges: (first, last) offsets, ascending, each wholly acted upon."""

    action: str
    at: int
    who: str
    filters: dict[str, str]
    topic: str
    partition: int
    ranges: list[Range]
    count: int


async def write_entries(
    producer: Producer,
    action: str,
    who: str,
    filters: Mapping[str, str],
    positions: Iterable[tuple[str, int, int]],
) -> None:
    """Durably, one entry a partition. filters: what was asked for. positions: topic, partition, offset.

    Raises BrokerError kinds.
    """
    places: defaultdict[tuple[str, int], list[Range]] = defaultdict(list)
    for topic, partition, offset in positions:
        places[topic, partition].append((offset, offset))
    at = time.time_ns() // 1_000_000
    entries = [
        Entry(action, at, who, dict(filters), topic, partition, merge_ranges(ranges), len(ranges))
        for (topic, partition), ranges in places.items()
    ]
    records = [Record(None, msgspec.json.encode(entry), at) for entry in entries]
    if records:
        (await producer.send_to(AUDIT, {0: records})).raise_first()


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Ascending, neighbours joined."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
