"""Appends to the partitions that one node leads travel together: one produce request under way per node.

Kafka handles the produce requests of a connection one after the other, and waits for the replicas each time. With a request
per partition, each would wait for all before it. One request for all partitions waits once.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiokafka import errors as kafka

from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import STALE_LEADER
from services.core.broker.kafka.protocol import Produce
from services.core.metrics import BROKER_QUOTA_WAIT

_MAX_REQUEST_BYTES = 8 << 20
_ANSWER_MARGIN = 1.0
"""Seconds by which the broker gives up waiting for its replicas before we give up waiting for the broker."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """One batch for one partition. `answer`: (error code, base offset). `sent`: it may have reached the broker."""

    topic: str
    partition: int
    data: bytes
    answer: "asyncio.Future[tuple[int, int]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sent: bool = False


class NodeSender:
    """The queue to one node. A batch whose answer was cancelled before it left is not sent."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self._node = cluster, node
        self._waiting: list[PendingBatch] = []
        self._throttled_until = 0.0
        self.task: asyncio.Task[None] | None = None

    def add(self, batch: PendingBatch, timeout: float) -> None:
        """Queue it. The task starts on the loop's next turn: batches that this turn adds leave together.

        Raises Throttled when the broker asked us to send nothing for `timeout` seconds or more.
        """
        muted = self._throttled_until - time.monotonic()
        if muted >= timeout:
            raise Throttled(f"Kafka node {self._node} asked for {muted:.1f} s of silence", retry_after=muted)
        self._waiting.append(batch)
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=f"kafka node {self._node}")

    async def _run(self) -> None:
        try:
            while self._waiting:
                if (muted := self._throttled_until - time.monotonic()) > 0:
                    await asyncio.sleep(muted)
                await self._exchange()
        finally:
            self.task = None

    async def _exchange(self) -> None:
        """Connect, send the waiting batches, settle each with its answer."""
        batches: list[PendingBatch] = []
        try:
            began = self._cluster.now()
            client = await self._cluster.client()
            connected = await client.ready(self._node)
            batches = self._next_request()
            if not batches:
                return
            if not connected:
                raise kafka.NodeNotReadyError(f"Kafka node {self._node} cannot be reached")
            for batch in batches:
                batch.sent = True
            answer = await client.send(self._node, self._request(batches))
        except kafka.NodeNotReadyError as error:
            self._fail(batches, self._cluster.explain(Unavailable(f"node {self._node}: {error}"), began, self._node))
        except kafka.KafkaError as error:
            self._fail(batches, OutcomeUnknown(f"node {self._node}: {error}"))
        except BrokerError as error:
            self._fail(batches or self._next_request(), error)
        except BaseException:
            self._fail(
                batches or self._next_request(), OutcomeUnknown(f"the exchange with Kafka node {self._node} broke off")
            )
            raise
        else:
            if self._settle(batches, answer) & STALE_LEADER:
                client.force_metadata_update()

    def _next_request(self) -> list[PendingBatch]:
        """Remove the next batches from the queue: up to a request's size, one per partition, without the cancelled ones."""
        taken: dict[tuple[str, int], PendingBatch] = {}
        rest: list[PendingBatch] = []
        size = 0
        for batch in self._waiting:
            if batch.answer.done():
                continue
            place = (batch.topic, batch.partition)
            if rest or place in taken or (taken and size + len(batch.data) > _MAX_REQUEST_BYTES):
                rest.append(batch)
            else:
                taken[place] = batch
                size += len(batch.data)
        self._waiting = rest
        return list(taken.values())

    def _request(self, batches: list[PendingBatch]) -> Produce:
        topics: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for batch in batches:
            topics[batch.topic].append((batch.partition, batch.data))
        patience = round((self._cluster.timing.request - _ANSWER_MARGIN) * 1000)
        return Produce(list(topics.items()), patience)

    def _settle(self, batches: list[PendingBatch], answer: Any) -> set[int]:
        """Settle each batch with its answer. Gives the error codes."""
        codes = set[int]()
        waiting = {(batch.topic, batch.partition): batch for batch in batches}
        for topic, partitions in answer.topics:
            for partition, code, offset, *_ in partitions:
                batch = waiting.pop((topic, partition), None)
                codes.add(code)
                if batch is not None and not batch.answer.done():
                    batch.answer.set_result((code, offset))
        self._fail(list(waiting.values()), OutcomeUnknown(f"Kafka node {self._node} left them out of its answer"))
        if throttle := answer.throttle_time_ms:
            self._throttled_until = time.monotonic() + throttle / 1000
            BROKER_QUOTA_WAIT.inc(throttle / 1000)
        return codes

    @staticmethod
    def _fail(batches: list[PendingBatch], error: BrokerError) -> None:
        for batch in batches:
            if not batch.answer.done():
                batch.answer.set_exception(error)
