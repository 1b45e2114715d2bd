"""Which dead letters an operator means."""

from dataclasses import asdict, dataclass

from services.core.letter import DeadLetter
from services.core.times import format_time


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters; None: any. since, until: ms, of the first failure, since <= time < until."""

    pipe: str | None = None
    destination: str | None = None
    reason: str | None = None
    since: int | None = None
    until: int | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter is meant."""
        return (
            self.pipe in (None, letter.pipe)
            and self.destination in (None, letter.destination)
            and self.reason in (None, letter.reason)
            and (self.since is None or self.since <= letter.first_failure)
            and (self.until is None or letter.first_failure < self.until)
        )

    def as_json(self) -> dict[str, str]:
        """What was asked for, for the audit."""
        times = {"since", "until"}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: format_time(value) if name in times else value for name, value in given.items()}
