"""Reading partitions without a group: from beginning to end, or the newest records."""

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime

from services.core.broker.contract import Broker, PartitionRange, Reader
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Batch, TopicPartition

PAGE = 500


async def read_topic(
    reader: Reader, topic: str, partition: int, stored: PartitionRange, *, page: int = PAGE, skips_damage: bool = False
) -> AsyncIterator[Batch]:
    """The batches of `stored.start <= offset < stored.end`, at most `page` records each, batches of damage among them.

    Records that retention removes meanwhile are skipped. skips_damage: so are damaged records, when their range is known.
    Raises DataDamaged, OffsetOutOfRange, Unavailable.
    """
    source, offset = TopicPartition(topic, partition), stored.start
    while offset < stored.end:
        batch = await _read_next(reader, source, offset, page, skips_damage=skips_damage)
        if isinstance(batch, int):
            offset = batch
            continue
        if batch is None:
            return
        count = sum(1 for found in batch.offsets if found < stored.end)
        if count and not (skips_damage and batch.damage):
            yield Batch(topic, partition, batch.offsets[:count], batch.records[:count], batch.damage)
        offset = batch.offsets[-1] + 1


async def _read_next(
    reader: Reader, source: TopicPartition, offset: int, most: int, *, skips_damage: bool
) -> Batch | int | None:
    """The next batch; or the offset behind records that are damaged, or that retention has removed; None at the end."""
    try:
        return await reader.read(*source, offset, max_records=most)
    except DataDamaged as error:
        if not (skips_damage and error.ranges):
            raise
        return max(offset, *(last for _, _, last in error.ranges)) + 1
    except OffsetOutOfRange as error:
        if error.start <= offset:
            raise
        return error.start


READ_RECORDS = 2_000


async def scan(
    reader: Reader, topic: str, partition: int, start: int | None, end: int | None, stored: PartitionRange | None = None
) -> AsyncIterator[Batch]:
    """The batches of `start <= offset < end`; None: the beginning, the end at the time of the call.

    stored: the range that the partition holds, when the caller knows it. Damaged and expired records are skipped. Raises
    UnknownTopic, Unavailable.
    """
    stored = stored or (await reader.describe(topic)).get(partition)
    if stored is None:
        return
    wanted = PartitionRange(max(stored.start, start or 0), stored.end if end is None else min(stored.end, end))
    with suppress(OffsetOutOfRange):  # the partition has lost its end meanwhile
        async for batch in read_topic(reader, topic, partition, wanted, page=READ_RECORDS, skips_damage=True):
            yield batch


_PAGE_EVENTS = 1000


async def read_tail(
    broker: Broker, topic: str, since_ms: int, most: int, *, skips_damage: bool = False
) -> AsyncIterator[Batch]:
    """The records written since then, by their timestamps; about `most` of a partition. skips_damage: as in `read_topic`.

    When there are more: the newest, but the oldest where offsets are not contiguous. Reads to the end at the time of the call;
    where offsets are not contiguous, to an end that it finds by reading. An unknown topic gives nothing. Raises BrokerError
    kinds.
    """
    try:
        starts = await broker.reader.offsets_at(topic, datetime.fromtimestamp(since_ms / 1000, UTC))
        # On Kinesis the end is found by reading, in several requests, and each waits for the shard's pace.
        stored = await broker.reader.describe(topic) if broker.is_contiguous(topic) else {}
    except UnknownTopic:
        return
    for partition, start in starts.items():
        found = stored.get(partition)
        first = start if found is None else max(start, found.start, found.end - most)
        end = None if found is None else found.end
        source = TopicPartition(topic, partition)
        async for batch in _read_to(broker, source, first, end, most, skips_damage=skips_damage):
            yield batch


async def _read_to(
    broker: Broker, source: TopicPartition, offset: int, end: int | None, most: int, *, skips_damage: bool
) -> AsyncIterator[Batch]:
    """The batches of `offset` to before `end` (None: the present end), about `most` records."""
    while (end is None or offset < end) and most > 0:
        batch = await _read_next(broker.reader, source, offset, min(most, _PAGE_EVENTS), skips_damage=skips_damage)
        if isinstance(batch, int):
            offset = batch
            continue
        if batch is None:
            return
        yield batch
        offset = batch.offsets[-1] + 1
        most -= len(batch.offsets)
