"""The facts of a healthy fleet, which a test then breaks."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from services.core.broker.contract import Lag
from services.core.pipe_file.pipes import PipeFile
from services.core.process.scrape import Sample
from services.fleet.doctor.facts import BrokerFacts, Disk, Facts, Instance, LogLine, ObserverFacts
from services.fleet.folder import FleetState

NOW = time.time()
DATA = Path("/srv/data")
LANE = {"pipe": "shop", "destination": "crm"}
OTHER_LANE = {"pipe": "shop", "destination": "erp"}
SERVICES = ("observer", "retrier", "expel", "transform", "ingest")

PIPES = PipeFile.model_validate(
    {
        "streams": {"orders": {}},
        "pipes": {
            "shop": {
                "sources": ["orders"],
                "destinations": [
                    {"name": name, "webhook": {"url": f"https://{name}.example.org/"}} for name in ("crm", "erp")
                ],
            },
            "large": {
                "sources": ["orders"],
                "transform": {"sql": "SELECT * FROM orders"},
                "destinations": [{"name": "billing", "webhook": {"url": "https://billing.example.org/"}}],
            },
        },
    }
)


BILLING = {"pipe": "large", "destination": "billing"}
NONE: Mapping[str, str] = {}
EVERYWHERE = {
    "penstock_retrier_up": "retrier",
    "penstock_observer_speaks": "observer",
    "penstock_retrier_next_due_timestamp_seconds": "",
    "penstock_ledger_reports_gone_total": "",
}
"""Metrics without labels: every service exports them, and one service sets them."""
OWN: dict[str, list[tuple[str, Mapping[str, str], float]]] = {
    "transform": [
        ("penstock_transform_query_up", {"pipe": "large"}, 1.0),
        ("penstock_broker_lag_records", {"group": "large", "topic": "orders", "partition": "0"}, 9.0),
        ("penstock_transform_table_age_seconds", {"table": "rates"}, 61.0),
        ("penstock_transform_table_refresh_seconds", {"table": "rates"}, 60.0),
    ],
    "expel": [("penstock_expel_lane_up", lane, 1.0) for lane in (LANE, OTHER_LANE, BILLING)],
    "observer": [
        ("penstock_observer_topic_up", {"topic": "shop.dead"}, 1.0),
        *(("penstock_ledger_open_minutes", lane, 3.0) for lane in (LANE, OTHER_LANE, BILLING)),
    ],
}


def sample(at: float, *values: tuple[str, Mapping[str, str], float]) -> Sample:
    return Sample(at, {(name, frozenset(labels.items())): value for name, labels, value in values})


def make_instance(service: str) -> Instance:
    """One process that works, with metrics of two readings."""
    one = Instance(f"{service}-1", service, f"127.0.0.1:{7000 + SERVICES.index(service)}", 100, 0, 0)
    one.log = DATA / "logs" / f"{one.name}.log"
    one.answer, one.skew, one.status, one.age = "ready", -0.4, "sleeping", 5000.0
    build = ("penstock_build_info", {"service": service, "version": "1.0.0"}, 1.0)
    more = [*OWN.get(service, []), *((metric, NONE, float(service == owner)) for metric, owner in EVERYWHERE.items())]
    read = [(("penstock_transform_events_read_total", {"pipe": "large"}, count)) for count in (100.0, 120.0)]
    one.first, one.second = (
        sample(at, build, *more, *([count] if service == "transform" else []))
        for at, count in zip((0.0, 5.0), read, strict=True)
    )
    return one


def healthy() -> Facts:
    """A fleet with two pipes, on which nothing is wrong."""
    state = FleetState(os.getpid(), "127.0.0.1:1", f"log://{DATA}/log", "pipes.yaml", "127.0.0.1:2", "127.0.0.1:3", [])
    facts = Facts(NOW, DATA, state, pipes=PIPES, pipes_path=Path("pipes.yaml"))
    facts.supervisor = Instance("the supervisor", "fleet", "127.0.0.1:1", 99, 0, 0, answer="ready", status="sleeping")
    facts.instances = [make_instance(service) for service in SERVICES]
    facts.disks = (Disk(DATA, 50_000_000_000, 100_000_000_000, 1_000_000, read_only=False),)
    facts.broker = BrokerFacts(f"log://{DATA}/log", is_log=True)
    for group in ("shop.crm", "shop.erp"):
        facts.broker.lags[group, "orders"] = facts.broker.later[group, "orders"] = {0: Lag(0, 0)}
    facts.broker.newest["orders"] = int(NOW * 1000) - 1000
    facts.observer = ObserverFacts("127.0.0.1:3", pipes=({"pipe": "shop", "health": "healthy", "reasons": []},))
    return facts


def instance(facts: Facts, service: str) -> Instance:
    return facts.of(service)[0]


def count(one: Instance, metric: str, labels: Mapping[str, str], first: float, second: float) -> None:
    """Set a metric of an instance, in both readings."""
    assert one.first is not None
    assert one.second is not None
    one.first.values[metric, frozenset(labels.items())] = first
    one.second.values[metric, frozenset(labels.items())] = second


def line(event: str, level: str = "warning", at: float = NOW - 10, **fields: object) -> LogLine:
    return LogLine(at, level, event, f"{event} {fields}", fields)


def raw(text: str) -> LogLine:
    """A line that is not of our log format."""
    return LogLine(0.0, "", "", text)
