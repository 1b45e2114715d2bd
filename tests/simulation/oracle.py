"""The oracle of the simulation: it is never faulted, and knows of every event what must become of it at every destination.

A 2xx obliges; a 4xx forbids for good; a refused key, or an answer that nothing was stored, until the event is sent again;
anything else leaves it open. Order counts between two events of one key when the client sent the second knowing that the first
was stored, or both in one request.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.simulation.transform import is_filtered
from tests.support.oracle import Fate, says_not_stored
from tests.support.virtual_loop import EPOCH

OLD_MS = int((EPOCH - 3 * 86_400) * 1000)
"""Three days before the history."""
HEARD_S = 1.5
"""After a pause is durable nothing is sent to its destination any more: a look each second, and what is under way."""


@dataclass
class Event:
    """One event: what is known of it, and what happened to it."""

    number: int
    stream: str
    key: str
    fate: Fate = Fate.UNSENT
    sent_at: float = 0.0
    after: "Event | None" = None
    """The event of its key that must arrive before it."""
    time: int | None = None
    """What it says itself of when it happened, ms."""
    is_lost: bool = False
    """An operator or the broker took it away, with whatever was still to be done."""

    @property
    def id(self) -> str:
        return f"e{self.number}"


def payload(event: Event) -> bytes:
    """A function of the id."""
    fill = hashlib.blake2b(event.id.encode(), digest_size=8).hexdigest()
    time = b"" if event.time is None else b',"time":%d' % event.time
    return b'{"id":"%s","key":"%s","fill":"%s"%s}' % (event.id.encode(), event.key.encode(), fill.encode(), time)


@dataclass
class Route:
    """One destination, as far as the oracle is concerned. since: events sent before are not for it, unless it begins earlier."""

    pipe: str
    name: str
    stream: str
    in_order: bool
    is_transformed: bool = False
    arrived: dict[int, int] = field(default_factory=dict)
    """By event: its place among all first arrivals."""
    deliveries: int = 0
    dead: set[int] = field(default_factory=set)
    excused: set[int] = field(default_factory=set)
    paused_at: float | None = None
    """Since when a pause is durable; None: the newest word is another one."""


class Oracle:
    """All events and all routes of one history. is_dated: every fourth event says that it is days old."""

    def __init__(self, *, is_dated: bool = False) -> None:
        self._is_dated = is_dated
        self.events: list[Event] = []
        self.routes: dict[tuple[str, str], Route] = {}
        self.complaints: list[str] = []
        self._last: dict[tuple[str, str], Event] = {}

    def issue(self, stream: str, key: str) -> Event:
        """A new event."""
        number = len(self.events)
        event = Event(number, stream, key, time=OLD_MS if self._is_dated and number % 4 == 0 else None)
        self.events.append(event)
        return event

    def sending(self, events: Sequence[Event], now: float) -> None:
        """One request with these leaves."""
        for event in events:
            if event.fate is Fate.UNSENT:
                last = self._last.get((event.stream, event.key))
                if last is not None:
                    event.after = last if last.fate is Fate.OBLIGED or last in events else last.after
                self._last[event.stream, event.key] = event
                event.sent_at = now
            if event.fate in (Fate.UNSENT, Fate.DENIED):
                event.fate = Fate.UNKNOWN  # from now on it may be stored, whatever was said of an earlier try

    def answered(self, events: Sequence[Event], tried_before: Iterable[Fate], status: int, body: bytes) -> None:
        """What a whole answer of ingest means. tried_before: the events' fates before this request."""
        fates = list(tried_before)
        if status == 200:
            for event in events:
                event.fate = Fate.OBLIGED
        elif status == 207:
            refused = {item["index"]: item for item in orjson.loads(body)["refused"]}
            for index, (event, before) in enumerate(zip(events, fates, strict=True)):
                _record_item(event, before, refused.get(index))
        elif 400 <= status < 500 and status not in (401, 408, 429):
            for event, before in zip(events, fates, strict=True):
                _deny(event, before, Fate.FORBIDDEN)
        elif status in (401, 429) or (status in (503, 507) and says_not_stored(body)):
            for event, before in zip(events, fates, strict=True):
                _deny(event, before, Fate.DENIED)

    def arrive(self, route: Route, event_id: str, data: object) -> None:
        """One delivery to a receiver that processes it."""
        route.deliveries += 1
        event = self._find(event_id)
        if event is None or event.stream != route.stream:
            self.complaints.append(f"{route.pipe}/{route.name}: {event_id} is foreign")
            return
        if route.is_transformed and is_filtered(event.id):
            self.complaints.append(f"{route.pipe}/{route.name}: {event_id} arrived although it is filtered")
        if data != orjson.loads(payload(event)) | ({"transformed": True} if route.is_transformed else {}):
            self.complaints.append(f"{route.pipe}/{route.name}: {event_id} arrived altered: {data!r}")
        if event.number in route.arrived:
            return
        route.arrived[event.number] = len(route.arrived)

    def bury(self, pipe: str, destination: str, event_id: str, time: int) -> None:
        """A dead letter. time: of its record, ms; Kafka deletes it when that is as old as the retention."""
        if time <= OLD_MS:
            self.complaints.append(f"the dead letter of {event_id} is born days old")
        event, route = self._find(event_id), self.routes.get((pipe, destination))
        if event is None:
            self.complaints.append(f"a dead letter of {pipe}/{destination} is foreign: {event_id}")
        elif route is not None:
            route.dead.add(event.number)

    def asked(self, route: Route, now: float, disturbed_until: float) -> None:
        """A request begins. disturbed_until: until when processes may not have heard of a pause."""
        if route.paused_at is not None and now - max(route.paused_at, disturbed_until) > HEARD_S:
            self.complaints.append(
                f"{route.pipe}/{route.name}: asked {now - route.paused_at:.1f} s after it was paused"
            )

    def _find(self, event_id: str) -> Event | None:
        number = event_id[1:]
        known = event_id.startswith("e") and number.isdigit() and int(number) < len(self.events)
        event = self.events[int(number)] if known else None
        return event if event is not None and event.fate is not Fate.UNSENT else None

    def is_owed(self, route: Route, event: Event) -> bool:
        """Whether it must be at this destination, or among its dead letters."""
        if route.is_transformed and is_filtered(event.id):
            return False
        return event.fate is Fate.OBLIGED and event.stream == route.stream and event.number not in route.excused

    def missing(self, route: Route) -> list[Event]:
        """Owed, and neither there nor dead."""
        return [
            event
            for event in self.events
            if self.is_owed(route, event) and event.number not in route.arrived and event.number not in route.dead
        ]

    def judge(self) -> list[str]:
        """Every way in which the promise is broken, for a person."""
        found = list(self.complaints)
        for route in self.routes.values():
            name = f"{route.pipe}/{route.name}"
            if missing := [event.id for event in self.missing(route)]:
                found.append(f"{name}: {len(missing)} lost: {missing[:8]}")
            bound = (Fate.FORBIDDEN, Fate.DENIED, Fate.UNSENT)
            trespassed = [
                e for e in self.events if e.fate in bound and (e.number in route.arrived or e.number in route.dead)
            ]
            if trespassed:
                found.append(f"{name}: arrived although never may: {[(e.id, e.fate.name) for e in trespassed[:8]]}")
            if route.in_order:
                found += self._judge_order(name, route)
        return found

    def _judge_order(self, name: str, route: Route) -> list[str]:
        for event in self.events:
            before = event.after
            if before is None or event.number not in route.arrived or before.fate is not Fate.OBLIGED:
                continue
            if before.number in route.dead or not self.is_owed(route, before):
                continue
            place = route.arrived.get(before.number)
            if place is None or place > route.arrived[event.number]:
                return [f"{name}: {event.id} of key {event.key} arrived before {before.id}"]
        return []


def _record_item(event: Event, before: Fate, item: dict[str, Any] | None) -> None:
    """What a 207 says of one event; item: None when it is stored."""
    if item is None:
        event.fate = Fate.OBLIGED
    elif item["retry"] is False:
        _deny(event, before, Fate.FORBIDDEN)
    elif item["reason"] not in ("outcome-unknown", "internal"):
        _deny(event, before, Fate.DENIED)


def _deny(event: Event, before: Fate, fate: Fate) -> None:
    """This request stored nothing of it; an earlier one may have."""
    if before in (Fate.UNSENT, Fate.DENIED, Fate.FORBIDDEN):
        event.fate = fate
