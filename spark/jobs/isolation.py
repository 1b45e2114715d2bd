"""After a query failed whose plan holds the transform: find the events on which it fails, and put them aside for good.

The events that the query would read next are read again as a batch and run through the same transform. What is found
goes to the dead letters first and then into `skipped.json` beside the checkpoint: from there the next run leaves it out.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from services.core.pipes import dead_letter_topic
from spark.brokers.endpoint import BatchName, Endpoint
from spark.checkpoint import Checkpoint
from spark.dead_letters import TRANSFORM_ERROR, dead_letters, rejected
from spark.jobs.culprits import exactly, find_culprits, fingerprint, try_transform
from spark.place import Place, Span
from spark.transforms.preparation import Prepared

log = structlog.get_logger()


def put_culprits_aside(
    session: SparkSession, prepared: Prepared, endpoint: Endpoint, checkpoint: Checkpoint, writer: str
) -> int:
    """How many events were found and put aside; 0: the transform is not to blame. Raises TransformBroken."""
    skipped = checkpoint.read_skipped()
    for spans in _windows(session, prepared, endpoint, checkpoint):
        raw = endpoint.read_spans(session, spans).where(f"NOT ({exactly(skipped)})").persist()
        try:
            places = _places(raw)
            culprits = find_culprits(places, lambda some, raw=raw: try_transform(prepared, raw, some)) if places else {}  # type: ignore[misc]
            if culprits:
                table: Any = raw.where(exactly(culprits)).toArrow()
        finally:
            raw.unpersist()
        if culprits:
            found = rejected(table, TRANSFORM_ERROR, lambda place, found=culprits: found[place])  # type: ignore[misc]
            records = dead_letters(found, pipe=prepared.pipe, max_bytes=endpoint.max_record_bytes)
            batch = BatchName(f"{writer}:skipped:{fingerprint(culprits)}", 0)
            endpoint.write_records(session, records, dead_letter_topic(prepared.pipe), batch)
            checkpoint.write_skipped([*skipped, *culprits])
            log.warning(
                "transform failed on events",
                pipe=prepared.pipe,
                events=len(culprits),
                errors=list(culprits.values())[:3],
            )
            return len(culprits)
    return 0


def _windows(
    session: SparkSession, prepared: Prepared, endpoint: Endpoint, checkpoint: Checkpoint
) -> Iterable[list[Span]]:
    """What the query has not done yet, up to the present end, in parts of about max_events."""
    topics = list(prepared.views)
    position = checkpoint.done_up_to(endpoint.parse_position)
    waiting = [
        Span(topic, partition, max(start, position.get((topic, partition), start)), end)
        for topic, partition, start, end in endpoint.held(session, topics)
    ]
    size = max(1, prepared.transform.max_events // max(1, len(waiting)))
    while waiting := [span for span in waiting if span.start < span.end]:
        yield [span._replace(end=min(span.end, span.start + size)) for span in waiting]
        waiting = [span._replace(start=min(span.end, span.start + size)) for span in waiting]


def _places(raw: DataFrame) -> Sequence[Place]:
    table: Any = raw.select("topic", "partition", f.col("offset")).toArrow()
    return sorted(Place(*row.values()) for row in table.to_pylist())
