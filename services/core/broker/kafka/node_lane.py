"""Appends to the partitions that one node leads travel together: one produce request under way per node.

Kafka works off one connection's produce requests one by one, each waiting for its replicas. A request per partition
would wait for all before it; one request for all partitions waits once.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiokafka import errors as kafka

from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.produce import Produce

_MAX_REQUEST_BYTES = 8 << 20
_ANSWER_MARGIN = 1.0
"""Seconds by which the broker gives up waiting for its replicas before we give up waiting for the broker."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One batch for one partition. `answer`: (error code, base offset). `sent`: it may have reached the broker."""

    topic: str
    partition: int
    data: bytes
    answer: "asyncio.Future[tuple[int, int]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sent: bool = False


class NodeLane:
    """The queue to one node. A parcel whose answer was cancelled before it left is not sent."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self._cluster, self._node = cluster, node
        self._waiting: list[Parcel] = []
        self._muted_until = 0.0
        self.task: asyncio.Task[None] | None = None

    def add(self, parcel: Parcel, timeout: float) -> None:
        """Queue it; the task starts on the loop's next turn, so what this turn adds leaves together.

        Raises Throttled when the broker asked for silence for longer than `timeout` seconds.
        """
        muted = self._muted_until - time.monotonic()
        if muted >= timeout:
            raise Throttled(f"Kafka node {self._node} asked for {muted:.1f} s of silence", retry_after=muted)
        self._waiting.append(parcel)
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=f"kafka node {self._node}")

    async def _run(self) -> None:
        try:
            while self._waiting:
                if (muted := self._muted_until - time.monotonic()) > 0:
                    await asyncio.sleep(muted)
                await self._exchange()
        finally:
            self.task = None

    async def _exchange(self) -> None:
        """Connect, take what waits, send it, hand out the answers. Every parcel taken is settled."""
        parcels: list[Parcel] = []
        try:
            client = await self._cluster.client()
            connected = await client.ready(self._node)
            parcels = self._take()
            if not parcels:
                return
            if not connected:
                raise kafka.NodeNotReadyError(f"Kafka node {self._node} cannot be reached")
            for parcel in parcels:
                parcel.sent = True
            answer = await client.send(self._node, self._request(parcels))
        except kafka.NodeNotReadyError as error:
            self._fail(parcels, Unavailable(f"node {self._node}: {error}"))
        except kafka.KafkaError as error:
            self._fail(parcels, OutcomeUnknown(f"node {self._node}: {error}"))
        except BrokerError as error:
            self._fail(parcels or self._take(), error)
        except BaseException:
            self._fail(parcels, OutcomeUnknown(f"the exchange with Kafka node {self._node} broke off"))
            raise
        else:
            self._settle(parcels, answer)

    def _take(self) -> list[Parcel]:
        """What waits and still matters, up to a request's size, one batch per partition."""
        taken: dict[tuple[str, int], Parcel] = {}
        rest: list[Parcel] = []
        size = 0
        for parcel in self._waiting:
            if parcel.answer.done():
                continue
            place = (parcel.topic, parcel.partition)
            if rest or place in taken or (taken and size + len(parcel.data) > _MAX_REQUEST_BYTES):
                rest.append(parcel)
            else:
                taken[place] = parcel
                size += len(parcel.data)
        self._waiting = rest
        return list(taken.values())

    def _request(self, parcels: list[Parcel]) -> Produce:
        topics: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for parcel in parcels:
            topics[parcel.topic].append((parcel.partition, parcel.data))
        patience = round((self._cluster.timing.request - _ANSWER_MARGIN) * 1000)
        return Produce(list(topics.items()), patience)

    def _settle(self, parcels: list[Parcel], answer: Any) -> None:
        waiting = {(parcel.topic, parcel.partition): parcel for parcel in parcels}
        for topic, partitions in answer.topics:
            for partition, code, offset, *_ in partitions:
                parcel = waiting.pop((topic, partition), None)
                if parcel is not None and not parcel.answer.done():
                    parcel.answer.set_result((code, offset))
        self._fail(list(waiting.values()), OutcomeUnknown(f"Kafka node {self._node} left them out of its answer"))
        if throttle := answer.throttle_time_ms:
            self._muted_until = time.monotonic() + throttle / 1000

    @staticmethod
    def _fail(parcels: list[Parcel], error: BrokerError) -> None:
        for parcel in parcels:
            if not parcel.answer.done():
                parcel.answer.set_exception(error)
