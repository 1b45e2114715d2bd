"""Streaming reads of the log, at most `max_events` a micro-batch, so that a backlog never becomes one giant batch."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from services.core.broker.contract import PartitionRange
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.reader import TopicReader
from spark.place import Span
from spark.sources.log_read import LogTask, path_of, plan_tasks, read_task
from spark.sources.offsets import Offset, advance, check_place, make_offset, place_of
from spark.sources.record_batches import raw_schema

UNBOUNDED = 1 << 62


class LogStreamReader(DataSourceStreamReader):
    """Lives in a Python process of its own beside the query; `read` runs in task workers and uses no state."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._path = path_of(options)
        self._topics = options["topics"].split(",")
        self._max_events = int(options["max_events"])
        self._schema = raw_schema(options)
        self._readers: dict[str, TopicReader] = {}

    def initialOffset(self) -> Offset:  # noqa: N802 - pyspark's name
        """The start of every topic, as it is now."""
        places = {}
        for topic in self._topics:
            incarnation, held = self._held(topic)
            places[topic] = (incarnation, {p: part.start for p, part in held.items()})
        return make_offset(places)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - pyspark's name
        """What a micro-batch may hold."""
        return ReadMaxRows(self._max_events)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - pyspark's name
        """The end of the next micro-batch. Raises OffsetOutOfRange, TopicRecreated: the query stops, nothing is skipped."""
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else UNBOUNDED
        places = {}
        for number, topic in enumerate(self._topics):
            incarnation, held = self._held(topic)
            known = place_of(start, topic)
            check_place(topic, incarnation, known, held)
            share = -(-room // (len(self._topics) - number))
            following = advance(known[1], held, share)
            places[topic] = (incarnation, following)
            room -= sum(following[p] - known[1].get(p, part.start) for p, part in held.items())
        return make_offset(places)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks between two offsets. Raises TopicRecreated when the records are not those that were counted."""
        ranges = []
        for topic in self._topics:
            incarnation, held = self._held(topic)
            known, following = place_of(start, topic)[1], place_of(end, topic)
            check_place(topic, incarnation, following, held)
            ranges += [Span(topic, p, known.get(p, 0), n) for p, n in following[1].items()]
        return list(plan_tasks(ranges))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task."""
        assert isinstance(partition, LogTask)
        return read_task(self._path, partition, self._schema)

    def stop(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _held(self, topic: str) -> tuple[str, dict[int, PartitionRange]]:
        """(incarnation, what each partition holds now). The file stays open: this is asked several times a second."""
        reader = self._readers.get(topic)
        if reader is None:
            reader = self._readers[topic] = TopicReader(DataFolder.prepare(self._path), topic)
        held = reader.ranges()
        return reader.store.meta.incarnation.hex(), held
