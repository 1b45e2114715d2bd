"""Estimates the Kinesis costs (provisioned mode) of the streams as they are, and of other layouts of streams.

Reads a sample of each stream, computes loads and costs, renders them.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.broker.contract import Reader
from services.core.broker.record import Batch, Record

ENTRIES_PER_PARTITION = 5_000
_PAGE = 500
_FRAME_BYTES = 64
"""The approximate size of a record's envelope, without key, value and headers."""


@dataclass(slots=True)
class TypeCount:
    """The events of one type. bytes: with keys and headers."""

    events: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Sample:
    """The events of one stream by type. seconds: the time of the sample. entries: Kinesis records; 0 on other brokers."""

    seconds: float
    sorts: dict[str, TypeCount] = field(default_factory=dict)
    entries: int = 0

    @property
    def events(self) -> int:
        return sum(sort.events for sort in self.sorts.values())

    @property
    def bytes(self) -> int:
        return sum(sort.bytes for sort in self.sorts.values())

    @property
    def events_per_entry(self) -> float:
        """How many events Kinesis stores as one entry; 1 when that is not known."""
        return max(1.0, self.events / self.entries) if self.entries else 1.0


async def read_sample(reader: Reader, topic: str, minutes: float, *, aggregated: bool) -> Sample:
    """Sample the events of the last minutes: at most `ENTRIES_PER_PARTITION` per partition, scaled up to the whole time.

    aggregated: the offsets are those of Kinesis, which show the events that share an entry. Raises BrokerError kinds.
    """
    begin = time.time() - 60 * minutes
    starts = await reader.offsets_at(topic, datetime.fromtimestamp(begin, UTC))
    whole = Sample(60 * minutes)
    for partition, offset in starts.items():
        part = await _read(reader, topic, partition, offset, begin, aggregated=aggregated)
        share = whole.seconds / part.seconds
        whole.entries += round(part.entries * share)
        for name, sort in part.sorts.items():
            known = whole.sorts.setdefault(name, TypeCount())
            known.events += round(sort.events * share)
            known.bytes += round(sort.bytes * share)
    return whole


async def _read(reader: Reader, topic: str, partition: int, offset: int, begin: float, *, aggregated: bool) -> Sample:
    sample, newest = Sample(1.0), begin
    entries: set[int] = set()
    while sample.events < ENTRIES_PER_PARTITION:
        batch = await reader.read(topic, partition, offset, max_records=_PAGE)
        if batch is None:
            newest = time.time()
            break
        if batch.damage is None:
            _add(sample, batch)
            entries.update(one >> 20 for one in batch.offsets if aggregated)
            newest = max(newest, batch.records[-1].timestamp / 1000)
        offset = batch.offsets[-1] + 1
    sample.seconds = max(1.0, newest - begin)
    sample.entries = len(entries)
    return sample


def _add(sample: Sample, batch: Batch) -> None:
    for record in batch.records:
        sort = sample.sorts.setdefault(type_of(record), TypeCount())
        sort.events += 1
        sort.bytes += _FRAME_BYTES + len(record.key or b"") + len(record.value or b"")
        sort.bytes += sum(len(name) + len(value) for name, value in record.headers)


def type_of(record: Record) -> str:
    """The CloudEvents type; `(none)` when there is none."""
    kind = record.header("ce_type")
    return kind.decode("utf-8", "replace") if kind else "(none)"


def namespace_of(kind: str) -> str:
    """The type up to its last dot: com.shop.order for com.shop.order.paid."""
    return kind.rpartition(".")[0] or kind


