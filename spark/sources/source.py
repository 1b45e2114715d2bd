"""The embedded log and Kinesis as one Spark data source, `penstock`: streams and batches in, batches out.

Reading gives the columns of `spark.shapes.RAW`; writing takes those of `spark.shapes.OUT`. Options: `broker` (its URL), `topics`
(comma-joined, reading), `max_events` (at most so many in a micro-batch), `origins` (streams: with `spark.shapes.ORIGINS_READ`),
`topic` and `writer` (writing), `ranges` (batch reading: see `batch_ranges`). The log stores a batch once, and is not for a
cluster: all processes share its host. Kinesis stores it at least once.

Spark pickles the classes by reference, so its workers need this package on their path. A worker loads only its broker's modules.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from spark.shapes import ORIGINS_READ, RAW

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamArrowWriter, DataSourceStreamReader
    from pyspark.sql.types import StructType

NAME = "penstock"


class BrokerSource(DataSource):
    """Registered by `spark.session`; use it by `format("penstock")`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> str:
        """What reading gives."""
        return f"{RAW}, {ORIGINS_READ} STRING" if "origins" in self.options else RAW

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":  # noqa: N802 - pyspark's name
        """For readStream."""
        if self._is_kinesis:
            from spark.sources.kinesis_stream import KinesisStreamReader

            return KinesisStreamReader(self.options)
        from spark.sources.log_stream import LogStreamReader

        return LogStreamReader(self.options)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """For read."""
        if self._is_kinesis:
            from spark.sources.kinesis_batch import KinesisBatchReader

            return KinesisBatchReader(self.options)
        from spark.sources.log_batch import LogBatchReader

        return LogBatchReader(self.options)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamArrowWriter":  # noqa: N802 - pyspark's name
        """For writeStream."""
        if self._is_kinesis:
            from spark.sources.kinesis_sink import KinesisStreamWriter

            return KinesisStreamWriter(self.options)
        from spark.sources.log_sink import LogStreamWriter

        return LogStreamWriter(self.options)

    @property
    def _is_kinesis(self) -> bool:
        return self.options["broker"].startswith("kinesis:")
