"""Every use of private parts of aiokafka's consumer, fetcher and group coordinator; `aiokafka_client` has those of its client.

`tests/unit/kafka/test_aiokafka_internals.py` fails when a new version of aiokafka changes one of these parts.
"""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import Fetcher, FetchResult
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.kafka.access import client_settings
from services.core.broker.kafka.aiokafka_client import forget_renewal, renewal_of
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import CORRUPT, FENCED, raise_for
from services.core.broker.kafka.eviction import client_id, name_process
from services.core.broker.kafka.fetch_by_id import FetchById, FindId, is_refused
from services.core.broker.kafka.leaders import by_topic
from services.core.broker.kafka.log_truncation import EpochHistory
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.record_batch import epochs_of
from services.core.broker.record import TopicPartition

log = structlog.get_logger()


# The fetcher: a limit of its memory, the leader epochs of the fetched records, and requests that name topics by their ids.
#
# aiokafka reads ahead for every partition without unpolled records, whether or not anybody polls. Kafka sends a large batch
# whole. So a member with 48 partitions may hold 50 MB. Here a member reads ahead only while it holds little, and while all
# members of the process together hold less than their budget. A member that holds nothing may always ask one node.

AHEAD_BYTES = 256 << 10
"""A member that holds this much fetches no more."""
BUDGET_BYTES = 32 << 20
POLL_BYTES = 512 << 10
"""A poll returns the records that came first, about this many bytes. The last batch may be a megabyte."""


class FetchBudget:
    """The bytes of unpolled records that all members of a process hold."""

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self._limit = limit
        self._held: dict[object, int] = {}

    def set_size(self, member: object, size: int) -> None:
        """This member holds this much now."""
        self._held[member] = size

    def leave(self, member: object) -> None:
        """This member holds nothing any more."""
        self._held.pop(member, None)

    @property
    def is_spent(self) -> bool:
        """Whether nobody should read ahead."""
        return sum(self._held.values()) >= self._limit


class BoundedFetcher(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    """Replaces aiokafka's own."""

    def __init__(self, client: Any, subscriptions: Any, budget: FetchBudget, **settings: Any) -> None:
        self._budget, self._turn = budget, 0
        self.find_id: FindId = lambda _source: None
        self._epochs: dict[KafkaPartition, EpochHistory] = {}
        super().__init__(_ObservedClient(client, self._observe), subscriptions, **settings)

    async def close(self) -> None:
        """Also releases its part of the budget. That its task has ended before is said by `fetched_records`, not here."""
        try:
            with suppress(kafka.KafkaError):
                await super().close()
        finally:
            self._budget.leave(self)

    def epochs_between(self, source: KafkaPartition, first: int, last: int) -> list[tuple[int, int]]:
        """As `EpochHistory.between`, for fetched records."""
        history = self._epochs.get(source)
        return [] if history is None else history.between(first, last)

    def waiting_bytes(self) -> int:
        """The bytes that it holds, as received; a batch counts whole until its last record is polled."""
        return sum(map(_size_of, self._records.values()))

    async def fetched_records(
        self, partitions: Collection[KafkaPartition], timeout: float = 0, max_records: int | None = None
    ) -> Any:
        """As aiokafka's, but the first that came, about POLL_BYTES at most. Raises KafkaError when a task has ended without which
        nothing comes any more: aiokafka tells nobody (aio-libs/aiokafka#983)."""
        for name, task in (("fetcher", self._fetch_task), ("metadata", renewal_of(self._client))):
            if task is not None and task.done() and not self._closed:
                raise kafka.KafkaError(f"aiokafka's task has ended: {name}") from task.exception()
        if not self._records and timeout:
            waiter = self._create_fetch_waiter()
            done, _ = await asyncio.wait([waiter], timeout=timeout)
            if not done:
                waiter.cancel()
                return {}
            waiter.result()
        return await super().fetched_records(partitions or self._came_first(), 0, max_records)

    async def _proc_fetch_request(self, *request: Any) -> Any:
        """As aiokafka's, but polls return the records as its decoder made them. To make a ConsumerRecord of each took a
        seventh of expel's CPU. And `close` may cancel it at any time: in its wait after a failed request, aiokafka's would raise
        that out of `close`, as if whoever closes were cancelled."""
        try:
            came = await super()._proc_fetch_request(*request)
        except asyncio.CancelledError:
            return False
        for result in self._records.values():
            if isinstance(result, FetchResult) and result._partition_records is not None:
                result._partition_records._consumer_record = _as_decoded
        return came

    def _came_first(self) -> list[KafkaPartition]:
        chosen, size = [], 0
        for source, result in self._records.items():
            if size >= POLL_BYTES:
                break
            chosen.append(source)
            size += _size_of(result)
        return chosen

    def _get_actions_per_node(self, assignment: Any) -> Any:
        """aiokafka's requests, without those for which there is no room."""
        named, *rest = super()._get_actions_per_node(assignment)
        by_id = [(node, FetchById(request, lambda source: self.find_id(source))) for node, request in named]
        requests = [(node, request) for node, request in by_id if request.topics]
        waiting = self.waiting_bytes()
        self._budget.set_size(self, waiting)
        if waiting >= AHEAD_BYTES:
            requests = []
        elif self._budget.is_spent:
            requests = self._in_turn(requests) if not waiting and not self._in_flight else []
        return requests, *rest

    def _in_turn(self, requests: list[Any]) -> list[Any]:
        """One request, to another node than the last time: the first may have nothing to send for long."""
        self._turn += 1
        return [requests[self._turn % len(requests)]] if requests else []

    def _observe(self, answer: Any) -> None:
        for topic, partitions in answer.topics:
            for number, code, *rest in partitions:
                source = KafkaPartition(topic, number)
                history = self._epochs.setdefault(source, EpochHistory())
                for first, epoch in epochs_of(rest[-1] or b""):
                    history.record(first, epoch)
                if code == CORRUPT and source not in self._records:  # aiokafka would ask again, and tell nobody
                    self._set_error(source, kafka.CorruptRecordException(f"{topic}[{number}]"))


def _as_decoded(_source: KafkaPartition, record: Any) -> Any:
    return record


def _size_of(result: Any) -> int:
    if not isinstance(result, FetchResult) or result._partition_records is None:
        return 0
    size: int = result._partition_records._records.size_in_bytes()
    return size


class _ObservedClient:
    """aiokafka's client; hands each fetch answer to `observe` before aiokafka decodes it, as one to a request by name."""

    def __init__(self, client: Any, observe: Any) -> None:
        self._client, self._observe = client, observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node: int, request: Any, **options: Any) -> Any:
        answer = await self._client.send(node, request, **options)
        if not isinstance(request, FetchById):
            return answer
        named = request.read(answer)
        if is_refused(named):
            await asyncio.sleep(_PAUSE)
            named = request.read(answer)  # meanwhile a position may have been found in another topic
        self._observe(named)
        return named


