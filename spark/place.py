"""Where records were read."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

DIGITS, _MOST_DIGITS = 19, 63
"""Of an offset below 2^63, and of Kinesis's, of 206 bits."""


def offset_text(offset: int) -> str:
    """As the column `offset` has it: with zeros in front, so that texts of one partition are ordered as their numbers are."""
    return f"{offset:0{DIGITS}d}" if offset < 1 << 63 else f"{offset:0{_MOST_DIGITS}d}"


class Place(NamedTuple):
    """One record of a source, ordered as it is read. offset: `offset_text`."""

    topic: str
    partition: int
    offset: str


class Span(NamedTuple):
    """Records `start <= offset < end` of one partition. Of Kinesis: of one shard, and `end - start` counts nothing."""

    topic: str
    partition: int
    start: int
    end: int


Position = dict[tuple[str, int], int]
"""The next offset to read, by topic and partition."""


def cut_evenly(spans: Sequence[Span], events: int) -> Iterator[list[Span]]:
    """These spans in parts of about so many events, where offsets count them."""
    waiting = [span for span in spans if span.start < span.end]
    size = max(1, events // max(1, len(waiting)))
    while waiting:
        yield [span._replace(end=min(span.end, span.start + size)) for span in waiting]
        waiting = [span._replace(start=span.start + size) for span in waiting if span.start + size < span.end]
