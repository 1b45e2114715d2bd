"""What lies between two positions of a query."""

from spark.jobs.query import Query
from spark.place import Position, Span


def spans_between(query: Query, begin: Position, end: Position) -> list[Span]:
    """The records from one position to another that are still stored; those of a place without begin from its start."""
    found = []
    for topic, partition, start, _ in query.endpoint.held(query.session, list(query.prepared.views)):
        place = (topic, partition)
        found.append(Span(topic, partition, max(start, begin.get(place, start)), end.get(place, start)))
    return [span for span in found if span.start < span.end]


def spans_of(query: Query, batch: int) -> list[Span]:
    """What a batch that Spark has planned reads."""
    checkpoint, parse = query.checkpoint, query.endpoint.parse_position
    return spans_between(
        query, checkpoint.position(batch - 1 if batch else None, parse), checkpoint.position(batch, parse)
    )
