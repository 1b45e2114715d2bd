"""From columns of raw field values to event ids, ordering keys and event times, and the ids and numbers that ingest makes.

A column is a list, a row is an event. Each function has a fast path for a column that is uniform and valid, as nearly every
column is: loops in C do the work. A second path goes row by row and finds each fault. An absent value and null mean the same.
"""

import binascii
import datetime
import hashlib
import itertools
import os
import re
import secrets
from typing import Annotated, NamedTuple

import msgspec

from services.core.http.problem_type import ProblemType
from services.core.ledger.report import MAX_NUMBER
from services.core.pipe_file.field_path import Column
from services.core.units import format_duration
from services.ingest import problems
from services.ingest.problems import kind_of

MAX_ID_BYTES = 256
MAX_KEY_BYTES = 1024
FUTURE_MS = 24 * 3_600_000
"""How far ahead of this machine's clock an event time may be. So no client's broken clock moves a watermark by years."""

_SECONDS_BELOW = 10**11
"""Smaller numbers are seconds (until the year 5138), others milliseconds (from 1973)."""

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
"""Characters that ids and attributes must not have, because they become HTTP headers."""

_NOTHING = type(None)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_Time = Annotated[datetime.datetime, msgspec.Meta(tz=True)]

Faults = dict[int, tuple[ProblemType, str]]
"""The faults by row."""


def read_ids(column: Column, name: str = "The id") -> tuple[list[bytes | None], Faults]:
    """Ids as UTF-8, None where absent. A string of 1 to 256 bytes without control characters, or an integer.

    name: begins the sentences about faults.
    """
    if set(map(type, column)) == {str}:
        ids = [value.encode() for value in column]
        if "".join(column).isprintable() and all(ids) and max(map(len, ids)) <= MAX_ID_BYTES:
            return ids, {}
    faults: Faults = {}
    return [_read_id(value, name, row, faults) for row, value in enumerate(column)], faults


def _read_id(value: object, name: str, row: int, faults: Faults) -> bytes | None:
    if value is None:
        return None
    if type(value) is int:
        return b"%d" % value
    if type(value) is not str:
        faults[row] = (problems.BAD_ID, f"{name} is {kind_of(value)}. Send a string, or an integer below 2^64.")
        return None
    encoded = value.encode()
    if CONTROL.search(value):
        faults[row] = (problems.BAD_ID_CHARACTERS, f"{name} has control characters. Send it without them.")
    elif not encoded:
        faults[row] = (problems.BAD_ID, f"{name} is an empty string. Leave it out, or send 1 to {MAX_ID_BYTES} bytes.")
    elif len(encoded) > MAX_ID_BYTES:
        faults[row] = (problems.BAD_ID, f"{name} has {len(encoded)} bytes. It may have at most {MAX_ID_BYTES}.")
    return encoded


def read_keys(column: Column, name: str = "The key") -> tuple[list[bytes | None], Faults]:
    """Ordering keys as UTF-8, None where absent. A string of at most 1024 bytes, or an integer. name: as in `read_ids`."""
    if set(map(type, column)) == {str}:
        keys = [value.encode() for value in column]
        if max(map(len, keys)) <= MAX_KEY_BYTES:
            return keys, {}
    faults: Faults = {}
    return [_read_key(value, name, row, faults) for row, value in enumerate(column)], faults


def _read_key(value: object, name: str, row: int, faults: Faults) -> bytes | None:
    if type(value) is int:
        return b"%d" % value
    if type(value) is str:
        key = value.encode()
        if len(key) <= MAX_KEY_BYTES:
            return key
        faults[row] = (problems.BAD_KEY, f"{name} has {len(key)} bytes. It may have at most {MAX_KEY_BYTES}.")
    elif value is not None:
        faults[row] = (problems.BAD_KEY, f"{name} is {kind_of(value)}. Send a string, or an integer below 2^64.")
    return None


