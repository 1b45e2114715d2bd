"""The dead letters of a pipe whose transform is part of the streaming plan: a query of its own that only rejects."""

from typing import Any

from pyspark.sql import DataFrame

from spark.dead_letters import judged
from spark.jobs.handler import Handler
from spark.observed import BatchReport
from spark.transforms.preparation import of_stream


class RejectHandler(Handler):
    """Sends what is no event to the dead letters, and lets the rest be."""

    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """One pass over the batch; only the bad records leave Spark."""
        report = BatchReport(self.prepared.pipe)
        found = []
        for stream, view in self.prepared.views.items():
            table: Any = view.bad(view.judge(of_stream(self.prepared, raw, stream))).toArrow()
            found += judged(table, view.checks)
        report.read = len(found)
        self.bury(raw, found, batch_id, report)
        return report
