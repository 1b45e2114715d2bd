"""After a query failed whose plan holds the transform: find the events on which it fails, and put them aside for good.

The events that the query was to do are read again as a batch and run through the same transform. What is found goes to
the dead letters first and then into `skipped.json` beside the checkpoint: from there the next run leaves it out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from spark.dead_letters import TRANSFORM_ERROR, rejected
from spark.jobs.burial import bury
from spark.jobs.culprits import exactly, find_culprits, fingerprint, places_of, try_transform
from spark.jobs.query import Query
from spark.jobs.streak import Streak
from spark.observed import BatchReport
from spark.place import Place, Span

SKIPPED_FILE = "skipped.json"


def read_skipped(query: Query) -> list[Place]:
    """Events that the query leaves out, as they are in the dead letters. Those behind its position are forgotten."""
    known = query.checkpoint.read_note(SKIPPED_FILE, list[Place]) or []
    position = query.checkpoint.done_up_to(query.endpoint.parse_position)
    ahead = [place for place in known if int(place.offset) >= position.get((place.topic, place.partition), 0)]
    if len(ahead) < len(known):
        query.checkpoint.write_note(SKIPPED_FILE, ahead)
    return ahead


def put_culprits_aside(query: Query, streak: Streak) -> int:
    """How many events were found, put aside and told of; 0: the transform is not to blame. Raises TransformBroken, Stopping."""
    skipped = read_skipped(query)
    passed = 0
    for spans in _windows(query):
        raw = query.endpoint.read_spans(query.session, spans).where(f"NOT ({exactly(skipped)})").persist()

        def trial(places: Sequence[Place], raw: Any = raw) -> str | None:
            query.check_not_stopping()
            return try_transform(query.prepared, raw, places)

        try:
            places = places_of(query.prepared, raw)
            culprits = find_culprits(places, trial) if places else {}
            passed += len(places) - len(culprits)
            if culprits:
                streak.extend(len(culprits), passed, next(iter(culprits.values())))
                table: Any = raw.where(exactly(culprits)).toArrow()
                found = rejected(table, TRANSFORM_ERROR, culprits.__getitem__)
                report = BatchReport(query.pipe, read=len(culprits))
                bury(query, found, f"skipped:{fingerprint(culprits)}", 0, report)
                query.report(report)
                query.checkpoint.write_note(SKIPPED_FILE, [*skipped, *culprits])
                return len(culprits)
        finally:
            raw.unpersist()
    return 0


def _windows(query: Query) -> Iterator[list[Span]]:
    """What the query was to do: the batch that it had begun, else all up to the present end; in parts of about max_events."""
    endpoint, checkpoint, prepared = query.endpoint, query.checkpoint, query.prepared
    position = checkpoint.done_up_to(endpoint.parse_position)
    begun = checkpoint.newest("offsets")
    planned = {} if begun == checkpoint.newest("commits") else checkpoint.position(begun, endpoint.parse_position)
    waiting = [
        Span(
            topic,
            partition,
            max(start, position.get((topic, partition), start)),
            min(end, planned.get((topic, partition), end)),
        )
        for topic, partition, start, end in endpoint.held(query.session, list(prepared.views))
    ]
    yield from endpoint.windows(waiting, prepared.transform.max_events)
