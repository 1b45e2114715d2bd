"""The result of the demo of an outage: as tables for a person, as one JSON object for a program."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.lag import LagHistogram
from services.core.scrape import Sample
from services.fleet.demo.fidelity import Loss, render_loss
from services.fleet.demo.flights import CHAOS_PIPE, SHAKY, STEADY
from services.fleet.demo.tracker import Tracker
from services.fleet.status import quantiles
from services.fleet.status_view import spread

PHASES = ("before", "during", "after")


@dataclass(slots=True)
class Course:
    """How the outage went. sample: what the services said last. marks: how many events had reached the steady destination when
    each of PHASES began. most_waiting: for the other one, at once. outage_s, recovery_s: how long it was down, and from then
    until everything was delivered.
    """

    sample: Sample = field(default_factory=lambda: Sample(0.0))
    marks: list[int] = field(default_factory=list)
    most_waiting: int = 0
    seconds: float = 0.0
    outage_s: float = 0.0
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came to one destination, in events. handed_over: times that an event went to the global retrier."""

    delivered: int
    duplicates: int
    lost: int
    wrong: int
    foreign: int
    unsigned: int
    dead: int
    handed_over: int

    @property
    def good(self) -> bool:
        """Every event as it was sent, and nothing else."""
        return not (self.lost or self.wrong or self.foreign or self.unsigned or self.dead)


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """outage_s: how long one destination was down; recovery_s: from its return until all was delivered.

    steady_lag_ms: the other destination's E2E lag before, during and after the outage, as P50, P95, P99. ledger: what the
    observer says of the same events.
    """

    broker: str
    sent: int
    accepted: int
    destinations: dict[str, Arrivals]
    most_waiting: int
    seconds: float
    outage_s: float
    recovery_s: float
    steady_lag_ms: dict[str, dict[str, float]]
    ledger: Loss

    @property
    def lost(self) -> int:
        """Deliveries that are missing."""
        return sum(arrivals.lost for arrivals in self.destinations.values())

    @property
    def good(self) -> bool:
        """Nothing lost, nothing altered, nothing invented."""
        return self.accepted == self.sent and all(arrivals.good for arrivals in self.destinations.values())

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {"ok": self.good, "lost": self.lost, **asdict(self)}


def make_chaos_result(
    broker: str, sent: int, accepted: int, trackers: dict[str, Tracker], course: Course, loss: Loss
) -> ChaosResult:
    """Put together what client, receivers, services and observer counted."""
    lags = trackers[STEADY].lags_ms
    ends = [*course.marks[1:], len(lags)]
    return ChaosResult(
        broker=broker,
        sent=sent,
        accepted=accepted,
        destinations={name: _arrivals(name, tracker, course.sample) for name, tracker in trackers.items()},
        most_waiting=course.most_waiting,
        seconds=round(course.seconds, 1),
        outage_s=round(course.outage_s, 1),
        recovery_s=round(course.recovery_s, 1),
        steady_lag_ms={
            phase: _quantiles(lags[begin:end]) for phase, begin, end in zip(PHASES, course.marks, ends, strict=True)
        },
        ledger=loss,
    )


def _quantiles(lags_ms: list[int]) -> dict[str, float]:
    histogram = LagHistogram()
    histogram.observe(lags_ms)
    return quantiles(histogram)


def _arrivals(name: str, tracker: Tracker, sample: Sample) -> Arrivals:
    to = {"pipe": CHAOS_PIPE, "destination": name}
    return Arrivals(
        delivered=len(tracker.delivered),
        duplicates=tracker.duplicates,
        lost=tracker.lost,
        wrong=tracker.wrong,
        foreign=tracker.foreign,
        unsigned=tracker.unsigned,
        dead=int(sample.total("penstock_expel_events_dead_total", **to)),
        handed_over=int(sample.total("penstock_expel_events_handed_over_total", **to)),
    )


def render_chaos(result: ChaosResult) -> RenderableType:
    """The tables that the demo ends with."""
    return Group(_title(result), _counts(result), Text(), _lags(result), render_loss(result.ledger))


def _title(result: ChaosResult) -> Text:
    words = f"{result.broker}, {result.seconds} s: {SHAKY} was down for {result.outage_s} s, "
    end = "nothing lost" if result.good else f"{result.lost} lost"
    return Text(words + end, style="bold green" if result.good else "bold red")


def _counts(result: ChaosResult) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "accepted", "delivered", "duplicates", "lost", "dead", "altered", "handed over"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, arrivals in result.destinations.items():
        bad = (arrivals.lost, arrivals.dead, arrivals.wrong + arrivals.foreign + arrivals.unsigned)
        table.add_row(
            Text(name, style="green" if arrivals.good else "red"),
            f"{result.accepted:,}",
            f"{arrivals.delivered:,}",
            f"{arrivals.duplicates:,}",
            *(Text(f"{count:,}", style="bold red" if count else "bold") for count in bad),
            f"{arrivals.handed_over:,}",
        )
    return table


def _lags(result: ChaosResult) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for phase in PHASES:
        table.add_row(
            f"{STEADY} {phase} the outage", spread(result.steady_lag_ms[phase]), Text("E2E lag P50 P95 P99", "dim")
        )
    table.add_row(f"{SHAKY} waiting at most", f"{result.most_waiting:,}", Text("events, on disk", "dim"))
    table.add_row(f"{SHAKY} up to date again", f"{result.recovery_s} s", Text("after its return", "dim"))
    return table
