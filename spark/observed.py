"""Counts and event times of a batch, taken while it runs: one pass, no second look at the events."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, Observation
from pyspark.sql import functions as f

from services.core.ledger.sets import Sets

COUNTS_WITHIN_S = 30.0
ORIGINS = "origins"
"""Names what was gathered of them (`spark.origins.gather`)."""
QUANTILES = 64
"""So many event times stand for all those of a batch."""


def count_and_times(time: Column, *more: Column) -> list[Column]:
    """Expressions for `DataFrame.observe`: `events`, `times` (event times in ms at even quantiles), and `more`."""
    at = f.array(*[f.lit((index + 0.5) / QUANTILES) for index in range(QUANTILES)])
    return [
        f.count(f.lit(1)).alias("events"),
        f.percentile_approx(f.unix_millis(time), at, f.lit(1000)).alias("times"),
        *more,
    ]


class NothingObserved(Exception):
    """A batch ran and its counts did not come: it cannot be said what happened to its events."""


def read_counts(observation: Observation) -> dict[str, Any]:
    """What was observed; call it after the action. Raises NothingObserved after COUNTS_WITHIN_S (`get` waits for ever)."""
    deadline = time.monotonic() + COUNTS_WITHIN_S
    while not _is_complete(observation):
        if time.monotonic() > deadline:
            raise NothingObserved
        time.sleep(0.001)
    return observation.get


def _is_complete(observation: Observation) -> bool:
    assert observation._jo is not None
    return bool(observation._jo.future().isCompleted())


def lags(events: int, times: list[int] | None, now_ms: int) -> list[int]:
    """About one lag in ms for each of the events, from their quantiles."""
    if not times or events <= 0:
        return []
    return [now_ms - times[index * len(times) // events] for index in range(events)]


@dataclass(slots=True)
class BatchReport:
    """What one batch of a pipe did. dead: dead letters by reason. Lags in ms: now - event time, at the start and at the
    end of the batch. seconds: how long handling it took. sets: what became of which origins; empty when nobody asks."""

    pipe: str
    read: int = 0
    written: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    lag_in: list[int] = field(default_factory=list)
    lag_out: list[int] = field(default_factory=list)
    seconds: float = 0.0
    sets: Sets = field(default_factory=Sets)
