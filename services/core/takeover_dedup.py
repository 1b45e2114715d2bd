"""Finds what the previous owner of a partition wrote to another topic and did not commit, so that it is not written twice."""

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.reading import read_tail
from services.core.broker.record import Batch, TopicPartition

log = structlog.get_logger()

TAIL_EVENTS = 5000
"""Records that are read at the end of a topic at most."""
WITHIN_S = 120.0
"""The longest time between a crash and the takeover: a session's time-out and a restart. So long expel takes an event of the
retry topic for written, also when the group was set back since: `penstock group reset` waits for it."""
_MAX_READ_S = 3.0
_MAX_PACED_READ_S = 6.0
"""Of Kinesis: a shard may be read five times a second, and the tail takes some seven reads. Polled batches wait meanwhile."""


class TakeoverDedup:
    """The part that expel and the global retrier share; each compares the records that `read` finds with its own.

    A process that dies between writing records on and committing leaves records that are written and will be polled again. Only
    the first `reach` records behind the commit of a partition can be such. While the broker cannot be asked none is found, and
    some events may be written twice. Not thread-safe.
    """

    def __init__(self, broker: Broker, reach: int) -> None:
        self._broker, self._reach = broker, reach
        self._left: dict[TopicPartition, int] = {}
        self._removed: set[TopicPartition] = set()
        """Since the last `read` began."""

    def is_started(self, sources: Collection[TopicPartition]) -> bool:
        """Whether `start` was called for all of these since they were assigned."""
        return not self._reach or self._left.keys() >= set(sources)

    def start(self, sources: Collection[TopicPartition]) -> None:
        """Nothing of these was polled yet. Those that were revoked during the last `read` are left out."""
        self._left = dict.fromkeys(set(sources) - self._removed, self._reach) | self._left

    def remove(self, sources: Collection[TopicPartition]) -> None:
        """These partitions were revoked: when they come back they may have had another owner."""
        self._removed |= set(sources)
        for source in sources:
            self._left.pop(source, None)

    def spend(self, source: TopicPartition, records: int) -> int:
        """How many of the next records may have been written before. To be called for each batch once, in order."""
        left = self._left.get(source, 0)
        if left > 0:
            self._left[source] = left - records
        return min(max(left, 0), records)

    async def read(self, since_ms: Mapping[str, int], visit: Callable[[str, Batch], None]) -> None:
        """Call `visit` with the newest records of these topics, from the given times on.

        Takes 3 s at most; 6 s where offsets are not contiguous.
        """
        self._removed.clear()
        limit = _MAX_READ_S if all(map(self._broker.is_contiguous, since_ms)) else _MAX_PACED_READ_S
        try:
            async with asyncio.timeout(limit):
                for topic, since in since_ms.items():
                    async for batch in read_tail(self._broker, topic, since, TAIL_EVENTS):
                        visit(topic, batch)
        except (BrokerError, TimeoutError) as error:
            log.warning(
                "tail_unknown",
                topics=list(since_ms),
                error=str(error) or f"it took more than {limit:g} s",
                hint="some events may be written twice",
            )
