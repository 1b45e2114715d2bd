"""What streams cost on Kinesis."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.aws.streams import make_template
from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from services.core.pipe_file.pipes import PipeFile
from services.fleet.cost import (
    HOURS_PER_MONTH,
    FleetSample,
    Load,
    Prices,
    StreamSample,
    layouts,
    namespace_of,
    pareto,
    read_fleet,
    read_sample,
    render_cost,
    summarise_cost,
)
from tests.contract.traffic import append

_PRICES = Prices(shard_hour=0.015, million_units=0.014)


def test_the_price_of_a_load() -> None:
    """Broken: an operator pays what nobody told. AWS' own arithmetic: a 5 KB record is one unit, one of 45 KB is two."""
    small = Load("s", events=100.0, bytes=100 * 5_120.0, entries=100.0)
    assert (small.shards, small.units) == (1, 100.0)
    assert Load("s", 100.0, 100 * 45 * 1024.0, 100.0).units == 200.0
    assert Load("s", 1_000.0, 1_000 * 300.0, 10.0).units == 20.0
    assert Load("s", 3_000.0, 300_000.0, 3_000.0).shards == 4
    hours, units = small.per_month(_PRICES)
    assert hours == pytest.approx(HOURS_PER_MONTH * 0.015)
    assert units == pytest.approx(100 * 3600 * HOURS_PER_MONTH / 1e6 * 0.014)
    assert small.per_month(_PRICES, shards=4)[0] == 4 * hours


def _sample() -> StreamSample:
    loads = (
        Load("com.shop.order.paid", 600.0, 300_000.0),
        Load("com.shop.order.sent", 300.0, 90_000.0),
        Load("com.shop.user", 100.0, 10_000.0),
    )
    return StreamSample("orders", {load.name: load for load in loads}, entries=50.0)


def test_other_layouts_fill_their_entries_less() -> None:
    """Broken: a stream per type looks cheaper than it would be, because it is taken to aggregate as well."""
    found = layouts([_sample()])
    assert [load.name for load in found["a stream per namespace"]] == ["com.shop.order", "com.shop"]
    assert len(found["a stream per type"]) == 3
    whole = found["as it is"][0]
    assert whole.per_entry == 20.0
    for name in ("a stream per namespace", "a stream per type"):
        assert sum(load.events for load in found[name]) == pytest.approx(whole.events)
        assert sum(load.bytes for load in found[name]) == pytest.approx(whole.bytes)
    assert sum(load.entries for load in found["a stream per type"]) == pytest.approx(3 * whole.entries)
    assert namespace_of("plain") == "plain"


def test_the_largest_types_come_first() -> None:
    """Broken: the list hides what costs most."""
    rows = pareto([_sample()])
    assert [row["type"] for row in rows] == ["com.shop.order.paid", "com.shop.order.sent", "com.shop.user"]
    assert [round(row["cumulative_share"], 3) for row in rows] == [0.75, 0.975, 1.0]


async def test_a_sample_of_what_is_stored(tmp_path: Path) -> None:
    """Broken: the report counts yesterday's events, or another partition's twice."""
    now = int(time.time() * 1000)
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec("t", 2))
        await append(broker, "t", [Record(None, b"old", now - 3_600_000)] * 5, 0)
        for partition in (0, 1):
            paid = Record(b"k", b"x" * 100, now - 30_000, (("ce_type", b"order.paid"),))
            await append(broker, "t", [paid] * 7 + [Record(None, b"y", now - 30_000)], partition)
        sample = await read_sample(broker.reader, "t", 1.0, aggregated=False)
    per_minute = {name: 60 * load.events for name, load in sample.types.items()}
    assert per_minute == pytest.approx({"order.paid": 14, "(none)": 2}, rel=0.05)
    assert sample.load.per_entry == pytest.approx(1.0)
    found = summarise_cost(FleetSample([sample], {"t": 2}, {"t": 3}), _PRICES)
    assert found["streams"][0]["shards_needed"] == 1
    assert found["streams"][0]["shard_hours_month"] == pytest.approx(3 * HOURS_PER_MONTH * 0.015)
    assert [row["layout"] for row in found["layouts"]] == ["as it is", "a stream per namespace", "a stream per type"]
    assert render_cost(found)


async def test_it_counts_what_the_templates_make(tmp_path: Path) -> None:
    """Broken: the estimate has the streams of people only, and the bill those that Penstock keeps for itself, too."""
    webhook = {"name": "hook", "webhook": {"url": "https://example.org"}}
    stream = {"name": "archive", "stream": "archive"}
    pipes = PipeFile.model_validate(
        {
            "streams": {"orders": {"partitions": 12, "shards": 2}, "archive": {"partitions": 1}},
            "pipes": {
                "keep": {"sources": ["orders"], "destinations": [stream]},
                "large": {"sources": ["orders"], "transform": {"sql": "SELECT 1"}, "destinations": [webhook]},
            },
        }
    )
    made = {
        resource["Properties"]["Name"]: resource["Properties"]["ShardCount"]
        for resource in make_template(pipes)["Resources"].values()
        if resource["Type"] == "AWS::Kinesis::Stream"
    }
    async with LogBroker.open(str(tmp_path)) as broker:
        fleet = await read_fleet(broker, pipes, 1.0)
    found = summarise_cost(fleet, _PRICES)
    assert {row["stream"]: row["shards"] for row in found["streams"]} == made
    assert found["total"]["shards"] == sum(made.values())
    assert found["total"]["shard_hours_month"] == pytest.approx(sum(made.values()) * HOURS_PER_MONTH * 0.015)
    as_it_is = found["layouts"][0]
    assert as_it_is["streams"] == len(made)
    assert as_it_is["shards"] == sum(made.values()) - 2, "orders and large.out have two shards, and need only one"
    grown = summarise_cost(replace(fleet, shards={"orders": 5}), _PRICES)
    assert grown["total"]["shards"] == sum(made.values()) + 3, "the existing shards count"