# Connecting and disconnecting the AIOKafkaConsumer of a member.
#
# Heartbeats run in the background, and `max_poll_interval_ms` is never reached: a paused member that nobody polls stays a member.
# So Kafka does not notice a worker that hangs while its event loop runs; its lag shows it. A frozen or dead one sends none.

_NEVER_MS = 2**31 - 1
_FETCH_BYTES = 256 << 10
_PARTITION_FETCH_BYTES = 64 << 10
"""Of one answer. A larger batch is sent alone (KIP-74); `BoundedFetcher` limits all of them."""
_STOP_SECONDS = 10.0


async def connect(cluster: Cluster, group: str, budget: FetchBudget) -> AIOKafkaConsumer:
    """A started consumer without a subscription. Its unpolled records count in `budget`. Raises Unavailable."""
    timing = cluster.timing
    client = AIOKafkaConsumer(
        bootstrap_servers=cluster.bootstrap,
        client_id=client_id(group, await asyncio.to_thread(name_process)),
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="none",
        session_timeout_ms=round(timing.session * 1000),
        heartbeat_interval_ms=round(timing.heartbeat * 1000),
        rebalance_timeout_ms=round(timing.rebalance * 1000),
        max_poll_interval_ms=_NEVER_MS,
        # A join is answered only when every member has drained.
        request_timeout_ms=round((timing.rebalance + timing.request) * 1000),
        metadata_max_age_ms=round(timing.metadata * 1000),
        max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
        fetch_max_bytes=_FETCH_BYTES,
        isolation_level="read_committed",
        **client_settings(cluster.access),
    )
    try:
        async with cluster.bounded(f"connect to Kafka at {cluster.bootstrap}", timing.request * 2):
            await client.start()
            await _bound(client, budget)
    except BaseException:
        await disconnect(client)
        raise
    return client


