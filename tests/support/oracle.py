"""The oracle of the fault tests: it is never faulted, and knows of every event what must become of it.

An event's payload is a function of its id. What ingest answered decides: a 2xx makes the id an obligation; a 4xx forbids
it; a 503 that says "not stored" denies it, which binds like a 4xx until the id is sent again; anything else (a time-out, a
cut connection, an unknown outcome) leaves it open. Ids are `<run>-<number>`, numbers dense, so that a ledger of millions of
events is a few bytes each.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import orjson

KEYS = 24
"""Ordering keys in use."""
TIME = int(time.time() * 1000)
"""Event time, ms: of today, because Kafka's retention counts from it."""


class Fate(IntEnum):
    """What is known of one event. The higher one wins."""

    UNSENT = 0
    DENIED = 1
    UNKNOWN = 2
    OBLIGED = 3
    FORBIDDEN = 4


def make_payload(event_id: str, *, acceptable: bool = True) -> bytes:
    """About 300 bytes of JSON. An unacceptable one has a time that ingest refuses."""
    number = int(event_id.rpartition("-")[2])
    fill = hashlib.blake2b(event_id.encode(), digest_size=32).hexdigest() * 3
    moment = str(TIME) if acceptable else '"no time at all"'
    return f'{{"id":"{event_id}","key":"k{number % KEYS}","time":{moment},"fill":"{fill}"}}'.encode()


@dataclass
class Ledger:
    """Every event of one run: its fate, how often it was sent, how often it arrived."""

    run: str
    fate: bytearray = field(default_factory=bytearray)
    sends: bytearray = field(default_factory=bytearray)
    arrivals: bytearray = field(default_factory=bytearray)
    dead: set[int] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    deliveries: int = 0

    def issue(self, count: int) -> range:
        """The numbers of `count` new events."""
        start = len(self.fate)
        for column in (self.fate, self.sends):
            column.extend(bytes(count))
        return range(start, start + count)

    def twin(self) -> "Ledger":
        """The same events on another way: fates are shared, arrivals are its own."""
        return Ledger(self.run, self.fate, self.sends)

    def event_id(self, number: int) -> str:
        """The id of an event."""
        return f"{self.run}-{number}"

    def payloads(self, numbers: Iterable[int]) -> list[bytes]:
        """What is sent for these."""
        return [make_payload(self.event_id(n), acceptable=self.fate[n] != Fate.FORBIDDEN) for n in numbers]

    def sending(self, numbers: Iterable[int]) -> None:
        """One request with these is about to leave: from now on they may be stored."""
        for number in numbers:
            self.sends[number] = min(255, self.sends[number] + 1)

    def settle(self, numbers: Iterable[int], fate: Fate) -> None:
        """What an answer said of these."""
        for number in numbers:
            self.fate[number] = max(self.fate[number], fate)

    def note_answer(self, numbers: Sequence[int], status: int, body: bytes) -> None:
        """What a whole answer of ingest means for the events of its request."""
        if status == 200:
            self.settle(numbers, Fate.OBLIGED)
        elif status == 207:
            refused = {item["index"]: item for item in orjson.loads(body)["refused"]}
            self.settle([n for i, n in enumerate(numbers) if i not in refused], Fate.OBLIGED)
            for index, item in refused.items():
                self.settle([numbers[index]], _fate_of(item["reason"], retry=item["retry"]))
        elif 400 <= status < 500 and status not in (408, 429):
            self.settle(numbers, Fate.FORBIDDEN)
        else:
            stored_nothing = status == 429 or (status in (503, 507) and says_not_stored(body))
            self.settle(numbers, Fate.DENIED if stored_nothing else Fate.UNKNOWN)

    def open_numbers(self, numbers: Iterable[int]) -> list[int]:
        """Those of these that a client would send again."""
        return [n for n in numbers if self.fate[n] < Fate.OBLIGED]

    def arrive(self, event_id: str, payload: bytes) -> int | None:
        """One delivery. The event's number when it is new here, else None."""
        self.deliveries += 1
        run, _, text = event_id.rpartition("-")
        number = int(text) if run == self.run and text.isdigit() else -1
        if not 0 <= number < len(self.fate) or not self.sends[number]:
            self.foreign.append(event_id)
            return None
        if payload != make_payload(event_id):
            self.altered.append(event_id)
        is_new = not self.arrived(number)
        self.arrivals[number] = min(255, self.arrivals[number] + 1)
        return number if is_new else None

    def arrived(self, number: int) -> int:
        """How often this event arrived."""
        if number >= len(self.arrivals):
            self.arrivals.extend(bytes(len(self.fate) - len(self.arrivals)))
        return self.arrivals[number]

    def bury(self, event_id: str) -> None:
        """It was found in the dead letters."""
        run, _, text = event_id.rpartition("-")
        if run == self.run and text.isdigit():
            self.dead.add(int(text))
        else:
            self.foreign.append(event_id)

    def lost(self) -> list[int]:
        """Obligations that neither arrived nor are in the dead letters."""
        return [n for n in self._with(Fate.OBLIGED) if not self.arrived(n) and n not in self.dead]

    def trespassers(self) -> list[int]:
        """Events that arrived although they never may."""
        bound = (Fate.FORBIDDEN, Fate.DENIED, Fate.UNSENT)
        return [n for n, fate in enumerate(self.fate) if fate in bound and (self.arrived(n) or n in self.dead)]

    def complaints(self, *, removed: int = 0) -> list[str]:
        """Every way in which the promise is broken, for a person. removed: events taken out of the stream on purpose."""
        lost, trespassers = self.lost(), self.trespassers()
        found = []
        if len(lost) != removed:
            found.append(f"{len(lost)} lost instead of {removed}: {[self.event_id(n) for n in lost[:10]]}")
        if trespassers:
            names = [(self.event_id(n), Fate(self.fate[n]).name) for n in trespassers[:10]]
            found.append(f"{len(trespassers)} arrived that never may: {names}")
        if self.altered:
            found.append(f"{len(self.altered)} arrived altered: {self.altered[:10]}")
        if self.foreign:
            found.append(f"{len(self.foreign)} arrived that nobody sent: {self.foreign[:10]}")
        return found

    def count(self, fate: Fate) -> int:
        """How many events have this fate."""
        return self.fate.count(fate)

    def duplicates(self) -> tuple[int, int]:
        """(deliveries beyond the first of events that were sent once, of events that the client sent again)."""
        own = again = 0
        for sends, arrivals in zip(self.sends, self.arrivals, strict=False):
            if arrivals > 1:
                if sends > 1:
                    again += arrivals - 1
                else:
                    own += arrivals - 1
        return own, again

    def _with(self, wanted: Fate) -> Iterable[int]:
        return (n for n, fate in enumerate(self.fate) if fate == wanted)


def _fate_of(reason: str, *, retry: bool) -> Fate:
    if not retry:
        return Fate.FORBIDDEN
    return Fate.UNKNOWN if reason in ("outcome-unknown", "internal") else Fate.DENIED


def says_not_stored(body: bytes) -> bool:
    """Whether the problem in an answer of 503 or 507 promises that nothing was stored."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    kind = str(document.get("type", "")).rpartition(":")[2]
    return document.get("outcome") == "not stored" or kind in ("overloaded", "stream-not-ready")
