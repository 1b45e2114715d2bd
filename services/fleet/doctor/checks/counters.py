"""What one collection says about counters: the alerts ask how much they grew in ten minutes, and it takes five seconds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.fleet.doctor.facts import Facts, Instance, LogLine

RECENT_S = 600.0
"""As the alerts look back."""


@dataclass(frozen=True, slots=True)
class Moves:
    """A child of a counter that is not 0. count: its growth within RECENT_S, at least. total: since the start of its process.

    when: for a person. is_old: nothing shows that it grew within RECENT_S, and there is no log to ask: no fault, but worth
    knowing. lines: those of the log within RECENT_S. last: when it grew last, seconds since the epoch; 0: unknown.
    """

    instance: Instance
    labels: Mapping[str, str]
    count: int
    total: int
    when: str
    is_old: bool = False
    lines: tuple[LogLine, ...] = ()
    last: float = 0.0

    @property
    def evidence(self) -> list[str]:
        """The count, and the newest line."""
        return [
            f"{self.count} {self.when} ({self.instance.name})",
            *(f"its log: {line.text[:300]}" for line in self.lines[-1:]),
        ]


def find_moves(facts: Facts, metric: str, *events: str, **labels: str) -> Iterator[Moves]:
    """Children of a counter with these labels that grew within RECENT_S, or that may have.

    The signs: a line of the log with one of these events, growth between the two readings, a process that is younger. Where none
    of them is there and the log was read, nothing happened.
    """
    for one, found, value, grown in facts.series(metric, **labels):
        if not value:
            continue
        lines = tuple(
            line
            for line in one.lines
            if line.event in events and line.at > facts.now - RECENT_S and _is_about(line, found)
        )
        age = facts.age_of(one)
        if lines:
            last = max(line.at for line in lines)
            when = f"within ten minutes, the last {format_span(max(0.0, facts.now - last))} ago"
            yield Moves(one, found, max(len(lines), int(grown)), int(value), when, lines=lines, last=last)
        elif grown:
            yield Moves(one, found, int(grown), int(value), f"in {facts.seconds():.0f} s", last=facts.now)
        elif age is not None and age < RECENT_S:
            yield Moves(one, found, int(value), int(value), f"since its start {format_span(age)} ago")
        elif one.log is None:
            when = f"since its start{f' {format_span(age)} ago' if age is not None else ''}; only its log has the time"
            yield Moves(one, found, int(value), int(value), when, is_old=True)


def _is_about(line: LogLine, labels: Mapping[str, str]) -> bool:
    """Whether a line has no other value for any of the labels. No destination is None in a log, and empty in a metric."""
    return all(str(line.fields[name] or "") == value for name, value in labels.items() if name in line.fields)


def format_span(seconds: float) -> str:
    """For a person, in the largest unit of which there are two."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def log_command(one: Instance, words: str) -> str:
    """Shows the newest lines of an instance's log that have one of these words (a pattern of grep -E)."""
    return f"grep -E '{words}' {one.log} | tail -3" if one.log is not None else f"the log of {one.name}: {words}"
