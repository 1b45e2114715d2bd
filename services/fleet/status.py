"""The state of a running fleet in numbers: what each node took, gave and is behind by; what each process costs."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.lag import LagHistogram
from services.core.pauses import Pause, Pauses
from services.core.pipes import (
    DELAYS_S,
    RETRIER_GROUP,
    RETRY_IN,
    PipeFile,
    delay_topic,
    delivery_group,
    delivery_topics,
    needs_retrier,
    parked_topic,
)
from services.core.scrape import Sample, scrape
from services.core.times import format_time
from services.fleet.folder import FleetState

SHARES = (0.5, 0.95, 0.99)
BROKER_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Look:
    """One look at the fleet. Rates need two: `previous` is the one before."""

    state: FleetState
    sample: Sample
    previous: Sample | None

    def rate(self, metric: str, **labels: str) -> float:
        """Events a second since the previous look. A process that was restarted meanwhile does not make it negative."""
        if self.previous is None:
            return 0.0
        seconds = max(0.001, self.sample.at - self.previous.at)
        return max(0.0, (self.sample.total(metric, **labels) - self.previous.total(metric, **labels)) / seconds)


async def look(state: FleetState, previous: Sample | None) -> Look:
    """Ask all processes, up to 5 s."""
    sample = await scrape([process.management for process in state.processes])
    return Look(state, sample, previous)


async def summarise(look: Look, pipes: PipeFile) -> dict[str, Any]:
    """Everything as JSON: `streams`, `transforms`, `destinations`, `processes`, and `retrier` or null.

    Lags in ms; rates in events a second.
    """
    async with _opened(look.state.broker) as broker:
        pauses = await _read_pauses(broker)
        destinations = [
            await _destination(look, broker, name, destination.name, delivery_topics(name, pipe), pauses)
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
        ]
        runs = any(process.service == "retrier" for process in look.state.processes)
        retrier = await _retrier(look, broker) if runs or needs_retrier(pipes) else None
    return {
        "broker": look.state.broker,
        "listen": look.state.listen,
        "observer": look.state.observer,
        "streams": [_stream(look, name) for name in pipes.streams],
        "transforms": [_transform(look, name) for name, pipe in pipes.pipes.items() if pipe.transform is not None],
        "destinations": destinations,
        "retrier": retrier,
        "processes": await asyncio.to_thread(_processes, look),
    }


def _opened(url: str) -> contextlib.AbstractAsyncContextManager[Broker | None]:
    """The broker, or None while it is away: the rest of the status is wanted all the more."""

    @contextlib.asynccontextmanager
    async def opened() -> Any:
        async with contextlib.AsyncExitStack() as stack:
            broker = None
            with contextlib.suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(BROKER_TIMEOUT_S):
                    broker = await stack.enter_async_context(open_broker(url))
            yield broker

    return opened()


def _stream(look: Look, name: str) -> dict[str, Any]:
    sample = look.sample
    return {
        "stream": name,
        "accepted": int(sample.total("penstock_ingest_events_accepted_total", stream=name)),
        "refused": int(sample.total("penstock_ingest_events_refused_total", stream=name)),
        "rate": look.rate("penstock_ingest_events_accepted_total", stream=name),
        "ingest_time_ms": quantiles(sample.lag("penstock_ingest_time_seconds", stream=name)),
    }


def _transform(look: Look, pipe: str) -> dict[str, Any]:
    sample = look.sample
    return {
        "pipe": pipe,
        "up": bool(sample.total("penstock_transform_query_up", pipe=pipe)),
        "read": int(sample.total("penstock_transform_events_read_total", pipe=pipe)),
        "written": int(sample.total("penstock_transform_events_written_total", pipe=pipe)),
        "dead": int(sample.total("penstock_transform_events_dead_total", pipe=pipe)),
        "rate": look.rate("penstock_transform_events_read_total", pipe=pipe),
        "lag_records": _transform_lag(sample, pipe),
        "lag_out_ms": quantiles(sample.lag("penstock_lag_out_seconds", pipe=pipe, node="transform")),
    }


def _transform_lag(sample: Sample, pipe: str) -> int | None:
    """Events that the transform has not read; None before it said."""
    known = any(name == "penstock_broker_lag_records" and ("group", pipe) in labels for name, labels in sample.values)
    return int(sample.total("penstock_broker_lag_records", group=pipe)) if known else None


async def _destination(
    look: Look, broker: Broker | None, pipe: str, destination: str, topics: list[str], pauses: Mapping[str, Pause]
) -> dict[str, Any]:
    labels = {"pipe": pipe, "destination": destination}
    sample = look.sample
    records, millis = await _group_lag(broker, delivery_group(pipe, destination), topics)
    pause = pauses.get(f"{pipe}/{destination}")
    return {
        **labels,
        "up": bool(sample.total("penstock_expel_lane_up", **labels)),
        "delivered": int(sample.total("penstock_expel_events_delivered_total", **labels)),
        "retried": int(sample.total("penstock_expel_events_retried_total", **labels)),
        "dead": int(sample.total("penstock_expel_events_dead_total", **labels)),
        "rate": look.rate("penstock_expel_events_delivered_total", **labels),
        "paused": None if pause is None else await _paused(broker, pipe, destination, pause),
        "lag_records": records,
        "lag_ms": millis,
        "e2e_lag_ms": quantiles(sample.lag("penstock_e2e_lag_seconds", **labels)),
    }


async def _paused(broker: Broker | None, pipe: str, destination: str, pause: Pause) -> dict[str, Any]:
    """parked: at most so many events; those that the pipe has parked for others since are counted, too, as all are not read."""
    parked, _ = await _group_lag(broker, delivery_group(pipe, destination), [parked_topic(pipe)])
    since, because = format_time(pause.at), pause.detail or pause.reason
    return {"since": since, "by": pause.by, "reason": pause.reason, "because": because, "parked": parked}


async def _read_pauses(broker: Broker | None) -> Mapping[str, Pause]:
    """By `<pipe>/<destination>`; none while the broker does not say."""
    if broker is None:
        return {}
    pauses = Pauses(broker.admin)
    with contextlib.suppress(BrokerError, TimeoutError):
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            await pauses.refresh()
    return pauses.paused()


async def _retrier(look: Look, broker: Broker | None) -> dict[str, Any]:
    """What the global retrier holds back. next_due_ms: until the first of the events that it has read ahead is due."""
    sample = look.sample
    waiting, _ = await _group_lag(broker, RETRIER_GROUP, [RETRY_IN, *map(delay_topic, DELAYS_S)])
    next_due = sample.total("penstock_retrier_next_due_timestamp_seconds")
    return {
        "up": bool(sample.total("penstock_retrier_up")),
        "waiting": waiting,
        "next_due_ms": max(0, int((next_due - time.time()) * 1000)) if next_due else None,
        "released": int(sample.total("penstock_retrier_events_released_total")),
        "dead": int(sample.total("penstock_retrier_events_dead_total")),
        "rate": look.rate("penstock_retrier_events_released_total"),
        "late_ms": quantiles(sample.lag("penstock_retrier_lateness_seconds")),
    }


async def _group_lag(broker: Broker | None, group: str, topics: list[str]) -> tuple[int | None, int | None]:
    """(records behind, age in ms of the oldest of them); None when the broker does not say."""
    if broker is None:
        return None, None
    try:
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            lags = [lag for topic in topics for lag in (await broker.admin.group_lag(group, topic)).values()]
    except (BrokerError, TimeoutError):
        return None, None
    return sum(lag.records for lag in lags), max((lag.millis for lag in lags), default=0)


def quantiles(histogram: LagHistogram) -> dict[str, float]:
    """P50, P95 and P99 in ms."""
    values = histogram.quantiles(SHARES)
    return {f"p{round(share * 100)}": round(value, 1) for share, value in zip(SHARES, values, strict=True)}


def _processes(look: Look) -> list[dict[str, Any]]:
    """CPU (percent of one core over a tenth of a second) and memory of each process with its children. Blocking."""
    found = [(process, _family(process.pid)) for process in look.state.processes]
    for _, family in found:
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.cpu_percent()
    psutil.cpu_percent(interval=0.1)
    return [
        {
            "name": process.name,
            "pid": process.pid,
            "restarts": process.restarts,
            "state": "down" if process.pid is None else look.sample.unready.get(process.management, "ready"),
            "cpu_percent": round(sum(_ask(one, "cpu") for one in family), 1),
            "rss_bytes": int(sum(_ask(one, "rss") for one in family)),
            "management": process.management,
            "log": process.log,
        }
        for process, family in found
    ]


def _family(pid: int | None) -> list[psutil.Process]:
    if pid is None:
        return []
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def _ask(process: psutil.Process, what: str) -> float:
    try:
        return process.cpu_percent() if what == "cpu" else float(process.memory_info().rss)
    except psutil.Error:
        return 0.0
