"""The owners of a group's shards: the rows of the lease table, and the plan of a member.

A **lease** is one row: one shard of one stream, for one group. Its **owner** reads the shard. A member that wants a
lease of another writes itself as owner and the other as **draining**; the other finishes its work in flight and
removes itself. The **holder** may commit: the draining member, else the owner. The holder keeps writing the row, so
its **counter** grows. A counter that does not change for the lease time means that the holder is dead. Every write
requires that the counter is unchanged, so a member that lost a lease cannot write it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol
from zlib import crc32

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.prefetch import Backlog
from services.core.broker.kinesis.streams import Shard, shard_id


class StartPosition(NamedTuple):
    """Where a shard without a commit is read from.

    oldest: its beginning. arrival: the records that arrived at `value` (ms) or later. date: the first record with a
    timestamp of `value` (ms) or later; its offset is not known yet. offset: the offset `value`.
    """

    kind: Literal["oldest", "arrival", "date", "offset"]
    value: int = 0


OLDEST = StartPosition("oldest")


class Lease(NamedTuple):
    """One row. stream: names an incarnation. committed: the last processed offset. is_done: the shard is processed to
    its end.

    arrived: arrival time of the committed record (ms), or a little earlier. settled: when nothing unprocessed was
    left behind (ms); at first the creation of the row. A record that arrived since then, and is older than the
    retention, is lost. retention: the shortest seen since then (ms); 0: none. open: when the shard was last seen open
    (ms); its children's records arrived later. switches: changes of the owner since the last commit.
    """

    stream: str
    shard: int
    parents: tuple[int, ...] = ()
    start: StartPosition = OLDEST
    owner: str | None = None
    draining: str | None = None
    counter: int = 0
    committed: int | None = None
    is_done: bool = False
    arrived: int = 0
    settled: int = 0
    switches: int = 0
    retention: int = 0
    open: int = 0

    @property
    def key(self) -> str:
        """The row's key, as in the KCL's format for several streams."""
        return f"{self.stream}:{shard_id(self.shard)}"

    @property
    def holder(self) -> str | None:
        """The member that may commit."""
        return self.draining or self.owner

    def progressed(self, settled: int, retention: int, open_ms: int) -> "Lease":
        """The row with the holder's progress."""
        least = retention if settled > self.settled else min(self.retention or retention, retention)
        return self._replace(settled=max(self.settled, settled), retention=least, open=max(self.open, open_ms))

    def acquired_by(self, member: str) -> "Lease":
        """The row after `member` acquired a lease that nobody holds."""
        switches = self.switches + (self.owner not in (None, member))
        return self._replace(owner=member, draining=None, switches=switches)

    def requested_by(self, member: str) -> "Lease":
        """The row after `member` requested the lease from its holder."""
        return self._replace(owner=member, draining=self.holder, switches=self.switches + 1)

    def released_by(self, member: str) -> "Lease":
        """The row after `member` released it to the requesting member, or to nobody."""
        owner = None if self.owner == member else self.owner
        return self._replace(owner=owner, draining=None if self.draining == member else self.draining)


