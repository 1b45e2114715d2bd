"""Requests to a Kafka cluster: to a node, any node, or a group's coordinator. Repeats none but the search for a coordinator."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.coordination import FindCoordinatorRequest

from services.core.broker.errors import AccessRefused, BrokerClosed, Unavailable
from services.core.broker.kafka.access import Access, client_settings
from services.core.broker.kafka.aiokafka_client import restart_renewal
from services.core.broker.kafka.error_codes import COORDINATOR_NOT_AVAILABLE, UNKNOWN_TOPIC, bounded, raise_for
from services.core.broker.kafka.protocol import DescribeTopicsRequest

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds. Production uses these defaults; only tests shorten them.

    session: a member without a heartbeat for this long loses its partitions. heartbeat: time between two heartbeats; a rebalance
    is noticed by them. drain: limit of on_revoke; the group waits for it during a rebalance. request: limit of one request. It is
    below `AppendPolicy.append_timeout`: the connection to a silent broker is closed before the append gives up. metadata: the age
    at which leaders and partition counts are read again.
    """

    session: float = 10.0
    heartbeat: float = 3.0
    drain: float = 35.0
    request: float = 7.0
    metadata: float = 5.0

    @property
    def rebalance(self) -> float:
        """The time that the group waits for a member that drains."""
        return self.drain + 5.0


_CLOSE_SECONDS = 5.0
_METADATA_PAUSE = 0.05
_COORDINATOR_PAUSE_S = 0.2
COORDINATOR_WAIT_S = 4.0
"""Less than callers wait for a lag: else they would end without the reason, when a group has no coordinator for long."""
_SELDOM = 300.0
_ASKED = 3
_OPINION_S = 1.0
"""How long a decision waits for another node's answer when it has one."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """leader: node id, -1 while there is none. in_sync: the number of `replicas` that are in sync. epoch: the leader's."""

    leader: int
    in_sync: int
    replicas: int
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic's metadata. id: a topic that is deleted and created again has another one."""

    partitions: dict[int, PartitionState]
    internal: bool
    id: str = ""

    def epoch_of(self, number: int) -> int:
        """Of the leader of this partition; -1 when it is not known."""
        return self.partitions[number].epoch if number in self.partitions else -1


