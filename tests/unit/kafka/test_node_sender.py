"""One request per node for all its partitions; answers, time-outs and silence."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from prometheus_client import REGISTRY

from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kafka.cluster import Cluster, Timing
from services.core.broker.kafka.node_sender import NodeSender, PendingBatch


class FakeNode(Cluster):
    """A cluster of one node that answers as it is told."""

    def __init__(self) -> None:
        super().__init__("nowhere:0", "test", Timing())
        self.requests: list[list[tuple[str, list[tuple[int, bytes]]]]] = []
        self.connected = True
        self.error: Exception | None = None
        self.silent = False
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.throttle_ms = 0
        self.code = 0
        self.updates = 0

    async def client(self) -> AIOKafkaClient:
        return cast("AIOKafkaClient", self)

    async def ready(self, node: int) -> bool:
        return self.connected

    def force_metadata_update(self) -> None:
        self.updates += 1

    async def send(self, node: int, request: Any) -> Any:
        topics = request.prepare({0: (3, 7)}).topics
        self.requests.append(topics)
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        answered = (
            [] if self.silent else [(t, [(p, self.code, 100 + p, -1, 0) for p, _ in parts]) for t, parts in topics]
        )
        return SimpleNamespace(topics=answered, throttle_time_ms=self.throttle_ms)


def _sender(node: FakeNode) -> NodeSender:
    return NodeSender(node, 1)


async def test_an_exchange_that_nobody_foresaw_leaves_no_batch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an append waits for ever when the exchange ends before it has taken its batches."""
    node = FakeNode()

    async def fail() -> AIOKafkaClient:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(node, "client", fail)
    batch, sender = PendingBatch("a", 0, b"x"), _sender(node)
    sender.add(batch, 1.0)
    running = sender.task
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(batch.answer, 600)
    assert running is not None
    with pytest.raises(RuntimeError, match="unforeseen"):
        await running


async def test_parcels_of_one_turn_travel_together() -> None:
    """If it fails, each partition waits for the replicas of all before it."""
    node = FakeNode()
    sender = _sender(node)
    batchs = [PendingBatch("t", partition, b"x") for partition in range(3)] + [PendingBatch("t", 0, b"second")]
    for batch in batchs:
        sender.add(batch, 5)
    answers = [await batch.answer for batch in batchs]
    assert answers == [(0, 100), (0, 101), (0, 102), (0, 100)]
    assert node.requests == [[("t", [(0, b"x"), (1, b"x"), (2, b"x")])], [("t", [(0, b"second")])]]


async def test_what_was_given_up_before_it_left_is_not_sent() -> None:
    """If it fails, "not stored" is said of a batch that goes out later: it is doubled, and out of order."""
    node = FakeNode()
    node.go_on.clear()
    sender = _sender(node)
    first, given_up, last = (PendingBatch("t", partition, b"x") for partition in range(3))
    sender.add(first, 5)
    await asyncio.sleep(0.01)
    sender.add(given_up, 5)
    sender.add(last, 5)
    given_up.answer.cancel()
    node.go_on.set()
    assert await last.answer == (0, 102)
    assert not given_up.sent
    assert [partition for request in node.requests for _, parts in request for partition, _ in parts] == [0, 2]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"connected": False}, Unavailable),
        ({"error": kafka.NodeNotReadyError()}, Unavailable),
        ({"error": kafka.RequestTimedOutError()}, OutcomeUnknown),
        ({"error": kafka.KafkaConnectionError("reset")}, OutcomeUnknown),
        ({"silent": True}, OutcomeUnknown),
    ],
)
async def test_failures_say_whether_it_left(change: dict[str, Any], kind: type[BrokerError]) -> None:
    """If it fails, a request that reached the broker counts as not sent, or the reverse."""
    node = FakeNode()
    vars(node).update(change)
    batch = PendingBatch("t", 0, b"x")
    _sender(node).add(batch, 5)
    with pytest.raises(kind):
        await batch.answer


async def test_a_throttled_node_is_left_alone() -> None:
    """If it fails, we go on sending to a broker that asked for silence, and it makes us wait longer and longer."""
    node = FakeNode()
    node.throttle_ms = 300
    sender = _sender(node)
    batch = PendingBatch("t", 0, b"x")
    waited = REGISTRY.get_sample_value("penstock_broker_quota_wait_seconds_total") or 0.0
    sender.add(batch, 5)
    await batch.answer
    assert REGISTRY.get_sample_value("penstock_broker_quota_wait_seconds_total") == pytest.approx(waited + 0.3)
    with pytest.raises(Throttled) as silence:
        sender.add(PendingBatch("t", 0, b"x"), 0.05)
    assert 0 < (silence.value.retry_after or 0) <= 0.3
    node.throttle_ms = 0
    patient = PendingBatch("t", 0, b"x")
    sender.add(patient, 5)
    assert await patient.answer == (0, 100)


async def test_a_bug_leaves_nobody_waiting() -> None:
    """If it fails, an unforeseen error makes senders wait for their whole time-out."""
    node = FakeNode()
    node.error = ZeroDivisionError()
    sender = _sender(node)
    batch = PendingBatch("t", 0, b"x")
    sender.add(batch, 5)
    task = sender.task
    with pytest.raises(OutcomeUnknown):
        await batch.answer
    assert task is not None
    with pytest.raises(ZeroDivisionError):
        await task


@pytest.mark.parametrize(
    ("code", "asks"), [(3, 1), (5, 1), (6, 1), (45, 1), (56, 1), (100, 1), (0, 0), (19, 0), (43, 0)]
)
async def test_a_node_that_may_not_lead_any_more(code: int, asks: int) -> None:
    """If it fails, a batch goes to the former leader, or to one whose disk is broken, until the metadata is old."""
    node = FakeNode()
    node.code = code
    batch = PendingBatch("t", 0, b"x")
    sender = _sender(node)
    sender.add(batch, 5)
    assert (await batch.answer)[0] == code
    while sender.task is not None:
        await asyncio.sleep(0)
    assert node.updates == asks
