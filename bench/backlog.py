"""Events that wait in a stream, as ingest stores them."""

import time
from collections import Counter

from bench.events import make_event
from services.core.broker.connect import open_broker
from services.core.broker.partitioner import choose_partition
from services.core.broker.producer import Producer
from services.core.broker.record import Record

_CHUNK = 1000


async def fill(url: str, stream: str, events: int) -> None:
    """Store so many events. The numbers of their origins have no gap in a partition, as ingest gives them."""
    now, stored = time.time_ns() // 1_000_000, Counter[int]()
    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        partitions = await producer.partition_count(stream)
        for start in range(0, events, _CHUNK):
            records = []
            for number in range(start, start + _CHUNK):
                partition = choose_partition(make_key(number), partitions)
                records.append(make_record(number, now, partition, stored[partition]))
                stored[partition] += 1
            (await producer.send(stream, records)).raise_first()


def make_key(number: int) -> bytes:
    """Of event `number`."""
    return b"user-%06d" % (number % 5000)


def make_record(number: int, now: int, partition: int, sequence: int) -> Record:
    """Event `number`. now: its arrival, ms. partition, sequence: of its origin."""
    marks = (
        ("ce_id", b"evt-%012d" % number),
        ("penstock_arrival", b"%d" % now),
        ("penstock_origin", b"bench:%d:%d" % (partition, sequence)),
    )
    return Record(make_key(number), make_event(number), now, marks)
