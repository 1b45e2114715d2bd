"""The demo's result: as a table for a person, as one JSON object for a program."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.lag import LagHistogram
from services.core.scrape import Sample
from services.fleet.demo.fidelity import Loss, render_loss
from services.fleet.demo.flights import DESTINATION, PIPE, STREAM
from services.fleet.demo.tracker import Tracker
from services.fleet.status import quantiles
from services.fleet.status_view import millis


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Counts of events; times in ms as P50, P95, P99; seconds: from the first event sent to the last one delivered.

    ledger: what the observer says of the same events.
    """

    broker: str
    sent: int
    accepted: int
    transformed: int
    delivered: int
    duplicates: int
    lost: int
    wrong: int
    foreign: int
    unsigned: int
    dead: int
    seconds: float
    ingest_time_ms: dict[str, float]
    transit_time_ms: dict[str, float]
    expel_time_ms: dict[str, float]
    e2e_lag_ms: dict[str, float]
    ledger: Loss

    @property
    def good(self) -> bool:
        """Nothing lost, nothing altered, nothing invented."""
        return self.accepted == self.sent and not (
            self.lost or self.wrong or self.foreign or self.unsigned or self.dead
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, and the E2E lags once more by their own names."""
        flat = {f"e2e_lag_{name}_ms": value for name, value in self.e2e_lag_ms.items()}
        return {"ok": self.good, **asdict(self), **flat}


def make_result(
    broker: str, sent: int, accepted: int, tracker: Tracker, sample: Sample, seconds: float, loss: Loss
) -> DemoResult:
    """Put together what client, receiver, services and observer counted."""
    e2e = LagHistogram()
    e2e.observe(tracker.lags_ms)
    to = {"pipe": PIPE, "destination": DESTINATION}
    dead = sample.total("penstock_transform_events_dead_total") + sample.total("penstock_expel_events_dead_total")
    return DemoResult(
        broker=broker,
        sent=sent,
        accepted=accepted,
        transformed=int(sample.total("penstock_transform_events_written_total", pipe=PIPE)),
        delivered=len(tracker.delivered),
        duplicates=tracker.duplicates,
        lost=tracker.lost,
        wrong=tracker.wrong,
        foreign=tracker.foreign,
        unsigned=tracker.unsigned,
        dead=int(dead),
        seconds=round(seconds, 1),
        ingest_time_ms=quantiles(sample.lag("penstock_ingest_time_seconds", stream=STREAM)),
        transit_time_ms=quantiles(sample.lag("penstock_transit_time_seconds", **to)),
        expel_time_ms=quantiles(sample.lag("penstock_expel_time_seconds", **to)),
        e2e_lag_ms=quantiles(e2e),
        ledger=loss,
    )


def render_result(result: DemoResult) -> RenderableType:
    """The tables that the demo ends with."""
    table = Table(box=None, show_header=False, pad_edge=False, title=_title(result), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    counts = [
        ("accepted", result.accepted, "stored durably and acknowledged"),
        ("transformed", result.transformed, "classified by PySpark"),
        ("delivered", result.delivered, "distinct, signed, each checked"),
        ("duplicates", result.duplicates, "delivered again"),
        ("lost", result.lost, "accepted, not delivered"),
    ]
    for name, count, meaning in counts:
        bad = name == "lost" and count
        table.add_row(name, Text(f"{count:,}", style="bold red" if bad else "bold"), meaning)
    times = [
        ("ingest time", result.ingest_time_ms, "a request's way to durable"),
        ("transit time", result.transit_time_ms, "ingest, Spark, to expel"),
        ("expel time", result.expel_time_ms, "expel to the 2xx"),
        ("E2E lag", result.e2e_lag_ms, "all of it, each event"),
    ]
    for name, values, meaning in times:
        table.add_row(f"{name} P50 P95 P99", "  ".join(millis(value) for value in values.values()), f"{meaning}")
    return Group(table, render_loss(result.ledger))


def _title(result: DemoResult) -> Text:
    words = [f"{count} {what}" for what, count in _wrongs(result) if count]
    text = "nothing lost" if result.good else ", ".join(words)
    return Text(f"{result.broker}, {result.seconds} s: {text}", style="bold green" if result.good else "bold red")


def _wrongs(result: DemoResult) -> list[tuple[str, int]]:
    return [
        ("not accepted", result.sent - result.accepted),
        ("lost", result.lost),
        ("altered", result.wrong),
        ("foreign", result.foreign),
        ("badly signed requests", result.unsigned),
        ("dead letters", result.dead),
    ]
