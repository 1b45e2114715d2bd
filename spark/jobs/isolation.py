"""After a query failed whose plan holds the transform: find the events on which it fails, and put them aside for good.

The events that the query was to do are read again as a batch and run through the same transform. What is found goes to
the dead letters first and then into `skipped.json` beside the checkpoint: from there the next run leaves it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame

from spark.dead_letters import TRANSFORM_ERROR, rejected
from spark.jobs.burial import bury
from spark.jobs.culprits import exactly, find_culprits, fingerprint, places_of, records_of
from spark.jobs.parts import MOST_ENDED, Part, PartByPart, PartName, within
from spark.jobs.query import Query
from spark.jobs.ranges import spans_of
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
        try:
            places = places_of(query.prepared, raw)
            culprits = find_culprits(places, partial(query.trial, raw)) if places else {}
            passed += len(places) - len(culprits)
            if culprits:
                streak.extend(len(culprits), passed, next(iter(culprits.values())))
                _put_aside(query, raw, culprits, skipped)
                return len(culprits)
        finally:
            raw.unpersist()
    return 0


def _put_aside(query: Query, raw: DataFrame, culprits: Mapping[Place, str], skipped: Sequence[Place]) -> None:
    table: Any = raw.where(exactly(culprits)).toArrow()
    found = rejected(table, TRANSFORM_ERROR, culprits.__getitem__)
    report = BatchReport(query.pipe, read=len(culprits))
    bury(query, found, f"skipped:{fingerprint(culprits)}", 0, report)
    query.report(report)
    query.checkpoint.write_note(SKIPPED_FILE, [*skipped, *culprits])


def search_by_parts(query: Query, streak: Streak) -> None:
    """When the batch to come ended processes: find the events that do, and put them aside. Raises TransformBroken, Stopping."""
    attempt = query.attempts.current
    if attempt is not None and (attempt.ended >= MOST_ENDED or attempt.parts not in (((),), ())):
        PartByPart(query.attempts, TrialParts(query, streak, attempt.batch), query.check_not_stopping).run(
            attempt.batch
        )


class TrialParts:
    """A planned batch as `PartByPart` works on it: nothing is written but dead letters."""

    def __init__(self, query: Query, streak: Streak, batch: int) -> None:
        self._query, self._streak, self._batch = query, streak, batch

    @property
    def _raw(self) -> DataFrame:
        spans = spans_of(self._query, self._batch)
        return self._query.endpoint.read_spans(self._query.session, spans).where(
            f"NOT ({exactly(read_skipped(self._query))})"
        )

    def places(self, part: Part) -> Sequence[Place]:
        """See PartWork."""
        return records_of(self._raw.where(within(part)))

    def is_stored(self, name: PartName | None) -> bool:
        """See PartWork."""
        return False

    def compute(self, part: Part, name: PartName | None) -> bool:
        """See PartWork. An event that fails without ending the process is not to be found here."""
        places = self.places(part)
        return not places or self._query.trial(self._raw, places) is None

    def passes(self, place: Place) -> bool:
        """See PartWork."""
        return self._query.trial(self._raw, [place]) is None

    def condemn(self, place: Place, why: str, name: PartName) -> None:
        """See PartWork."""
        self._streak.extend(1, 0, why)
        _put_aside(self._query, self._raw, {place: why}, read_skipped(self._query))


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
