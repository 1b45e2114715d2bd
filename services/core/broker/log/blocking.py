"""The log for code without an event loop, such as Spark workers and drivers. Every function blocks and opens its own
files, so it may be called from any process of the host, also from a forked one.

Reading: `ends`, `first_stored`, `read_range`. Writing: `append`; a whole batch once: `append_once`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import Packed, pack_all
from services.core.broker.log.sqlite_file import classified
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import Fence, TopicWriter
from services.core.broker.record import Batch, Record

Parts = Mapping[int, Sequence[Record]]
"""Records by partition (`partitioner.choose_partition`), in the order to store them."""


def ends(path: str | Path, topic: str) -> dict[int, PartitionRange]:
    """The range of each partition now. Raises UnknownTopic, DataDamaged, Unavailable."""
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        return reader.ranges()


def first_stored(path: str | Path, topic: str) -> float | None:
    """When the oldest record of a partition that has some was stored, in seconds since the epoch; None: there is none.

    Raises UnknownTopic, DataDamaged, Unavailable.
    """
    with TopicReader(DataFolder.prepare(path), topic) as reader, classified(topic):
        row = reader.store.connection.execute("SELECT stored_ms FROM batches ORDER BY pos LIMIT 1").fetchone()
    return None if row is None else row[0] / 1000


def read_range(
    path: str | Path, topic: str, partition: int, start: int, end: int, *, max_records: int = 5_000
) -> Iterator[Batch]:
    """The records `start <= offset < end` of one partition, in order, in batches of at most max_records.

    Raises OffsetOutOfRange when some are gone or do not exist yet, DataDamaged with the exact offsets that are lost. Records
    that compaction removed, and ranges that `repair` recorded as lost, are passed over: offsets jump. Holds the file open until
    exhausted or closed.
    """
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        while start < end:
            run = reader.read(partition, start, min(max_records, end - start))
            if run is None:
                held = reader.ranges()[partition]
                raise OffsetOutOfRange(topic, partition, end, held.start, held.end)
            run = run.below(end)
            for first in range(0, len(run.records), max_records):
                some = slice(first, first + max_records)
                yield Batch(topic, partition, run.offsets[some], run.records[some])
            start = run.next


def append(path: str | Path, topic: str, parts: Parts) -> None:
    """Store all records in one durable transaction; raises as `append_once`."""
    blocks = _pack(parts)
    with TopicWriter(DataFolder.prepare(path), topic, WallClock()) as log:
        log.append(blocks)


def append_once(path: str | Path, topic: str, writer: str, epoch: int, parts: Parts) -> bool:
    """Store all records in one durable transaction, unless this epoch of this writer was stored before (False).

    Raises UnknownTopic, RecordTooLarge, Unavailable, StorageFull, DataDamaged (nothing stored), OutcomeUnknown.
    """
    blocks = _pack(parts)
    with TopicWriter(DataFolder.prepare(path), topic, WallClock()) as log:
        return log.append(blocks, Fence(writer, epoch)) is not None


def last_epoch(path: str | Path, topic: str, writer: str) -> int | None:
    """The newest epoch that this writer stored, None before the first."""
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        return reader.last_epoch(writer)


def _pack(parts: Parts) -> dict[int, list[Packed]]:
    return {partition: pack_all(records) for partition, records in parts.items() if records}
