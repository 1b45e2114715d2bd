"""What is known of a batch: how many events it read and wrote, their lags, and which of them passed, were filtered or are dead.

Spark gathers all of it while the batch runs: no second pass over the events. Lags and origins are gathered by aggregates of ours
(`spark/jvm`), in each task; the driver gets a bounded text, however many events there are.
"""

import math
import re
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pyroaring import BitMap
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as f

from services.core import metrics
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.accumulator import SetKey, Sets
from services.core.ledger.minute import MINUTE_MS, minute_of, near_minutes
from services.core.ledger.report import MAX_NUMBER, Outcome
from spark.java import is_observed
from spark.jvm.classes import LAGS, MOMENT
from spark.jvm.classes import ORIGINS as ORIGINS_FUNCTION

NODE: Final = "transform"
"""This service's name in reports and dead letters."""
OBSERVED_WITHIN_S = 120.0
ORIGINS = "origins"
"""Names the gathered origins among the observed values."""
STEPS = 200
"""Lags that differ by less than about 1/STEPS are counted as one; so none is off by more than 0.26 %. As in CountByLag.scala."""


@dataclass(slots=True)
class BatchLags:
    """lag_in, lag_out: events by now - event time in ms, at the start and at the end of the batch, or of the event in real-time
    mode. took: written events by the ms between these two."""

    lag_in: Counter[int] = field(default_factory=Counter)
    lag_out: Counter[int] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class BatchReport:
    """What one batch of a pipe did.

    dead: dead letters by reason. lag_in, lag_out, took: as in `BatchLags`. sets: the outcome of each origin; empty without a
    ledger. minute: of the end of a batch of real-time mode, whose events are timed one by one. earlier: of its lags, those that
    were measured in the minute before that.
    """

    pipe: str
    read: int = 0
    written: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    lag_in: Counter[int] = field(default_factory=Counter)
    lag_out: Counter[int] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)
    sets: Sets = field(default_factory=Sets)
    minute: int | None = None
    earlier: BatchLags = field(default_factory=BatchLags)


def count_by_lag(lag_ms: Column) -> Column:
    """An expression for `DataFrame.observe`: the number of events by lag, for `read_lags`."""
    return f.call_function(LAGS, lag_ms)


def count_by_minute(lag_ms: Column, at_ms: Column, name: str) -> list[Column]:
    """As `count_by_lag`, once for even minutes of the clock and once for odd ones, for `read_minutes`. at_ms: of the measurement.

    A batch of real-time mode lasts 15 s, so it has events of two minutes at most.
    """
    even, odd = _halves(name)
    is_odd = (at_ms / MINUTE_MS).cast("long") % 2 == 1
    return [count_by_lag(f.when(~is_odd, lag_ms)).alias(even), count_by_lag(f.when(is_odd, lag_ms)).alias(odd)]


def read_minutes(row: Mapping[str, Any], name: str, minute: int) -> tuple[Counter[int], Counter[int]]:
    """The lags that were measured in this minute, and those of the minute before."""
    even, odd = (read_lags(row[one]) for one in _halves(name))
    return (odd, even) if minute % 2 else (even, odd)


def _halves(name: str) -> tuple[str, str]:
    return name, f"{name}_odd"


def age(time: Column) -> Column:
    """The ms from an event time to `began`."""
    return _now() - f.unix_millis(time)


def began() -> Column:
    """An expression for `DataFrame.observe`: `began`, when Spark began with the batch, in ms; null without events."""
    return f.max(_now()).alias("began")


def _now() -> Column:
    """When Spark began with the batch, in ms. A plain number would be in the code that Spark generates, and each batch would
    compile its own code."""
    return f.call_function(MOMENT, f.unix_millis(f.current_timestamp()))


def clock_now() -> Column:
    """The worker's clock in ms, read for every row: `now()` is one moment of the whole batch."""
    return f.expr("reflect('java.lang.System', 'currentTimeMillis')").cast("long")


def read_lags(observed: str, *, later_ms: int = 0) -> Counter[int]:
    """The number of events by lag in ms, with `later_ms` added to each, from `count_by_lag`.

    Within 0.26 % of the true lag, and exact below 190 ms.
    """
    found: Counter[int] = Counter()
    for step, _, events in (each.partition(":") for each in observed.split()):
        found[_lag_at(int(step)) + later_ms] += int(events)
    return found


@lru_cache(maxsize=1 << 15)
def _lag_at(step: int) -> int:
    lag = round(math.expm1(abs(step) / STEPS))
    return lag if step > 0 else -lag


class NothingObserved(Exception):
    """A batch ran and its counts did not arrive: the outcome of its events is unknown."""


def read_observed(observation: Observation) -> dict[str, Any]:
    """The observed values. Call it after the action. Raises NothingObserved after OBSERVED_WITHIN_S, and when Spark took what is
    observed out of the plan."""
    deadline = time.monotonic() + OBSERVED_WITHIN_S
    while not is_observed(observation):
        if time.monotonic() > deadline:
            raise NothingObserved
        time.sleep(0.001)
    if not (found := observation.get):
        raise NothingObserved("Spark's plan has no part that counts the events")
    return found