HOURS_PER_MONTH = 730.0
SHARD_BYTES, SHARD_ENTRIES = 1_000_000.0, 1_000.0
UNIT_BYTES = 25 * 1024
USED = 0.75
"""The planned utilisation of a shard; about the one that the autoscaler keeps."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars. Source: the price list of Kinesis Data Streams, provisioned mode, us-east-1. Other regions differ."""

    shard_hour: float = 0.015
    million_units: float = 0.014


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one stream per second. per_entry: how many events are stored as one entry."""

    name: str
    events: float
    bytes: float
    per_entry: float

    @property
    def entries(self) -> float:
        """Entries per second."""
        return self.events / self.per_entry

    @property
    def shards(self) -> int:
        """The number of shards that this load needs."""
        return max(1, math.ceil(max(self.bytes / SHARD_BYTES, self.entries / SHARD_ENTRIES) / USED))

    @property
    def units(self) -> float:
        """PUT payload units per second: 25 KB each, at least one per entry."""
        size = self.bytes / self.entries if self.entries else 0.0
        return self.entries * max(1, math.ceil(size / UNIT_BYTES))

    def per_month(self, prices: Prices, shards: int | None = None) -> tuple[float, float]:
        """Dollars (for shard-hours, for PUT payload units). shards: the number of shards; None: as many as the load needs."""
        hours = (self.shards if shards is None else shards) * HOURS_PER_MONTH
        return hours * prices.shard_hour, self.units * 3600 * HOURS_PER_MONTH / 1e6 * prices.million_units


def load_of(name: str, sample: Sample) -> Load:
    """The load of the stream as it is."""
    return Load(name, sample.events / sample.seconds, sample.bytes / sample.seconds, sample.events_per_entry)


def divided(samples: Iterable[tuple[str, Sample]], by: Callable[[str], str]) -> list[Load]:
    """The loads if each name that `by` gives to a type had its own stream.

    An entry then holds fewer events: in proportion to the stream's share of the events.
    """
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
    """The streams of each layout, by its name."""
    return {
        "as it is": [load_of(name, sample) for name, sample in samples],
        "a stream per namespace": divided(samples, namespace_of),
        "a stream per type": divided(samples, lambda kind: kind),
    }


def pareto(samples: Iterable[tuple[str, Sample]]) -> list[tuple[str, float, float, float]]:
    """(type, events per second, bytes per second, cumulative share of all bytes), the largest first."""
    loads = sorted(divided(samples, lambda kind: kind), key=lambda load: -load.bytes)
    total, so_far, rows = sum(load.bytes for load in loads), 0.0, []
    for load in loads:
        so_far += load.bytes
        rows.append((load.name, load.events, load.bytes, so_far / total if total else 1.0))
    return rows


_SHOWN_TYPES = 20


def summarise_cost(samples: list[tuple[str, Sample]], shards: Mapping[str, int], prices: Prices) -> dict[str, Any]:
    """`streams`, `layouts`, `pareto`, `prices`; dollars per month, loads per second. shards: the existing ones, on Kinesis."""
    return {
        "prices": {"shard_hour": prices.shard_hour, "million_put_units": prices.million_units},
        "streams": [_stream(name, sample, shards.get(name), prices) for name, sample in samples],
        "layouts": [_layout(name, loads, prices) for name, loads in layouts(samples).items()],
        "pareto": [
            {"type": kind, "events": events, "bytes": size, "cumulative_share": share}
            for kind, events, size, share in pareto(samples)
        ],
    }


def _stream(name: str, sample: Sample, there: int | None, prices: Prices) -> dict[str, Any]:
    load = load_of(name, sample)
    hours, units = load.per_month(prices, there)
    return {
        "stream": name,
        "events": load.events,
        "bytes": load.bytes,
        "events_per_entry": load.per_entry,
        "shards": there,
        "shards_needed": load.shards,
        "put_units": load.units,
        "shard_hours_month": hours,
        "put_units_month": units,
        "month": hours + units,
    }


def _layout(name: str, loads: list[Any], prices: Prices) -> dict[str, Any]:
    parts = [load.per_month(prices) for load in loads]
    return {
        "layout": name,
        "streams": len(loads),
        "shards": sum(load.shards for load in loads),
        "shard_hours_month": sum(hours for hours, _ in parts),
        "put_units_month": sum(units for _, units in parts),
        "month": sum(hours + units for hours, units in parts),
    }


def render_cost(found: dict[str, Any]) -> RenderableType:
    """Three tables: streams, layouts, types."""
    return Group(
        _table(
            "Streams",
            found["streams"],
            (
                "stream",
                "events",
                "bytes",
                "events_per_entry",
                "shards",
                "shards_needed",
                "put_units",
                "shard_hours_month",
                "put_units_month",
                "month",
            ),
        ),
        _table(
            "Layouts with the shards that each needs",
            found["layouts"],
            ("layout", "streams", "shards", "shard_hours_month", "put_units_month", "month"),
        ),
        _table(
            "Types, the largest first", found["pareto"][:_SHOWN_TYPES], ("type", "events", "bytes", "cumulative_share")
        ),
    )


_HEADINGS = {
    "events": "events/s",
    "bytes": "bytes/s",
    "events_per_entry": "events per entry",
    "shards_needed": "shards needed",
    "put_units": "PUT units/s",
    "shard_hours_month": "shard-hours, $/month",
    "put_units_month": "PUT units, $/month",
    "month": "$/month",
    "cumulative_share": "cumulative share",
}


def _table(title: str, rows: list[dict[str, Any]], keys: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(_HEADINGS.get(key, key), justify="left" if key == keys[0] else "right")
    for row in rows:
        table.add_row(*(Text(_cell(key, row[key])) for key in keys))
    return table


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return ascii(value)[1:-1]
    if key == "cumulative_share":
        return f"{value:.1%}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
