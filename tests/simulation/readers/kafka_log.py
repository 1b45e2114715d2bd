"""One partition as Kafka keeps it for its readers: batches with leaders' epochs, a high-water mark, transactions, retention.

Readers get what is below the last stable offset: the high-water mark, or the first open transaction. What lies above the
high-water mark is on the leader only, and a change of leaders may cut it off. An unclean election cuts off below it. A node
that does not hear of an election answers for some seconds more from the log as it was.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from services.core.broker.record import Record

_BASE, _EPOCH = struct.Struct(">q"), struct.Struct(">i")
_CRC_AT, _ATTRIBUTES_AT = 17, 21
_ATTRIBUTES, _CRC = struct.Struct(">h"), struct.Struct(">I")
_CONTROL = 1 << 5
_MARK = struct.Struct(">hh")
_LIMIT = 1 << 20
_after = attrgetter("after")


class Held(NamedTuple):
    """One batch as it is stored. number: of the sequence of its producer; -1: none. is_mark: it ends a transaction."""

    base: int
    records: int
    epoch: int
    data: bytes
    producer: int = -1
    number: int = -1
    in_transaction: bool = False
    is_mark: bool = False
    time: int = 0

    @property
    def after(self) -> int:
        """The offset behind it."""
        return self.base + self.records


class Rolled(NamedTuple):
    """A transaction that was rolled back: the producer, its first offset and that of the mark."""

    producer: int
    first: int
    last: int


def pack_batch(
    records: Sequence[Record], *, producer: int = -1, number: int = -1, in_transaction: bool = False
) -> bytes:
    """As a producer sends it."""
    builder = DefaultRecordBatchBuilder(2, 0, int(in_transaction), producer, 0, number, _LIMIT)
    for index, record in enumerate(records):
        builder.append(index, record.timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


def _pack_mark(producer: int, *, is_commit: bool, time: int) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 1, producer, 0, -1, _LIMIT)
    builder.append(0, time, _MARK.pack(0, is_commit), b"\0" * 6, [])
    data = bytearray(builder.build())
    _ATTRIBUTES.pack_into(data, _ATTRIBUTES_AT, _ATTRIBUTES.unpack_from(data, _ATTRIBUTES_AT)[0] | _CONTROL)
    _CRC.pack_into(data, _CRC_AT, calc_crc32c(bytes(data[_ATTRIBUTES_AT:])))
    return bytes(data)


@dataclass
class Log:
    """What one leader has. epochs: each with its first offset. open: first offset of each open transaction, by producer."""

    batches: list[Held] = field(default_factory=list)
    start: int = 0
    end: int = 0
    high_water: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    open: dict[int, int] = field(default_factory=dict)
    rolled: list[Rolled] = field(default_factory=list)

    def copy(self) -> "Log":
        """As it is now."""
        return Log(
            list(self.batches),
            self.start,
            self.end,
            self.high_water,
            list(self.epochs),
            dict(self.open),
            list(self.rolled),
        )

    @property
    def epoch(self) -> int:
        """Of its newest leader."""
        return self.epochs[-1][0]

    @property
    def stable(self) -> int:
        """One behind the last offset that a reader of committed records gets."""
        return min(self.high_water, *self.open.values()) if self.open else self.high_water

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """(the newest epoch that is not newer, where its records end); (-1, -1) when it knows none that high."""
        if epoch > self.epoch:
            return -1, -1
        known = max((number for number, _ in self.epochs if number <= epoch), default=epoch)
        return known, next((first for number, first in self.epochs if number > epoch), self.end)

    def read(
        self, offset: int, most: int, *, is_first: bool = True, zeros_at: int | None = None
    ) -> tuple[bytes, list[tuple[int, int]]]:
        """(whole batches from the one with this offset on, the rolled-back transactions in them).

        is_first: no other partition's batch is in the answer; then the first batch is sent however large it is. zeros_at: the
        batch with this first offset is a block of zeros on this node's disk.
        """
        found: list[Held] = []
        size, stable = 0, self.stable
        for held in self.batches[bisect_right(self.batches, offset, key=_after) :]:
            if held.after > stable or (size + len(held.data) > most and (found or not is_first)):
                break
            found.append(held)
            size += len(held.data)
        if not found:
            return b"", []
        first, last = found[0].base, found[-1].after
        rolled = [(one.producer, one.first) for one in self.rolled if one.last >= first and one.first < last]
        return b"".join(bytes(len(held.data)) if held.base == zeros_at else held.data for held in found), rolled

    def at_time(self, millis: int) -> int:
        """The first offset of a batch that is not older; -1 when there is none."""
        return next((held.base for held in self.batches if held.time >= millis and held.after <= self.stable), -1)


class Partition:
    """One partition of one life of a topic. published: told whenever readers may find something new."""

    def __init__(self, leader: int, published: Callable[[], None]) -> None:
        self.leader, self.log, self._published = leader, Log(), published
        self.is_held_up = False
        """Whether no follower has what comes now: the high-water mark stands still."""
        self.was_cut = False
        """Whether it ever lost records that were committed to it."""
        self.zeros: dict[int, int] = {}
        """Nodes on whose disks there is a block of zeros in place of a batch, and the batch's first offset."""
        self.stale: dict[int, tuple[int, Log]] = {}
        """Leader and log as nodes know them that hear of no election."""

    def seen_by(self, node: int) -> tuple[int, Log]:
        """(leader, log) as this node knows them."""
        return self.stale.get(node, (self.leader, self.log))

    def isolate(self, node: int) -> None:
        """It hears no news from now on."""
        self.stale.setdefault(node, (self.leader, self.log.copy()))

    def append(
        self, data: bytes, count: int, time: int, *, producer: int = -1, number: int = -1, in_transaction: bool = False
    ) -> int:
        """The first offset. A repeat of one of the producer's last batches is not stored again."""
        log = self.log
        if number >= 0:
            for held in reversed(log.batches):
                if (held.producer, held.number) == (producer, number):
                    return held.base
        placed = bytearray(data)
        _BASE.pack_into(placed, 0, log.end)
        _EPOCH.pack_into(placed, 12, log.epoch)
        base = log.end
        log.batches.append(Held(base, count, log.epoch, bytes(placed), producer, number, in_transaction, time=time))
        log.end += count
        if in_transaction:
            log.open.setdefault(producer, base)
        self._settle()
        return base

    def end_transaction(self, producer: int, *, is_commit: bool, time: int) -> None:
        """Commit it or roll it back."""
        log = self.log
        first = log.open.pop(producer, None)
        if first is None:
            return  # an election cut it off
        if not is_commit:
            log.rolled.append(Rolled(producer, first, log.end))
        self.append(_pack_mark(producer, is_commit=is_commit, time=time), 1, time)

    def _settle(self) -> None:
        if not self.is_held_up:
            self.log.high_water = self.log.end
        self._published()

    def catch_up(self) -> None:
        """The followers have everything."""
        self.is_held_up = False
        self._settle()

    def elect(self, leader: int, cut: int) -> int:
        """Another leader, whose log ends at or before `cut`. Gives its end. Below the high-water mark it is unclean.

        A transaction that was rolled back goes as a whole: without its mark it would be open once more.
        """
        log = self.log
        for rolled in sorted(log.rolled, key=lambda one: -one.last):
            cut = min(cut, rolled.first) if rolled.last >= cut else cut
        self.was_cut |= cut < log.high_water
        while log.batches and log.batches[-1].after > cut:
            log.batches.pop()
        log.end = log.batches[-1].after if log.batches else log.start
        log.high_water = min(log.high_water, log.end)
        log.open = {producer: first for producer, first in log.open.items() if first < log.end}
        log.rolled = [one for one in log.rolled if one.last < log.end]
        epoch = log.epoch + 1
        while log.epochs and log.epochs[-1][1] >= log.end:
            log.epochs.pop()
        log.epochs.append((epoch, log.end))
        self.zeros = {node: base for node, base in self.zeros.items() if base < log.end}
        self.leader = leader
        self.catch_up()
        return log.end

    def expire(self, before: int) -> None:
        """Retention: whole batches only."""
        log = self.log
        while log.batches and log.batches[0].after <= min(before, log.high_water):
            log.start = log.batches.pop(0).after
        self.zeros = {node: base for node, base in self.zeros.items() if base >= log.start}