class Cluster:
    """One aiokafka client, connected when it is first used. Safe for concurrent use."""

    def __init__(
        self,
        bootstrap: str,
        name: str,
        timing: Timing,
        access: Access | None = None,
        *,
        metadata_age: float = _SELDOM,
    ) -> None:
        """`metadata_age`: the age in seconds at which the leaders of tracked topics are read again."""
        self.bootstrap, self._name, self.timing, self.access = bootstrap, name, timing, access
        self._metadata_age = metadata_age
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._tracked: set[str] = set()
        self._ended = 0
        """How often the task ended that renews the client's metadata."""
        self._is_new = True
        """Whether Kafka may not have made its topic of groups yet."""

    async def client(self) -> AIOKafkaClient:
        """The connected client. Raises Unavailable, BrokerClosed."""
        if self._client is not None:
            self._go_on_renewing(self._client)
            return self._client
        async with self._connecting:
            if self._closed:
                raise BrokerClosed("the Kafka connection was closed")
            if self._client is None:
                self._client = await self._connect()
        return self._client

    def _go_on_renewing(self, client: AIOKafkaClient) -> None:
        if (error := restart_renewal(client)) is None:
            return
        self._ended += 1
        if self._ended & (self._ended - 1) == 0:  # the 1st, 2nd, 4th and so on
            log.error(
                "kafka_metadata_task_ended",
                client=self._name,
                error=repr(error),
                times=self._ended,
                hint="aiokafka's task that asks for new leaders ended with an unexpected error. The task was started again",
            )

    async def _connect(self) -> AIOKafkaClient:
        client = AIOKafkaClient(
            bootstrap_servers=self.bootstrap,
            client_id=self._name,
            request_timeout_ms=round(self.timing.request * 1000),
            metadata_max_age_ms=round(self._metadata_age * 1000),
            **client_settings(self.access),
        )
        try:
            async with self.bounded(f"connect to Kafka at {self.bootstrap}", self.timing.request * 2):
                await client.bootstrap()
        except BaseException:
            await client.close()
            raise
        return client

    @asynccontextmanager
    async def bounded(self, what: str, seconds: float, node: int | None = None) -> AsyncIterator[None]:
        """As `error_codes.bounded`, with the reason when the node (None: any) is not reached because of our login or a
        certificate."""
        began = self.now()
        try:
            async with bounded(what, seconds):
                yield
        except Unavailable as error:
            raise self.explain(error, began, node) from error

    def now(self) -> float:
        """For `explain`."""
        return 0.0 if self.access is None else self.access.now()

    def explain(self, error: Unavailable, began: float, node: int | None = None) -> Unavailable:
        """The error, or AccessRefused when since then the node (None: any) was not reached because it does not accept us, or we
        do not accept it."""
        if self.access is None:
            return error
        known = None if node is None or self._client is None else self._client.cluster.broker_metadata(node)
        problem = self.access.problem_since(began, None if known is None else (known.host, known.port))
        return error if problem is None else AccessRefused(problem)

    async def close(self) -> None:
        """Close the connections, within seconds; requests that wait for an answer fail."""
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
        async with self.bounded(f"{type(request).__name__} to node {node}", self.timing.request + 1, node):
            return await client.send(node, request)

    async def ask_any(self, request: Any) -> Any:
        """One request to the first node that can be connected to. Raises Unavailable."""
        client = await self.client()
        nodes, began = [broker.nodeId for broker in client.cluster.brokers()], self.now()
        async with self.bounded(type(request).__name__, self.timing.request + 1):
            for node in random.sample(nodes, len(nodes)):
                if await client.ready(node):
                    return await client.send(node, request)
        raise self.explain(Unavailable(f"none of Kafka's nodes can be reached, {self.bootstrap}"), began)

    async def ask_coordinator(self, group: str, request: Any) -> Any:
        """One request to the group's coordinator. Raises Unavailable.

        A new Kafka makes its topic of groups when it is first asked for a coordinator. Until then none is available, so it is
        asked again, for COORDINATOR_WAIT_S at most. Later only an outage leaves a group without one, which nobody waits for.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (min(self.timing.request, COORDINATOR_WAIT_S) if self._is_new else 0.0)
        found = await self.ask_any(FindCoordinatorRequest(group, 0))
        while found.error_code == COORDINATOR_NOT_AVAILABLE and loop.time() < deadline:
            await asyncio.sleep(_COORDINATOR_PAUSE_S)
            found = await self.ask_any(FindCoordinatorRequest(group, 0))
        self._is_new = False
        raise_for(found.error_code, f"find the coordinator of group {group}", f"Describe on group {group}")
        return await self.ask(found.coordinator_id, request)

    async def describe(self, topics: Sequence[str] | None = None) -> dict[str, TopicState]:
        """Fresh metadata of these topics, or of all. Unknown ones are absent. Raises Unavailable.

        Nodes learn of a new topic one after the other. So other nodes are asked about a topic that a node does not know.
        """
        found: dict[str, TopicState] = {}
        async for states in self.describe_by_node(topics):
            found |= states
            if topics is None or found.keys() >= set(topics):
                break
        return found

    async def describe_agreed(self, topics: Sequence[str]) -> dict[str, TopicState]:
        """As `describe`, as most of three nodes know it, with the newest leader that any of them knows. Where a position or a
        commit depends on the answer: a node that hears no news still knows a topic that was deleted, and leaders that were
        replaced. Raises Unavailable, also when as many nodes know one topic of a name as another.

        A node that is slow is waited for while fewer than two have answered, and `_OPINION_S` longer.
        """
        client = await self.client()
        nodes, began = [broker.nodeId for broker in client.cluster.brokers()], self.now()
        asked = random.sample(nodes, min(_ASKED, len(nodes)))
        request = DescribeTopicsRequest(topics)
        pending = {asyncio.create_task(self._ask_if_ready(client, node, request)) for node in asked}
        found: list[dict[str, TopicState]] = []
        try:
            async with self.bounded("metadata", self.timing.request + 1):
                while pending and not _is_agreed(found, topics, len(asked)):
                    wait = _OPINION_S if found else None
                    done, pending = await asyncio.wait(pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        break
                    found += [_states(answer) for task in done if (answer := task.result()) is not None]
        finally:
            for task in pending:
                task.cancel()
        if not found:
            raise self.explain(Unavailable(f"none of Kafka's nodes can be reached, {self.bootstrap}"), began)
        return {
            topic: _newest(topic, known) for topic in topics if (known := [one[topic] for one in found if topic in one])
        }

    async def describe_at(self, node: int, topics: Sequence[str]) -> dict[str, TopicState]:
        """As `describe`, as this node knows them. Raises Unavailable."""
        return _states(await self.ask(node, DescribeTopicsRequest(topics)))

    async def describe_by_node(self, topics: Sequence[str] | None) -> AsyncGenerator[dict[str, TopicState], None]:
        """As `describe`, with the answer of each node that can be reached. Raises Unavailable when there is none."""
        client = await self.client()
        nodes, began = [broker.nodeId for broker in client.cluster.brokers()], self.now()
        reached = False
        for node in random.sample(nodes, len(nodes)):
            async with self.bounded("metadata", self.timing.request + 1):
                answer = await self._ask_if_ready(client, node, DescribeTopicsRequest(topics))
            if answer is not None:
                reached = True
                yield _states(answer)
        if not reached:
            raise self.explain(Unavailable(f"none of Kafka's nodes can be reached, {self.bootstrap}"), began)

    @staticmethod
    async def _ask_if_ready(client: AIOKafkaClient, node: int, request: Any) -> Any:
        """None when the node cannot be reached, or the connection breaks."""
        try:
            return await client.send(node, request) if await client.ready(node) else None
        except (kafka.KafkaConnectionError, kafka.NodeNotReadyError, kafka.RequestTimedOutError):
            return None

    async def track(self, topic: str) -> bool:
        """Let the client refresh this topic's leaders from now on. False when there is no such topic. Raises Unavailable."""
        if topic not in await self.describe([topic]):
            self._tracked.discard(topic)
            return False
        client = await self.client()
        self._tracked.add(topic)
        async with self.bounded(f"metadata of {topic}", self.timing.request):
            await client.set_topics(self._tracked)
            while not client.cluster.partitions_for_topic(topic):
                await asyncio.sleep(_METADATA_PAUSE)
                await client.force_metadata_update()
        return True


