"""The embedded log. The driver is on the log's host, so a batch's records are collected there and appended in one transaction."""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import MAX_RECORD_BYTES
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.record import Record
from spark.brokers.contract import BatchName, DataSourceBroker
from spark.records import OffsetRange
from spark.sources.log import store_batch


class LogSparkBroker(DataSourceBroker):
    """The log in the folder `path`. Stores a batch exactly once, by its writer and epoch."""

    max_record_bytes = MAX_RECORD_BYTES
    stores_once = True

    def __init__(self, path: str) -> None:
        super().__init__(f"log://{path}")
        self._path = path

    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The topics' incarnations. Raises UnknownTopic, DataDamaged."""
        found = {}
        for topic in topics:
            with TopicReader(DataFolder.prepare(self._path), topic) as reader:
                found[topic] = reader.store.meta.incarnation.hex()
        return found

    def stored_ranges(self, session: SparkSession, topics: Sequence[str]) -> list[OffsetRange]:
        return [
            OffsetRange(topic, p, part.start, part.end)
            for topic in topics
            for p, part in blocking.ends(self._path, topic).items()
        ]

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> bool:
        if records:
            return store_batch(self._path, topic, batch.writer, records, batch.epoch)
        stored = self.last_epoch(topic, batch.writer)  # nothing is stored for an empty batch
        return stored is None or stored < batch.epoch

    def read_since(self, topic: str, since: Sequence[OffsetRange]) -> list[Record]:
        ends, found = blocking.ends(self._path, topic), list[Record]()
        before = {part.partition: part.end for part in since}
        for partition, now in ends.items():
            start = max(now.start, before.get(partition, now.start))
            for batch in blocking.read_range(self._path, topic, partition, start, now.end):
                found += batch.records
        return found

    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        blocking.append(self._path, topic, {0: records})

    def last_epoch(self, topic: str, writer: str) -> int | None:
        return blocking.last_epoch(self._path, topic, writer)
