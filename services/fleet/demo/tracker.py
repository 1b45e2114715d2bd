"""What arrived at the demo's webhook, compared event by event with what had to."""

from dataclasses import dataclass, field

from services.fleet.demo.flights import Flight
from services.fleet.receiver import Received


@dataclass(slots=True)
class Tracker:
    """delivered: distinct ids that were expected. wrong: of these, with another content. foreign: ids that nobody sent.

    lags_ms: from the arrival at ingest to the arrival here, of each first delivery, both by this machine's clock.
    """

    flights: dict[str, Flight]
    delivered: set[str] = field(default_factory=set)
    duplicates: int = 0
    wrong: int = 0
    foreign: int = 0
    unsigned: int = 0
    lags_ms: list[int] = field(default_factory=list)

    def take(self, received: Received) -> None:
        """Count one request."""
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
        """Events that have not arrived."""
        return len(self.flights) - len(self.delivered)

    def recent_lag(self) -> int | None:
        """The median of the last thousand lags, in ms; None before the first."""
        recent = sorted(self.lags_ms[-1000:])
        return recent[len(recent) // 2] if recent else None
