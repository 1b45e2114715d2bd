"""What is known of each stream: its shards, and how many partitions it has to those who write."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.shards import Shard, parse_shard
from services.core.broker.kinesis.slots import PARTITIONS_TAG
from services.core.broker.kinesis.timing import Timing

_TAG_SECONDS = 120.0
"""Tags are asked for this seldom, or when the shards changed: an account may ask five times a second in all."""

_STALE_SECONDS = 300.0
"""While the service does not answer, what was known stays good for so long: a put tells whether it is."""


@dataclass(frozen=True, slots=True)
class Topology:
    """shards: all that are kept, closed ones too. partitions: to be written to, see `slots`."""

    shards: tuple[Shard, ...]
    partitions: int


@dataclass(slots=True)
class _Known:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    topology: Topology | None = None
    asked: float = 0.0
    tag: int | None = None
    tag_asked: float = 0.0


class Streams:
    """A cache over ListShards and the tag. One request at a time for each stream."""

    def __init__(self, kinesis: Any, timing: Timing) -> None:
        self._kinesis, self._timing = kinesis, timing
        self._streams: dict[str, _Known] = {}

    async def of(self, topic: str, *, max_age: float | None = None) -> Topology:
        """At most `max_age` seconds old (default: `Timing.sync`). Raises UnknownTopic, Unavailable."""
        known = self._streams.setdefault(topic, _Known())
        limit = self._timing.sync if max_age is None else max_age
        wanted = time.monotonic() - limit
        if known.topology is not None and known.asked > wanted:
            return known.topology
        async with known.lock:
            if known.topology is not None and known.asked > wanted:
                return known.topology
            return await self._refresh(topic, known)

    def forget(self, topic: str) -> None:
        """Ask anew next time, of the tag too."""
        self._streams.pop(topic, None)

    async def _refresh(self, topic: str, known: _Known) -> Topology:
        asking = time.monotonic()
        try:
            shards = await self._list_shards(topic)
            changed = known.topology is None or known.topology.shards != shards
            if changed or asking - known.tag_asked > _TAG_SECONDS:
                known.tag = await self._read_tag(topic)
                known.tag_asked = asking
        except UnknownTopic:
            self._streams.pop(topic, None)
            raise
        except Unavailable:
            if known.topology is not None and asking - known.asked < _STALE_SECONDS:
                return known.topology
            raise
        partitions = known.tag or sum(shard.is_open for shard in shards)
        known.topology, known.asked = Topology(shards, partitions), asking
        return known.topology

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
        async with bounded(f"list tags of {topic}", self._timing.request):
            answer = await self._kinesis.list_tags_for_stream(StreamName=topic)
        value = next((tag.get("Value") for tag in answer["Tags"] if tag["Key"] == PARTITIONS_TAG), None)
        return int(value) if value is not None and value.isdecimal() and int(value) > 0 else None
