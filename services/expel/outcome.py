"""What came of one attempt to deliver, and what an HTTP status says about trying again."""

from collections.abc import Mapping
from dataclasses import dataclass

RECOVERABLE_STATUSES = frozenset({408, 425, 429})
GONE = 410


@dataclass(frozen=True, slots=True)
class Failure:
    """Why events were not delivered.

    reason: a stable word for metrics and dead letters, e.g. `http_503`, `timeout`. detail: for a person, no secrets.
    recoverable: the same attempt may succeed later. retry_after: seconds for which not to try again: the receiver asked for
    them, clamped, or its breaker stays open.
    gone: the receiver wants nothing any more (410). ours: this process or our broker failed, not the receiver; no attempt
    is used up.
    """

    reason: str
    detail: str
    recoverable: bool
    retry_after: float | None = None
    gone: bool = False
    ours: bool = False


Outcome = None | Failure | Mapping[int, Failure]
"""None: everything was delivered. A Failure: nothing was. A mapping: these (by index in the delivery) were not."""


def is_recoverable(status: int) -> bool:
    """408, 425, 429 and 5xx; other 4xx and 3xx (redirects are not followed) are not."""
    return status in RECOVERABLE_STATUSES or status >= 500


def fail_by_status(status: int, excerpt: str = "", retry_after: float | None = None) -> Failure:
    """The failure that a status outside 2xx means. excerpt: the beginning of the answer, printable."""
    detail = f"the receiver answered {status}" + (f": {excerpt}" if excerpt else "")
    return Failure(f"http_{status}", detail, is_recoverable(status), retry_after, gone=status == GONE)
