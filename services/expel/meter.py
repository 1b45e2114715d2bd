"""What a lane counts. Values are gathered in plain lists and handed to the histograms together: per event that is an append."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import structlog

from services.core import metrics
from services.core.broker.record import Record
from services.expel.delivery import Delivery
from services.expel.lane_ledger import NODE, LaneLedger
from services.expel.outcome import Failure, Outcome

log = structlog.get_logger()

_FLUSH_AT = 5000
_MOST_TOLD = 100
"""Destinations that nobody has, told by name."""


class LaneMeter:
    """The metrics of one destination of one pipe. Call `flush` now and then.

    `ledger`: what is told of its events; `wall_clock` in seconds since the epoch.
    """

    def __init__(
        self,
        pipe: str,
        destination: str,
        wall_clock: Callable[[], float] = time.time,
        ledger: LaneLedger | None = None,
    ) -> None:
        self._names = (pipe, destination)
        self.ledger = ledger or LaneLedger()
        self._wall_clock = wall_clock
        self._lag_in = metrics.LAG_IN.labels(pipe, NODE)
        self._lag_out = metrics.LAG_OUT.labels(pipe, NODE)
        self._transit = metrics.TRANSIT_TIME.labels(pipe, destination)
        self._expel_time = metrics.EXPEL_TIME.labels(pipe, destination)
        self._e2e = metrics.E2E_LAG.labels(pipe, destination)
        self._event_lag = metrics.EVENT_LAG.labels(pipe, destination)
        self._delivered = metrics.EXPEL_DELIVERED.labels(pipe, destination)
        self._succeeded = metrics.EXPEL_ATTEMPTS.labels(pipe, destination, "delivered")
        self._in_flight = metrics.EXPEL_LANE_EVENTS.labels(pipe, destination)
        self._replayed = metrics.EXPEL_REPLAYED.labels(pipe, destination)
        self._paused = metrics.EXPEL_PAUSED.labels(pipe, destination)
        self._up = metrics.EXPEL_LANE_UP.labels(pipe, destination)
        self._event_lags_in: list[int] = []
        self._transits: list[int] = []
        self._event_lags: list[int] = []
        self._e2es: list[int] = []
        self._expel_times: Counter[int] = Counter()
        self._counts = [0, 0]
        self._told_unclaimed: set[str] = set()

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch."""
        return int(self._wall_clock() * 1000)

    def took(self, records: Sequence[Record], arrivals: Sequence[int], now_ms: int) -> None:
        """A polled batch arrived here."""
        self._event_lags_in += [now_ms - record.timestamp for record in records]
        self._transits += [now_ms - arrival for arrival in arrivals if arrival]
        if len(self._event_lags_in) > _FLUSH_AT:
            self.flush()

    def delivered(self, delivery: Delivery) -> None:
        """The destination acknowledged all of these."""
        now_ms = self.now_ms()
        self._event_lags += [now_ms - record.timestamp for record in delivery.records]
        self._e2es += [now_ms - arrival for arrival in delivery.arrivals if arrival]
        for _, offsets, taken_ms in delivery.runs:
            self._expel_times[now_ms - taken_ms] += len(offsets)
        self._counts[0] += len(delivery.parts)
        self.ledger.add("delivered", delivery.records)
        if len(self._event_lags) > _FLUSH_AT:
            self.flush()

    def attempted(self, outcome: Outcome) -> None:
        """One attempt ended."""
        if outcome is None:
            self._counts[1] += 1
        else:
            word = outcome.reason if isinstance(outcome, Failure) else "partial"
            metrics.EXPEL_ATTEMPTS.labels(*self._names, word).inc()

    def retried(self, events: int, reason: str) -> None:
        """So many events will be tried again."""
        metrics.EXPEL_RETRIED.labels(*self._names, reason).inc(events)

    def buried(self, reason: str, events: int = 1) -> None:
        """So many events are durable among the dead letters."""
        metrics.EXPEL_DEAD.labels(*self._names, reason).inc(events)

    def handed_over(self, reason: str) -> None:
        """One event is durable in retry-in."""
        metrics.EXPEL_HANDED_OVER.labels(*self._names, reason).inc()

    def twins(self, events: int) -> None:
        """So many events came back twice."""
        metrics.EXPEL_TWINS.labels(*self._names).inc(events)

    def unclaimed(self, events: Mapping[str, int], topic: str) -> None:
        """So many events were passed over, by the destination that they are for, and nobody will deliver them."""
        for destination, count in events.items():
            metrics.EXPEL_UNCLAIMED.labels(self._names[0], "unknown_destination").inc(count)
            if destination not in self._told_unclaimed and len(self._told_unclaimed) < _MOST_TOLD:
                self._told_unclaimed.add(destination)
                log.error(
                    "unclaimed_events",
                    topic=topic,
                    destination=destination,
                    events=count,
                    hint="they stay where they are until the topic's retention ends. Try: penstock check",
                )

    def inherited(self, events: int) -> None:
        """So many events had been handed over by who had the partition before."""
        metrics.EXPEL_INHERITED.labels(*self._names).inc(events)

    def parked(self, reason: str, events: int) -> None:
        """So many events are durable in the parked topic."""
        metrics.EXPEL_PARKED.labels(*self._names, reason).inc(events)

    def replayed(self, events: int) -> None:
        """So many parked events were taken again."""
        self._replayed.inc(events)

    def paused(self, is_paused: bool) -> None:
        """Whether events are parked instead of being sent."""
        self._paused.set(1 if is_paused else 0)

    def in_flight(self, events: int) -> None:
        """So many events are taken and not settled."""
        self._in_flight.set(events)

    def up(self, is_up: bool) -> None:
        """Whether the lane delivers."""
        self._up.set(1 if is_up else 0)

    def flush(self) -> None:
        """Hand everything gathered to the metrics."""
        lags_in, lags_out = Counter(self._event_lags_in), Counter(self._event_lags)
        self._lag_in.observe_counts(lags_in)
        self.ledger.arrived(lags_in)
        self._transit.observe(self._transits)
        self._event_lag.observe_counts(lags_out)
        self._lag_out.observe_counts(lags_out)
        self._e2e.observe(self._e2es)
        self._expel_time.observe_counts(self._expel_times)
        for values in (self._event_lags_in, self._transits, self._event_lags, self._e2es, self._expel_times):
            values.clear()
        delivered, succeeded = self._counts
        self._delivered.inc(delivered)
        self._succeeded.inc(succeeded)
        self._counts = [0, 0]
