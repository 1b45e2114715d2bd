"""The embedded log and Kinesis as one Spark data source, `penstock`, for streams, and for batches that are read.

Reading returns the columns RAW of `spark.records`; writing takes its columns OUT. Options: `broker` (its URL); for a stream that
is read: `topics` (comma-joined), `max_events` (the limit of a micro-batch), on the log `begins` (the offset before the first
batch), on Kinesis `checkpoint` (the query's) and `tasks` (at most so many); for a batch that is read: `ranges`; for a stream that
is written: `topic`, `writer`. The log stores a batch once, and is not for a cluster: all processes share its host. Kinesis stores
a batch at least once.

Spark pickles the classes by reference, so its workers need this package on their path. A worker loads only its broker's modules.
"""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from spark.records import RAW

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamArrowWriter, DataSourceStreamReader
    from pyspark.sql.types import StructType

NAME = "penstock"


class BrokerSource(DataSource):
    """Registered by `spark.session`; use it by `format("penstock")`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return RAW

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":  # noqa: N802 - pyspark's name
        if self._is_kinesis:
            from spark.sources.kinesis import KinesisStreamReader

            return KinesisStreamReader(self.options)
        from spark.sources.log import LogStreamReader

        return LogStreamReader(self.options)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        if self._is_kinesis:
            from spark.sources.kinesis import KinesisBatchReader

            return KinesisBatchReader(self.options)
        from spark.sources.log import LogBatchReader

        return LogBatchReader(self.options)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamArrowWriter":  # noqa: N802 - pyspark's name
        if self._is_kinesis:
            from spark.sources import puts

            return puts.open_writer(self.options)
        from spark.sources import log

        return log.open_writer(self.options)

    @property
    def _is_kinesis(self) -> bool:
        return self.options["broker"].startswith("kinesis:")
