"""What operators decided about events that were not delivered: entries of `penstock.audit`, one partition, kept for ever.

Written when what was decided is durable, by the command line, and by expel for what a pipe file drops.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pipes import AUDIT

REDRIVE, DISCARD = "redrive", "discard"
"""Of dead letters."""
DROP = "drop"
"""Of events that waited for a destination which the pipe file has removed: where they lie in the retry or parked topic."""

Range = tuple[int, int]
DIGEST_BYTES = 6


class Entry(msgspec.Struct, frozen=True):
    """One batch of one action in one partition. at: ms. ranges: (first, last) offsets, ascending, each wholly acted upon.

    digests: of the records acted upon, DIGEST_BYTES each, in the order of their offsets: a topic that was made anew has other
    records there. Empty in entries of earlier versions, and where nobody asks.
    """

    action: str
    at: int
    who: str
    filters: dict[str, str]
    topic: str
    partition: int
    ranges: list[Range]
    count: int
    digests: bytes = b""


class ActedUpon(NamedTuple):
    """One record. digest: `digest_of` it, or empty."""

    topic: str
    partition: int
    offset: int
    digest: bytes = b""


def digest_of(record: Record) -> bytes:
    """What a record is known by, wherever it lies: of its key, value and headers."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (
        record.key,
        record.value,
        *(part for name, value in record.headers for part in (name.encode(), value)),
    ):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest()


async def write_entries(
    producer: Producer,
    action: str,
    who: str,
    filters: Mapping[str, str],
    records: Iterable[ActedUpon],
) -> None:
    """Durably, one entry a partition. filters: what was asked for. Raises BrokerError kinds."""
    places: defaultdict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for topic, partition, offset, digest in records:
        places[topic, partition][offset] = digest
    at = time.time_ns() // 1_000_000
    entries = [
        Entry(action, at, who, dict(filters), topic, partition, _join(found), len(found), _digests(found))
        for (topic, partition), found in places.items()
    ]
    written = [Record(None, msgspec.json.encode(entry), at) for entry in entries]
    if written:
        (await producer.send_to(AUDIT, {0: written})).raise_first()


def _digests(found: Mapping[int, bytes]) -> bytes:
    """In the order of the offsets; none when one of them has none."""
    return b"".join(found[offset] for offset in sorted(found)) if all(found.values()) else b""


def _join(offsets: Iterable[int]) -> list[Range]:
    """Ascending, neighbours joined."""
    merged: list[Range] = []
    for offset in sorted(offsets):
        if merged and offset == merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], offset)
        else:
            merged.append((offset, offset))
    return merged
