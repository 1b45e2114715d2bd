"""What is known of each stream: its shards, and how many partitions it has to those who write."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.core import metrics
from services.core.broker.errors import BrokerError, Unavailable, UnknownTopic
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.shards import Shard, parse_shard
from services.core.broker.kinesis.slots import PARTITIONS_TAG
from services.core.broker.kinesis.tags import read_tags
from services.core.broker.kinesis.timing import Timing
from services.core.broker.trouble import end_tasks

log = structlog.get_logger()

_TAG_SECONDS = 120.0
"""Tags are asked for this seldom, or when the shards changed: an account may ask five times a second in all."""

_STALE_SECONDS = 300.0
"""While the service does not answer, what was known stays good for so long: a put tells whether it is."""


@dataclass(frozen=True, slots=True)
class Topology:
    """shards: all that are kept, closed ones too. partitions: to be written to, see `slots`. is_tagged: the tag says so now.

    is_certain: the tag says so, or did, or the shards are as they were made, as far as their listing tells.
    """

    shards: tuple[Shard, ...]
    partitions: int
    is_tagged: bool = True
    is_certain: bool = True


@dataclass(slots=True)
class _Known:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    topology: Topology | None = None
    asked: float = 0.0
    told: int = 0
    """The most that its tag ever said."""
    untold: int = 0
    """The open shards that it had without a tag, when it was met."""
    tag: int | None = None
    tag_asked: float = -_TAG_SECONDS
    is_alarmed: bool = False
    failed: float = -_STALE_SECONDS
    """When a try began that failed."""
    refreshing: asyncio.Task[None] | None = None


class Streams:
    """A cache over ListShards and the tag. One request at a time for each stream."""

    def __init__(self, kinesis: Any, timing: Timing) -> None:
        self._kinesis, self._timing = kinesis, timing
        self._streams: dict[str, _Known] = {}

    async def of(self, topic: str, *, max_age: float | None = None) -> Topology:
        """At most `max_age` seconds old. Raises UnknownTopic, Unavailable.

        Without `max_age` at most twice `Timing.sync`, and older while the service does not answer: nobody waits for it then.
        """
        known = self._streams.setdefault(topic, _Known())
        wanted = time.monotonic() - (self._timing.sync if max_age is None else max_age)
        if known.topology is not None:
            if known.asked > wanted:
                return known.topology
            if max_age is None and self._refresh_soon(topic, known):
                return known.topology
        async with known.lock:
            if known.topology is not None and known.asked > wanted:
                return known.topology
            return await self._refresh(topic, known)

    def _refresh_soon(self, topic: str, known: _Known) -> bool:
        """See to it that what is known gets younger. False: it is too old to go on with meanwhile."""
        now, sync = time.monotonic(), self._timing.sync
        is_failing = known.failed > known.asked
        if now - known.asked >= (_STALE_SECONDS if is_failing or known.refreshing is not None else 2 * sync):
            return False
        if known.refreshing is None and now - known.failed >= sync:
            known.refreshing = asyncio.create_task(self._refresh_known(topic, known), name=f"kinesis-shards-{topic}")
        return True

    async def _refresh_known(self, topic: str, known: _Known) -> None:
        try:
            async with known.lock:
                await self._refresh(topic, known)
        except BrokerError as error:  # whoever asks next meets it, too, when it lasts
            log.info("shards_not_listed", stream=topic, error=str(error))
        finally:
            known.refreshing = None

    async def close(self) -> None:
        """Ask for nothing more."""
        await end_tasks(*(known.refreshing for known in self._streams.values()))

    def refresh(self, topic: str) -> None:
        """Ask anew next time, of the tag too; how many partitions it has stays known meanwhile."""
        if (known := self._streams.get(topic)) is not None:
            known.asked = known.tag_asked = -_STALE_SECONDS

    def forget(self, topic: str) -> None:
        """The stream was deleted, or made: what is known is of another one."""
        known = self._streams.pop(topic, None)
        if known is not None and known.refreshing is not None:
            known.refreshing.cancel()

    async def _refresh(self, topic: str, known: _Known) -> Topology:
        asking = time.monotonic()
        try:
            shards = await self._list_shards(topic)
            changed = known.topology is None or known.topology.shards != shards
            if changed or asking - known.tag_asked > _TAG_SECONDS:
                await self._renew_tag(topic, known)
        except UnknownTopic:
            self._streams.pop(topic, None)
            raise
        except Unavailable:
            known.failed = asking
            if known.topology is not None and asking - known.asked < _STALE_SECONDS:
                return known.topology
            raise
        known.topology, known.asked = self._count(topic, known, shards), asking
        return known.topology

    def _count(self, topic: str, known: _Known, shards: tuple[Shard, ...]) -> Topology:
        """Nothing makes the partitions fewer, and a reshard of an untagged stream makes no other ones: keys would move."""
        open_shards = sum(shard.is_open for shard in shards)
        known.told = max(known.told, known.tag or 0)
        known.untold = known.untold or open_shards
        partitions = known.told or known.untold
        is_resharded = any(shard.parents or not shard.is_open for shard in shards)
        found = Topology(shards, partitions, known.tag == partitions, bool(known.told) or not is_resharded)
        is_doubtful = partitions != (known.tag or open_shards) or not found.is_certain
        metrics.BROKER_TAG_MISSING.labels(topic).set(is_doubtful)
        if is_doubtful and not known.is_alarmed:
            log.error(
                "partitions_not_told",
                stream=topic,
                tag=known.tag,
                open_shards=open_shards,
                partitions=partitions,
                hint="a process that starts now may take another number, and keys move. "
                f"Try: the tag {PARTITIONS_TAG} with the number that the stream was made with, also in your infrastructure code",
            )
        known.is_alarmed = is_doubtful
        return found

    async def _renew_tag(self, topic: str, known: _Known) -> None:
        """It seldom changes: while the service does not tell, what it was holds, for shards that are new, too."""
        asking = time.monotonic()
        try:
            known.tag = await self._read_tag(topic)
            known.tag_asked = asking
        except Unavailable:
            if known.topology is None:
                raise
            known.tag_asked = asking - _TAG_SECONDS + self._timing.sync

    async def _list_shards(self, topic: str) -> tuple[Shard, ...]:
        found: list[Shard] = []
        page: dict[str, str] = {"StreamName": topic}
        async with bounded(f"list shards of {topic}", self._timing.request):
            while page:
                answer = await self._kinesis.list_shards(**page)
                found += map(parse_shard, answer["Shards"])
                page = {"NextToken": answer["NextToken"]} if answer.get("NextToken") else {}
        return tuple(found)

    async def _read_tag(self, topic: str) -> int | None:
        value = (await read_tags(self._kinesis, topic, self._timing)).get(PARTITIONS_TAG)
        return int(value) if value is not None and value.isdecimal() and int(value) > 0 else None
