"""Which partition a key belongs to: Kafka's default rule (murmur2), the same in every backend and in Spark.

Source of the rule: org.apache.kafka.clients.producer.internals.BuiltInPartitioner.partitionForKey:
`toPositive(murmur2(key)) % partitions`, murmur2 with seed 0x9747b28c, toPositive = `& 0x7fffffff`.
"""

from collections.abc import Sequence

from murmurhash2 import murmurhash2

from services.core.broker.record import Record

_SEED = 0x9747B28C


def choose_partition(key: bytes, partitions: int) -> int:
    """The partition of this key among `partitions` (> 0)."""
    return (murmurhash2(key, _SEED) & 0x7FFFFFFF) % partitions


def split_by_key(records: Sequence[Record], partitions: int, keyless: int = 0) -> dict[int, list[Record]]:
    """The records by partition, order kept. Those without a key all go to partition `keyless`."""
    parts: dict[int, list[Record]] = {}
    for record in records:
        partition = keyless if record.key is None else choose_partition(record.key, partitions)
        part = parts.get(partition)
        if part is None:
            parts[partition] = [record]
        else:
            part.append(record)
    return parts
