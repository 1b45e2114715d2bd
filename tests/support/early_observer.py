"""The observer, ten minutes ahead of its time: what everybody said a moment ago, it hears then. So all minutes are final at once.

`python -m tests.support.early_observer`, with the arguments of `python -m services.observer`. Start it when all is done.
"""

import tests.upgrade.former_names  # noqa: F401  # it runs under the last release, too

# isort: split
import os
import sys
import time
from functools import partial

import msgspec

from services.core.ledger.report import Report
from services.core.process.lifecycle import run_service
from services.observer import app
from services.observer.follower import Follower
from services.observer.ledger import liveness
from services.observer.ledger.liveness import Liveness
from services.observer.settings import ObserverSettings

AHEAD_MS = 10 * 60_000


def _hear_later() -> None:
    hear = Liveness.record

    def later(self: Liveness, report: Report, received_ms: int) -> None:
        at_ms = report.at_ms + AHEAD_MS
        del received_ms
        hear(self, msgspec.structs.replace(report, at_ms=at_ms), at_ms)

    Liveness.record = later  # type: ignore[method-assign]
    liveness.TAKEOVER_MS = 5_000  # what was killed is replaced already
    early = partial(Follower, now_ms=lambda: int(time.time() * 1000) + AHEAD_MS)
    app.Follower = early  # type: ignore[attr-defined,assignment]


if __name__ == "__main__":
    _hear_later()
    sys.exit(run_service(ObserverSettings, app.start, sys.argv[1:], dict(os.environ)))
