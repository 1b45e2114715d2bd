"""The parts of reports that a newer version wrote and this observer does not know: counted, logged once, shown as a reason.

They appear while an observer is older than another service: during an upgrade in another order than that of docs/upgrading.md,
or on the way back.
"""

from collections import Counter
from collections.abc import Sequence

import structlog

from services.core import metrics
from services.core.version import VERSION
from services.observer.health import WATCHED_MINUTES, Reason

log = structlog.get_logger()

EVERY_PIPE = ""
_HINT = (
    "the rest of these reports counts, and no event is missing because of it. Try: upgrade the observer first "
    "(docs/upgrading.md)"
)


class NewerParts:
    """Of the reports that a follower has read. Memory is bounded by the pipes and the few reasons."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        """By pipe and reason: when it was last seen (ms), and the number."""

    def count(self, pipe: str, now_ms: int, reasons: Sequence[str], detail: str) -> None:
        """Add these parts of one report. pipe: EVERY_PIPE when the report does not say it."""
        for reason, number in Counter(reasons).items():
            metrics.NOT_UNDERSTOOD.labels("report", reason).inc(number)
            _, before = self._seen.get((pipe, reason), (0, 0))
            if not before:
                log.warning("report_of_newer_version", pipe=pipe or None, reason=reason, detail=detail, hint=_HINT)
            self._seen[pipe, reason] = now_ms, before + number

    def as_reasons(self, pipe: str, now_ms: int) -> list[Reason]:
        """Why the figures of this pipe may be incomplete; empty when nothing unknown came lately."""
        since = now_ms - WATCHED_MINUTES * 60_000
        found = sorted(
            f"{number} with an unknown {reason}"
            for (name, reason), (seen_ms, number) in self._seen.items()
            if name in (pipe, EVERY_PIPE) and seen_ms >= since
        )
        if not found:
            return []
        text = f"parts of reports are of a newer version than this observer ({VERSION}): {', '.join(found)}"
        return [("degraded", text)]
