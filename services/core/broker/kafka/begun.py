"""Which partitions each group has begun to read: on record of our own, because Kafka forgets it.

Kafka drops the offsets of a group that has had no members for `offsets.retention.minutes` (seven days by default). Without a
record of our own, a group that comes back then looks like one that never was: at "latest" it would skip what waited for it,
at "earliest" deliver everything again. The metadata of a commit cannot say it, it goes with the commit; nor can a
group of ours, whose offsets go in the same way. So it stands in `penstock.groups`: one partition, compacted, kept for ever, a
small record per group and partition. It is written behind the first commit, before the first record is read: a crash in
between leaves a commit without a row, which the next placement mends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import structlog

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged, TopicExists, Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.look import look
from services.core.broker.kafka.offsets import EARLIEST, ends, list_offsets
from services.core.broker.record import Batch, Record, TopicPartition

log = structlog.get_logger()

GROUPS = "penstock.groups"
SPEC = TopicSpec(GROUPS, 1, compact=True)
_SOURCE = TopicPartition(GROUPS, 0)
_SEPARATOR = "\n"
_PAGE = 5000
_REMEDY = (
    "Try: another leader for the partition, whose copy may be intact (kafka-reassign-partitions); or, when every group has "
    f"offsets (kafka-consumer-groups --describe), delete {GROUPS}: it is written anew from those"
)
_FOREIGN = "it is passed over. Try: let nobody but Penstock write to this topic"

Append = Callable[[str, Sequence[Record]], Awaitable[None]]


class Begun(NamedTuple):
    """topic: the id of the topic in which the group began. partitions: how many it had then."""

    topic: str
    partitions: int


class BegunGroups:
    """What the topic says, read on from where the last look ended. Safe for concurrent use."""

    def __init__(self, cluster: Cluster, create: Callable[[TopicSpec], Awaitable[None]], append: Append) -> None:
        self._cluster, self._create, self._append = cluster, create, append
        self._known: dict[str, Begun] = {}
        self._topic, self._next = "", 0
        self._reading = asyncio.Lock()

    async def of(self, group: str, sources: Collection[TopicPartition]) -> dict[TopicPartition, Begun]:
        """What is on record of these. Raises Unavailable, also when the record is damaged."""
        async with self._reading:
            await self._read_on()
        keys = {source: _key(group, source) for source in sources}
        return {source: self._known[key] for source, key in keys.items() if key in self._known}

    async def note(self, group: str, begun: Mapping[TopicPartition, Begun]) -> None:
        """Put on record what is not yet; durable when it returns. Raises BrokerError kinds."""
        new = {key: row for source, row in begun.items() if self._known.get(key := _key(group, source)) != row}
        if not new:
            return
        if not self._topic:
            with suppress(TopicExists):  # another process begins at this moment
                await self._create(SPEC)
        records = [Record(key.encode(), msgspec.json.encode(row), 0) for key, row in new.items()]
        await self._append(GROUPS, records)
        self._known |= new

    async def _read_on(self) -> None:
        state = (await self._cluster.describe([GROUPS])).get(GROUPS)
        found = "" if state is None else state.id
        if found != self._topic:
            self._topic, self._next, self._known = found, 0, {}
        if not found:
            return
        end = (await ends(self._cluster, [_SOURCE]))[_SOURCE]
        while self._next < end:
            first = (await list_offsets(self._cluster, {_SOURCE: EARLIEST}))[_SOURCE]
            try:
                batch = await look(self._cluster, _SOURCE, max(first, self._next), _PAGE)
            except DataDamaged as error:
                raise Unavailable(f"{error}; {_REMEDY}") from error
            if batch is not None:
                self._take(batch)
            self._next = end if batch is None else batch.offsets[-1] + 1

    def _take(self, batch: Batch) -> None:
        """Raises Unavailable for a damaged one: a group that is not found here begins anew, and skips what waits for it."""
        if batch.damage is not None:
            first, last, detail = batch.damage
            raise Unavailable(f"{GROUPS}[0]: offsets {first} to {last} are damaged: {detail}. {_REMEDY}")
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            try:
                begun = msgspec.json.decode(record.value or b"", type=Begun)
                self._known[(record.key or b"").decode()] = begun
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("groups_record_unreadable", topic=GROUPS, offset=offset, error=str(error), hint=_FOREIGN)


def _key(group: str, source: TopicPartition) -> str:
    return _SEPARATOR.join((group, source.topic, str(source.partition)))
