"""The cost report, as data and as tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.fleet.cost.model import Prices, layouts, load_of, pareto
from services.fleet.cost.sample import Sample

_SHOWN_TYPES = 20


def summarise_cost(samples: list[tuple[str, Sample]], shards: Mapping[str, int], prices: Prices) -> dict[str, Any]:
    """`streams`, `layouts`, `pareto`, `prices`; dollars a month, loads a second. shards: what there are, on Kinesis."""
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
    """Three tables."""
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
            "Layouts, each with the shards that it needs",
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
    "cumulative_share": "share up to here",
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
