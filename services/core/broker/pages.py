"""Reading a partition from beginning to end, page by page, without a group."""

from collections.abc import AsyncIterator

from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.record import Batch

PAGE = 500


async def read_topic(admin: Admin, topic: str, partition: int, held: PartitionRange) -> AsyncIterator[Batch]:
    """The records from `held.start` to before `held.end`, in batches of at most PAGE, those of damage among them.

    What retention takes meanwhile is left out. Raises DataDamaged, Unavailable.
    """
    offset = held.start
    while offset < held.end:
        try:
            batch = await admin.read(topic, partition, offset, max_records=PAGE)
        except OffsetOutOfRange as error:
            if error.start <= offset:
                raise
            offset = error.start
            continue
        if batch is None:
            return
        count = sum(1 for found in batch.offsets if found < held.end)
        if count:
            yield Batch(topic, partition, batch.offsets[:count], batch.records[:count], batch.damage)
        offset = batch.offsets[-1] + 1
