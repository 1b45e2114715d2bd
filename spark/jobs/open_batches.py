"""Up to which batch a query in the streaming plan has settled what follows a commit, and by which sources and columns it read.

What failed the checks of a run is in no output. So the next run settles the open batches by the checks of the run that left them,
also when the pipe file has other ones now.
"""

import json
from dataclasses import replace
from typing import Self

import msgspec
import structlog
from pyspark.sql.types import StructType

from services.core.broker.errors import UnknownTopic
from spark.jobs.checkpoint import Checkpoint
from spark.jobs.query import Query
from spark.records import Offsets, RecordOffset, offset_text

log = structlog.get_logger()

REPORTED_FILE = "told_up_to.json"
REJECTED_FILE = "rejected_up_to.json"


class UpTo(msgspec.Struct, frozen=True):
    """The last batch that is done, and its end. batch: -1 before the first.

    columns: of each source (JSON of Spark's type; None: any text), by which later batches are checked. None: not known; earlier
    versions do not write it.
    """

    batch: int
    end: list[RecordOffset]
    columns: dict[str, str | None] | None = None

    @classmethod
    def at(cls, batch: int, end: Offsets, columns: dict[str, str | None] | None = None) -> Self:
        return cls(batch, [RecordOffset(*place, offset_text(offset)) for place, offset in end.items()], columns)

    def offsets(self) -> Offsets:
        return {(topic, partition): int(offset) for topic, partition, offset in self.end}


def write_up_to(query: Query, name: str, batch: int, end: Offsets) -> UpTo:
    """Write this note beside the checkpoint, durably."""
    up_to = UpTo.at(batch, end, query.prepared.columns)
    query.checkpoint.write_note(name, up_to)
    return up_to


def read_up_to(checkpoint: Checkpoint, name: str) -> Offsets:
    """The position in this note; empty without one."""
    known = checkpoint.read_note(name, UpTo)
    return {} if known is None else known.offsets()


def of_last_run(query: Query) -> Query:
    """With the sources and the checks of the run that left batches open: what failed these is in no output, whatever the pipe
    file says now."""
    known = query.checkpoint.read_note(REJECTED_FILE, UpTo)
    former = None if known is None else known.columns
    if former is None or former == query.prepared.columns:
        return query
    now, any_view = query.prepared.views, next(iter(query.prepared.views.values()))
    views = {
        stream: now.get(stream, any_view).with_columns(None if text is None else StructType.fromJson(json.loads(text)))
        for stream, text in former.items()
        if stream in now or _exists(query, stream)
    }
    return replace(query, prepared=replace(query.prepared, views=views))


def _exists(query: Query, stream: str) -> bool:
    try:
        query.broker.identify(query.session, [stream])
    except UnknownTopic:
        log.warning(
            "source_is_gone", pipe=query.pipe, stream=stream, hint="bad records of its last batch are gone, too"
        )
        return False
    return True
