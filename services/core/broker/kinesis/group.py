"""Joining a group: `contract.Broker.consumer`."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from services.core.broker.contract import OnRevoke, Start
from services.core.broker.kinesis.consumer import KinesisConsumer
from services.core.broker.kinesis.member_side import GroupSide, MemberSide
from services.core.broker.kinesis.membership import Membership


@asynccontextmanager
async def join(
    shared: GroupSide, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke
) -> AsyncIterator[KinesisConsumer]:
    """A member for the time of the context; the group's lease table is made when it has none. Raises UnknownTopic."""
    side = MemberSide(shared, group)
    for topic in topics:
        shared.identities.forget(topic)  # it may have been made anew: what another one's leases say is not about it
        await side.look(topic)
    await side.table.prepare()
    membership = Membership(side, group, topics, start, on_revoke)
    try:
        await membership.join()
        yield KinesisConsumer(side, membership)
    finally:
        await membership.leave()
