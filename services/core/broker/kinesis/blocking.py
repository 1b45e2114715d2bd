"""Kinesis for code without an event loop, such as Spark's drivers and workers.

Every method blocks, and may be called from any thread. Do not use it across a fork: each process opens its own.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, TypeVar

from services.core.broker.contract import Appended, PartitionRange
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.kinesis.appender import KinesisAppender
from services.core.broker.kinesis.broker import KinesisBroker
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.record_format import NAME_BYTES
from services.core.broker.kinesis.shard_lookup import retry_briefly
from services.core.broker.partitioner import split_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, estimate_size, split_by_size
from services.core.broker.retry import AppendPolicy, append_with_retry

T = TypeVar("T")
_PATIENT = AppendPolicy(deadline=60.0, patience=60.0)
"""Nobody waits for an answer, and a failed batch is written again as a whole."""
_READ_RECORDS = 5_000
_SEND_BYTES = 512 << 10
"""Bytes sent together: a shard accepts a megabyte a second, and each send has the producer's deadline."""


class _NamedAppender:
    """An Appender for one entry, whose name is given."""

    def __init__(self, appender: KinesisAppender, name: bytes) -> None:
        self._appender, self._name = appender, name
        self.partition_count = appender.partition_count

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        return await self._appender.append(
            topic, partition, records, timeout=timeout, given_names=lambda _bodies: self._name
        )

    async def close(self) -> None:
        """Nothing: the appender is shared."""


def _entry_name(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=NAME_BYTES // 2).hexdigest().encode()


class BlockingKinesis:
    """An open connection, with an event loop on a daemon thread. Every wait is limited as the broker's are."""

    def __init__(self, url: str) -> None:
        """`url`: see `parse_kinesis_url`. Raises ValueError, Unavailable."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kinesis", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        try:
            self.broker = self.wait(self._stack.enter_async_context(KinesisBroker.open(url)))
            self._producer = self.wait(self._stack.enter_async_context(Producer(self.broker.appender, policy=_PATIENT)))
        except BaseException:
            self.close()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Drain, and end the thread."""
        self.wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stream(self, topic: str) -> Stream:
        """The stream now. Raises UnknownTopic, Unavailable."""
        return self.wait(retry_briefly(lambda: self.broker.stream(topic)))

    def ranges(self, topic: str) -> Mapping[int, PartitionRange]:
        """The stored range of each shard. Takes seconds. Raises UnknownTopic, Unavailable."""
        return self.wait(self.broker.reader.describe(topic))

    def read(self, topic: str, shard: int, offset: int, max_records: int = _READ_RECORDS) -> Batch | None:
        """As `Reader.read`."""
        return self.wait(self.broker.reader.read(topic, shard, offset, max_records=max_records))

    def read_range(self, topic: str, shard: int, start: int, end: int) -> Iterator[Batch]:
        """The records `start <= offset < end` of a shard, in order; 0 is the oldest record.

        Raises OffsetOutOfRange when the first or the last of them have expired, or do not exist yet.
        """
        at = start
        while at < end:
            batch = self.read(topic, shard, at)
            if batch is None:
                raise OffsetOutOfRange(topic, shard, end, start, at, contiguous=False)
            kept = sum(offset < end for offset in batch.offsets)
            if kept:
                yield Batch(topic, shard, batch.offsets[:kept], batch.records[:kept], batch.damage)
            at = batch.offsets[-1] + 1

    def put(self, topic: str, records: Sequence[Record], turn: int, name: str) -> None:
        """As `send`, of records with a name. A repeat with the same name and records has the same bytes, also from another
        process: members of groups skip it (`prefetch`). So nothing else may have this name. Raises BrokerError kinds.
        """
        count = self.wait(self._producer.partition_count(topic))
        for number, (_, some) in enumerate(split_by_size(records, _SEND_BYTES)):
            parts = split_by_key(some, count, keyless=turn % count)
            self.wait(self._put_parts(topic, parts, f"{name}:{number}"))

    async def _put_parts(self, topic: str, parts: Mapping[int, Sequence[Record]], name: str) -> None:
        """Each part in one entry: it has less than half of the bytes of the largest."""
        deadline = time.monotonic() + _PATIENT.deadline

        async def put(partition: int, records: Sequence[Record]) -> Appended:
            named = _NamedAppender(self.broker.appender, _entry_name(f"{name}:{partition}"))
            return await append_with_retry(
                named,
                topic,
                partition,
                records,
                _PATIENT,
                size=estimate_size(records),
                deadlines=lambda: [deadline] * len(records),
            )

        for stored in await asyncio.gather(*(put(partition, records) for partition, records in parts.items())):
            for _, error in stored.failed:
                raise error

    def send(self, topic: str, records: Sequence[Record], turn: int = 0) -> None:
        """Store the records by key, durably, with the producer's retries. Those without a key go to one partition,
        another each turn.

        At least once: Kinesis has no idempotent put. Raises BrokerError kinds; then some may be stored.
        """
        count = self.wait(self._producer.partition_count(topic))
        for _, some in split_by_size(records, _SEND_BYTES):
            parts = split_by_key(some, count, keyless=turn % count)
            self.wait(self._producer.send_to(topic, parts)).raise_first()
