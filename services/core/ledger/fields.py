"""Statistics of payloads, per top-level field of a JSON object: the share of nulls, the number of different values, the mean.

Of a sample: the first event of each batch, at most `PER_SECOND` per second. So the cost is the same at any rate. The figures
are not exact: they show that something changed.
"""

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import msgspec
import orjson

PER_SECOND = 10
MAX_BYTES = 16_384
"""Larger payloads are ignored."""
MAX_FIELDS = 40
"""Further fields of a minute are ignored."""
MAX_NAME = 100
KEPT_HASHES = 64
_LARGEST = 1e150
"""Larger numbers count as this one: their squares would be infinite."""


class FieldStats(msgspec.Struct, array_like=True):
    """One field. seen: events that have it. nulls: of these, with the value null. numbers, total, squares: of its numbers,
    the count, the sum, the sum of squares. hashes: the smallest of its values' hashes."""

    seen: int = 0
    nulls: int = 0
    numbers: int = 0
    total: float = 0.0
    squares: float = 0.0
    hashes: set[int] = msgspec.field(default_factory=set)

    def add(self, value: object) -> None:
        """Add one parsed JSON value. A value that is nested too deeply to be encoded is ignored."""
        try:
            written = orjson.dumps(value)
        except orjson.JSONEncodeError:
            return
        self.seen += 1
        if value is None:
            self.nulls += 1
            return
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = max(-_LARGEST, min(_LARGEST, float(value)))
            self.numbers += 1
            self.total += number
            self.squares += number * number
        self.hashes.add(crc32(written))
        if len(self.hashes) > 4 * KEPT_HASHES:
            self.trim()

    def merge(self, other: "FieldStats | PackedStats") -> None:
        self.seen += other.seen
        self.nulls += other.nulls
        self.numbers += other.numbers
        self.total += other.total
        self.squares += other.squares
        self.hashes.update(other.hashes)
        if len(self.hashes) > 4 * KEPT_HASHES:
            self.trim()

    def trim(self) -> None:
        """Drop hashes that do not count any more."""
        self.hashes = set(sorted(self.hashes)[:KEPT_HASHES])

    def distinct(self) -> float:
        """The number of different values: exact below KEPT_HASHES, else mostly within 12 % (k minimum values)."""
        if len(self.hashes) < KEPT_HASHES:
            return float(len(self.hashes))
        return (KEPT_HASHES - 1) * 2.0**32 / (sorted(self.hashes)[KEPT_HASHES - 1] + 1)


class PackedStats(NamedTuple):
    """`FieldStats` in some hundred bytes."""

    seen: int
    nulls: int
    numbers: int
    total: float
    squares: float
    hashes: "array[int]"

    @classmethod
    def pack(cls, stats: FieldStats) -> "PackedStats":
        """With the hashes that count."""
        hashes = array("I", sorted(stats.hashes)[:KEPT_HASHES])
        return cls(stats.seen, stats.nulls, stats.numbers, stats.total, stats.squares, hashes)


class FieldSet(msgspec.Struct, frozen=True, array_like=True):
    """The sampled events of one minute of the wall clock, as they arrived at ingest or left expel."""

    minute: int
    events: int
    fields: dict[str, FieldStats]


class FieldSample:
    """Fed by a node, batch by batch; emptied by its reporter once a minute."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._second = self._left = 0
        self._minute = 0
        self._events = 0
        self._fields: dict[str, FieldStats] = {}

    def offer(self, value: bytes | None) -> None:
        """Sample the payload of one event of a batch. Anything but a JSON object is ignored."""
        now = int(self._clock())
        if now != self._second:
            self._second, self._left = now, PER_SECOND
        if self._left <= 0 or value is None or len(value) > MAX_BYTES:
            return
        self._left -= 1
        try:
            document = orjson.loads(value)
        except orjson.JSONDecodeError:
            return
        if isinstance(document, dict):
            self._minute = self._minute or now // 60
            self._add(document)

    def _add(self, document: dict[str, object]) -> None:
        self._events += 1
        for name, value in document.items():
            stats = self._fields.get(name)
            if stats is None:
                if len(self._fields) >= MAX_FIELDS or len(name) > MAX_NAME:
                    continue
                stats = self._fields[name] = FieldStats()
            stats.add(value)

    def drain(self, *, last: bool = False) -> FieldSet | None:
        """The minute that is over; with `last`, the present one as well. None without events."""
        if not self._events or not (last or int(self._clock()) // 60 > self._minute):
            return None
        found = FieldSet(self._minute, self._events, self._fields)
        self._minute, self._events, self._fields = 0, 0, {}
        for stats in found.fields.values():
            stats.trim()
        return found
