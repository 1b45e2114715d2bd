"""Requests to a Kafka cluster: who to ask, and fresh facts about topics. Never retries, never creates a topic."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.coordination import FindCoordinatorRequest

from services.core.broker.errors import BrokerClosed, Unavailable
from services.core.broker.kafka.error_codes import UNKNOWN_TOPIC, bounded, raise_for
from services.core.broker.kafka.protocol import DescribeTopicsRequest

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds. Fixed for production; only tests shorten them.

    session: without a heartbeat for this long, a member has lost its partitions. heartbeat: how often it says so, and
    how fast it hears of a rebalance. drain: what on_revoke may take; others wait for it during a rebalance.
    request: how long one request may go unanswered; below `AppendPolicy.append_timeout`, so that a silent broker is
    found out, and its connection closed, before the append gives up. metadata: how old leaders and partition counts get.
    """

    session: float = 10.0
    heartbeat: float = 3.0
    drain: float = 35.0
    request: float = 7.0
    metadata: float = 5.0

    @property
    def rebalance(self) -> float:
        """How long the group waits for a member that drains."""
        return self.drain + 5.0


_CLOSE_SECONDS = 5.0
_METADATA_PAUSE = 0.05
_SELDOM = 300.0


@dataclass(frozen=True, slots=True)
class PartitionState:
    """leader: node id, -1 while there is none. in_sync: how many of the `replicas` have everything. epoch: the leader's."""

    leader: int
    in_sync: int
    replicas: int
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class TopicState:
    """What the cluster says about one topic now. id: another one when it was deleted and made anew."""

    partitions: dict[int, PartitionState]
    internal: bool
    id: str = ""


class Cluster:
    """One aiokafka client, connected when it is first used. Safe for concurrent use."""

    def __init__(self, bootstrap: str, name: str, timing: Timing, *, metadata_age: float = _SELDOM) -> None:
        """`metadata_age`: how old the leaders of tracked topics get, in seconds."""
        self._bootstrap, self._name, self.timing = bootstrap, name, timing
        self._metadata_age = metadata_age
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._tracked: set[str] = set()

    async def client(self) -> AIOKafkaClient:
        """The connected client. Raises Unavailable, BrokerClosed."""
        if self._client is not None:
            return self._client
        async with self._connecting:
            if self._closed:
                raise BrokerClosed("the Kafka connection was closed")
            if self._client is None:
                self._client = await self._connect()
        return self._client

    async def _connect(self) -> AIOKafkaClient:
        client = AIOKafkaClient(
            bootstrap_servers=self._bootstrap,
            client_id=self._name,
            request_timeout_ms=round(self.timing.request * 1000),
            metadata_max_age_ms=round(self._metadata_age * 1000),
        )
        try:
            async with bounded(f"connect to Kafka at {self._bootstrap}", self.timing.request * 2):
                await client.bootstrap()
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Close the connections; what waits for an answer fails. Bounded."""
        async with self._connecting:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await client.close()
            except TimeoutError:
                log.warning("kafka_close_timed_out", client=self._name, seconds=_CLOSE_SECONDS)

    async def ask(self, node: int, request: Any) -> Any:
        """One request to one node. Raises Unavailable."""
        client = await self.client()
        async with bounded(f"{type(request).__name__} to node {node}", self.timing.request + 1):
            return await client.send(node, request)

    async def ask_any(self, request: Any) -> Any:
        """One request to the first node that can be connected to. Raises Unavailable."""
        client = await self.client()
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        async with bounded(type(request).__name__, self.timing.request + 1):
            for node in random.sample(nodes, len(nodes)):
                if await client.ready(node):
                    return await client.send(node, request)
        raise Unavailable(f"none of Kafka's nodes can be reached, {self._bootstrap}")

    async def ask_coordinator(self, group: str, request: Any) -> Any:
        """One request to the node that keeps this group. Raises Unavailable."""
        found = await self.ask_any(FindCoordinatorRequest(group, 0))
        raise_for(found.error_code, f"find the coordinator of group {group}")
        return await self.ask(found.coordinator_id, request)

    async def describe(self, topics: Sequence[str] | None = None) -> dict[str, TopicState]:
        """Fresh metadata of these topics, or of all. Unknown ones are absent. Raises Unavailable.

        A node hears of a new topic a moment after others do: one that it does not know is asked for elsewhere, too.
        """
        found: dict[str, TopicState] = {}
        async for states in self.describe_by_node(topics):
            found |= states
            if topics is None or found.keys() >= set(topics):
                break
        return found

    async def describe_by_node(self, topics: Sequence[str] | None) -> AsyncGenerator[dict[str, TopicState], None]:
        """As `describe`, as one reachable node after the other sees it. Raises Unavailable when there is none."""
        client = await self.client()
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        reached = False
        for node in random.sample(nodes, len(nodes)):
            async with bounded("metadata", self.timing.request + 1):
                answer = await self._ask_if_ready(client, node, DescribeTopicsRequest(topics))
            if answer is not None:
                reached = True
                yield _states(answer)
        if not reached:
            raise Unavailable(f"none of Kafka's nodes can be reached, {self._bootstrap}")

    @staticmethod
    async def _ask_if_ready(client: AIOKafkaClient, node: int, request: Any) -> Any:
        """None when the node cannot be reached, or leaves while it is asked."""
        try:
            return await client.send(node, request) if await client.ready(node) else None
        except (kafka.KafkaConnectionError, kafka.NodeNotReadyError, kafka.RequestTimedOutError):
            return None

    async def track(self, topic: str) -> bool:
        """Have the client keep this topic's leaders fresh. False when there is no such topic. Raises Unavailable."""
        if topic not in await self.describe([topic]):
            self._tracked.discard(topic)
            return False
        client = await self.client()
        self._tracked.add(topic)
        async with bounded(f"metadata of {topic}", self.timing.request):
            await client.set_topics(self._tracked)
            while not client.cluster.partitions_for_topic(topic):
                await asyncio.sleep(_METADATA_PAUSE)
                await client.force_metadata_update()
        return True


def _states(answer: Any) -> dict[str, TopicState]:
    return {
        topic: TopicState(
            {
                number: PartitionState(leader, len(isr), len(replicas), epoch)
                for _, number, leader, epoch, replicas, isr, *_ in partitions
            },
            bool(internal),
            str(topic_id),
        )
        for code, topic, topic_id, internal, partitions, *_ in answer.topics
        if not _missing(code, topic)
    }


def _missing(code: int, topic: str) -> bool:
    """Whether the topic does not exist; other trouble (no leader yet, not authorised) is raised."""
    if code in (UNKNOWN_TOPIC, kafka.InvalidTopicError.errno):
        return True
    raise_for(code, f"metadata of {topic}")
    return False
