"""From records to one Kafka record batch: one builder call per record, nothing else per record."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from services.core.broker.record import Record

_MAGIC = 2
_UNCOMPRESSED = 0

MAX_RECORD_BYTES = (1 << 20) + (64 << 10)
"""Key + value + headers of one record: a payload of 1 MiB with room for key and headers."""

BATCH_FRAMING = 16 << 10
"""Above any batch header, record header and header varints of one record."""

MAX_BATCH_BYTES = MAX_RECORD_BYTES + BATCH_FRAMING
"""max.message.bytes of the topics that we create."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends: with it the broker recognises a batch that it has already. See `sequence`."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class Packed:
    """The first `count` of the given records, as Kafka stores them."""

    count: int
    data: bytes


def pack(records: Sequence[Record], limit: int, identity: Identity, sequence: int) -> Packed:
    """As many of the records (at least one) as a batch of `limit` bytes holds. A first record above it is packed alone."""
    builder = DefaultRecordBatchBuilder(_MAGIC, _UNCOMPRESSED, 0, identity.producer_id, identity.epoch, sequence, limit)
    add = builder.append
    count = 0
    for record in records:
        if add(count, record.timestamp, record.key, record.value, list(record.headers)) is None:
            break
        count += 1
    return Packed(count, builder.build())


def content_bytes(record: Record) -> int:
    """Key + value + headers, exactly."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name.encode()) + len(value) for name, value in record.headers)
