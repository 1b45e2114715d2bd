"""Where records were read."""

from typing import NamedTuple


class Place(NamedTuple):
    """One record of a source, ordered as it is read."""

    topic: str
    partition: int
    offset: int


class Span(NamedTuple):
    """Records `start <= offset < end` of one partition."""

    topic: str
    partition: int
    start: int
    end: int


Position = dict[tuple[str, int], int]
"""The next offset to read, by topic and partition."""
