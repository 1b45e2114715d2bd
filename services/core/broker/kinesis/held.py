"""A lease that this member holds, and the only way to write it."""

import asyncio
from collections.abc import Callable

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.backlog import Backlog
from services.core.broker.kinesis.lease_table import LeaseTable
from services.core.broker.kinesis.leases import Lease

_TRIES = 5


class Held:
    """One held lease. row: as last written. until: it cannot be another's before (by `clock`, seconds).

    backlog: what is read and not processed. begun: the first offset of this ownership; what lies below belongs to an
    earlier one. is_placed: it is known where reading begins. revoking: being drained, nothing more is returned.
    retention: the stream's, ms, as last seen. open_ms: when the shard was last seen open.
    """

    def __init__(
        self,
        backlog: Backlog,
        member: str,
        row: Lease,
        until: float,
        table: LeaseTable,
        clock: Callable[[], float],
        lease: float,
        retention: int,
    ) -> None:
        self.source, self.row, self.until, self.retention = backlog.source, row, until, retention
        self.open_ms = row.open
        self.backlog = backlog
        self.begun = 0 if row.committed is None else row.committed
        self.is_placed = self.revoking = False
        self.reading: asyncio.Task[None] | None = None
        self._member, self._table, self._clock, self._lease = member, table, clock, lease
        self._writing = asyncio.Lock()

    @property
    def is_readable(self) -> bool:
        """Whether poll may return its records: not when another may have taken it meanwhile."""
        return not (self.revoking or self.backlog.is_paused) and self._clock() < self.until

    @property
    def renewed(self) -> float:
        """When it was last written."""
        return self.until - self._lease

    async def write(self, change: Callable[[Lease], Lease]) -> bool:
        """Write the row as its holder; False when this member holds it no longer.

        The counter can have moved without that: an answer was lost, or somebody asked for the lease. Then it is tried again.
        """
        async with self._writing:
            for _ in range(_TRIES):
                sent = self._clock()
                new = change(self.row)
                if await self._table.replace(self.row, new):
                    self.row, self.until = new._replace(counter=self.row.counter + 1), sent + self._lease
                    return True
                row = await self._table.get(self.row.key)
                if row is None or row.holder != self._member:
                    self.until = 0.0
                    return False
                self.row = row
            raise Unavailable(f"lease of {self.source.topic}[{self.source.partition}]: others keep writing it")

    async def renew(self) -> bool:
        """Say that this member lives, and how far the group is."""
        return await self.write(self._progressed)

    async def commit(self, offset: int) -> bool:
        """Make `offset` the last processed one; False when it is not this member's any more, or was never returned by this
        ownership: then it is an earlier one's, perhaps of another life of the stream. Never goes back.
        """
        if self.row.committed is None or offset > self.row.committed:
            if not self.backlog.has_returned(offset):
                return False
            arrived = self.backlog.arrived(offset)
            if not await self.write(lambda row: self._progressed(_committed(row, offset, arrived))):
                return False
        elif not await self.renew():  # nothing new to write, but only the table tells whether it may be said
            return False
        self.backlog.processed(offset)
        return True

    def _progressed(self, row: Lease) -> Lease:
        return row.progressed(self.backlog.settled, self.retention, self.open_ms)

    def close(self) -> None:
        """It is not this member's any more."""
        if self.reading is not None:
            self.reading.cancel()
        self.backlog.close()

    async def stop_reading(self) -> None:
        """End the reading task."""
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait((self.reading,))
            self.reading = None


def _committed(row: Lease, offset: int, arrived: int) -> Lease:
    committed = offset if row.committed is None else max(row.committed, offset)
    return row._replace(committed=committed, arrived=max(row.arrived, arrived), switches=0)
