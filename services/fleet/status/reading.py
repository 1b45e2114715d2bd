"""The state of a running fleet in numbers: the events in and out and the lag of each node, CPU and memory of each process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import psutil

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.control.pauses import Pause, list_paused
from services.core.fleet_broker import open_fleet_broker
from services.core.lag import LagHistogram
from services.core.ledger.report import Breaker
from services.core.pipe_file.pipes import PipeFile, needs_retrier, own_streams
from services.core.pipe_file.topic_names import (
    RETRIER_GROUP,
    RETRIER_TOPICS,
    delivery_group,
    delivery_topics,
    lane_name,
    parked_topic,
    renames_of,
)
from services.core.process.scrape import Sample, scrape
from services.core.times import format_time
from services.fleet.folder import FleetState
from services.fleet.status.paused import pause_json

SHARES = (0.5, 0.95, 0.99)
BREAKER_STATES: tuple[str, ...] = get_args(Breaker)
"""By the value of `penstock_expel_breaker_state`."""
BROKER_TIMEOUT_S = 10.0


@dataclass(slots=True)
class StatusReading:
    """One reading of the fleet's metrics. Rates need two: `previous` is the one before."""

    state: FleetState
    sample: Sample
    previous: Sample | None

    def rate(self, metric: str, **labels: str) -> float:
        """Events per second since the previous reading. Never negative, also when a process was restarted in between."""
        if self.previous is None:
            return 0.0
        seconds = max(0.001, self.sample.at - self.previous.at)
        return max(0.0, (self.sample.total(metric, **labels) - self.previous.total(metric, **labels)) / seconds)


async def read_status(state: FleetState, previous: Sample | None) -> StatusReading:
    """Read the metrics of all processes. Takes up to 5 s."""
    sample = await scrape([process.management for process in state.processes])
    return StatusReading(state, sample, previous)


async def summarise(reading: StatusReading, pipes: PipeFile) -> dict[str, Any]:
    """The status as JSON: `streams`, `tables`, `transforms`, `destinations`, `processes`, and `retrier` or null.

    Counters are of the processes that run now: they count from `since`, the start of the fleet (null: unknown), or from the
    process's restart. `lag_ms` is the age of the oldest event that is not settled, by its own time.
    Lags are in ms, of all events since that start. Rates are in events per second, since the reading before. `lag_out_ms` and
    `event_lag_ms` count from the event's own time, `e2e_lag_ms` from its arrival at ingest. Old events that are sent now have a
    large age and a small E2E lag.
    """
    async with _opened(reading.state.broker, pipes) as broker:
        pauses = await _read_pauses(broker, pipes)
        destinations = [
            await _destination(reading, broker, name, destination.name, delivery_topics(name, pipe), pauses)
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
        ]
        runs = any(process.service == "retrier" for process in reading.state.processes)
        retrier = await _retrier(reading, broker) if runs or needs_retrier(pipes) else None
    return {
        "broker": reading.state.broker,
        "penstock": reading.state.penstock,
        "listen": reading.state.listen,
        "observer": reading.state.observer,
        "since": await asyncio.to_thread(_started, reading.state.pid),
        "streams": [_stream(reading, name) for name in own_streams(pipes)],
        "tables": [_table(reading, name) for name, stream in pipes.streams.items() if stream.compact],
        "transforms": [
            _transform(reading, name, pauses) for name, pipe in pipes.pipes.items() if pipe.transform is not None
        ],
        "destinations": destinations,
        "retrier": retrier,
        "processes": await asyncio.to_thread(_processes, reading),
    }


@contextlib.asynccontextmanager
async def _opened(url: str, pipes: PipeFile) -> AsyncIterator[Broker | None]:
    """The broker, or None while it is unreachable: the rest of the status is still shown."""
    async with contextlib.AsyncExitStack() as stack:
        broker = None
        with contextlib.suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(BROKER_TIMEOUT_S):
                broker = await stack.enter_async_context(open_fleet_broker(url, pipes))
        yield broker


