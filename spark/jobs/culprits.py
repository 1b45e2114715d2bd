"""Which events make a transform fail: found by running it on ever smaller parts of a batch.

A few events that fail are poisoned: they go to the dead letters and the rest goes on. When most fail, the transform is
broken, and no event is to blame: the query stops.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark.sql import DataFrame

from spark.brokers.endpoint import Endpoint
from spark.errors import is_answer, shorten
from spark.place import Place
from spark.transforms.preparation import Prepared, of_stream

SAMPLE = 8
"""So many events of a batch are tried alone first; a transform that fails on each of them is broken."""
MOST = 100
"""More poisoned events in one batch mean that the transform is broken."""


class TransformBroken(Exception):
    """The transform fails on most events, not on single ones. Nothing of the batch was written or rejected."""


def fingerprint(places: Iterable[Place]) -> str:
    """A name for these events: the same for the same set, so that a write of their dead letters happens once for each set."""
    return hashlib.sha256(repr(sorted(places)).encode()).hexdigest()[:16]


Trial = Callable[[Sequence[Place]], str | None]
"""Runs the transform on these events alone: None when it passed, else what it raised."""


def find_culprits(places: Sequence[Place], trial: Trial) -> dict[Place, str]:
    """The events, among those of a batch whose transform failed, on which it fails alone, and with what.

    places: in order, at least one. Empty when the failure does not come again. Takes about 2 * log2(n) trials a culprit.
    Raises TransformBroken; also when parts pass that fail together.
    """
    problem = trial(places)
    if problem is None:
        return {}
    sample = places[:: max(1, len(places) // SAMPLE)][:SAMPLE]
    alone = {place: found for place in sample if (found := trial([place])) is not None}
    if len(places) > SAMPLE and len(alone) == len(sample):
        raise TransformBroken(f"it fails on each of {len(sample)} events tried alone, e.g.: {problem}")
    culprits: dict[Place, str] = {}
    _search(places, trial, alone, culprits)
    if not culprits:
        raise TransformBroken(f"it fails on the batch, and on none of its {len(places)} events alone: {problem}")
    if len(places) > SAMPLE and 2 * len(culprits) > len(places):
        raise TransformBroken(f"it fails on {len(culprits)} of {len(places)} events, e.g.: {problem}")
    return culprits


def _search(places: Sequence[Place], trial: Trial, alone: dict[Place, str], culprits: dict[Place, str]) -> None:
    """Add the culprits among `places` to `culprits`."""
    if len(places) == 1:
        found = alone.get(places[0]) or trial(places)
        if found is not None:
            culprits[places[0]] = found
            if len(culprits) > MOST:
                raise TransformBroken(f"it fails on more than {MOST} events of one batch, e.g.: {found}")
        return
    middle = len(places) // 2
    halves = [half for half in (places[:middle], places[middle:]) if len(half) == 1 or trial(half) is not None]
    for half in halves:
        _search(half, trial, alone, culprits)


def span(places: Sequence[Place]) -> str:
    """A SQL condition on raw columns: from the first to the last of these places, in each partition."""
    parts = (f"offset BETWEEN '{min(offsets)}' AND '{max(offsets)}'" for offsets in _by_partition(places).values())
    return _any_of(_by_partition(places), parts)


def exactly(places: Iterable[Place]) -> str:
    """A SQL condition on raw columns that is true for these records alone."""
    parts = (f"offset IN ({', '.join(map(repr, offsets))})" for offsets in _by_partition(places).values())
    return _any_of(_by_partition(places), parts)


def _by_partition(places: Iterable[Place]) -> dict[tuple[str, int], list[str]]:
    offsets: dict[tuple[str, int], list[str]] = {}
    for place in places:
        offsets.setdefault((place.topic, place.partition), []).append(place.offset)
    return offsets


def _any_of(partitions: Iterable[tuple[str, int]], parts: Iterable[str]) -> str:
    found = [f"(topic = '{t}' AND partition = {p} AND {part})" for (t, p), part in zip(partitions, parts, strict=True)]
    return " OR ".join(found) or "false"


def places_of(prepared: Prepared, raw: DataFrame) -> list[Place]:
    """The events of a batch, in order; records that are no events left out: a transform does not see them."""
    found: list[Place] = []
    for stream, view in prepared.views.items():
        good = view.good(view.judge(of_stream(prepared, raw, stream)))
        table: Any = good.select("event.topic", "event.partition", "event.offset").toArrow()
        found += [Place(*row.values()) for row in table.to_pylist()]
    return sorted(found)


def records_of(raw: DataFrame) -> list[Place]:
    """The records of a batch, in order, events or not."""
    table: Any = raw.select("topic", "partition", "offset").toArrow()
    return sorted(Place(*row.values()) for row in table.to_pylist())


def try_transform(prepared: Prepared, endpoint: Endpoint, raw: DataFrame, places: Sequence[Place]) -> str | None:
    """A trial on a batch of raw records: does all that a write does, and stores nothing. Raises when Java is gone."""
    part = raw.where(span(places))
    frames = {
        stream: view.good(view.judge(of_stream(prepared, part, stream))) for stream, view in prepared.views.items()
    }
    try:
        endpoint.try_write(prepared.apply(frames, raw.sparkSession))
    except Exception as error:  # whatever the operator's code raises
        if not is_answer(error):
            raise
        return f"{type(error).__name__}: {shorten(error)}"
    return None
