"""A group's offsets from outside of it: for operators, and for lag while nobody is a member."""

import asyncio
from collections.abc import Mapping

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis.lease_table import LeaseTable
from services.core.broker.kinesis.leases import Begin, Lease, Watch, by_stream
from services.core.broker.kinesis.membership import Stream
from services.core.broker.kinesis.timing import Timing

_UNSETTLED = Begin("offset", 0)
"""Of a row that an operator made: its offset is committed; it says nothing about where the group begins elsewhere."""


async def committed(table: LeaseTable, stream: str) -> dict[int, int]:
    """The last processed offset by shard, also of shards that are done."""
    rows = by_stream(await table.rows(), stream)
    return {row.shard: row.committed for row in rows if row.committed is not None}


async def set_committed(
    table: LeaseTable, stream: Stream, processed: Mapping[int, int], timing: Timing, now_ms: int
) -> None:
    """Move the group. Raises Unavailable while it has members, UnknownTopic for a shard that neither stream nor group know.

    A shard that only the group knows has aged out: it is done. A row whose holder died without letting go is waited for,
    as long as a lease lasts.
    """
    shards = {shard.number: shard for shard in stream.shards}
    known = shards.keys() | {row.shard for row in by_stream(await table.rows(), stream.name)}
    if unknown := processed.keys() - known:
        raise UnknownTopic(f"{stream.name} has no shards {sorted(unknown)}")
    if await has_members(table, timing):
        raise Unavailable("the group has members. Try: stop them first")
    rows = {row.shard: row for row in by_stream(await table.rows(), stream.name)}
    for number, offset in processed.items():
        if number not in rows:
            seen_open = now_ms if shards[number].is_open else 0
            new = Lease(stream.name, number, shards[number].parents, _UNSETTLED, settled=now_ms, open=seen_open)
            await table.add(new)
        row = rows.get(number) or await table.get(new.key)
        assert row is not None
        is_done = number not in shards
        moved = row._replace(
            committed=offset,
            is_done=is_done,
            owner=None,
            draining=None,
            arrived=0,
            settled=now_ms,
            switches=0,
            retention=stream.retention_ms,
        )
        if not await table.replace(row, moved):
            raise Unavailable("the group has members. Try: stop them first")


async def copy_positions(table: LeaseTable, to: LeaseTable, stream: str, timing: Timing) -> bool:
    """Give the group of `to` the rows that it has not, as they are, but nobody's; whether there were any.

    Raises Unavailable while that group has members.
    """
    known = await to.rows()
    missing = [row for row in by_stream(await table.rows(), stream) if row.key not in known]
    if missing and await has_members(to, timing):
        raise Unavailable("the group has members. Try: stop them first")
    for row in missing:
        await to.add(row._replace(owner=None, draining=None, counter=0, switches=0))
    return bool(missing)


async def has_members(table: LeaseTable, timing: Timing) -> bool:
    """Whether somebody writes the leases. Takes up to the lease time when holders are named that may be dead."""
    watch = Watch(timing.lease)
    loop = asyncio.get_running_loop()
    seen: dict[str, int] = {}
    while True:
        rows = await table.rows()
        if any(seen.get(row.key, row.counter) != row.counter for row in rows.values()):
            return True
        seen = {row.key: row.counter for row in rows.values()}
        if len(watch.look(rows.values(), loop.time())) == len(rows):
            return False
        await asyncio.sleep(timing.lease / 10)
