"""The demo's events, and what must become of each: computed here without Spark, so that a loss or a change is exact."""

import datetime
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.fleet.event_source import SourceEvent

EXAMPLES = Path(__file__).parents[3] / "examples"
STREAM, PIPE, DESTINATION = "flights", "punctuality", "operations"
CHAOS_PIPE, STEADY, SHAKY = "departures", "operations", "partner"


@dataclass(frozen=True, slots=True)
class Flight:
    """One event as it is sent, and what must be delivered for it."""

    payload: bytes
    expected: dict[str, Any]


def load_flights(newest: float) -> dict[str, Flight]:
    """All events by id, their times shifted so that the newest is at `newest` (seconds since the epoch). Blocking."""
    with gzip.open(EXAMPLES / "flights.ndjson.gz") as file:
        events = [orjson.loads(line) for line in file]
    last = max(datetime.datetime.fromisoformat(event["time"]) for event in events)
    shift = datetime.datetime.fromtimestamp(newest, datetime.UTC) - last
    flights = {}
    for event in events:
        time = datetime.datetime.fromisoformat(event["time"]) + shift
        event["time"] = time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        flights[event["id"]] = Flight(orjson.dumps(event), expect(event))
    return flights


def expect(event: dict[str, Any]) -> dict[str, Any]:
    """What the SQL of examples/pipes.yaml must make of this event."""
    delay, late = event["dep_delay"], event["arr_delay"]
    kept = ("id", "time", "carrier", "flight", "tailnum", "origin", "dest", "dep_delay", "arr_delay")
    return {
        **{name: event[name] for name in kept},
        "status": _status(delay),
        "made_up": None if delay is None or late is None else delay - late,
        "distance_km": int(event["distance"] * 1.609344 + 0.5),
    }


def _status(delay: int | None) -> str:
    if delay is None:
        return "cancelled"
    if delay >= 60:
        return "very late"
    return "late" if delay >= 15 else "on time"


def as_source(flights: dict[str, Flight]) -> Iterator[SourceEvent]:
    """The events as the sender takes them."""
    for position, flight in enumerate(flights.values(), start=1):
        yield SourceEvent(position, flight.payload, "")
