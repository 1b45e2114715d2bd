"""Writing dead letters: durably, once for each name, counted by reason."""

from collections import Counter
from collections.abc import Sequence

import structlog

from services.core.pipes import dead_letter_topic
from spark.brokers.endpoint import BatchName
from spark.dead_letters import Rejected, dead_letters
from spark.jobs.query import Query
from spark.observed import BatchReport
from spark.origins import Origins, origins_of, put

log = structlog.get_logger()


def bury(
    query: Query, found: Sequence[Rejected], name: str, epoch: int, report: BatchReport, *, counted: bool = False
) -> Origins:
    """Store these records as dead letters of the pipe, unless (name, epoch) was stored before, and add them to the report.

    Gives their origins, when there is a ledger. counted: see `origins_of`.
    """
    dead: Origins = {}
    reasons = Counter(item.reason for item in found)
    report.dead += reasons
    if found:
        if query.ledger:
            dead = origins_of([item.record for item in found], query.pipe, counted=counted)
            put(report.sets, "dead", dead)
        most = query.endpoint.max_record_bytes
        records = dead_letters(found, pipe=query.pipe, version=query.prepared.version, max_bytes=most)
        batch = BatchName(f"{query.writer}:{name}", epoch)
        query.endpoint.write_records(query.session, records, dead_letter_topic(query.pipe), batch)
        log.warning(
            "dead letters",
            pipe=query.pipe,
            events=len(found),
            reasons=dict(reasons),
            examples=[item.detail for item in found[:3]],
        )
    return dead
