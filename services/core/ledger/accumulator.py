"""From records to sets of origins. On the hot path an event costs one append; origins are parsed in bulk.

The origins of a batch mostly come from one incarnation and partition, and have one length. Then they are a table, and the
columns of the number are copied, one copy each. If they differ in length only, the prefix is searched and cut out. Those of
several partitions are separated first, at three times the cost. Others are parsed one by one, at six times the cost. Origins
that wait to be parsed are one text per batch: to keep the headers would keep the memory around them in use, which costs more
than everything else here.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson
from pyroaring import BitMap

from services.core import metrics
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.report import MAX_NUMBER, Node, OriginSet, Outcome, Span, pack_numbers


class SetKey(NamedTuple):
    """The common fields of the origins of one set, as in `OriginSet`."""

    outcome: Outcome
    incarnation: str
    partition: int
    minute: int | None = None
    due: Span | None = None


class Sets:
    """Unions of origins. A dense run takes a few bytes, however many events it has. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[SetKey, BitMap] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def numbers(self, key: SetKey) -> BitMap:
        """The set of this key, which may be changed."""
        return self._found.setdefault(key, BitMap())

    def add_range(self, key: SetKey, first: int, count: int) -> None:
        self.numbers(key).add_range(first, first + count)

    def add(self, key: SetKey, numbers: Iterable[int]) -> None:
        """These numbers, each below 2^32."""
        self.numbers(key).update(numbers)

    def merge(self, other: "Sets") -> None:
        """Add everything of `other`, which must not be used afterwards."""
        for key, numbers in other._found.items():
            mine = self._found.setdefault(key, numbers)
            if mine is not numbers:
                mine |= numbers

    def pack(self) -> tuple[OriginSet, ...]:
        return tuple(OriginSet(*key[:4], pack_numbers(numbers), key.due) for key, numbers in self._found.items())


_PLACE = 2
"""The index of the origin among the headers that ingest writes; in other records it is searched."""
_FOLD_AT = 20_000
"""The most origins that wait to be parsed."""
_ORIGIN = re.compile(rb"([a-z0-9]{1,64}):(\d{1,9}):(\d{1,10})")
_DIGITS_AND_COMMAS = b"0123456789,"
_Settled = tuple[Outcome, Span | None]


class Accumulator:
    """The events of one pipe that one node settled. Not thread-safe.

    Records without a valid origin were written by other programs: they are outside the ledger, and are only counted.
    """

    def __init__(self, node: Node, pipe: str) -> None:
        self._waiting: dict[_Settled, list[bytes]] = {}
        self._count = 0
        self._sets = Sets()
        self._missing = metrics.LEDGER_OUTSIDE.labels(node, pipe, "no_origin")
        self._malformed = metrics.LEDGER_OUTSIDE.labels(node, pipe, "bad_origin")

    def add(self, outcome: Outcome, records: Sequence[Record], due: Span | None = None) -> None:
        """Add settled records. due: as in `OriginSet`."""
        try:
            found = [value for name, value in [record.headers[_PLACE] for record in records] if name == ORIGIN]
        except IndexError:
            found = []
        if len(found) < len(records):
            found = [origin for record in records if (origin := record.header(ORIGIN)) is not None]
            self._missing.inc(len(records) - len(found))
        if found:
            text = b",".join(found)
            if text.count(b",") < len(found):
                self._waiting.setdefault((outcome, due), []).append(text)
                self._count += len(found)
            else:
                self._fold_each((outcome, due), found)
        if self._count > _FOLD_AT:
            self._fold_all()

    def drain(self) -> Sets:
        """Everything since the last call."""
        self._fold_all()
        sets, self._sets = self._sets, Sets()
        return sets

    def _fold_all(self) -> None:
        for settled, waiting in self._waiting.items():
            self._fold(settled, waiting)
        self._waiting = {}
        self._count = 0

    def _fold(self, settled: _Settled, waiting: list[bytes]) -> None:
        """Batches with equal ends together: partitions alternate from batch to batch, seldom within one."""
        alike: dict[tuple[bytes, int, bytes, int], list[bytes]] = {}
        for batch in waiting:
            first, last = batch.partition(b",")[0], batch.rpartition(b",")[2]
            ends = (first.rpartition(b":")[0], len(first), last.rpartition(b":")[0], len(last))
            alike.setdefault(ends, []).append(batch)
        for batches in alike.values():
            origins = b",".join(batches)
            if self._fold_uniform(settled, origins):
                continue
            for alone in _split_by_prefix(origins):
                if not self._fold_uniform(settled, b",".join(alone)):
                    self._fold_each(settled, alone)

    def _fold_uniform(self, settled: _Settled, origins: bytes) -> bool:
        """Parse all at once. False, with nothing done, when they differ in more than their numbers, or one is invalid."""
        first = _ORIGIN.match(origins)
        if first is None:
            return False
        prefix = origins[: first.start(3)]
        numbers = _cut_columns(origins, len(prefix), first.end()) or _cut_prefixes(origins, prefix)
        if not numbers or numbers.translate(None, _DIGITS_AND_COMMAS):
            return False
        try:
            found = BitMap(orjson.loads(b"[" + numbers + b"]"))
        except (orjson.JSONDecodeError, OverflowError):  # a leading zero, nothing at all, or too large
            return False
        if numbers.count(b",") != origins.count(b",") or found.max() >= MAX_NUMBER:
            return False
        known = self._sets.numbers(SetKey(settled[0], first[1].decode(), int(first[2]), due=settled[1]))
        known |= found
        return True

    def _fold_each(self, settled: _Settled, origins: list[bytes]) -> None:
        found: dict[tuple[bytes, bytes], list[int]] = {}
        malformed = 0
        for origin in origins:
            match = _ORIGIN.fullmatch(origin)
            if match is None or (number := int(match[3])) >= MAX_NUMBER:
                malformed += 1
            else:
                found.setdefault((match[1], match[2]), []).append(number)
        self._malformed.inc(malformed)
        for (incarnation, partition), numbers in found.items():
            self._sets.add(SetKey(settled[0], incarnation.decode(), int(partition), due=settled[1]), numbers)


def _split_by_prefix(origins: bytes) -> Iterable[list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for origin in origins.split(b","):
        found.setdefault(origin.rpartition(b":")[0], []).append(origin)
    return found.values()


def _cut_columns(origins: bytes, start: int, length: int) -> bytes | None:
    """The rest of each origin after `start` bytes; None unless all have this length and the same first bytes."""
    step = length + 1
    count, rest = divmod(len(origins) + 1, step)
    if rest or origins[length::step] != b"," * (count - 1):
        return None
    if any(origins[at::step] != origins[at : at + 1] * count for at in range(start)):
        return None
    width = step - start
    numbers = bytearray(b",") * (width * count)
    for at in range(width - 1):
        numbers[at::width] = origins[start + at :: step]
    return bytes(numbers[:-1])


def _cut_prefixes(origins: bytes, prefix: bytes) -> bytes | None:
    """The rest of each origin after the prefix; None unless all have it."""
    if (b"," + origins).count(b"," + prefix) <= origins.count(b","):
        return None
    return (b"," + origins).replace(b"," + prefix, b",")[1:]
