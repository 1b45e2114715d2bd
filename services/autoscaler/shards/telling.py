"""What an operator sees of one stream's decisions: log lines and metrics."""

import re
import time

import structlog

from services.autoscaler.shards.figures import StreamDecision, StreamFigures, StreamMemory
from services.autoscaler.shards.layout import shard_loads
from services.core import metrics

log = structlog.get_logger()

_SAY_AGAIN_S = 300.0
"""How often a reason to hold that stays the same is logged."""

_FIGURES = re.compile(r"[\d.,]+")
"""What may differ between two texts of one reason."""


class Telling:
    """Metrics at each decision; a line at each change, and for a hold when its reason changes, or was not said for minutes."""

    def __init__(self, topic: str, *, dry_run: bool) -> None:
        self._topic, self._dry_run = topic, dry_run
        self._said, self._said_at = "", 0.0

    def tell(self, figures: StreamFigures, decision: StreamDecision, memory: StreamMemory) -> None:
        """memory: as it is after the decision."""
        loads = shard_loads(figures.layout, figures.slots)
        wanted = decision.layout
        verdict = "hold" if wanted is None else ("up" if len(wanted) > len(loads) else "down")
        metrics.AUTOSCALER_DECISIONS.labels(self._topic, verdict).inc()
        metrics.AUTOSCALER_SHARDS.labels(self._topic).set(len(loads))
        metrics.AUTOSCALER_LOAD.labels(self._topic).set(max(loads, default=0.0))
        metrics.AUTOSCALER_UPDATES.labels(self._topic).set(len(memory.updates))
        kind, now = _FIGURES.sub("", decision.reason.partition(":")[0]), time.monotonic()
        if wanted is None and kind == self._said and now - self._said_at < _SAY_AGAIN_S:
            return
        self._said, self._said_at = kind, now
        log.info(
            "shards_decided",
            stream=self._topic,
            decision=verdict,
            reason=decision.reason,
            loads=[round(load, 3) for load in loads],
            full=sorted(figures.full),
            layout=wanted,
            at_once=decision.at_once,
            dry_run=self._dry_run,
        )
