"""aiokafka's fetcher with two things that it lacks: a bound on what it keeps, and the leader epochs of what it read.

aiokafka reads ahead for every partition that has nothing waiting, whether or not anybody polls, and Kafka sends a large
batch whole: a member with 48 partitions may keep 50 MB. Here a member reads ahead only while it has little waiting and all
members of the process together have less than their budget; with nothing waiting it may always ask one node.
"""

import asyncio
from collections.abc import Collection
from typing import Any

from aiokafka.consumer.fetcher import Fetcher, FetchResult
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.kafka.leader_epochs import EpochHistory
from services.core.broker.kafka.scan import epochs_of

AHEAD_BYTES = 256 << 10
"""A member with so much waiting asks for no more."""
BUDGET_BYTES = 32 << 20
POLL_BYTES = 512 << 10
"""A poll takes what came first, until it has so much. The last of it may be a batch of a megabyte."""


class FetchBudget:
    """What all members of a process keep together, unpolled, in bytes."""

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self._limit = limit
        self._held: dict[object, int] = {}

    def hold(self, member: object, size: int) -> None:
        """This member keeps so much now."""
        self._held[member] = size

    def leave(self, member: object) -> None:
        """This member keeps nothing any more."""
        self._held.pop(member, None)

    @property
    def is_spent(self) -> bool:
        """Whether nobody should read ahead."""
        return sum(self._held.values()) >= self._limit


class BoundedFetcher(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    """See the module. Made like aiokafka's own, and in its place."""

    def __init__(self, client: Any, subscriptions: Any, budget: FetchBudget, **settings: Any) -> None:
        self._budget, self._turn = budget, 0
        self._epochs: dict[KafkaPartition, EpochHistory] = {}
        super().__init__(_NotingClient(client, self._note_epochs), subscriptions, **settings)

    async def close(self) -> None:
        """Also gives back what it held of the budget."""
        try:
            await super().close()
        finally:
            self._budget.leave(self)

    def epochs_between(self, source: KafkaPartition, first: int, last: int) -> list[tuple[int, int]]:
        """(offset, epoch) where they begin, for fetched records from offset `first` to `last`."""
        history = self._epochs.get(source)
        return [] if history is None else history.between(first, last)

    def waiting_bytes(self) -> int:
        """As they were sent; a batch counts whole until its last record is polled."""
        return sum(map(_size_of, self._records.values()))

    async def fetched_records(
        self, partitions: Collection[KafkaPartition], timeout: float = 0, max_records: int | None = None
    ) -> Any:
        """As aiokafka's, of those that came first, about POLL_BYTES at most."""
        if not self._records and timeout:
            waiter = self._create_fetch_waiter()
            done, _ = await asyncio.wait([waiter], timeout=timeout)
            if not done:
                waiter.cancel()
                return {}
            waiter.result()
        return await super().fetched_records(partitions or self._came_first(), 0, max_records)

    def _came_first(self) -> list[KafkaPartition]:
        chosen, size = [], 0
        for source, result in self._records.items():
            if size >= POLL_BYTES:
                break
            chosen.append(source)
            size += _size_of(result)
        return chosen

    def _get_actions_per_node(self, assignment: Any) -> Any:
        """What aiokafka would ask for, less what there is no room for."""
        requests, *rest = super()._get_actions_per_node(assignment)
        waiting = self.waiting_bytes()
        self._budget.hold(self, waiting)
        if waiting >= AHEAD_BYTES:
            requests = []
        elif self._budget.is_spent:
            requests = self._in_turn(requests) if not waiting and not self._in_flight else []
        return requests, *rest

    def _in_turn(self, requests: list[Any]) -> list[Any]:
        """One of them, another node's than the last time: the first may have nothing to send for long."""
        self._turn += 1
        return [requests[self._turn % len(requests)]] if requests else []

    def _note_epochs(self, answer: Any) -> None:
        for topic, partitions in answer.topics:
            for number, _, *rest in partitions:
                history = self._epochs.setdefault(KafkaPartition(topic, number), EpochHistory())
                for first, epoch in epochs_of(rest[-1] or b""):
                    history.note(first, epoch)


def _size_of(result: Any) -> int:
    if not isinstance(result, FetchResult) or result._partition_records is None:
        return 0
    size: int = result._partition_records._records.size_in_bytes()
    return size


class _NotingClient:
    """aiokafka's client, of which each fetch answer is looked at before it is taken apart."""

    def __init__(self, client: Any, note: Any) -> None:
        self._client, self._note = client, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def send(self, node: int, request: Any, **options: Any) -> Any:
        answer = await self._client.send(node, request, **options)
        if type(answer).API_KEY == _FETCH:
            self._note(answer)
        return answer


_FETCH = 1
