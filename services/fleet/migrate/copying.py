"""For both kinds of copies: the end of one, the origins in it, and how its partitions are worked on."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pyroaring import BitMap64

from services.core import event
from services.core.broker.record import Record
from services.fleet.problem import CommandFailed

PAGE = 1000
"""Records of a read."""
_AT_ONCE = 8
"""Partitions: each holds a page of both ends in memory."""
APPEND_S = 8.0
GIVE_UP = "penstock migrate STREAM --undo, then the same migration again"

T = TypeVar("T")


class CopyDiffers(CommandFailed):
    """The copy is not the same as the stream. Nothing depends on it yet."""


class Complete(NamedTuple):
    """What is written down at the hand-over. ends: of the stream, and so of its former topic. bases: of the copy, by partition,
    if they are known only now. copy_ends: where the copy has the ends; empty: at the same offsets. pairs: see `OffsetPair`."""

    ends: Mapping[int, int]
    bases: Mapping[int, int] = {}
    copy_ends: Mapping[int, int] = {}
    pairs: Mapping[int, Sequence[tuple[int, int]]] = {}


async def gather_few(work: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """A few at a time, in order. When one fails, the others go on to their end: an append that was cancelled might arrive later.
    Raises the first CopyDiffers, else the first error."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def take_turn(one: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await one()

    results = await asyncio.gather(*map(take_turn, work), return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: not isinstance(one, CopyDiffers)):
        raise error
    return [one for one in results if not isinstance(one, BaseException)]


class OriginCount:
    """The sets of origins of the stream and of its copy, as far as both were read."""

    def __init__(self) -> None:
        self._sets: tuple[dict[str, BitMap64], dict[str, BitMap64]] = ({}, {})
        self.without = 0
        """Records without an origin."""

    def add(self, stream: Sequence[Record], copy: Sequence[Record]) -> None:
        for records, sets in zip((stream, copy), self._sets, strict=True):
            for record in records:
                packed = record.header(event.ORIGIN)
                if packed is None:
                    self.without += records is stream
                    continue
                run, _, number = packed.decode("ascii", "replace").rpartition(":")
                if number.isdigit():
                    sets.setdefault(run, BitMap64()).add(int(number))

    def counts(self) -> tuple[int, int]:
        """Origins of the stream, and those of them that the copy lacks."""
        stream, copy = self._sets
        missing = sum(len(numbers - copy.get(run, BitMap64())) for run, numbers in stream.items())
        return sum(map(len, stream.values())), missing
