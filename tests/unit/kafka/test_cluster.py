"""What nodes say of topics when they do not agree, and aiokafka's task that renews what a client knows of leaders."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.coordination import FindCoordinatorRequest
from structlog.testing import capture_logs

from services.autoscaler.groups import topics
from services.core import group_lag
from services.core.broker.errors import Unavailable
from services.core.broker.kafka.cluster import COORDINATOR_WAIT_S, Cluster, Timing
from services.core.broker.kafka.protocol import DescribeTopicsRequest, DescribeTopicsResponse
from services.observer import backlogs

OLD, NEW = UUID(int=1), UUID(int=2)


class Nodes:
    """As aiokafka's client. known: by node, the id of topic "t", and leader and epoch of its partition. None: no such topic.

    silent: nodes that never answer. away: nodes that cannot be reached.
    """

    def __init__(self, known: dict[int, tuple[UUID, int, int] | None]) -> None:
        self.known, self.silent, self.away = known, set[int](), set[int]()
        self.cluster = SimpleNamespace(brokers=lambda: [SimpleNamespace(nodeId=node) for node in known])
        self._sync_task = None

    async def ready(self, node: int) -> bool:
        return node not in self.away

    async def send(self, node: int, request: DescribeTopicsRequest) -> Any:
        if node in self.silent:
            await asyncio.Event().wait()
        found = self.known[node]
        topic_id, leader, epoch = found or (UUID(int=0), 0, 0)
        parts: list[Any] = [(0, 0, leader, epoch, [1, 2, 3], [1, 2, 3], [], {})] if found else []
        rows: list[Any] = [(0 if found else 3, "t", topic_id, False, parts, 0, {})]
        return DescribeTopicsResponse(0, [], "c", 1, rows, {})


def make_cluster(nodes: Any) -> Cluster:
    cluster = Cluster("127.0.0.1:1", "c", Timing())
    cluster._client = cast("AIOKafkaClient", nodes)
    return cluster


@pytest.mark.parametrize("seed", range(6))
async def test_a_node_that_hears_no_news_is_outvoted(seed: int) -> None:
    """If it fails, one node that is cut off from the controller says which topic is read, and who leads it."""
    random.seed(seed)
    cluster = make_cluster(Nodes({1: (OLD, 1, 4), 2: (NEW, 2, 0), 3: (NEW, 3, 1)}))
    found = (await cluster.describe_agreed(["t"]))["t"]
    assert (found.id, found.partitions[0].leader) == (str(NEW), 3)
    newest = (await make_cluster(Nodes({1: (NEW, 1, 4), 2: (NEW, 2, 5)})).describe_agreed(["t"]))["t"]
    assert newest.partitions[0].leader == 2


async def test_nodes_that_are_away_or_silent_or_slow_to_learn_hold_up_nothing() -> None:
    """If it fails, no group can begin to read while one of three nodes is down, or a topic is new."""
    nodes = Nodes({1: (NEW, 1, 0), 2: (NEW, 1, 0), 3: (NEW, 1, 0)})
    nodes.silent = {2}
    assert "t" in await make_cluster(nodes).describe_agreed(["t"])
    nodes.silent, nodes.away = set(), {2, 3}
    assert "t" in await make_cluster(nodes).describe_agreed(["t"])
    nodes.away = {1, 2, 3}
    with pytest.raises(Unavailable, match="none of Kafka's nodes"):
        await make_cluster(nodes).describe_agreed(["t"])
    assert "t" in await make_cluster(Nodes({1: (NEW, 1, 0), 2: None, 3: None})).describe_agreed(["t"])
    assert await make_cluster(Nodes({1: None, 2: None})).describe_agreed(["t"]) == {}


async def test_nobody_decides_between_two_nodes_that_know_different_topics() -> None:
    """If it fails, a group begins anew in a topic that was deleted, or in the new one, by chance."""
    with pytest.raises(Unavailable, match="different topics"):
        await make_cluster(Nodes({1: (OLD, 1, 4), 2: (NEW, 2, 0)})).describe_agreed(["t"])


async def test_the_coordinator_of_a_new_kafka_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the first command that asks a new Kafka about a group ends with an error; or it waits for ever; or in an
    outage of a coordinator `penstock status` waits for each destination."""
    monkeypatch.setattr("services.core.broker.kafka.cluster._COORDINATOR_PAUSE_S", 0.001)
    asked: list[int] = []

    class NewKafka(Nodes):
        ready_after = 3

        async def send(self, node: int, request: Any) -> Any:
            if not isinstance(request, FindCoordinatorRequest):
                return "answer"
            asked.append(node)
            return SimpleNamespace(error_code=15 if len(asked) <= self.ready_after else 0, coordinator_id=1)

    nodes = NewKafka({1: None})
    cluster = make_cluster(nodes)
    assert await cluster.ask_coordinator("g", object()) == "answer"
    assert len(asked) == 4
    nodes.ready_after = 1_000_000
    new = make_cluster(nodes)
    new.timing = Timing(request=0.05)
    with pytest.raises(Unavailable, match="find the coordinator of group g"):
        await new.ask_coordinator("g", object())
    for known in (cluster, new):
        asked.clear()
        with pytest.raises(Unavailable, match="find the coordinator of group g"):
            await known.ask_coordinator("g", object())
        assert len(asked) == 1
    limits = group_lag.WITHIN_S, backlogs.WITHIN_S, topics.WITHIN_S
    assert min(limits) > COORDINATOR_WAIT_S, "who waits for a lag gives up first, and never learns the reason"


async def test_a_task_of_aiokafka_that_has_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one unexpected error leaves appends, lag and commands without new leaders until a restart, silently."""
    answers: list[Exception | None] = [RuntimeError("not expected"), RuntimeError("not expected"), None]

    async def update(_self: object, *_: object) -> bool:
        if (error := answers.pop(0)) is not None:
            raise error
        return True

    monkeypatch.setattr(AIOKafkaClient, "_metadata_update", update)
    client = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
    client._sync_task = asyncio.create_task(client._md_synchronizer())
    renewed = client.force_metadata_update()
    cluster = make_cluster(client)
    with capture_logs() as logs:
        while not renewed.done():
            assert await cluster.client() is client
            await asyncio.sleep(0)
    assert renewed.result()
    assert [line["event"] for line in logs] == ["kafka_metadata_task_ended"] * 2
    await cluster.close()
