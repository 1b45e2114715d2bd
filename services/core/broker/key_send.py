"""Sending records by key and learning which of them failed, by their place in the list."""

from collections.abc import Sequence

from services.core.broker.errors import BrokerError
from services.core.broker.partitioner import choose_partition
from services.core.broker.producer import Producer
from services.core.broker.record import Record


async def send_by_key(producer: Producer, topic: str, records: Sequence[Record]) -> dict[int, Exception]:
    """Durably, in order per key; answers when all are settled. {index: error} of those that are not known to be stored:
    after OutcomeUnknown they may be, and sending them again may double them.

    Raises nothing but CancelledError; when nothing could even be queued, everything failed with that error.
    """
    places: dict[int, list[int]] = {}
    try:
        count = await producer.partition_count(topic)
        keyless = producer.rotate_keyless(topic, count)
        for index, record in enumerate(records):
            partition = keyless if record.key is None else choose_partition(record.key, count)
            places.setdefault(partition, []).append(index)
        parts = {partition: [records[index] for index in indexes] for partition, indexes in places.items()}
        result = await producer.send_to(topic, parts)
    except BrokerError as error:
        return dict.fromkeys(range(len(records)), error)
    return {places[part.partition][index]: error for part in result.parts for index, error in part.failed}
