"""Estimates the Kinesis costs (provisioned mode) of a pipe file's streams as they are, and of other layouts of streams.

Reads a sample of each topic of events, computes loads and costs, renders them. The other topics are those of `wanted_topics`, as
in the templates of `infra/aws`: their shards cost the same hours, and their few events are not counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.broker.contract import Broker, Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.record import Record
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRY_IN, event_topics
from services.core.provision import wanted_topics
from services.core.story.search import time_of
from services.fleet.console import make_table

RECORDS_PER_PARTITION = 5_000
_PAGE = 500
_FRAME_BYTES = 64
"""The approximate size of a record's envelope, without key, value and headers."""
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


@dataclass(slots=True)
class Load:
    """The load of a stream or of a type, per second. entries: Kinesis records, each of one or more events."""

    name: str
    events: float = 0.0
    bytes: float = 0.0
    entries: float = 0.0

    @property
    def per_entry(self) -> float:
        """The number of events in an entry."""
        return self.events / self.entries if self.entries else 1.0

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


@dataclass(slots=True)
class StreamSample:
    """The loads of one stream by type, whose entries are not known, and the entries of the stream (0: not known)."""

    name: str
    types: dict[str, Load] = field(default_factory=dict)
    entries: float = 0.0

    @property
    def load(self) -> Load:
        """The whole stream. Without known entries each event counts as one."""
        events, size = (sum(getattr(load, name) for load in self.types.values()) for name in ("events", "bytes"))
        return Load(self.name, events, size, min(self.entries or events, events))


async def read_sample(reader: Reader, topic: str, minutes: float, *, aggregated: bool) -> StreamSample:
    """Sample the events of the last minutes: at most about RECORDS_PER_PARTITION per partition, scaled up to the whole time.

    aggregated: the offsets are those of Kinesis, which show the events that share an entry. Raises BrokerError kinds.
    """
    begin = time.time() - 60 * minutes
    sample = StreamSample(topic)
    for partition, start in (await reader.offsets_at(topic, datetime.fromtimestamp(begin, UTC))).items():
        records: list[Record] = []
        entries: set[int] = set()
        newest, offset = begin, start
        while len(records) < RECORDS_PER_PARTITION:
            batch = await reader.read(topic, partition, offset, max_records=_PAGE)
            if batch is None:
                newest = time.time()
                break
            if batch.damage is None:
                records += batch.records
                entries.update(one >> 20 for one in batch.offsets if aggregated)
                newest = max(newest, time_of(batch.records[-1]) / 1000)
            offset = batch.offsets[-1] + 1
        share = 1 / max(1.0, newest - begin)
        sample.entries += len(entries) * share
        for record in records:
            kind = record.header("ce_type")
            name = kind.decode("utf-8", "replace") if kind else "(none)"
            load = sample.types.setdefault(name, Load(name))
            load.events += share
            load.bytes += share * _size(record)
    return sample


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value) for name, value in record.headers)
    return _FRAME_BYTES + len(record.key or b"") + len(record.value or b"") + headers


def divided(samples: Iterable[StreamSample], by: Callable[[str], str]) -> list[Load]:
    """The loads if each name that `by` gives to a type had its own stream.

    An entry then has fewer events: in proportion to the type's share of the stream's events.
    """
    found: dict[str, Load] = {}
    for sample in samples:
        whole = sample.load
        for kind in sample.types.values():
            load = found.setdefault(by(kind.name), Load(by(kind.name)))
            load.events += kind.events
            load.bytes += kind.bytes
            load.entries += kind.events / max(1.0, whole.per_entry * kind.events / whole.events)
    return list(found.values())


def namespace_of(kind: str) -> str:
    """The type up to its last dot: com.shop.order for com.shop.order.paid."""
    return kind.rpartition(".")[0] or kind


def layouts(samples: Sequence[StreamSample]) -> dict[str, list[Load]]:
    """The streams of each layout, by its name."""
    return {
        "as it is": [sample.load for sample in samples],
        "a stream per namespace": divided(samples, namespace_of),
        "a stream per type": divided(samples, lambda kind: kind),
    }


@dataclass(frozen=True, slots=True)
class FleetSample:
    """samples: of the topics of events. topics: every topic of the pipe file, with the shards that it is created with. shards:
    the existing ones of each topic that exists; None: the broker is not Kinesis."""

    samples: Sequence[StreamSample]
    topics: Mapping[str, int]
    shards: Mapping[str, int] | None = None


