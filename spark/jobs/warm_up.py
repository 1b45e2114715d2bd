"""Running a pipe's transform before it counts, so that the first event does not wait for Java and Python to load."""

import time
from collections.abc import Sequence

import structlog

from spark.jobs.culprits import try_transform
from spark.jobs.query import Query
from spark.place import Place, Span, offset_text

log = structlog.get_logger()

WARM_S = 1.0
"""Warm is what takes no longer than this,"""
RUNS, LIMIT_S = 5, 10.0
"""and what is not warm after so many times, or so many seconds, may run as it is."""
_EVENTS = 20


def warm_up(query: Query) -> None:
    """Read a few of the newest events, transform them and keep nothing. Failures are the query's to meet. Blocking."""
    spans = query.endpoint.newest(query.session, list(query.prepared.views), _EVENTS)
    begun = time.monotonic()
    for _ in range(RUNS):
        query.check_not_stopping()
        before = time.monotonic()
        with query.pulse.at_work(query.writer, "the run before the first batch"):
            raw = query.endpoint.read_spans(query.session, spans)
            try_transform(query.prepared, query.endpoint, raw, _ends(spans))
        now = time.monotonic()
        if now - before < WARM_S or now - begun > LIMIT_S:
            break
    log.info("warm", pipe=query.pipe, seconds=round(time.monotonic() - begun, 1))


def _ends(spans: Sequence[Span]) -> list[Place]:
    return [Place(span.topic, span.partition, offset_text(at)) for span in spans for at in (span.start, span.end)]
