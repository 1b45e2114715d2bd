"""The two shapes in which events pass through expel: a polled `Chunk`, and a `Delivery`, which is one request.

Both are a few parallel lists, sliced and never walked on the way, because a Python object per event would cost more than
everything else.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.core.broker.record import Record, TopicPartition


@dataclass(slots=True)
class Chunk:
    """Deliverable events of one polled batch, rendered. All lists have the same length and order."""

    source: TopicPartition
    offsets: Sequence[int]
    records: Sequence[Record]
    parts: Sequence[bytes]
    """What the destination's body is joined from."""
    ids: Sequence[bytes]
    arrivals: Sequence[int]
    """Arrival at ingest, ms; 0 when unknown."""
    taken_ms: int
    """Arrival here, ms since the epoch."""
    taken_at: float
    """The same in monotonic seconds."""
    size: int
    """Bytes of all parts."""
    weight_each: float
    """Bytes that an event counts in its lane: its share of what the batch's records and parts take."""


class Run(NamedTuple):
    """Consecutive events of a delivery that came from one chunk."""

    source: TopicPartition
    offsets: Sequence[int]
    taken_ms: int


class Unreadable(NamedTuple):
    """A record that cannot be delivered to anybody: dead letters, at once. events: how many it stands for."""

    offset: int
    record: Record
    reason: str
    detail: str
    events: int = 1


@dataclass(slots=True, eq=False)
class Delivery:
    """The events of one request and their history. Lists as in Chunk; `runs` covers them in order."""

    parts: Sequence[bytes]
    ids: Sequence[bytes]
    arrivals: Sequence[int]
    records: Sequence[Record]
    runs: Sequence[Run]
    size: int
    weight: float
    attempts: int = 0
    first_failure: int = 0
    """When the first attempt failed, ms since the epoch; 0 before."""
    message_id: str = ""
    """Filled by the sender; stable over retries of these events."""
    lapsed: frozenset[TopicPartition] = frozenset()
    """Partitions that are being revoked: their events are not tried again by us."""
    disowned: frozenset[TopicPartition] = frozenset()
    """Partitions that left while this was under way. What we know of them is over: when they come back, perhaps as a topic
    made anew under the same name, the same offsets mean other events."""

    def __len__(self) -> int:
        return len(self.parts)

    def places(self) -> list[tuple[TopicPartition, int, int]]:
        """(source, offset, taken_ms) of each event. Walks all; for failures, not for the usual way."""
        return [(run.source, offset, run.taken_ms) for run in self.runs for offset in run.offsets]

    def subset(self, indexes: Sequence[int]) -> "Delivery":
        """Only these events (ascending indexes), with the same history and a message id of their own."""
        places = self.places()
        parts = [self.parts[i] for i in indexes]
        return Delivery(
            parts,
            [self.ids[i] for i in indexes],
            [self.arrivals[i] for i in indexes],
            [self.records[i] for i in indexes],
            group_runs(places[i] for i in indexes),
            sum(map(len, parts)),
            self.weight * len(parts) / len(self),
            self.attempts,
            self.first_failure,
            lapsed=self.lapsed,
            disowned=self.disowned,
        )

    def split(self, sources: Collection[TopicPartition]) -> "tuple[Delivery | None, Delivery | None]":
        """(the events of other partitions, the events of these); None instead of an empty one."""
        if all(run.source not in sources for run in self.runs):
            return self, None
        places = self.places()
        kept = [index for index, place in enumerate(places) if place[0] not in sources]
        gone = [index for index, place in enumerate(places) if place[0] in sources]
        return (self.subset(kept) if kept else None), self.subset(gone)


def group_runs(places: Iterable[tuple[TopicPartition, int, int]]) -> list[Run]:
    """Neighbours of one source and one poll become one run."""
    runs: list[Run] = []
    offsets: list[int] = []
    for source, offset, taken_ms in places:
        if not runs or runs[-1].source != source or runs[-1].taken_ms != taken_ms:
            offsets = []
            runs.append(Run(source, offsets, taken_ms))
        offsets.append(offset)
    return runs
