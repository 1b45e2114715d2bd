"""What is known of a batch: how many events it read and wrote, their lags, and which of them passed, were filtered or are dead.

Spark gathers all of it while the batch runs: no second pass over the events. Origins and lags are gathered as one text, because
each value of a list that comes out of Java is a call of its own.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import orjson
from pyroaring import BitMap
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as f

from services.core import metrics
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.accumulator import SetKey, Sets
from services.core.ledger.minute import minute_of
from services.core.ledger.report import MAX_NUMBER, Outcome
from spark.java import is_observed
from spark.jvm.classes import LAGS
from spark.records import ORIGINS_READ
from spark.transforms.view import header

NODE: Final = "transform"
"""This service's name in reports and dead letters."""
OBSERVED_WITHIN_S = 30.0
ORIGINS = "origins"
"""Names the gathered origins among the observed values."""
STEPS = 200
"""Lags that differ by less than about 1/STEPS are counted as one; so none is off by more than 0.26 %. As in CountByLag.scala."""


@dataclass(slots=True)
class BatchReport:
    """What one batch of a pipe did.

    dead: dead letters by reason. lag_in, lag_out: events by now - event time in ms, at the start and at the end of the batch.
    took: written events by the ms between these two. sets: the outcome of each origin; empty without a ledger.
    """

    pipe: str
    read: int = 0
    written: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    lag_in: Counter[int] = field(default_factory=Counter)
    lag_out: Counter[int] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)
    sets: Sets = field(default_factory=Sets)


def count_by_lag(lag_ms: Column) -> Column:
    """An expression for `DataFrame.observe`: the number of events by lag, for `read_lags`."""
    return f.call_function(LAGS, lag_ms)


def age(time: Column) -> Column:
    """The ms from an event time to `began`."""
    return f.unix_millis(f.current_timestamp()) - f.unix_millis(time)


def began() -> Column:
    """An expression for `DataFrame.observe`: `began`, when Spark began with the batch, in ms; null without events."""
    return f.max(f.unix_millis(f.current_timestamp())).alias("began")


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
    """The observed values. Call it after the action. Raises NothingObserved after OBSERVED_WITHIN_S."""
    deadline = time.monotonic() + OBSERVED_WITHIN_S
    while not is_observed(observation):
        if time.monotonic() > deadline:
            raise NothingObserved
        time.sleep(0.001)
    return observation.get


Origins = dict[tuple[str, int], BitMap]
"""Numbers by incarnation and partition."""
_NONE = BitMap()
_PREFIX = re.compile(r"([a-z0-9]{1,64}):(\d{1,9})")
_COUNT = re.compile(r"#(\d{1,9})\b")
_NUMBER = re.compile(r"[0-9]{1,10}")
_DIGITS_AND_COMMA = frozenset("0123456789,")


def with_origin(records: DataFrame, condition: Column | None = None, *, timed: bool = False) -> DataFrame:
    """Records with the column ORIGINS_READ, filled where the condition holds. timed: each origin with its time in ms.

    In a column of its own, because there it is generated code; an aggregate interprets its arguments, at twice the cost.
    """
    origin = header(ORIGIN).cast("string")
    if timed:
        origin = f.concat(origin, f.lit(":"), f.unix_millis(f.col("timestamp")).cast("string"))
    return records.withColumn(ORIGINS_READ, origin if condition is None else f.when(condition, origin))


def gather_origins() -> Column:
    """An aggregate over ORIGINS_READ: all origins, as one text."""
    return f.array_join(f.collect_list(f.col(ORIGINS_READ)), " ")


def split_count(text: str) -> tuple[int, str]:
    """The number of records that a gathered text declares (0 when it declares none), and its origins."""
    return sum(map(int, _COUNT.findall(text))), _COUNT.sub("", text)


def parse_origins(text: str, pipe: str, *, events: int = 0) -> Origins:
    """The origins in a gathered text, which came from so many events.

    Events without an origin, or with a malformed one, were written by others: they are counted and left out.
    """
    parts: dict[str, list[str]] = {}
    origins = text.split()
    if len(origins) < events:
        metrics.LEDGER_OUTSIDE.labels(NODE, pipe, "no_origin").inc(events - len(origins))
    for origin in origins:
        prefix, _, number = origin.rpartition(":")
        parts.setdefault(prefix, []).append(number)
    found: Origins = {}
    bad = 0
    for prefix, numbers in parts.items():
        place = _PREFIX.fullmatch(prefix)
        good = _parse_numbers(numbers) if place else []
        bad += len(numbers) - len(good)
        if place and good:
            found.setdefault((place[1], int(place[2])), BitMap()).update(good)
    if bad:
        metrics.LEDGER_OUTSIDE.labels(NODE, pipe, "bad_origin").inc(bad)
    return found


def _parse_numbers(texts: list[str]) -> list[int]:
    joined = ",".join(texts)
    if set(joined) <= _DIGITS_AND_COMMA:
        with suppress(orjson.JSONDecodeError):  # a leading zero, or nothing at all: not ours
            numbers: list[int] = orjson.loads(f"[{joined}]")
            if len(numbers) == len(texts) and max(numbers) < MAX_NUMBER:
                return numbers
    return [number for text in texts if _NUMBER.fullmatch(text) and (number := int(text)) < MAX_NUMBER]


def collect_origins(records: DataFrame, pipe: str) -> Origins:
    """Of records in Spark: executes the frame."""
    return parse_origins(collect_text(records), pipe)


def collect_text(records: DataFrame) -> str:
    """The gathered origins of records in Spark: executes the frame."""
    row = with_origin(records).agg(gather_origins()).first()
    return row[0] if row else ""


def origins_of(records: Sequence[Record], pipe: str, *, counted: bool) -> Origins:
    """Of records that left Spark. counted: those without an origin are counted elsewhere, with all that is read."""
    texts = (origin.decode(errors="replace") for record in records if (origin := record.header(ORIGIN)) is not None)
    return parse_origins(" ".join(texts), pipe, events=0 if counted else len(records))


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
    report: BatchReport, read: Iterable[tuple[str, int]], written: str, dead: Iterable[Origins] = ()
) -> None:
    """Record the outcomes of a batch: origins in the output passed; the rest was filtered, unless it is reported as dead.

    read: gathered origins and the number of events, by source. written: the gathered origins of the output.
    """
    passed = parse_origins(written, report.pipe)
    add_outcome(report.sets, "passed", passed)
    settled = union([passed, *dead])
    for text, events in read:
        add_outcome(report.sets, "filtered", without(parse_origins(text, report.pipe, events=events), settled))


def add_accepted(report: BatchReport, made: str, at_ms: int) -> None:
    """Record new events as accepted, from their gathered origins with times. at_ms: when they arrived."""
    by_minute: dict[int, list[str]] = {}
    for part in made.split():
        origin, _, time = part.rpartition(":")
        by_minute.setdefault(minute_of(int(time), at_ms), []).append(origin)
    for minute, origins in by_minute.items():
        add_outcome(report.sets, "accepted", parse_origins(" ".join(origins), report.pipe), minute)
