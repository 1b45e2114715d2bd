"""Origins of a batch: gathered by Spark into one text while it runs, read in bulk.

One text, because each value of a list that comes out of Java is a call of its own.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import orjson
from pyroaring import BitMap
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from services.core import metrics
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.minute import minute_of
from services.core.ledger.report import MAX_NUMBER, Outcome
from services.core.ledger.sets import SetKey, Sets
from spark.dead_letters import NODE
from spark.observed import BatchReport
from spark.shapes import ORIGINS_READ
from spark.view import header

Origins = dict[tuple[str, int], BitMap]
"""Numbers by incarnation and partition."""
COLUMN = ORIGINS_READ
_PREFIX = re.compile(r"([a-z0-9]{1,64}):(\d{1,9})")
_COUNT = re.compile(r"#(\d{1,9})\b")
_NUMBER = re.compile(r"[0-9]{1,10}")
_DIGITS_AND_COMMA = frozenset("0123456789,")


def with_origin(records: DataFrame, condition: Column | None = None, *, timed: bool = False) -> DataFrame:
    """Records with what `gather` needs in COLUMN: of those for which the condition holds. timed: each with its time in ms.

    In a column of its own, because it is generated code there; an aggregate interprets what it is given, at twice the cost.
    """
    origin = header(ORIGIN).cast("string")
    if timed:
        origin = f.concat(origin, f.lit(":"), f.unix_millis(f.col("timestamp")).cast("string"))
    return records.withColumn(COLUMN, origin if condition is None else f.when(condition, origin))


def gather() -> Column:
    """An aggregate over what `with_origin` gave: the origins, as one text."""
    return f.array_join(f.collect_list(f.col(COLUMN)), " ")


def split_count(text: str) -> tuple[int, str]:
    """From what was gathered of ORIGINS_READ: of how many records it says it is (0 when it does not say), and the origins."""
    return sum(map(int, _COUNT.findall(text))), _COUNT.sub("", text)


def read_origins(text: str, pipe: str, *, events: int = 0) -> Origins:
    """From what `gather` gave, of so many events. Those without an origin, or with something else in its place, were
    written by others: they are counted and left out."""
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
        good = _read_numbers(numbers) if place else []
        bad += len(numbers) - len(good)
        if place and good:
            found.setdefault((place[1], int(place[2])), BitMap()).update(good)
    if bad:
        metrics.LEDGER_OUTSIDE.labels(NODE, pipe, "bad_origin").inc(bad)
    return found


def _read_numbers(texts: list[str]) -> list[int]:
    joined = ",".join(texts)
    if set(joined) <= _DIGITS_AND_COMMA:
        with suppress(orjson.JSONDecodeError):  # a leading zero, or nothing at all: not ours
            numbers: list[int] = orjson.loads(f"[{joined}]")
            if len(numbers) == len(texts) and max(numbers) < MAX_NUMBER:
                return numbers
    return [number for text in texts if _NUMBER.fullmatch(text) and (number := int(text)) < MAX_NUMBER]


def collect_origins(records: DataFrame, pipe: str) -> Origins:
    """Of records in Spark: executes the frame."""
    return read_origins(collect_text(records), pipe)


def collect_text(records: DataFrame) -> str:
    """As `gather` gives it: executes the frame."""
    row = with_origin(records).agg(gather()).first()
    return row[0] if row else ""


def origins_of(records: Sequence[Record], pipe: str, *, counted: bool) -> Origins:
    """Of records that left Spark. counted: those without an origin were, where all that is read is looked at."""
    texts = (origin.decode(errors="replace") for record in records if (origin := record.header(ORIGIN)) is not None)
    return read_origins(" ".join(texts), pipe, events=0 if counted else len(records))


def without(these: Origins, others: Origins) -> Origins:
    """Those that are not among the others."""
    return {place: numbers - others.get(place, _NONE) for place, numbers in these.items()}


def add_settled(
    report: BatchReport, read: Iterable[tuple[str, int]], written: str, dead: Iterable[Origins] = ()
) -> None:
    """What is in the output passed, and the rest of what was read was filtered, but for those that are told of as dead.

    read: what was gathered of events, and how many these were, by source. written: what was gathered of the output.
    """
    passed = read_origins(written, report.pipe)
    put(report.sets, "passed", passed)
    settled = union([passed, *dead])
    for text, events in read:
        put(report.sets, "filtered", without(read_origins(text, report.pipe, events=events), settled))


def add_made(report: BatchReport, made: str, at_ms: int) -> None:
    """From what was gathered, with times, of new events that arrived at this time: they are accepted."""
    by_minute: dict[int, list[str]] = {}
    for part in made.split():
        origin, _, time = part.rpartition(":")
        by_minute.setdefault(minute_of(int(time), at_ms), []).append(origin)
    for minute, origins in by_minute.items():
        put(report.sets, "accepted", read_origins(" ".join(origins), report.pipe), minute)


def union(several: Iterable[Origins]) -> Origins:
    """All of them."""
    found: Origins = {}
    for origins in several:
        for place, numbers in origins.items():
            found[place] = found.get(place, _NONE) | numbers
    return found


def put(sets: Sets, outcome: Outcome, origins: Origins, minute: int | None = None) -> None:
    """Say that this became of these events. minute: of those that are accepted."""
    for (incarnation, partition), numbers in origins.items():
        if numbers:
            known = sets.numbers(SetKey(outcome, incarnation, partition, minute))
            known |= numbers


_NONE = BitMap()
