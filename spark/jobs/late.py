"""Events that come behind the watermark of a transform over several events: Spark drops them, we keep them.

Spark tells how many rows of a batch it dropped, not which. After such a batch its events are read again, and those behind
the watermark that it ran with go to the dead letters. A note beside the checkpoint says up to which batch that is settled:
what a crash left open is settled at the next start.
"""

from typing import Any

from pyspark.sql import functions as f

from spark.dead_letters import rejected
from spark.jobs.burial import bury
from spark.jobs.query import Query
from spark.jobs.ranges import spans_of
from spark.observed import BatchReport
from spark.place import Place
from spark.transforms.preparation import of_stream
from spark.view import TIME

LATE = "late"
"""The reason, and the name of these dead letters."""
SETTLED_FILE = "late_up_to.json"


class LateEvents:
    """Settles the late events of a query's batches, one batch after the other."""

    def __init__(self, query: Query) -> None:
        """Settles what the last run left open. Blocking. Raises what reading and writing raise."""
        self._query = query
        settled = query.checkpoint.read_note(SETTLED_FILE, int)
        self._settled = -1 if settled is None else settled
        if settled is None:
            query.checkpoint.write_note(SETTLED_FILE, -1)
        done = query.checkpoint.newest("commits")
        if done is not None:
            self.settle(done, dropped=True)

    def settle(self, batch: int, *, dropped: bool) -> None:
        """This batch is done; dropped: Spark dropped rows of it, or may have. So may those before it that are not settled."""
        while self._settled < batch:
            following = self._settled + 1
            if dropped or following < batch:
                self._keep(following)
            self._query.checkpoint.write_note(SETTLED_FILE, following)
            self._settled = following

    def _keep(self, batch: int) -> None:
        query, view_of = self._query, self._query.prepared.views
        watermark = query.checkpoint.watermark(batch)
        spans = spans_of(query, batch)
        if not watermark or not spans:
            return
        raw = query.endpoint.read_spans(query.session, spans)

        def detail(_place: Place) -> str:
            return f"its time is behind the watermark {watermark} ms of batch {batch}; a result still open then may hold it"

        found = []
        for stream, view in view_of.items():
            judged = view.judge(of_stream(query.prepared, raw, stream))
            table: Any = view.unused(judged.where(f.col(TIME) <= f.timestamp_millis(f.lit(watermark)))).toArrow()
            found += rejected(table, LATE, detail)
        report = BatchReport(query.pipe)
        bury(query, found, LATE, batch, report, counted=True)
        query.report(report)