Origins = dict[tuple[str, int], BitMap]
"""Numbers by incarnation and partition."""
OriginsByMinute = dict[int | None, Origins]
"""Under None: without a minute."""
_NONE = BitMap()
_ORIGIN = re.compile(rb"([a-z0-9]{1,64}):([0-9]{1,9}):([0-9]{1,10})")


def gather_origins(where: Column | None = None, minute: Column | None = None) -> Column:
    """An aggregate over raw records or records to write: the origins in their headers, for `read_origins`.

    where: without the others. minute: a BIGINT for each; the result is by minute.
    """
    headers = f.col("headers") if where is None else f.when(where, f.col("headers"))
    return f.call_function(ORIGINS_FUNCTION, headers, *([] if minute is None else [minute]))


def minute_at(time: Column, arrival: int) -> Column:
    """`minute_of` for a timestamp, as an expression."""
    first, last = near_minutes(arrival)
    own = f.floor(f.unix_millis(time) / MINUTE_MS)
    return f.when(own.between(first, last), own).otherwise(arrival // MINUTE_MS).cast("bigint")


class Gathered(NamedTuple):
    """Gathered origins. malformed, valid: the numbers of headers; a record without one is in neither."""

    origins: OriginsByMinute
    malformed: int = 0
    valid: int = 0

    @property
    def all(self) -> Origins:
        """Those without minute."""
        return self.origins.get(None, {})

    def counted(self, pipe: str, events: int | None = None) -> Origins:
        """As `all`, and count what others wrote: malformed origins, and, if the number of records is known, those without one."""
        missing = 0 if events is None else events - self.malformed - self.valid
        for reason, outside in (("no_origin", missing), ("bad_origin", self.malformed)):
            if outside > 0:
                metrics.LEDGER_OUTSIDE.labels(NODE, pipe, reason).inc(outside)
        return self.all


NO_ORIGINS = Gathered({})


def read_origins(text: str) -> Gathered:
    """From the text of `gather_origins`, whose form is in CollectOrigins.scala."""
    malformed, valid, *sets = text.split() or ("0", "0")
    found: OriginsByMinute = {}
    for each in sets:
        incarnation, partition, minute, numbers = each.split(":")
        of_minute = found.setdefault(int(minute) if minute else None, {})
        of_minute[incarnation, int(partition)] = BitMap.deserialize(b64decode(numbers))
    return Gathered(found, int(malformed), int(valid))


def collect_origins(records: DataFrame) -> Gathered:
    """Of records in Spark: executes the frame."""
    row = records.agg(gather_origins()).first()
    return read_origins(row[0]) if row else NO_ORIGINS


def origins_of(records: Sequence[Record], *, arrival: int | None = None) -> Gathered:
    """Of records that left Spark. arrival: of new events, in ms; the result is by minute."""
    parts: dict[tuple[int | None, bytes, bytes], list[int]] = {}
    malformed = valid = 0
    for record in records:
        origin = record.header(ORIGIN)
        if origin is None:
            continue
        match = _ORIGIN.fullmatch(origin)
        if match is None or (number := int(match[3])) >= MAX_NUMBER:
            malformed += 1
            continue
        minute = None if arrival is None else minute_of(record.timestamp, arrival)
        parts.setdefault((minute, match[1], match[2]), []).append(number)
        valid += 1
    found: OriginsByMinute = {}
    for (minute, incarnation, partition), numbers in parts.items():
        known = found.setdefault(minute, {}).setdefault((incarnation.decode(), int(partition)), BitMap())
        known.update(numbers)
    return Gathered(found, malformed, valid)


def without(these: Origins, others: Origins) -> Origins:
    """Those that are not among the others."""
    return {place: numbers - others.get(place, _NONE) for place, numbers in these.items()}


def union(several: Iterable[Origins]) -> Origins:
    found: Origins = {}
    for origins in several:
        for place, numbers in origins.items():
            found[place] = found.get(place, _NONE) | numbers
    return found


def add_outcome(sets: Sets, outcome: Outcome, origins: Origins, minute: int | None = None) -> None:
    """Record this outcome of these origins. minute: of those that are accepted."""
    for (incarnation, partition), numbers in origins.items():
        if numbers:
            known = sets.numbers(SetKey(outcome, incarnation, partition, minute))
            known |= numbers


def add_settled(
    report: BatchReport, read: Iterable[tuple[Gathered, int]], written: Gathered, dead: Iterable[Origins] = ()
) -> None:
    """Record the outcomes of a batch: origins in the output passed; the rest was filtered, unless it is reported as dead.

    read: gathered origins and the number of events, by source. written: the gathered origins of the output.
    """
    add_outcome(report.sets, "passed", written.all)
    settled = union([written.all, *dead])
    for gathered, events in read:
        add_outcome(report.sets, "filtered", without(gathered.counted(report.pipe, events), settled))


def add_accepted(report: BatchReport, made: Gathered) -> None:
    """Record new events, gathered by their minute, as accepted."""
    for minute, origins in made.origins.items():
        add_outcome(report.sets, "accepted", origins, minute)
