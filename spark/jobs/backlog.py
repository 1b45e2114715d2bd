"""How many records a pipe has not done: asked beside its query, so that it is known, and grows, while the query is down."""

from collections.abc import Iterable

from spark.place import Position, Span

Backlog = dict[tuple[str, int], int]
"""Records by topic and partition."""


def measure_backlog(held: Iterable[Span], done: Position) -> Backlog:
    """From what was done to the present ends."""
    return {
        (topic, partition): max(0, end - max(start, done.get((topic, partition), start)))
        for topic, partition, start, end in held
    }
