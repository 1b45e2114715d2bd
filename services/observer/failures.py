"""What the dead letters say about each destination: how many, when, and their common causes. Bounded whatever comes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.causes import Cause, Causes
from services.core.letter import DeadLetter
from services.core.pipes import PipeFile

CAUSES = 50
"""Kept by name for each destination; the rarest of more are counted together."""

Name = tuple[str, str]
"""Pipe and destination."""


@dataclass(slots=True)
class Failures:
    """Of one destination. last: ms, the newest first failure; None without letters."""

    causes: Causes = field(default_factory=lambda: Causes(CAUSES))
    last: int | None = None

    @property
    def letters(self) -> int:
        """How many were read."""
        return self.causes.letters

    def since(self, when: int) -> list[Cause]:
        """The causes that were seen at or after `when` (ms), the most frequent first. Their counts are of all times."""
        return [cause for cause in self.causes.most_common() if cause.last >= when]


class FailureBook:
    """By destination of the pipe file, and no other: what else a letter may name takes no memory."""

    def __init__(self, pipes: PipeFile) -> None:
        self._by_name = {
            (name, destination.name): Failures()
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
        }

    def note(self, letter: DeadLetter) -> str:
        """Count one letter; "", or why it is no destination's: `no_destination` (a transform gave up), `unknown_destination`."""
        if not letter.destination:
            return "no_destination"
        failures = self._by_name.get((letter.pipe, letter.destination))
        if failures is None:
            return "unknown_destination"
        failures.causes.add(letter)
        failures.last = max(failures.last or letter.first_failure, letter.first_failure)
        return ""

    def all(self) -> Mapping[Name, Failures]:
        """Every destination, in the pipe file's order."""
        return self._by_name