class LeaseExpiry:
    """The time since each counter changed, as one member observes it. Seconds, by the clock of `find_free`."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._changed: dict[str, tuple[int, float]] = {}

    def find_free(self, rows: Collection[Lease], now: float) -> frozenset[str]:
        """Keys of the rows without a living holder."""
        changed = {row.key: (row.counter, now) for row in rows}
        for key, (counter, since) in self._changed.items():
            if key in changed and changed[key][0] == counter:
                changed[key] = (counter, since)
        self._changed = changed
        return frozenset(row.key for row in rows if row.holder is None or now - changed[row.key][1] >= self._lease)


class LeasePlan(NamedTuple):
    """The rows to write: `acquire` free ones, `request` those of the member with most."""

    acquire: list[Lease]
    request: list[Lease]


_MOST_ASKED = 5


def plan_leases(rows: Iterable[Lease], free: Collection[str], member: str) -> LeasePlan:
    """A fair share for `member`: free rows up to it; if none is free, some of the member with most leases, if it has
    two more.

    Only shards whose parents are done count; an operator may have moved the group back to a parent. A member requests
    at most a quarter of the difference at once, so that members that join together do not request too much.
    """
    every = {(row.stream, row.shard): row for row in rows}
    todo = [
        row
        for row in every.values()
        if not row.is_done and all(every[row.stream, p].is_done for p in row.parents if (row.stream, p) in every)
    ]
    loads = Counter(row.owner for row in todo if row.owner and row.key not in free)
    mine = loads.pop(member, 0)
    share = -(-len(todo) // (len(loads) + 1))
    # an order of its own for each member: two seldom want the same one
    todo.sort(key=lambda row: crc32(f"{member}/{row.key}".encode()))
    acquire = [row for row in todo if row.key in free][: max(0, share - mine)]
    if acquire or not loads:
        return LeasePlan(acquire, [])
    richest, most = max(loads.items(), key=lambda item: (item[1], item[0] or ""))
    if most - mine < 2:
        return LeasePlan([], [])
    theirs = [row for row in todo if row.owner == richest and row.draining is None and row.key not in free]
    return LeasePlan([], theirs[: min(_MOST_ASKED, max(1, (most - mine) // 4))])


def new_rows(
    stream: str, shards: Collection[Shard], rows: Collection[Lease], start: StartPosition, now_ms: int, begun_ms: int
) -> list[Lease]:
    """Rows to add for a stream: first for shards without parents, for others once their parents are done.

    start: for a new group, which misses nothing that arrived before `begun_ms`; a known group keeps its start. A
    child is read from its beginning, or like its parents if nothing in them was for the group. Its records arrived
    after the last record of its parents, and after they were seen open.
    """
    known = {row.shard: row for row in rows}
    listed = {shard.number for shard in shards}
    roots = [row for row in rows if not row.parents]
    if roots:
        start = min((row.start for row in roots if row.start.kind != "offset"), default=start, key=lambda b: b.value)
    elif rows:
        start = OLDEST  # the group's start is unknown: it must not skip unread records
    added = []
    for shard in shards:
        parents = tuple(number for number in shard.parents if number in listed or number in known)
        if shard.number in known or any(number not in known or not known[number].is_done for number in parents):
            continue
        before = [known[number] for number in parents]
        # For a shard whose parents came and went unseen: the time at which the group last saw the stream.
        settled = max((_open_until(row) for row in before or rows), default=begun_ms)
        seen_open = now_ms if shard.is_open else 0
        added.append(Lease(stream, shard.number, parents, _inherit(before, start), settled=settled, open=seen_open))
    return added


def _open_until(row: Lease) -> int:
    return max(row.open, row.arrived) or row.settled


def old_rows(shards: Collection[Shard], rows: Collection[Lease]) -> list[Lease]:
    """Rows of a stream to remove: done, the shard aged out, and all its children have rows."""
    known = {row.shard for row in rows}
    waiting = {parent for shard in shards if shard.number not in known for parent in shard.parents}
    kept = waiting | {shard.number for shard in shards}
    return [row for row in rows if row.is_done and row.shard not in kept]


def _inherit(parents: Collection[Lease], start: StartPosition) -> StartPosition:
    if not parents:
        return start
    starts = {row.start for row in parents}
    if len(starts) == 1 and all(row.committed is None for row in parents):
        (same,) = starts
        return OLDEST if same.kind == "offset" else same
    return OLDEST


def by_stream(rows: Mapping[str, Lease], stream: str) -> list[Lease]:
    """The rows of one incarnation of a stream."""
    return [row for row in rows.values() if row.stream == stream]


class LeaseTable(Protocol):
    """One group's rows; `dynamo_table` has them in DynamoDB. Calls are limited in time and raise BrokerError kinds only."""

    async def rows(self) -> dict[str, Lease]:
        """All rows by key, as last written."""

    async def get(self, key: str) -> Lease | None:
        """One row, as last written."""

    async def add(self, lease: Lease) -> None:
        """Add a row, unless its key exists."""

    async def remove(self, old: Lease) -> None:
        """Remove a row, unless its counter has changed."""

    async def replace(self, old: Lease, new: Lease) -> bool:
        """Write `new` with the counter of `old` plus one. False: the counter has changed and nothing was written.
        After an error the row may have been written."""


_TRIES = 5


class HeldLease:
    """A lease that this member holds. Only `write` changes its row.

    row: as last written. until: no other member can hold it before (seconds of `clock`). backlog: its read,
    unprocessed records. begun: the first offset of this ownership; lower ones belong to an earlier one. is_placed:
    the read position is known. revoking: it is being drained, and returns nothing more. retention: the stream's, ms.
    open_ms: when the shard was last seen open.
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
        """Whether poll may return its records. Not when another member may hold it."""
        return not (self.revoking or self.backlog.is_paused) and self._clock() < self.until

    @property
    def renewed(self) -> float:
        """When it was last written."""
        return self.until - self._lease

    async def write(self, change: Callable[[Lease], Lease]) -> bool:
        """Write the row as its holder. False: this member holds it no longer.

        The counter may have changed although this member holds it: an answer was lost, or a member requested the
        lease. Then the write is repeated.
        """
        async with self._writing:
            for _ in range(_TRIES):
                if self.row.holder != self._member:  # a write before this one released it
                    self.until = 0.0
                    return False
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
            raise Unavailable(f"lease of {self.source.topic}[{self.source.partition}]: other members keep changing it")

    async def renew(self) -> bool:
        """Keep the lease, and record the progress."""
        return await self.write(self._progressed)

    async def commit(self, offset: int) -> bool:
        """Commit the offset. False: this member does not hold the lease, or this ownership never returned the offset.
        Then the offset is of an earlier ownership, perhaps of another incarnation. Never goes back."""
        if self.row.committed is None or offset > self.row.committed:
            arrived = self.backlog.arrived(offset)
            if arrived is None or not await self.write(lambda row: self._progressed(_committed(row, offset, arrived))):
                return False
        elif not await self.renew():  # nothing new to write, but only the table can confirm the lease
            return False
        self.backlog.processed(offset)
        return True

    def _progressed(self, row: Lease) -> Lease:
        row = row.progressed(self.backlog.settled, self.retention, self.open_ms)
        copy = self.backlog.passed_copy()  # nobody commits what is not returned
        # Who sets a position does not know when its record arrived. The member does when it has passed the entry there.
        if copy is None or (copy[0] <= (row.committed or 0) and row.arrived):
            return row
        return _committed(row, *copy)

    def close(self) -> None:
        """The lease is lost or released."""
        if self.reading is not None:
            self.reading.cancel()
        self.backlog.close()

    async def stop_reading(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait((self.reading,))
            self.reading = None


def _committed(row: Lease, offset: int, arrived: int) -> Lease:
    committed = offset if row.committed is None else max(row.committed, offset)
    return row._replace(committed=committed, arrived=max(row.arrived, arrived), switches=0)
