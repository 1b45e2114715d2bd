"""Looking for records in stretches of topics, so many at most."""

import asyncio
from collections.abc import Callable, Collection, Hashable
from typing import Any

from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN, read_id
from services.observer.ledger.scan import scan

Found = tuple[str | None, str, int, int]
"""Event id, topic, partition, offset."""


class Search:
    """found: by key, what was found last. count: records that were read. complete: no stretch was left before its end."""

    def __init__(self, admin: Admin, most: int) -> None:
        self._admin, self._most = admin, most
        self.found: dict[Any, Found] = {}
        self.count = 0
        self.complete = True

    async def read(
        self,
        topic: str,
        partition: int,
        start: int | None,
        end: int | None,
        wanted: Collection[Hashable],
        key: Callable[[Record], Hashable],
        held: PartitionRange | None = None,
    ) -> None:
        """Look in this stretch for records whose key is wanted, until all are found or `most` records were read.

        The other arguments are those of `scan`, and so are the errors.
        """
        async for batch in scan(self._admin, topic, partition, start, end, held):
            if self.count >= self._most:
                self.complete = False
                return
            self.count += len(batch.records)
            self._take(batch, wanted, key)
            if all(one in self.found and self.found[one][1] == topic for one in wanted):
                return
            await asyncio.sleep(0)

    def _take(self, batch: Batch, wanted: Collection[Hashable], key: Callable[[Record], Hashable]) -> None:
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            if (found := key(record)) in wanted:
                self.found[found] = read_id(record), batch.topic, batch.partition, offset


def read_origin(record: Record) -> bytes | None:
    """The key of what lies in a stream."""
    return record.header(ORIGIN)