def read_times(column: Column, arrival: int, oldest: int = 0, name: str = "The time") -> tuple[list[int], Faults]:
    """Event times in ms; `arrival` (ms) where absent.

    RFC 3339 text with an offset, or a number of seconds or milliseconds since 1970; from `oldest` (ms) until a day after arrival.
    name: as in `read_ids`.
    """
    kinds = set(map(type, column))
    if kinds == {_NOTHING}:
        return [arrival] * len(column), {}
    if kinds == {str}:
        try:
            moments = msgspec.convert(column, list[_Time])
        except msgspec.ValidationError:
            pass
        else:
            times = [(moment - _EPOCH) // _MILLISECOND for moment in moments]
            if min(times) >= oldest and max(times) <= arrival + FUTURE_MS:
                return times, {}
    elif kinds == {int} and min(column) >= max(oldest, _SECONDS_BELOW) and max(column) <= arrival + FUTURE_MS:
        return column, {}
    faults: Faults = {}
    return [_read_time(value, arrival, oldest, name, row, faults) for row, value in enumerate(column)], faults


def _read_time(value: object, arrival: int, oldest: int, name: str, row: int, faults: Faults) -> int:
    time = arrival
    if type(value) is str:
        try:
            time = (msgspec.convert(value, _Time) - _EPOCH) // _MILLISECOND
        except msgspec.ValidationError:
            detail = (
                f"{name} is a string, but not RFC 3339 with an offset. Send a time like 2026-01-02T03:04:05.678Z, or a number of "
                "seconds or milliseconds since 1970."
            )
            faults[row] = (problems.BAD_TIME, detail)
    elif type(value) is int or type(value) is float:
        time = round(value * 1000) if abs(value) < _SECONDS_BELOW else round(value)
    elif value is not None:
        detail = (
            f"{name} is {kind_of(value)}. Send an RFC 3339 string, or a number of seconds or milliseconds since 1970."
        )
        faults[row] = (problems.BAD_TIME, detail)
    if time < 0:
        faults[row] = (problems.TIME_OUT_OF_RANGE, f"{name} is before 1970. Send a later one.")
    elif time > arrival + FUTURE_MS:
        detail = f"{name} is more than a day after the arrival. Check the client's clock, and the unit of numbers."
        faults[row] = (problems.TIME_OUT_OF_RANGE, detail)
    elif time < oldest:
        age = format_duration((arrival - oldest) / 1000)
        detail = (
            f"{name} is more than {age} before the arrival, which is half of the stream's retention. Send newer events."
        )
        faults[row] = (problems.TOO_OLD, detail)
    return time


MAX_IDS = 1 << 14
_COUNTED = [b"%04x-" % (0x8000 | number) for number in range(MAX_IDS)]


class IdMaker:
    """UUID version 7 (RFC 9562) for events without an id. One process only: not for use on both sides of a fork.

    Layout: 48 bits of milliseconds, 12 random bits of the request, 14 bits that count within the request (in order), 48 random
    bits. Two ids are equal only if two requests of one millisecond have the same 12 bits, and the same 48 bits at the same count.

    The random bits are SHAKE-128 of a secret seed and a counter: as hard to guess as the system's. Reading the system's for
    each request would release the interpreter, which the log's threads then acquire: 30 us for 100 ids, against 5.
    """

    def __init__(self) -> None:
        self._seed = os.urandom(32)
        self._counter = itertools.count()

    def make(self, count: int, now_ms: int) -> list[bytes]:
        """`count` (at most MAX_IDS) ids as ASCII text, ascending."""
        if count > MAX_IDS:
            raise ValueError(f"at most {MAX_IDS} ids at once")
        digest = hashlib.shake_128(b"%b%d" % (self._seed, next(self._counter))).digest(6 * count + 2)
        digits, stamp = binascii.hexlify(digest), b"%012x" % now_ms
        head = b"%b-%b-7%b-" % (stamp[:8], stamp[8:], digits[:3])
        return [
            head + counted + digits[start : start + 12]
            for counted, start in zip(_COUNTED, range(4, 12 * count + 4, 12), strict=False)
        ]


class Numbers(NamedTuple):
    """Consecutive numbers in one partition, from `first` on. prefix: the beginning of the packed `event.Origin` of each."""

    incarnation: str
    first: int
    prefix: bytes


class Origins:
    """Numbers the events that one process run sends into one stream: 0, 1, 2, … in each partition, without a gap.

    Each stream has an incarnation of its own, so two streams never share an origin. A new incarnation begins before a number is
    too large for the ledger's sets.
    """

    def __init__(self, limit: int = MAX_NUMBER) -> None:
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self._next: dict[int, int] = {}
        self._prefixes: dict[int, bytes] = {}

    def reserve(self, partition: int, count: int) -> Numbers:
        """Reserve `count` numbers, at most `limit`."""
        first = self._next.get(partition, 0)
        if first + count > self._limit:
            self._begin()
            first = 0
        if not first:
            self._prefixes[partition] = f"{self.incarnation}:{partition}:".encode()
        self._next[partition] = first + count
        return Numbers(self.incarnation, first, self._prefixes[partition])
