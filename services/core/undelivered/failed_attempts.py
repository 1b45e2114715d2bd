"""The failed attempts to deliver an event: when each ended, and with which failure. For the story of the event.

They travel where something is written about the event anyway: in a header of its records in the topics of retries, parked events
and dead letters, and in the report of a delivery that needed more than one attempt (`ledger.report.FailureSet`). As text:
`ms:reason`, joined by commas, oldest first. Versions before 0.2 lose it, and so does a redrive; the counts of attempts are apart.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_KEPT = 50
"""Of one event; the newest."""
PARTIAL = "partial"
"""The reason of an attempt after which the receiver named several failures in its answer."""
_MAX_REASON = 40
_OTHER = re.compile(r"[^A-Za-z0-9_.-]")
_ATTEMPT = re.compile(r"(\d{1,15}):([A-Za-z0-9_.-]{1,40})")


class FailedAttempt(NamedTuple):
    """at_ms: when it ended. reason: a stable word as in dead letters."""

    at_ms: int
    reason: str

    @classmethod
    def of(cls, at_ms: int, reason: str) -> "FailedAttempt":
        """With a reason that can be packed."""
        return cls(at_ms, _OTHER.sub("_", reason[:_MAX_REASON]) or "unknown")


def pack_attempts(attempts: Sequence[FailedAttempt]) -> bytes:
    """The newest MAX_KEPT."""
    return ",".join(f"{at_ms}:{reason}" for at_ms, reason in attempts[-MAX_KEPT:]).encode()


def parse_attempts(data: bytes | str | None) -> list[FailedAttempt]:
    """As far as it can be read: it explains, and decides nothing. Never raises."""
    text = data.decode(errors="replace") if isinstance(data, bytes) else data or ""
    found: Iterable[re.Match[str] | None] = (_ATTEMPT.fullmatch(part) for part in text.split(",")[-MAX_KEPT:])
    return [FailedAttempt(int(match[1]), match[2]) for match in found if match is not None]
