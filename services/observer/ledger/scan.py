"""Reading a stretch of a topic, bounded: for recovery and for naming missing events."""

from collections.abc import AsyncIterator

from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.errors import DataDamaged, OffsetOutOfRange
from services.core.broker.record import Batch

READ_RECORDS = 2_000


async def scan(
    admin: Admin, topic: str, partition: int, start: int | None, end: int | None, held: PartitionRange | None = None
) -> AsyncIterator[Batch]:
    """The batches of `start <= offset < end`; None: the beginning, the end as it is at the call.

    held: what the partition holds, by somebody who asked just now. What is damaged or gone is passed over. Raises UnknownTopic,
    Unavailable. Each read leaves the event loop to others.
    """
    held = held or (await admin.describe(topic)).get(partition)
    if held is None:
        return
    at, stop = max(held.start, start or 0), held.end if end is None else min(held.end, end)
    while at < stop:
        try:
            batch = await admin.read(topic, partition, at, max_records=READ_RECORDS)
        except DataDamaged as error:
            at = max(at, *(last for _, _, last in error.ranges)) + 1
            continue
        except OffsetOutOfRange as error:
            if error.start <= at:
                return
            at = error.start
            continue
        if batch is None:
            return
        if batch.damage is None:
            yield batch
        at = batch.offsets[-1] + 1
