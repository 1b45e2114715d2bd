"""The embedded log as a Spark data source, `penstock-log`: streams and batches in, exactly-once batches out.

Reading gives the columns of `spark.shapes.RAW`; writing takes those of `spark.shapes.OUT`. Options: `path` (the
log's folder), `topics` (comma-joined, reading), `max_events` (at most so many in a micro-batch), `topic` and `writer`
(writing), `ranges` (batch reading: see `LogBatchReader`). Not for a cluster: all processes share the log's host.

Spark pickles the classes by reference, so its workers need this package on their path.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from spark.shapes import RAW

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark.sources.log_batch import LogBatchReader
    from spark.sources.log_sink import LogStreamWriter
    from spark.sources.log_stream import LogStreamReader

NAME = "penstock-log"


class LogSource(DataSource):
    """Registered by `spark.session`; use it by `format("penstock-log")`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> str:
        """What reading gives."""
        return RAW

    def streamReader(self, schema: "StructType") -> "LogStreamReader":  # noqa: N802 - pyspark's name
        """For readStream."""
        from spark.sources.log_stream import LogStreamReader

        return LogStreamReader(self.options)

    def reader(self, schema: "StructType") -> "LogBatchReader":
        """For read."""
        from spark.sources.log_batch import LogBatchReader

        return LogBatchReader(self.options)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "LogStreamWriter":  # noqa: N802 - pyspark's name
        """For writeStream."""
        from spark.sources.log_sink import LogStreamWriter

        return LogStreamWriter(self.options)