async def _bound(client: AIOKafkaConsumer, budget: FetchBudget) -> None:
    """Replace aiokafka's fetcher, which has nothing to do yet, by ours."""
    theirs = client._fetcher
    await theirs.close()
    client._fetcher = BoundedFetcher(
        client._client,
        client._subscription,
        budget,
        fetch_max_bytes=_FETCH_BYTES,
        max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
        fetcher_timeout=theirs._fetcher_timeout,
        auto_offset_reset="none",
        isolation_level="read_committed",
    )


async def disconnect(client: AIOKafkaConsumer) -> None:
    """Leave the group and close the connections, within seconds. When the group rebalances for longer, or the broker is away,
    only the connections are closed; the group notices by the missing heartbeats."""
    forget_renewal(client._client)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await client.stop()
    except TimeoutError:
        log.warning("kafka_leave_timed_out", seconds=_STOP_SECONDS)
        if client._fetcher is not None:
            await client._fetcher.close()
        await client._client.close()


# Commits of a member, each under the generation in which its partitions were assigned.
#
# aiokafka's own commit uses the generation at the time of sending, and sends again after a failure. So a commit that waited for a
# coordinator while the group rebalanced was sent under the next generation, and Kafka accepted it although its partitions had
# another owner.

_PAUSE = 0.1
_REJOIN = kafka.RebalanceInProgressError.errno
_MOVED = frozenset(
    error.errno
    for error in (
        kafka.GroupCoordinatorNotAvailableError,
        kafka.NotCoordinatorForGroupError,
        kafka.RequestTimedOutError,
    )
)
_LOADING = kafka.GroupLoadInProgressError.errno


class Generation(NamedTuple):
    """The group's generation in which a member was given its partitions. member: its id; "" when it belongs to no group."""

    number: int
    member: str


def generation_of(client: Any) -> Generation:
    """The member's generation now, as aiokafka knows it."""
    coordinator = client._coordinator
    return Generation(coordinator.generation, coordinator.member_id)


async def send_heartbeat(client: Any) -> bool:
    """Whether the group still has this member. Raises KafkaError."""
    return bool(client._coordinator.member_id) and bool(await client._coordinator._do_heartbeat())


def read_by_id(client: Any, find_id: FindId) -> None:
    """Read each partition in the topic that has this id, from now on. Until then nothing is fetched."""
    client._fetcher.find_id = find_id


def epochs_between(client: Any, source: KafkaPartition, first: int, last: int) -> list[tuple[int, int]]:
    """As `BoundedFetcher.epochs_between`."""
    found: list[tuple[int, int]] = client._fetcher.epochs_between(source, first, last)
    return found


async def send_commit(
    client: Any, group: str, generation: Generation, rows: Mapping[TopicPartition, tuple[int, CommitMetadata]]
) -> frozenset[TopicPartition]:
    """Commit (next offset to read, metadata) by partition. Returns the refused partitions: the group has a new generation.

    Sends again while the coordinator moves; the caller limits the time. Raises KafkaError, BrokerError. When it raises or is
    cancelled, some may be committed.
    """
    coordinator, left = client._coordinator, dict(rows)
    while left:
        await coordinator.ensure_coordinator_known()
        if not generation.member or generation_of(client) != generation:
            return frozenset(left)  # removed from the group, or in the next generation already
        offsets = by_topic((source, (position, str(note))) for source, (position, note) in left.items())
        request = OffsetCommitRequest(group, generation.number, generation.member, -1, offsets)
        try:
            answer = await coordinator._send_req(request)
        except kafka.KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(_PAUSE)
            continue
        codes = {TopicPartition(topic, number): code for topic, rest in answer.topics for number, code in rest}
        if fenced := {code for code in codes.values() if code in FENCED}:
            _leave_generation(client, generation, fenced)
            return frozenset(source for source in left if codes.get(source) in FENCED)
        if not _MOVED.isdisjoint(codes.values()):
            coordinator.coordinator_dead()
        for source, code in codes.items():
            if code not in _MOVED and code != _LOADING:
                rights = f"Read on group {group}", f"Read on topic {source.topic}"
                raise_for(code, f"commit of group {group} in {source.topic}[{source.partition}]", *rights)
                left.pop(source, None)
        if left:
            await asyncio.sleep(_PAUSE)
    return frozenset()


def _leave_generation(client: Any, generation: Generation, codes: set[int]) -> None:
    """Make aiokafka join again, unless it has done so since the request."""
    if generation_of(client) != generation:
        return
    if codes == {_REJOIN}:
        client._coordinator.request_rejoin()
    else:
        client._coordinator.reset_generation()