async def read_fleet(broker: Broker, pipes: PipeFile, minutes: float) -> FleetSample:
    """Sample the events of the last minutes, and count the shards. Raises BrokerError kinds."""
    resharding, existing = broker.resharding, await broker.admin.topics()
    specs = wanted_topics(pipes, has_retrier=RETRY_IN in existing)
    topics = {spec.name: spec.first_shards for spec in specs}
    samples = []
    for topic in event_topics(pipes):
        try:
            samples.append(await read_sample(broker.reader, topic, minutes, aggregated=resharding is not None))
        except UnknownTopic:
            samples.append(StreamSample(topic))
    if resharding is None:
        return FleetSample(samples, topics)
    shards = {name: len((await resharding.shards(name)).numbers) for name in topics if name in existing}
    return FleetSample(samples, topics, shards)


def summarise_cost(fleet: FleetSample, prices: Prices) -> dict[str, Any]:
    """`streams`, `total`, `layouts`, `pareto`, `prices`; dollars per month, loads per second. A topic without existing shards
    counts with those that it is created with."""
    found = {sample.name: sample.load for sample in fleet.samples}
    shards = {**fleet.topics, **(fleet.shards or {})}
    rows = [_stream(found.get(name, Load(name)), count, prices) for name, count in shards.items()]
    own = [count for name, count in shards.items() if name not in found]
    return {
        "prices": {"shard_hour": prices.shard_hour, "million_put_units": prices.million_units},
        "streams": rows,
        "total": {"streams": len(rows)} | {name: sum(row[name] for row in rows) for name in _SUMMED},
        "layouts": [_layout(name, loads, own, prices) for name, loads in layouts(fleet.samples).items()],
        "pareto": pareto(fleet.samples),
    }


_SUMMED = ("shards", "shard_hours_month", "put_units_month", "month")


def pareto(samples: Iterable[StreamSample]) -> list[dict[str, Any]]:
    """The types, the largest first, with the cumulative share of all bytes."""
    loads = sorted(divided(samples, lambda kind: kind), key=lambda load: -load.bytes)
    total, so_far, rows = sum(load.bytes for load in loads), 0.0, []
    for load in loads:
        so_far += load.bytes
        share = so_far / total if total else 1.0
        rows.append({"type": load.name, "events": load.events, "bytes": load.bytes, "cumulative_share": share})
    return rows


def _stream(load: Load, shards: int, prices: Prices) -> dict[str, Any]:
    """shards: the existing ones, or those that the stream is created with."""
    hours, units = load.per_month(prices, shards)
    return {
        "stream": load.name,
        "events": load.events,
        "bytes": load.bytes,
        "events_per_entry": load.per_entry,
        "shards": shards,
        "shards_needed": load.shards,
        "put_units": load.units,
        "shard_hours_month": hours,
        "put_units_month": units,
        "month": hours + units,
    }


def _layout(name: str, loads: Sequence[Load], own: Sequence[int], prices: Prices) -> dict[str, Any]:
    """own: the shards of each topic that Penstock keeps for itself, in every layout."""
    parts = [load.per_month(prices) for load in loads]
    hours = sum(hours for hours, _ in parts) + sum(own) * HOURS_PER_MONTH * prices.shard_hour
    units = sum(units for _, units in parts)
    return {
        "layout": name,
        "streams": len(loads) + len(own),
        "shards": sum(load.shards for load in loads) + sum(own),
        "shard_hours_month": hours,
        "put_units_month": units,
        "month": hours + units,
    }


_SHOWN_TYPES = 20
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


def render_cost(found: dict[str, Any]) -> RenderableType:
    """Three tables: streams with their total, layouts, types."""
    total = dict.fromkeys(found["streams"][0], "") | found["total"] | {"stream": "total"}
    total.pop("streams")
    return Group(
        _table("Streams, with those that Penstock keeps for itself", [*found["streams"], total]),
        _table("Layouts with the shards that each needs", found["layouts"]),
        _table("Types, the largest first", found["pareto"][:_SHOWN_TYPES]),
    )


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    columns = [_HEADINGS.get(key, key) for key in (rows[0] if rows else ())]
    table = make_table(*columns, right=columns[1:], title=title)
    for row in rows:
        table.add_row(*(Text(_cell(key, value)) for key, value in row.items()))
    return table


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return ascii(value)[1:-1]
    if key == "cumulative_share":
        return f"{value:.1%}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
