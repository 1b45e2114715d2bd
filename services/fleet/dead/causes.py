"""Why letters died, grouped: their reason, and their detail without what differs from one event to the next."""

import re
from dataclasses import dataclass

from services.fleet.dead.letter import DeadLetter, Position, format_time

MAX_GROUPS = 1000
OTHER = "(other details)"

_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`")
_VARYING = re.compile(r"\b(?=[\w.:+-]*\d)[\w.:+-]*\w")


def normalise(detail: str) -> str:
    """The detail with quoted parts, and words with a digit (numbers, ids, times), replaced."""
    return " ".join(_VARYING.sub("#", _QUOTED.sub("'…'", detail)).split())


@dataclass(slots=True)
class Cause:
    """first, last: ms, of the first failures. example: the newest letter's position."""

    reason: str
    detail: str
    count: int
    first: int
    last: int
    example: Position

    def as_json(self) -> dict[str, object]:
        """Times in RFC 3339."""
        return {
            "reason": self.reason,
            "detail": self.detail,
            "count": self.count,
            "first_seen": format_time(self.first),
            "last_seen": format_time(self.last),
            "example": str(self.example),
        }


class Causes:
    """At most MAX_GROUPS groups and one more for each reason: what comes then is counted as its OTHER."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], Cause] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count one."""
        key = (letter.reason, normalise(letter.detail))
        if key not in self._groups and len(self._groups) >= MAX_GROUPS:
            key = (letter.reason, OTHER)
        seen = letter.first_failure
        cause = self._groups.setdefault(key, Cause(*key, 0, seen, seen, letter.position))
        cause.count += 1
        cause.first = min(cause.first, seen)
        if seen >= cause.last:
            cause.last, cause.example = seen, letter.position

    def most_common(self) -> list[Cause]:
        """The most frequent first."""
        return sorted(self._groups.values(), key=lambda cause: -cause.count)
