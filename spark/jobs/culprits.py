"""Which events make a transform fail: found by running it on ever smaller parts of a batch.

A few events that fail are **culprits**: they go to the dead letters, and the rest goes on. When most fail, the transform is
broken, and no event is a culprit: the query stops.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from spark.brokers.contract import SparkBroker, TooMuch
from spark.errors import is_of_spark, shorten
from spark.java import is_answer
from spark.jobs.checkpoint import Checkpoint
from spark.records import OffsetRange, RecordOffset, offset_text
from spark.transforms.preparation import Prepared

SAMPLE = 8
"""Events of a batch that are tried alone first. A transform that fails on each of them is broken."""
MAX_CULPRITS = 100
"""More culprits in one batch mean that the transform is broken."""
ALL_FAILED = 20
"""Culprits in a row, with no event between them that passed, that mean that the transform is broken."""
STREAK_FILE = "failed_in_row.json"


class TransformBroken(Exception):
    """The transform fails on most events, not on single ones. Nothing of the batch was written or rejected."""


Trial = Callable[[Sequence[RecordOffset]], str | None]
"""Runs the transform on these events alone: None when it passed, else its error. Raises TooMuch."""


def find_culprits(records: Sequence[RecordOffset], trial: Trial) -> dict[RecordOffset, str]:
    """The events of a failed batch on which the transform fails alone, and its errors.

    records: in order, at least one. Empty when the failure does not repeat. Makes about 2 * log2(n) trials for a culprit.
    Several events that are too much for a trial are not: it is tried what each half does. One alone is a culprit. When nothing
    else failed, the failure does not repeat: the real run has no such limit.
    Raises TransformBroken; also when parts pass that fail together.
    """
    failed: str | None = None

    def tried(some: Sequence[RecordOffset]) -> str | None:
        nonlocal failed
        try:
            found = trial(some)
        except TooMuch as error:
            return str(error)
        failed = failed or found
        return found

    problem = tried(records)
    if problem is None:
        return {}
    sample = records[:: max(1, len(records) // SAMPLE)][:SAMPLE]
    alone = {record: found for record in sample if (found := tried([record])) is not None}
    if len(records) > SAMPLE and len(alone) == len(sample):
        raise TransformBroken(f"it fails on each of {len(sample)} events tried alone, e.g.: {problem}")
    culprits: dict[RecordOffset, str] = {}
    _search(records, tried, alone, culprits)
    if not culprits and failed is None:
        return {}
    if not culprits:
        raise TransformBroken(f"it fails on the batch, and on none of its {len(records)} events alone: {failed}")
    if len(records) > SAMPLE and 2 * len(culprits) > len(records):
        raise TransformBroken(f"it fails on {len(culprits)} of {len(records)} events, e.g.: {problem}")
    return culprits


def _search(
    records: Sequence[RecordOffset], trial: Trial, alone: dict[RecordOffset, str], culprits: dict[RecordOffset, str]
) -> None:
    """Add the culprits among `records` to `culprits`."""
    if len(records) == 1:
        found = alone.get(records[0]) or trial(records)
        if found is not None:
            culprits[records[0]] = found
            if len(culprits) > MAX_CULPRITS:
                raise TransformBroken(f"it fails on more than {MAX_CULPRITS} events of one batch, e.g.: {found}")
        return
    middle = len(records) // 2
    halves = [half for half in (records[:middle], records[middle:]) if len(half) == 1 or trial(half) is not None]
    for half in halves:
        _search(half, trial, alone, culprits)


class FailureStreak:
    """Culprits since the last event that passed: a slow stream has too few events in a batch to show a broken transform.

    Kept beside the checkpoint, so that a restart does not begin to count again.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._length = checkpoint.read_note(STREAK_FILE, int) or 0

    def add(self, failed: int, passed: int, example: str) -> None:
        """Some events of a batch failed. Call it before they are rejected. Raises TransformBroken: then reject none."""
        length = 0 if passed else self._length + failed
        if length >= ALL_FAILED:
            raise TransformBroken(f"it failed on the last {length} events, and none passed, e.g.: {example}")
        self._save(length)

    def reset(self) -> None:
        """An event passed."""
        self._save(0)

    def _save(self, length: int) -> None:
        if length != self._length:
            self._checkpoint.write_note(STREAK_FILE, length)
            self._length = length


def fingerprint(records: Iterable[RecordOffset]) -> str:
    """A name for this set of events, so that the dead letters of each set are written once."""
    text = repr(sorted(records)).replace("RecordOffset(", "Place(")  # the text of earlier versions: the name is stored
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PartRange(NamedTuple):
    """Records of one partition, from the first to the last of these offsets (texts, as in `RecordOffset`)."""

    topic: str
    partition: int
    first: str
    last: str


Part = tuple[PartRange, ...]
"""In the order of reading. Empty: the whole batch."""


def ranges_of(records: Sequence[RecordOffset]) -> Part:
    """From the first to the last of these records, in each partition. records: in order."""
    found: dict[tuple[str, int], PartRange] = {}
    for topic, partition, offset in records:
        known = found.get((topic, partition))
        found[topic, partition] = PartRange(topic, partition, known.first if known else offset, offset)
    return tuple(found.values())


def part_of(ranges: Iterable[OffsetRange]) -> Part:
    """These ranges, none of which is empty."""
    return tuple(PartRange(t, p, offset_text(start), offset_text(end - 1)) for t, p, start, end in ranges)


def to_ranges(part: Part) -> list[OffsetRange]:
    """The records of a part, not of the whole batch."""
    return [OffsetRange(topic, partition, int(first), int(last) + 1) for topic, partition, first, last in part]


def within(part: Part) -> str:
    """A SQL condition on raw columns that is true for the records of this part."""
    texts = [f"(topic = '{t}' AND partition = {p} AND offset BETWEEN '{a}' AND '{b}')" for t, p, a, b in part]
    return " OR ".join(texts) or "true"


def exactly(records: Collection[RecordOffset]) -> str:
    """A SQL condition on raw columns that is true for these records alone."""
    return f"(topic, partition, offset) IN ({', '.join(map(repr, map(tuple, records)))})" if records else "false"


def list_events(prepared: Prepared, raw: DataFrame) -> list[RecordOffset]:
    """The events of a batch, in order, without the records that fail a check: a transform does not see those."""
    return list_records(
        *(f.select("event.topic", "event.partition", "event.offset") for f in prepared.views_of(raw).values())
    )


def list_records(*frames: DataFrame) -> list[RecordOffset]:
    """The records of frames with raw columns, in order."""
    tables: list[Any] = [frame.select("topic", "partition", "offset").toArrow() for frame in frames]
    return sorted(RecordOffset(*row.values()) for table in tables for row in table.to_pylist())


def try_transform(
    prepared: Prepared, broker: SparkBroker, raw: DataFrame, records: Sequence[RecordOffset]
) -> str | None:
    """A trial on a batch of raw records: does all that a write does, stores nothing.

    Raises TooMuch, and what Java or Spark raises when it is gone.
    """
    frames = prepared.views_of(raw.where(within(ranges_of(records))))
    try:
        broker.try_write(prepared.apply(frames, raw.sparkSession))
    except TooMuch:
        raise
    except Exception as error:  # any error of the operator's code
        if not is_answer(error) or is_of_spark(error):
            raise
        return f"{type(error).__name__}: {shorten(error)}"
    return None
