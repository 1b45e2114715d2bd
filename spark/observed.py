"""Counts and lags of a batch, taken while it runs: one pass, no second look at the events."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pyspark.sql import Column, Observation
from pyspark.sql import functions as f

from services.core.ledger.sets import Sets

COUNTS_WITHIN_S = 30.0
ORIGINS = "origins"
"""Names what was gathered of them (`spark.origins.gather`)."""
STEPS = 200
"""Lags that differ by less than about 1/STEPS are counted as one; so none is off by more than 0.26 %."""
_MOST_STEPS = 1 << 15
"""More than there are between minus and plus 6,000 years; the aggregate is exact up to three quarters of it."""


def count_by_lag(lag_ms: Column) -> Column:
    """An expression for `DataFrame.observe`: how many events by lag, for `read_lags`."""
    step = f.round(f.signum(lag_ms) * f.log1p(f.abs(lag_ms)) * STEPS).cast("int")
    return f.call_function("approx_top_k", step, f.lit(_MOST_STEPS), f.lit(_MOST_STEPS))


def in_text(counts: Column) -> Column:
    """What `count_by_lag` gives as one text: each value of a list that comes out of Java is a call of its own.

    Not for a lag from `age` in the plan of a stream, where Spark wants such an aggregate bare.
    """
    texts = f.transform(
        counts, lambda each: f.concat_ws(":", each["item"].cast("string"), each["count"].cast("string"))
    )
    return f.array_join(texts, " ")


def age(time: Column) -> Column:
    """How many ms an event time lies before `began`."""
    return f.unix_millis(f.current_timestamp()) - f.unix_millis(time)


def began() -> Column:
    """An expression for `DataFrame.observe`: `began`, when Spark began with the batch, ms; null without events."""
    return f.max(f.unix_millis(f.current_timestamp())).alias("began")


def clock_now() -> Column:
    """The worker's clock in ms, anew for every row: `now()` is one moment of the whole batch."""
    return f.expr("reflect('java.lang.System', 'currentTimeMillis')").cast("long")


def read_lags(observed: str | Sequence[Mapping[str, int]], *, later_ms: int = 0) -> Counter[int]:
    """How many events by lag in ms, with `later_ms` added to each, from what `count_by_lag` gave, or of that `in_text`.

    Within 0.26 % of what was observed, and exact below 190 ms.
    """
    if isinstance(observed, str):
        pairs = [(int(step), int(events)) for step, _, events in (each.partition(":") for each in observed.split())]
    else:
        pairs = [(each["item"], each["count"]) for each in observed]
    found: Counter[int] = Counter()
    for step, events in pairs:
        found[_lag_at(step) + later_ms] += events
    return found


@lru_cache(maxsize=_MOST_STEPS)
def _lag_at(step: int) -> int:
    lag = round(math.expm1(abs(step) / STEPS))
    return lag if step > 0 else -lag


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


@dataclass(slots=True)
class BatchReport:
    """What one batch of a pipe did. dead: dead letters by reason. Lags: events by now - event time in ms, at the start and at
    the end of the batch. took: written events by ms from there to here. sets: what became of which origins; empty when
    nobody asks."""

    pipe: str
    read: int = 0
    written: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    lag_in: Counter[int] = field(default_factory=Counter)
    lag_out: Counter[int] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)
    sets: Sets = field(default_factory=Sets)