def _stream(reading: StatusReading, name: str) -> dict[str, Any]:
    sample = reading.sample
    return {
        "stream": name,
        "accepted": int(sample.total("penstock_ingest_events_accepted_total", stream=name)),
        "refused": int(sample.total("penstock_ingest_events_refused_total", stream=name)),
        "rate": reading.rate("penstock_ingest_events_accepted_total", stream=name),
        "ingest_time_ms": quantiles(sample.lag("penstock_ingest_time_seconds", stream=name)),
    }


def _table(reading: StatusReading, stream: str) -> dict[str, Any]:
    """rows, behind_ms: null before a table service has opened the table. rebuilt: since its process was started."""
    sample = reading.sample
    rows = sample.children("penstock_table_keys", stream=stream)
    behind = sample.children("penstock_table_behind_seconds", stream=stream)
    rebuilt = sample.children("penstock_table_rebuilt_timestamp_seconds", stream=stream)
    at, reason = max(((value, labels["reason"]) for labels, value in rebuilt), default=(0.0, ""))
    return {
        "table": stream,
        "rows": int(rows[0][1]) if rows else None,
        "behind_ms": round(behind[0][1] * 1000) if behind else None,
        "rate": reading.rate("penstock_table_records_total", stream=stream),
        "rebuilt": {"at": format_time(int(at * 1000)), "reason": reason} if at else None,
    }


def _transform(reading: StatusReading, pipe: str, pauses: Mapping[str, Pause]) -> dict[str, Any]:
    sample, pause = reading.sample, pauses.get(pipe)
    return {
        "pipe": pipe,
        "up": bool(sample.total("penstock_transform_query_up", pipe=pipe)),
        **_mode(sample, pipe),
        "read": int(sample.total("penstock_transform_events_read_total", pipe=pipe)),
        "written": int(sample.total("penstock_transform_events_written_total", pipe=pipe)),
        "dead": int(sample.total("penstock_transform_events_dead_total", pipe=pipe)),
        "rate": reading.rate("penstock_transform_events_read_total", pipe=pipe),
        "paused": None if pause is None else pause_json(pause),
        "lag_records": transform_lag(sample, pipe),
        "lag_out_ms": quantiles(sample.lag("penstock_lag_out_seconds", pipe=pipe, node="transform")),
    }


def _mode(sample: Sample, pipe: str) -> dict[str, str | None]:
    """`mode`: null before the transform runs. `why`: the reason against real-time, in a word; null when it was not asked for."""
    mine = next((labels for labels, _ in sample.children("penstock_transform_mode", pipe=pipe)), {})
    return {"mode": mine.get("mode"), "why": mine.get("why") or None}


def transform_lag(sample: Sample, pipe: str) -> int | None:
    """Events that the transform has not read; None before it reported."""
    found = sample.children("penstock_broker_lag_records", group=pipe)
    return int(sum(value for _, value in found)) if found else None


async def _destination(
    reading: StatusReading,
    broker: Broker | None,
    pipe: str,
    destination: str,
    topics: list[str],
    pauses: Mapping[str, Pause],
) -> dict[str, Any]:
    labels = {"pipe": pipe, "destination": destination}
    sample = reading.sample
    records, millis = await _group_lag(broker, delivery_group(pipe, destination), topics)
    pause, waiting = pauses.get(lane_name(pipe, destination)), _waiting(sample, labels)
    return {
        **labels,
        "up": bool(sample.total("penstock_expel_lane_up", **labels)),
        "delivered": int(sample.total("penstock_expel_events_delivered_total", **labels)),
        "retried": int(sample.total("penstock_expel_events_retried_total", **labels)),
        "dead": int(sample.total("penstock_expel_events_dead_total", **labels)),
        "rate": reading.rate("penstock_expel_events_delivered_total", **labels),
        "paused": None if pause is None else await _paused(broker, pipe, destination, pause, waiting),
        "breaker": BREAKER_STATES[worst_breaker(sample, labels)],
        "breaker_open": worst_breaker(sample, labels) > 0,
        "next_probe_ms": _next_probe(sample, labels),
        "lag_records": records,
        "lag_ms": millis,
        "waiting": waiting,
        "e2e_lag_ms": quantiles(sample.lag("penstock_e2e_lag_seconds", **labels)),
        "event_lag_ms": quantiles(sample.lag("penstock_event_lag_seconds", **labels)),
    }


