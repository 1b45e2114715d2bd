"""What a batch wrote: told by its records where they pass through this process, else by what Spark gathered meanwhile."""

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from services.core.broker.record import Record
from services.core.event import ORIGIN
from spark.observed import ORIGINS, age, began, count_by_lag, in_text, read_counts, read_lags
from spark.origins import gather, with_origin


class Wanted(Enum):
    """Which origins are asked for. TIMED: each with its event's time."""

    NONE = 0
    PLAIN = 1
    TIMED = 2


class Written(NamedTuple):
    """times: events by their time, ms. origins: as `spark.origins.gather` gives them; empty when none are wanted."""

    times: Counter[int]
    origins: str


def of_records(records: Sequence[Record], wanted: Wanted) -> Written:
    """By the records themselves."""
    times = Counter([record.timestamp for record in records])
    if wanted is Wanted.NONE:
        return Written(times, "")
    if wanted is Wanted.TIMED:
        pairs = [(record.header(ORIGIN), record.timestamp) for record in records]
        found = [b"%b:%d" % (origin, time) for origin, time in pairs if origin is not None]
    else:
        found = [origin for record in records if (origin := record.header(ORIGIN)) is not None]
    return Written(times, b" ".join(found).decode(errors="replace"))


def observe(frame: DataFrame, wanted: Wanted, seen: Observation) -> DataFrame:
    """The frame (columns OUT, and one more), such that executing it tells `seen` what `of_observation` takes."""
    metrics = [in_text(count_by_lag(age(f.col("timestamp")))).alias("lags"), began()]
    if wanted is not Wanted.NONE:
        frame = with_origin(frame, timed=wanted is Wanted.TIMED)
        metrics.append(gather().alias(ORIGINS))
    return frame.observe(seen, *metrics)


def of_observation(seen: Observation) -> Written:
    """By what was observed; times are within 0.26 % of their age. Raises NothingObserved."""
    values = read_counts(seen)
    ages = read_lags(values["lags"])
    times = Counter({values["began"] - lag: events for lag, events in ages.items()})
    return Written(times, values.get(ORIGINS, ""))
