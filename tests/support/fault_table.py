"""The fault table: one row per trial, printed at the end of a test run, also when tests run in several workers."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import damage_table

PROPERTY = "fault_row"
HEAD = (
    f"{'fault':<44} {'broker':<6} {'acked':>8} {'arrived':>8} {'dead':>5} {'twice':>6} {'share':>6} {'resent':>6} {'lost':>5} "
    f"{'removed':>7} {'recovery':>9} {'ack gap':>8}  peak RSS, MB; seed; answers"
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one trial measured.

    duplicates: deliveries beyond the first of events that the client sent once; sent_again: of those that it sent again.
    removed: events taken out of the stream on purpose, by retention or damage, and reported in exactly this number.
    recovery: seconds until a fresh event got through. gap: longest time without an acknowledgement. peak_rss in MB.
    """

    fault: str
    broker: str
    acknowledged: int
    delivered: int
    dead: int
    duplicates: int
    sent_again: int
    lost: int
    recovery: float | None
    gap: float | None
    peak_rss: dict[str, int]
    seed: int
    answers: dict[str, int]
    removed: int = 0

    @property
    def share(self) -> float:
        """Duplicates of the acknowledged events, 0 to 1."""
        return self.duplicates / max(1, self.acknowledged)

    def text(self) -> str:
        """One line under HEAD."""
        memory = " ".join(f"{name}={peak}" for name, peak in self.peak_rss.items())
        answers = " ".join(f"{status}:{count}" for status, count in self.answers.items())
        return (
            f"{self.fault:<44} {self.broker:<6} {self.acknowledged:>8} {self.delivered:>8} {self.dead:>5} "
            f"{self.duplicates:>6} {self.share:>6.2%} {self.sent_again:>6} {self.lost:>5} "
            f"{self.removed:>7} {_seconds(self.recovery):>9} {_seconds(self.gap):>8}  {memory}; {self.seed}; {answers}"
        )

    def as_property(self) -> tuple[str, object]:
        """For a test's `record_property`; travels from worker to controller."""
        return PROPERTY, dataclasses.asdict(self)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that have rows."""
    rows = [Row(**value) for value in _properties(terminalreporter, PROPERTY)]
    if rows:
        terminalreporter.section("faults")
        terminalreporter.write_line(HEAD)
        for row in sorted(rows, key=lambda row: (row.fault, row.broker)):
            terminalreporter.write_line(row.text())
    damaged = [damage_table.Damaged(**value) for value in _properties(terminalreporter, damage_table.PROPERTY)]
    if damaged:
        terminalreporter.section("the log, damaged")
        for line in damage_table.table(damaged):
            terminalreporter.write_line(line)


def _properties(terminalreporter: pytest.TerminalReporter, wanted: str) -> list[Any]:
    """The values of this name that tests recorded."""
    return [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == wanted
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
