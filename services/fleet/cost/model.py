"""What Kinesis charges for a load, in provisioned mode, and what another layout of streams would be charged."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.fleet.cost.sample import Sample, namespace_of

HOURS_PER_MONTH = 730.0
SHARD_BYTES, SHARD_ENTRIES = 1_000_000.0, 1_000.0
UNIT_BYTES = 25 * 1024
USED = 0.75
"""How full a shard is planned to be; the autoscaler keeps about this."""


@dataclass(frozen=True, slots=True)
class Prices:
    """In US dollars. Source: the price list of Kinesis Data Streams, provisioned mode, us-east-1. Other regions differ."""

    shard_hour: float = 0.015
    million_units: float = 0.014


@dataclass(frozen=True, slots=True)
class Load:
    """A stream's, a second. per_entry: events that are stored as one entry."""

    name: str
    events: float
    bytes: float
    per_entry: float

    @property
    def entries(self) -> float:
        """A second."""
        return self.events / self.per_entry

    @property
    def shards(self) -> int:
        """What it needs."""
        return max(1, math.ceil(max(self.bytes / SHARD_BYTES, self.entries / SHARD_ENTRIES) / USED))

    @property
    def units(self) -> float:
        """PUT payload units a second: 25 KB each, at least one an entry."""
        size = self.bytes / self.entries if self.entries else 0.0
        return self.entries * max(1, math.ceil(size / UNIT_BYTES))

    def per_month(self, prices: Prices, shards: int | None = None) -> tuple[float, float]:
        """(for shard-hours, for PUT payload units). shards: there are; None: as many as it needs."""
        hours = (self.shards if shards is None else shards) * HOURS_PER_MONTH
        return hours * prices.shard_hour, self.units * 3600 * HOURS_PER_MONTH / 1e6 * prices.million_units


def load_of(name: str, sample: Sample) -> Load:
    """The stream as it is."""
    return Load(name, sample.events / sample.seconds, sample.bytes / sample.seconds, sample.events_per_entry)


def divided(samples: Iterable[tuple[str, Sample]], by: Callable[[str], str]) -> list[Load]:
    """One stream for each name that `by` gives to a type. Fewer events meet in an entry then: as many as the share says."""
    found: dict[str, tuple[float, float, float]] = {}
    for _, sample in samples:
        for kind, sort in sample.sorts.items():
            events, size, entries = found.get(by(kind), (0.0, 0.0, 0.0))
            share = sort.events / sample.events if sample.events else 0.0
            per_entry = max(1.0, sample.events_per_entry * share)
            more = sort.events / sample.seconds
            found[by(kind)] = events + more, size + sort.bytes / sample.seconds, entries + more / per_entry
    return [
        Load(name, events, size, events / entries if entries else 1.0)
        for name, (events, size, entries) in found.items()
    ]


def layouts(samples: list[tuple[str, Sample]]) -> dict[str, list[Load]]:
    """By name of the layout, its streams."""
    return {
        "as it is": [load_of(name, sample) for name, sample in samples],
        "a stream per namespace": divided(samples, namespace_of),
        "a stream per type": divided(samples, lambda kind: kind),
    }


def pareto(samples: Iterable[tuple[str, Sample]]) -> list[tuple[str, float, float, float]]:
    """(type, events a second, bytes a second, share of all bytes up to here), the largest first."""
    loads = sorted(divided(samples, lambda kind: kind), key=lambda load: -load.bytes)
    total, so_far, rows = sum(load.bytes for load in loads), 0.0, []
    for load in loads:
        so_far += load.bytes
        rows.append((load.name, load.events, load.bytes, so_far / total if total else 1.0))
    return rows
