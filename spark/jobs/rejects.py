"""The dead letters of a pipe whose transform is part of the streaming plan: a query of its own that only rejects."""

from pyspark.sql import DataFrame

from spark.dead_letters import Rejected, judged
from spark.jobs.burial import bury
from spark.jobs.handler import Handler
from spark.observed import BatchReport
from spark.transforms.preparation import Prepared, of_stream

REJECTS = "rejects"
"""Names the query: its writer and its checkpoint."""
DEAD = "dead"
"""Names its dead letters, and those of the query that judges and transforms at once."""


class RejectHandler(Handler):
    """Sends what is no event to the dead letters, and lets the rest be."""

    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """One pass over the batch; only the bad records leave Spark."""
        found = reject(self.query.prepared, raw)
        report = BatchReport(self.query.pipe, read=len(found))
        bury(self.query, found, DEAD, batch_id, report)
        return report


def reject(prepared: Prepared, raw: DataFrame) -> list[Rejected]:
    """The records of a batch that are no events."""
    return [
        item
        for stream, view in prepared.views.items()
        for item in judged(view.bad(view.judge(of_stream(prepared, raw, stream))).toArrow(), view.checks)
    ]
