"""Groups dead letters by cause: the reason, and the detail without the parts that differ between events."""

import re
from dataclasses import asdict, dataclass
from functools import lru_cache

from services.core.security.masking import mask_text
from services.core.times import format_time
from services.core.undelivered.dead_letter import DeadLetter, Position

OTHER = "other"
"""The reason of all causes that are too rare to be listed."""

_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`")
_FIELD = re.compile(r"field .{1,500}?: expected \S+( NOT NULL)?, found ")
"""How the detail of a `schema_mismatch` begins."""
_PLACE = re.compile(r"\['[^']*'\]|\[\d+\]")
_VARYING = re.compile(r"\b(?=[\w.:+-]*\d)[\w.:+-]*\w")
_STATUS = re.compile(r"http_(\d{3})")
_MAX_ID = 256


@lru_cache(4096)
def normalise(detail: str) -> str:
    """The detail with placeholders for quoted parts, words with a digit (numbers, ids, times), and secrets.

    The name and type of a field stay, without indexes and keys. So there is a line for each field and kind of value.
    """
    masked = mask_text(detail)
    field = _FIELD.match(masked)
    begin = "" if field is None else _PLACE.sub("[]", field[0])
    rest = masked if field is None else masked[field.end() :]
    return begin + " ".join(_VARYING.sub("#", _QUOTED.sub("'…'", rest)).split())


@dataclass(frozen=True, slots=True)
class Example:
    """One dead letter of a cause. event_id and detail are for a person, without secrets."""

    position: Position
    event_id: str | None
    detail: str

    @classmethod
    def of(cls, letter: DeadLetter) -> "Example":
        """The shown part of this dead letter."""
        event_id = letter.event_id
        shown = None if event_id is None else mask_text(event_id[:_MAX_ID])
        return cls(letter.position, shown, mask_text(letter.detail))


@dataclass(slots=True)
class Cause:
    """One cause. first, last: ms, when its first and last event became dead letters. example: the newest dead letter."""

    reason: str
    detail: str
    count: int
    first: int
    last: int
    example: Example

    @property
    def status(self) -> int | None:
        """The status of the receiver's answer, if that was the reason."""
        match = _STATUS.fullmatch(self.reason)
        return None if match is None else int(match[1])

    def as_json(self) -> dict[str, object]:
        """Times in RFC 3339."""
        return {
            "reason": self.reason,
            "status": self.status,
            "detail": self.detail,
            "count": self.count,
            "first_seen": format_time(self.first),
            "last_seen": format_time(self.last),
            "example": {**asdict(self.example), "position": str(self.example.position)},
        }

    def absorb(self, other: "Cause") -> None:
        """Add the other's counts."""
        self.count += other.count
        self.first = min(self.first, other.first)
        if other.last >= self.last:
            self.last, self.example = other.last, other.example


class Causes:
    """About the `limit` most frequent causes. At most twice as many are kept; then the rarest are counted as OTHER.

    The sum of all counts is exact. A cause that was counted as OTHER and occurs again begins at 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: dict[tuple[str, str], Cause] = {}
        self._other: Cause | None = None
        self.letters = 0

    def add(self, letter: DeadLetter) -> None:
        """Count one dead letter."""
        self.letters += 1
        seen = letter.dead_since
        one = Cause(letter.reason, normalise(letter.detail), 1, seen, seen, Example.of(letter))
        known = self._groups.get((one.reason, one.detail))
        if known is not None:
            known.absorb(one)
            return
        self._groups[one.reason, one.detail] = one
        if len(self._groups) > 2 * self._limit:
            self._merge_rarest()

    def _merge_rarest(self) -> None:
        ranked = sorted(self._groups.values(), key=_rank)
        self._groups = {(cause.reason, cause.detail): cause for cause in ranked[: self._limit]}
        for cause in ranked[self._limit :]:
            if self._other is None:
                self._other = Cause(OTHER, "causes too rare to be named", 0, cause.first, cause.last, cause.example)
            self._other.absorb(cause)

    def most_common(self) -> list[Cause]:
        """The most frequent first; OTHER last."""
        named = sorted(self._groups.values(), key=_rank)
        return named if self._other is None else [*named, self._other]


def _rank(cause: Cause) -> tuple[int, int]:
    """The most frequent first; of equals the latest."""
    return -cause.count, -cause.last
