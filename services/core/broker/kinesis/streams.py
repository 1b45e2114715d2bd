"""A stream's shards, its partitions, and the shard of each partition.

Readers see shards: a `TopicPartition` read from Kinesis has the number of its shard, 7 for `shardId-000000000007`. A
split or merge closes shards and opens others with higher numbers, so the numbers of open shards need not start at 0.

Writers see partitions. A topic of N partitions divides the 2^128 hash keys into N equal slots. An append to partition
p goes to the middle of slot p by explicit hash key, and the shard that contains this point stores it. So a split or
merge moves whole partitions, and keys keep their order, because parents are drained before children are read. N is
the stream's tag `PARTITIONS_TAG`; a stream without it has as many partitions as open shards. In a new stream both
numbers are the same.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from services.core import metrics
from services.core.broker.errors import BrokerError, Throttled, Unavailable, UnknownTopic
from services.core.broker.kinesis.aws import Timing, bounded
from services.core.broker.lease_member import end_tasks

_SHARD_PREFIX = "shardId-"


class Shard(NamedTuple):
    """One shard. parents: two after a merge. first_key, last_key: its range of hash keys. is_open: it accepts writes."""

    number: int
    parents: tuple[int, ...]
    first_key: int
    last_key: int
    is_open: bool


def shard_id(number: int) -> str:
    return f"{_SHARD_PREFIX}{number:012d}"


def shard_number(name: str) -> int:
    """Raises ValueError."""
    if not name.startswith(_SHARD_PREFIX):
        raise ValueError(f"not the name of a shard: {name!r}")
    return int(name.removeprefix(_SHARD_PREFIX))


def parse_shard(row: Mapping[str, Any]) -> Shard:
    """From a row of ListShards."""
    parents = [row[name] for name in ("ParentShardId", "AdjacentParentShardId") if row.get(name)]
    return Shard(
        number=shard_number(row["ShardId"]),
        parents=tuple(shard_number(name) for name in parents),
        first_key=int(row["HashKeyRange"]["StartingHashKey"]),
        last_key=int(row["HashKeyRange"]["EndingHashKey"]),
        is_open=row["SequenceNumberRange"].get("EndingSequenceNumber") is None,
    )


def open_shards(shards: Collection[Shard]) -> list[Shard]:
    """Those that accept writes, by hash range."""
    return sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.first_key)


PARTITIONS_TAG = "penstock:partitions"
HASH_KEYS = 1 << 128


def hash_key_of(partition: int, partitions: int) -> int:
    """The middle of slot `partition`."""
    return (2 * partition + 1) * HASH_KEYS // (2 * partitions)


def shard_of(hash_key: int, shards: Sequence[Shard]) -> Shard | None:
    """The open shard that contains this hash key. None for a moment while the stream is being resharded."""
    return next((shard for shard in shards if shard.is_open and shard.first_key <= hash_key <= shard.last_key), None)


def next_split(shards: Sequence[Shard], partitions: int) -> tuple[Shard, int] | None:
    """The next split towards one shard per slot: (shard, first hash key of its second half). None: there are enough.

    Each split halves a shard's slots, so a doubling needs one split per shard.
    """
    for shard in open_shards(shards):
        inside = [p for p in range(partitions) if shard.first_key <= hash_key_of(p, partitions) <= shard.last_key]
        if len(inside) > 1:
            return shard, inside[len(inside) // 2] * HASH_KEYS // partitions
    return None


_MOST_TAGS = 50
"""The most tags of a stream, and the most in one answer. Without this limit an answer may hold fewer."""


async def read_tags(kinesis: Any, topic: str, timing: Timing) -> dict[str, str]:
    """Raises BrokerError kinds."""
    async with bounded(f"list tags of {topic}", timing.request):
        answer = await kinesis.list_tags_for_stream(StreamName=topic, Limit=_MOST_TAGS)
    return {tag["Key"]: tag.get("Value", "") for tag in answer["Tags"]}


PAUSE_S = 0.05


async def status_of(kinesis: Any, topic: str, timing: Timing) -> str | None:
    """ACTIVE, UPDATING and so on. None: there is no such stream."""
    try:
        async with bounded(f"describe {topic}", timing.request):
            answer = await kinesis.describe_stream_summary(StreamName=topic)
    except UnknownTopic:
        return None
    return str(answer["StreamDescriptionSummary"]["StreamStatus"])


async def settle(kinesis: Any, topic: str, timing: Timing) -> None:
    """Wait until the stream is ACTIVE. Retries when throttled or unavailable. Raises Unavailable after
    `Timing.settle` seconds."""
    deadline = time.monotonic() + timing.settle
    pause = PAUSE_S
    while (status := await _status_or_why_not(kinesis, topic, timing)) != "ACTIVE":
        if time.monotonic() > deadline:
            raise Unavailable(f"{topic} is still {status} after {timing.settle:g} s")
        await asyncio.sleep(pause)
        pause = min(1.0, 2 * pause)


async def _status_or_why_not(kinesis: Any, topic: str, timing: Timing) -> str | None:
    try:
        return await status_of(kinesis, topic, timing)
    except (Throttled, Unavailable) as error:
        return f"of unknown status ({error})"


log = structlog.get_logger()

_TAG_SECONDS = 120.0
"""Time between two requests for the tag, unless the shards changed. An account may make five a second in all."""

_STALE_SECONDS = 300.0
"""While the service does not answer, a cached topology stays in use for this long."""


@dataclass(frozen=True, slots=True)
class Topology:
    """shards: all that the service lists, closed ones too. partitions: how many there are to write to. is_tagged: the
    tag has this number now.

    is_certain: the number comes from the tag, now or earlier, or from shards that, by their listing, were never
    resharded.
    """

    shards: tuple[Shard, ...]
    partitions: int
    is_tagged: bool = True
    is_certain: bool = True


@dataclass(slots=True)
class _CachedStream:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    topology: Topology | None = None
    listed_at: float = 0.0
    largest_tag: int = 0
    """The largest value of the tag so far."""
    first_open_shards: int = 0
    """Open shards at the first listing, for a stream without a tag."""
    tag: int | None = None
    tag_read_at: float = -_TAG_SECONDS
    is_alarmed: bool = False
    failed: float = -_STALE_SECONDS
    """When the last failed attempt began."""
    refreshing: asyncio.Task[None] | None = None


class Streams:
    """A cache over ListShards and the tag. One request at a time per stream."""

    def __init__(self, kinesis: Any, timing: Timing, prefix: str = "") -> None:
        """prefix: of the fleet's names in the account, for the log."""
        self._kinesis, self._timing, self._prefix = kinesis, timing, prefix
        self._streams: dict[str, _CachedStream] = {}

    async def find(self, topic: str, *, max_age: float | None = None) -> Topology:
        """The topology, at most `max_age` seconds old. Raises UnknownTopic, Unavailable.

        Without `max_age` it is at most twice `Timing.sync` old, and older while the service does not answer: then
        no caller waits.
        """
        known = self._streams.setdefault(topic, _CachedStream())
        wanted = time.monotonic() - (self._timing.sync if max_age is None else max_age)
        if known.topology is not None:
            if known.listed_at > wanted:
                return known.topology
            if max_age is None and self._refresh_soon(topic, known):
                return known.topology
        async with known.lock:
            if known.topology is not None and known.listed_at > wanted:
                return known.topology
            return await self._refresh(topic, known)

    def _refresh_soon(self, topic: str, known: _CachedStream) -> bool:
        """Start a refresh in the background. False: the cached topology is too old to use meanwhile."""
        now, sync = time.monotonic(), self._timing.sync
        is_failing = known.failed > known.listed_at
        if now - known.listed_at >= (_STALE_SECONDS if is_failing or known.refreshing is not None else 2 * sync):
            return False
        if known.refreshing is None and now - known.failed >= sync:
            known.refreshing = asyncio.create_task(self._refresh_known(topic, known), name=f"kinesis-shards-{topic}")
        return True

    async def _refresh_known(self, topic: str, known: _CachedStream) -> None:
        try:
            async with known.lock:
                await self._refresh(topic, known)
        except BrokerError as error:  # an error that lasts reaches the next caller
            log.info("shards_not_listed", stream=topic, error=str(error))
        finally:
            known.refreshing = None

    async def close(self) -> None:
        await end_tasks(*(known.refreshing for known in self._streams.values()))

    def invalidate(self, topic: str) -> None:
        """Ask again next time, for the tag too. The number of partitions stays known."""
        if (known := self._streams.get(topic)) is not None:
            known.listed_at = known.tag_read_at = -_STALE_SECONDS

    def forget(self, topic: str) -> None:
        """Drop the cache of a stream that was deleted or created."""
        known = self._streams.pop(topic, None)
        if known is not None and known.refreshing is not None:
            known.refreshing.cancel()

    async def _refresh(self, topic: str, known: _CachedStream) -> Topology:
        started = time.monotonic()
        try:
            shards = await self._list_shards(topic)
            changed = known.topology is None or known.topology.shards != shards
            if changed or started - known.tag_read_at > _TAG_SECONDS:
                await self._renew_tag(topic, known)
        except UnknownTopic:
            self._streams.pop(topic, None)
            raise
        except Unavailable:
            known.failed = started
            if known.topology is not None and started - known.listed_at < _STALE_SECONDS:
                return known.topology
            raise
        known.topology, known.listed_at = self._count_partitions(topic, known, shards), started
        return known.topology

    def _count_partitions(self, topic: str, known: _CachedStream, shards: tuple[Shard, ...]) -> Topology:
        """The number never falls, and resharding a stream without a tag does not change it: keys would move."""
        open_shards = sum(shard.is_open for shard in shards)
        known.largest_tag = max(known.largest_tag, known.tag or 0)
        known.first_open_shards = known.first_open_shards or open_shards
        partitions = known.largest_tag or known.first_open_shards
        is_resharded = any(shard.parents or not shard.is_open for shard in shards)
        found = Topology(shards, partitions, known.tag == partitions, bool(known.largest_tag) or not is_resharded)
        is_doubtful = partitions != (known.tag or open_shards) or not found.is_certain
        metrics.BROKER_TAG_MISSING.labels(topic).set(is_doubtful)
        if is_doubtful and not known.is_alarmed:
            log.error(
                "partitions_tag_missing",
                stream=self._prefix + topic,
                tag=known.tag,
                open_shards=open_shards,
                partitions=partitions,
                hint="a process that starts now may use another number of partitions, and then keys move. Try: set the tag "
                f"{PARTITIONS_TAG} to the number with which the stream was created, also in your infrastructure code",
            )
        known.is_alarmed = is_doubtful
        return found

    async def _renew_tag(self, topic: str, known: _CachedStream) -> None:
        """The tag seldom changes. While it cannot be read, the old value holds, for new shards too."""
        started = time.monotonic()
        try:
            known.tag = await self._read_tag(topic)
            known.tag_read_at = started
        except Unavailable:
            if known.topology is None:
                raise
            known.tag_read_at = started - _TAG_SECONDS + self._timing.sync

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
