"""Sources that were added to a pipe or removed since its last run, where Spark's own source compares both ends of a batch.

Its Kafka source takes a topic that is only in the offset before a batch for deleted, and one that is only in the offset after it
for new, with a first record at 0. Everything else is lost data for it, and the query ends. So before a run, the offset from which
the next batch begins gets the topics of that batch. It is the end of a batch that is done, so Spark needs it for nothing else.
"""

import structlog
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from spark.jobs.query import Query

log = structlog.get_logger()


def fit_offsets(query: Query) -> None:
    """To be called when all that the last run left open is settled. Blocking. Raises CheckpointInUse, the errors of reading and
    writing."""
    checkpoint, broker = query.checkpoint, query.broker
    planned, done = checkpoint.newest("offsets"), checkpoint.newest("commits")
    if not query.prepared.row_by_row or planned is None:
        return
    wanted = list(query.prepared.views)
    batch = planned
    if planned != done:
        batch, wanted = planned - 1, _topics(query, planned)
    before = None if batch < 0 else checkpoint.source_offset(batch)
    if before is None or set(wanted) == set(_topics(query, batch)):
        return
    after = broker.with_topics(query.session, before, wanted)
    if after != before:
        log.info("sources_changed", pipe=query.pipe, batch=batch, before=before, after=after)
        checkpoint.replace_source_offset(batch, after)


def without_removed(query: Query, raw: DataFrame) -> DataFrame:
    """A pipe's raw stream. A batch that was planned before a source was removed has its records, too: they are no events of the
    sources that are left."""
    checkpoint, views = query.checkpoint, list(query.prepared.views)
    planned = checkpoint.newest("offsets")
    if not query.prepared.row_by_row or planned is None or checkpoint.source_offset(planned) is None:
        return raw
    removed = sorted(set(_topics(query, planned)) - set(views))
    if not removed:
        return raw
    if planned != checkpoint.newest("commits"):
        log.warning("removed_sources_left_out", pipe=query.pipe, batch=planned, sources=removed)
    return raw.where(f.col("topic").isin(views))


def _topics(query: Query, batch: int) -> list[str]:
    return list(dict.fromkeys(topic for topic, _ in query.checkpoint.offsets(batch, query.broker.parse_offsets)))
