"""The events of the demo and their expected results, computed here without Spark, so that each loss or change is found."""

import datetime
import gzip
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from services.fleet.receiver import Received

PIPE_FILE, _EVENTS = Path(__file__).with_name("pipes.yaml"), Path(__file__).with_name("flights.ndjson.gz")
"""In a clone they are links into `examples/`; in the wheel they are files."""
STREAM, PIPE, DESTINATION = "flights", "punctuality", "operations"
CHAOS_PIPE, STEADY, SHAKY = "departures", "operations", "partner"


@dataclass(frozen=True, slots=True)
class Flight:
    """One event as it is sent, and its expected delivery."""

    payload: bytes
    expected: dict[str, Any]


def load_flights(newest: float) -> dict[str, Flight]:
    """All events by id, their times shifted so that the newest is at `newest` (seconds since the epoch). Blocking."""
    with gzip.open(_EVENTS) as file:
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
    """The expected result of the SQL in examples/pipes.yaml for this event."""
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


@dataclass(slots=True)
class Tracker:
    """delivered: the distinct expected ids. wrong: those of them with other content. foreign: ids that were not sent.

    lags_ms: of each first delivery, from its arrival at ingest to its arrival here, both by this machine's clock.
    """

    flights: dict[str, Flight]
    delivered: set[str] = field(default_factory=set)
    duplicates: int = 0
    wrong: int = 0
    foreign: int = 0
    unsigned: int = 0
    lags_ms: list[int] = field(default_factory=list)

    def add(self, received: Received) -> None:
        if received.signed is not True:
            self.unsigned += 1
            return
        now = int(received.at * 1000)
        for event in received.events:
            event_id = str(event.get("id"))
            flight = self.flights.get(event_id)
            if flight is None:
                self.foreign += 1
            elif event_id in self.delivered:
                self.duplicates += 1
            else:
                self.delivered.add(event_id)
                self.wrong += event.get("data") != flight.expected
                self.lags_ms.append(now - int(event["penstockarrival"]))

    @property
    def lost(self) -> int:
        """The number of events that have not arrived."""
        return len(self.flights) - len(self.delivered)

    def counts(self, dead: int) -> dict[str, int]:
        """For the demo's result. dead: the number of dead letters."""
        return {
            "delivered": len(self.delivered),
            "duplicates": self.duplicates,
            "lost": self.lost,
            "wrong": self.wrong,
            "foreign": self.foreign,
            "unsigned": self.unsigned,
            "dead": dead,
        }

    def is_good(self, dead: int) -> bool:
        """Whether every event arrived unchanged, and no other event."""
        return not (self.lost or self.wrong or self.foreign or self.unsigned or dead)

    def recent_lag(self) -> int | None:
        """The median of the last thousand lags, in ms; None before the first."""
        recent = sorted(self.lags_ms[-1000:])
        return recent[len(recent) // 2] if recent else None
