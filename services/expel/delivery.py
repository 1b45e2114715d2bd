"""Events for one destination, as a few parallel lists.

The lists are sliced and not iterated, because a Python object per event would cost more than everything else.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.core.broker.record import Record, TopicPartition, estimate_size
from services.core.undelivered.failed_attempts import MAX_KEPT, PARTIAL, FailedAttempt

Position = tuple[TopicPartition, int, int]
"""(source, offset, polled_ms) of one event."""


class OffsetRun(NamedTuple):
    """Consecutive events of a delivery from one polled batch. polled_ms: when it was polled, ms since the epoch."""

    source: TopicPartition
    offsets: Sequence[int]
    polled_ms: int


class Unreadable(NamedTuple):
    """A record that cannot be delivered, and becomes a dead letter at once. events: how many events it stands for."""

    offset: int
    record: Record
    reason: str
    detail: str
    events: int = 1


@dataclass(slots=True, eq=False)
class Delivery:
    """Events of one destination and their history: first those of one polled batch, later those of one request.

    parts, ids, arrivals and records have the same length and order; `runs` covers them in order.
    """

    parts: Sequence[bytes]
    """The destination's body is joined from these."""
    ids: Sequence[bytes]
    arrivals: Sequence[int]
    """Arrival at ingest, ms since the epoch; 0 when unknown."""
    records: Sequence[Record]
    runs: Sequence[OffsetRun]
    size: int = 0
    """Bytes of all parts."""
    weight: float = 0.0
    """Bytes that the events count in their lane: records and parts."""
    polled_at: float = 0.0
    """When the first of the events was polled, monotonic seconds."""
    attempts: int = 0
    first_failure: int = 0
    """When the first attempt failed, ms since the epoch; 0 before."""
    failures: tuple[FailedAttempt, ...] = ()
    """The failed attempts of this round that the receiver saw, the newest MAX_KEPT."""
    message_id: str = ""
    """Set by the sender; the same for every attempt with these events."""
    lapsed: frozenset[TopicPartition] = frozenset()
    """Partitions that are being revoked: this process does not try their events again."""
    disowned: frozenset[TopicPartition] = frozenset()
    """Partitions that were revoked while this was sent. Its outcome settles none of their offsets: when such a partition comes
    back, its topic may have been deleted and created anew, and the same offsets are other events."""

    def __len__(self) -> int:
        return len(self.parts)

    def set_polled(self, source: TopicPartition, polled_ms: int, polled_at: float) -> None:
        """Complete a rendered batch. source: the polled partition, to which the offsets belong."""
        ((_, offsets, _),) = self.runs
        self.runs, self.polled_at = [OffsetRun(source, offsets, polled_ms)], polled_at
        self.size = sum(map(len, self.parts))
        self.weight = self.size + estimate_size(self.records)

    def cut(self, start: int, stop: int, size: int) -> "Delivery":
        """Events start to stop of a polled batch. size: bytes of their parts."""
        ((source, offsets, polled_ms),) = self.runs
        return Delivery(
            self.parts[start:stop],
            self.ids[start:stop],
            self.arrivals[start:stop],
            self.records[start:stop],
            [OffsetRun(source, offsets[start:stop], polled_ms)],
            size,
            self.weight * (stop - start) / len(self.parts),
            self.polled_at,
        )

    def join(self, other: "Delivery") -> "Delivery":
        """These events and then the other's, as a new request."""
        return Delivery(
            [*self.parts, *other.parts],
            [*self.ids, *other.ids],
            [*self.arrivals, *other.arrivals],
            [*self.records, *other.records],
            [*self.runs, *other.runs],
            self.size + other.size,
            self.weight + other.weight,
            self.polled_at,
        )

    def add_attempt(self, now_ms: int, reasons: Collection[str]) -> None:
        """Count an attempt that the receiver saw and that failed. reasons: the distinct ones of the failures."""
        reason = next(iter(reasons)) if len(reasons) == 1 else PARTIAL
        self.attempts += 1
        self.failures = (*self.failures, FailedAttempt.of(now_ms, reason))[-MAX_KEPT:]

    def positions(self) -> list[Position]:
        """The position of each event. It iterates over all events: only for failures."""
        return [(run.source, offset, run.polled_ms) for run in self.runs for offset in run.offsets]

    def subset(self, indexes: Sequence[int]) -> "Delivery":
        """These events (ascending indexes), with the same history and a message id of their own."""
        positions = self.positions()
        parts = [self.parts[i] for i in indexes]
        return Delivery(
            parts,
            [self.ids[i] for i in indexes],
            [self.arrivals[i] for i in indexes],
            [self.records[i] for i in indexes],
            group_runs(positions[i] for i in indexes),
            sum(map(len, parts)),
            self.weight * len(parts) / len(self),
            self.polled_at,
            self.attempts,
            self.first_failure,
            self.failures,
            lapsed=self.lapsed,
            disowned=self.disowned,
        )

    def split(self, sources: Collection[TopicPartition]) -> "tuple[Delivery | None, Delivery | None]":
        """(the events of other partitions, the events of these); None in place of an empty one."""
        if all(run.source not in sources for run in self.runs):
            return self, None
        positions = self.positions()
        kept = [index for index, position in enumerate(positions) if position[0] not in sources]
        gone = [index for index, position in enumerate(positions) if position[0] in sources]
        return (self.subset(kept) if kept else None), self.subset(gone)


class Rendered(NamedTuple):
    """A batch rendered by a sender: the events to deliver, in one run, and the records that cannot be delivered."""

    delivery: Delivery
    unreadable: Sequence[Unreadable] = ()


def group_runs(positions: Iterable[Position]) -> list[OffsetRun]:
    """Neighbours of one partition and one poll become one run."""
    runs: list[OffsetRun] = []
    offsets: list[int] = []
    for source, offset, polled_ms in positions:
        if not runs or runs[-1].source != source or runs[-1].polled_ms != polled_ms:
            offsets = []
            runs.append(OffsetRun(source, offsets, polled_ms))
        offsets.append(offset)
    return runs
