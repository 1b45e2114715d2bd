"""The newest records of a topic, read without a group: what somebody wrote there shortly before it died."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

from services.core.broker.contract import Broker
from services.core.broker.errors import UnknownTopic
from services.core.broker.record import Batch, TopicPartition

_PAGE_EVENTS = 1000


async def read_tail(broker: Broker, topic: str, since_ms: int, most: int) -> AsyncIterator[Batch]:
    """What was written since then (by its records' timestamps), at most about `most` records a partition.

    If there is more it is the newest, but where offsets are not contiguous the oldest of it. Ends where each partition ended
    when it was asked for; nothing for a topic that is not there. Raises BrokerError kinds.
    """
    try:
        starts = await broker.admin.offsets_at(topic, datetime.fromtimestamp(since_ms / 1000, UTC))
        held = await broker.admin.describe(topic)
    except UnknownTopic:
        return
    for partition, start in starts.items():
        found = held[partition]
        newest = max(start, found.start, found.end - most if broker.features.contiguous_offsets else 0)
        async for batch in _read_to(broker, TopicPartition(topic, partition), newest, found.end, most):
            yield batch


async def _read_to(broker: Broker, source: TopicPartition, offset: int, end: int, most: int) -> AsyncIterator[Batch]:
    """From `offset` to before `end`, at most `most` records."""
    while offset < end and most > 0:
        batch = await broker.admin.read(*source, offset, max_records=min(most, _PAGE_EVENTS))
        if batch is None:
            return
        yield batch
        offset = batch.offsets[-1] + 1
        most -= len(batch.offsets)
