"""Deliveries that wait for their next attempt, by when it is due. They hold no slot and no connection."""

import heapq
from collections.abc import Collection

from services.core.broker.record import TopicPartition
from services.expel.delivery import Delivery


class Retries:
    """A heap by due time (monotonic seconds). Bounded by the lane, whose unsettled events these are."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Delivery]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, delivery: Delivery, due: float) -> None:
        """Wait until `due`."""
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, delivery))

    def due(self) -> float | None:
        """When the first one may go; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Delivery:
        """The first one."""
        return heapq.heappop(self._heap)[2]

    def drop(self, sources: Collection[TopicPartition]) -> list[Delivery]:
        """Take out the events of these partitions and give them back."""
        dropped = []
        waiting, self._heap = self._heap, []
        for due, sequence, delivery in waiting:
            kept, gone = delivery.split(sources)
            if kept is not None:
                self._heap.append((due, sequence, kept))
            if gone is not None:
                dropped.append(gone)
        heapq.heapify(self._heap)
        return dropped