def worst_breaker(sample: Sample, labels: Mapping[str, str]) -> int:
    """The state of a destination's circuit breaker: an index of BREAKER_STATES, the highest of all processes of expel."""
    states = [int(value) for _, value in sample.children("penstock_expel_breaker_state", **labels)]
    return min(max(states, default=0), len(BREAKER_STATES) - 1)


def _next_probe(sample: Sample, labels: Mapping[str, str]) -> int | None:
    """Milliseconds until a receiver is tested again; of several processes with an open breaker the first. None: none has one."""
    times = [value for _, value in sample.children("penstock_expel_next_probe_timestamp_seconds", **labels)]
    return max(0, int((min(times) - time.time()) * 1000)) if times else None


def _waiting(sample: Sample, labels: Mapping[str, str]) -> int | None:
    """Events that wait for another attempt, with the retrier or parked; None without an observer, which knows them."""
    found = sample.children("penstock_ledger_waiting_events", **labels)
    return int(sum(value for _, value in found)) if found else None


async def _paused(
    broker: Broker | None, pipe: str, destination: str, pause: Pause, waiting: int | None
) -> dict[str, Any]:
    """parked: an upper bound. Of the events behind the group's position, which are also other destinations' and copies of events
    of a former name, no more are parked than wait: the records are not read."""
    parked, _ = await _group_lag(broker, delivery_group(pipe, destination), [parked_topic(pipe)])
    return {**pause_json(pause), "parked": min((one for one in (parked, waiting) if one is not None), default=None)}


async def _read_pauses(broker: Broker | None, pipes: PipeFile) -> Mapping[str, Pause]:
    """By `<pipe>/<destination>`, and by pipe for transforms; empty while the broker does not answer."""
    if broker is None:
        return {}
    with contextlib.suppress(BrokerError, TimeoutError):
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            return await list_paused(broker.reader, renames_of(pipes))
    return {}


async def _retrier(reading: StatusReading, broker: Broker | None) -> dict[str, Any]:
    """The events that wait in the global retrier. next_due_ms: until the first event that it has read ahead is due."""
    sample = reading.sample
    waiting, _ = await _group_lag(broker, RETRIER_GROUP, RETRIER_TOPICS)
    next_due = sample.total("penstock_retrier_next_due_timestamp_seconds")
    return {
        "up": bool(sample.total("penstock_retrier_up")),
        "waiting": waiting,
        "next_due_ms": max(0, int((next_due - time.time()) * 1000)) if next_due else None,
        "released": int(sample.total("penstock_retrier_events_released_total")),
        "dead": int(sample.total("penstock_retrier_events_dead_total")),
        "rate": reading.rate("penstock_retrier_events_released_total"),
        "late_ms": quantiles(sample.lag("penstock_retrier_lateness_seconds")),
    }


async def _group_lag(broker: Broker | None, group: str, topics: Sequence[str]) -> tuple[int | None, int | None]:
    """(records behind, age in ms of the oldest of them); None when the broker does not answer."""
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


def _started(pid: int) -> str | None:
    """When the process started. Blocking."""
    try:
        return format_time(int(psutil.Process(pid).create_time() * 1000))
    except psutil.Error:
        return None


def _processes(reading: StatusReading) -> list[dict[str, Any]]:
    """CPU (percent of one core over a tenth of a second) and memory of each process with its children. `since`: its start.
    Blocking."""
    found = [(process, _family(process.pid)) for process in reading.state.processes]
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
            "state": "down" if process.pid is None else reading.sample.unready.get(process.management, "ready"),
            "since": None if process.pid is None else _started(process.pid),
            "cpu_percent": round(sum(_read_figure(one, "cpu") for one in family), 1),
            "rss_bytes": int(sum(_read_figure(one, "rss") for one in family)),
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


def _read_figure(process: psutil.Process, what: str) -> float:
    try:
        return process.cpu_percent() if what == "cpu" else float(process.memory_info().rss)
    except psutil.Error:
        return 0.0
