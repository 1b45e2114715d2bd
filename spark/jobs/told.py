"""Up to where it was told what a query in the plan settled. Such a query tells of a batch after Spark has noted it as done:
what a crash left untold in between is read again, and told at the next start.
"""

import msgspec
from pyspark.sql import functions as f

from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint
from spark.jobs.culprits import exactly
from spark.jobs.isolation import SKIPPED_FILE
from spark.jobs.query import Query
from spark.jobs.ranges import spans_between
from spark.jobs.rejects import REJECTS
from spark.observed import BatchReport
from spark.origins import Origins, collect_origins, put, union, without
from spark.place import Place, Position, Span, offset_text
from spark.transforms.preparation import Prepared, of_stream
from spark.view import VERDICT

TOLD_FILE = "told_up_to.json"


class Told(msgspec.Struct, frozen=True):
    """The last batch that was told of, and its end. batch: -1 before the first."""

    batch: int
    end: list[Place]

    def position(self) -> Position:
        """The end as a position."""
        return {(topic, partition): int(offset) for topic, partition, offset in self.end}


class ToldBatches:
    """Tells of a query's batches, one after the other, without a gap."""

    def __init__(self, query: Query) -> None:
        """Tells what the last run left untold. Blocking. Raises what reading and writing raise."""
        self._query = query
        known = query.checkpoint.read_note(TOLD_FILE, Told)
        newest = query.checkpoint.newest("commits")
        if known is None:  # what was done before anybody asked stays outside of the ledger
            known = self._write(-1 if newest is None else newest)
        self._noted, self._last = known, known.batch
        self.catch_up()

    def tell(self, batch: int, report: BatchReport) -> None:
        """This batch is done. What lies between the last one that was told of and this one is read again."""
        if batch - 1 > self._last:
            self._read_again(batch - 1)
        self._query.report(report)
        self._last = batch

    def note(self) -> None:
        """Note what was told; without it that is told again after a crash, which does no harm."""
        if self._last > self._noted.batch:
            self._noted = self._write(self._last)

    def catch_up(self) -> None:
        """Read again whatever is done and not told."""
        newest = self._query.checkpoint.newest("commits")
        if newest is not None and newest > self._last:
            self._read_again(newest)
            self.note()

    def _write(self, batch: int) -> Told:
        query = self._query
        end = query.checkpoint.position(batch if batch >= 0 else None, query.endpoint.parse_position)
        told = Told(batch, [Place(*place, offset_text(offset)) for place, offset in end.items()])
        query.checkpoint.write_note(TOLD_FILE, told)
        return told

    def _read_again(self, batch: int) -> None:
        """From what is noted to the end of this batch."""
        query = self._query
        end = query.checkpoint.position(batch, query.endpoint.parse_position)
        untold = spans_between(query, self._noted.position(), end)
        for part in query.endpoint.windows(untold, query.prepared.transform.max_events):
            query.report(self._recompute(part))
        self._last = batch

    def _recompute(self, spans: list[Span]) -> BatchReport:
        """What became of these events: by the same transform, when it treats each by itself. Else only that they were read."""
        query, prepared = self._query, self._query.prepared
        skipped = query.checkpoint.read_note(SKIPPED_FILE, list[Place]) or []
        raw = query.endpoint.read_spans(query.session, spans).where(f"NOT ({exactly(skipped)})")
        judged = {stream: view.judge(of_stream(prepared, raw, stream)) for stream, view in prepared.views.items()}
        read = union(collect_origins(frame.where(f.col(VERDICT).isNull()), query.pipe) for frame in judged.values())
        written: Origins = {}
        if prepared.row_by_row:
            good = {stream: view.good(judged[stream]) for stream, view in prepared.views.items()}
            written = collect_origins(prepared.apply(good, query.session), query.pipe)
        report = BatchReport(query.pipe)
        put(report.sets, "passed", written)
        put(report.sets, "filtered", without(read, written))
        return report


def settled_position(prepared: Prepared, endpoint: Endpoint, checkpoint: Checkpoint) -> Position:
    """Up to where everything that a pipe read was told of, by each of its queries."""
    done = checkpoint.done_up_to(endpoint.parse_position)
    if prepared.per_batch:
        return done
    known = checkpoint.read_note(TOLD_FILE, Told)
    told = {} if known is None else known.position()
    rejected = checkpoint.beside(REJECTS).done_up_to(endpoint.parse_position)
    return {place: min(told[place], rejected[place]) for place in told.keys() & rejected.keys()}
