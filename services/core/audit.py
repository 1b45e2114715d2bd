"""Writes `penstock.audit`: operators' decisions about events that were not delivered, and who added partitions. One partition,
kept for ever.

The command line writes the entries of a redrive, a discard and a freeze after the action is durable, and those of a moved group
before. Expel writes one for the events that a pipe file drops.
`penstock apply --grow` and the autoscaler write one before a topic grows.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pipe_file.topic_names import AUDIT
from services.core.version import newer_format

REDRIVE, DISCARD = "redrive", "discard"
"""Actions on dead letters."""
DROP = "drop"
"""The action on events that waited for a removed destination. The entry has their offsets in the retry or parked topic."""

SKIP, RESET = "skip", "reset"
"""The actions on the group of a destination. The entry has the offsets that the group passes over, or reads again."""
GROW = "grow"
"""Partitions are added to a topic. The entry is written before. `count`: how many; `from` and `to` are in `filters`."""

PLAN, CANCEL = "plan", "cancel"
"""The actions on planned windows: announced, and ended early. The entry has no records; `filters` has the window."""
FREEZE, UNFREEZE = "freeze", "unfreeze"
"""The actions on the size of a group of instances. The entry has no records; `filters` has the group, the reason and the end."""

RESTORE = "restore"
"""The log was restored from a backup. Offsets behind the backup were given again. The entry names no record."""

Range = tuple[int, int]
_VERSION = 1
_CONTENT_BYTES, _TIME_BYTES = 6, 6


class Entry(msgspec.Struct, frozen=True):
    """One batch of one action in one partition. at: ms. ranges: (first, last) offsets, ascending; all their records count.

    digests: 6 bytes of the content and 6 of the time of each record, in the order of the offsets. They tell the records from
    those of a topic that was created again. Entries of earlier versions have the first 6 bytes of each, or none. Empty in entries
    of other actions. An entry of GROW is about the whole topic: it has no ranges, and partition 0. version: of this format.
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
    version: int = _VERSION


def decode_entry(value: bytes | None) -> Entry:
    """Raises ValueError when it is no entry, or one of a newer version, whose offsets may mean something else."""
    entry = msgspec.json.decode(value or b"", type=Entry)
    if entry.version > _VERSION:
        raise ValueError(newer_format("the entry", entry.version, _VERSION))
    return entry


class ActedUpon(NamedTuple):
    """One record. digest: from `digest_of`, or empty."""

    topic: str
    partition: int
    offset: int
    digest: bytes = b""


def digest_of(record: Record) -> bytes:
    """A hash of the record's key, value and headers, then its time: the same event may be the same dead letter again, later."""
    found = hashlib.blake2b(digest_size=_CONTENT_BYTES)
    for part in (
        record.key,
        record.value,
        *(part for name, value in record.headers for part in (name.encode(), value)),
    ):
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.digest() + (record.timestamp % (1 << 8 * _TIME_BYTES)).to_bytes(_TIME_BYTES)


class MovedGroup(NamedTuple):
    """A group moves in one partition. at: its next offset before, if it is known; to: afterwards. events: between both.

    first, last: the offsets of these events; None without any.
    """

    topic: str
    partition: int
    at: int | None
    to: int
    events: int
    first: int | None = None
    last: int | None = None


async def write_moves(
    producer: Producer, action: str, who: str, filters: Mapping[str, str], moves: Iterable[MovedGroup]
) -> None:
    """Write one entry per partition, durably: SKIP or RESET. Raises BrokerError kinds."""
    at, entries = time.time_ns() // 1_000_000, []
    for one in moves:
        ranges = [] if one.first is None or one.last is None else [(one.first, one.last)]
        where = {"from": "none" if one.at is None else str(one.at), "to": str(one.to)}
        entries.append(Entry(action, at, who, {**filters, **where}, one.topic, one.partition, ranges, one.events))
    await _write(producer, entries)


async def write_growth(producer: Producer, who: str, topic: str, has: int, partitions: int) -> None:
    """Write that partitions are about to be added to the topic, durably. Raises BrokerError kinds."""
    at, change = time.time_ns() // 1_000_000, {"from": str(has), "to": str(partitions)}
    await _write(producer, [Entry(GROW, at, who, change, topic, 0, [], partitions - has)])


async def write_act(producer: Producer, action: str, who: str, about: Mapping[str, str]) -> None:
    """Write one entry without records durably: PLAN, CANCEL, FREEZE or UNFREEZE. Raises BrokerError kinds."""
    await _write(producer, [Entry(action, time.time_ns() // 1_000_000, who, dict(about), "", 0, [], 0)])


async def write_entries(
    producer: Producer,
    action: str,
    who: str,
    filters: Mapping[str, str],
    records: Iterable[ActedUpon],
) -> None:
    """Write one entry per partition, durably. filters: the operator's selection. Raises BrokerError kinds."""
    places: defaultdict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for topic, partition, offset, digest in records:
        places[topic, partition][offset] = digest
    at = time.time_ns() // 1_000_000
    entries = [
        Entry(action, at, who, dict(filters), topic, partition, _join(found), len(found), _digests(found))
        for (topic, partition), found in places.items()
    ]
    await _write(producer, entries)


async def _write(producer: Producer, entries: Sequence[Entry]) -> None:
    records = [Record(None, msgspec.json.encode(entry), entry.at) for entry in entries]
    if records:
        (await producer.send_to(AUDIT, {0: records})).raise_first()


def _digests(found: Mapping[int, bytes]) -> bytes:
    """The digests in the order of the offsets; empty when one of them is missing."""
    return b"".join(found[offset] for offset in sorted(found)) if all(found.values()) else b""


def _join(offsets: Iterable[int]) -> list[Range]:
    """The offsets as ascending ranges."""
    merged: list[Range] = []
    for offset in sorted(offsets):
        if merged and offset == merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], offset)
        else:
            merged.append((offset, offset))
    return merged


def covers(entry: Entry, offset: int, digest: bytes) -> bool:
    """Whether the entry has this record. Entries without digests have every record at their offsets."""
    size, begin = len(entry.digests) // max(1, sum(last - first + 1 for first, last in entry.ranges)), 0
    for first, last in entry.ranges:
        if first <= offset <= last:
            at = begin + (offset - first) * size
            return digest.startswith(entry.digests[at : at + size])
        begin += (last - first + 1) * size
    return False