def _is_agreed(found: Sequence[dict[str, TopicState]], topics: Sequence[str], asked: int) -> bool:
    """Whether more than half of the nodes have answered, and as many know the same topic of each name."""
    votes = [Counter(one[topic].id for one in found if topic in one) for topic in topics]
    return len(found) > asked // 2 and all(max(each.values(), default=0) > asked // 2 for each in votes)


def _newest(topic: str, known: Sequence[TopicState]) -> TopicState:
    """The topic that most nodes know, each partition as the one with the newest leader knows it."""
    (first, most), *others = Counter(state.id for state in known).most_common()
    if others and others[0][1] == most:
        raise Unavailable(f"Kafka's nodes know different topics {topic!r}")
    states = [state for state in known if state.id == first]
    partitions: dict[int, PartitionState] = {}
    for state in states:
        for number, held in state.partitions.items():
            if number not in partitions or held.epoch > partitions[number].epoch:
                partitions[number] = held
    return TopicState(partitions, states[0].internal, first)


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
    """Whether the topic does not exist. Raises other errors (no leader yet, not authorised)."""
    if code in (UNKNOWN_TOPIC, kafka.InvalidTopicError.errno):
        return True
    raise_for(code, f"metadata of {topic}", f"Describe on topic {topic}")
    return False
