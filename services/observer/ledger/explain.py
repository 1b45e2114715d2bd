"""The missing events of a minute, one by one: which they are, and where each was last seen."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.errors import UnknownTopic
from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Node
from services.core.pipes import output_topic
from services.observer.ledger.origins import Origins
from services.observer.ledger.retried import search_retrier
from services.observer.ledger.search import Found, Search, read_origin
from services.observer.ledger.settlement import StepSets
from services.observer.ledger.table import Table

MAX_NAMED = 1_000
SPAN_MINUTES = 15
"""Of event time, from before the minute on: where its events lie in what a transform wrote."""
MAX_READ = 300_000
"""Records that one answer reads at most."""


class Missing(msgspec.Struct, frozen=True):
    """One event. missing_at, destination: the step that did not settle it. seen_by: the last step that did.

    topic, partition, offset, event_id: the record as it was last seen, in the pipe's streams or, handed over to the retrier, in
    its topics; None when it was not found. The offset is a text: not every reader of JSON takes numbers of so many digits.
    """

    origin: str
    missing_at: Node
    destination: str | None
    seen_by: Node
    event_id: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """named: at most `MAX_NAMED` of all the missing ones. complete: the stretch in which they must lie was read to its end."""

    pipe: str
    minute: int
    missing: int
    named: tuple[Missing, ...]
    records_read: int
    complete: bool


async def explain(table: Table, admin: Admin, pipe: str, minute: int) -> Explanation:
    """Name the missing events of a pipe's minute. Reads at most `MAX_READ` records. Raises KeyError, BrokerError kinds."""
    settlement = table.settlement(pipe, minute)
    missing = [one for step in settlement.steps for one in _name(step, table, pipe)]
    named = missing[:MAX_NAMED]
    wanted = {one.origin.encode() for one in named}
    search = Search(admin, MAX_READ)
    if wanted:
        for stream in table.flow.pipes[pipe].sources:
            for partition, held in (await _partitions(admin, stream)).items():
                start = table.reaches.before(stream, partition, minute - 1)  # an event may be ahead of its minute
                end = table.reaches.after(stream, partition, minute + (BEHIND_MS + MINUTE_MS) // MINUTE_MS)
                await search.read(stream, partition, start, end, wanted, read_origin, held)
        passed = table.flow.pipes[pipe].transforms
        if behind := {one.origin.encode() for one in named if passed and one.seen_by != "ingest"}:
            await _search_output(search, admin, output_topic(pipe), minute, behind)
    again = Search(admin, MAX_READ - search.count)
    await search_retrier(again, admin, table.book.rounds, pipe, [_key(one) for one in named if _was_retried(one)])
    return Explanation(
        pipe,
        minute,
        len(settlement.missing()),
        tuple(_place(one, again.found.get(_key(one)) or search.found.get(one.origin.encode())) for one in named),
        search.count + again.count,
        search.complete and again.complete,
    )


def _was_retried(missing: Missing) -> bool:
    return "retrier" in (missing.missing_at, missing.seen_by)


def _key(missing: Missing) -> tuple[bytes, str | None]:
    return missing.origin.encode(), missing.destination


def _place(missing: Missing, found: Found | None) -> Missing:
    if found is None:
        return missing
    event_id, topic, partition, offset = found
    return msgspec.structs.replace(missing, event_id=event_id, topic=topic, partition=partition, offset=str(offset))


def _name(step: StepSets, table: Table, pipe: str) -> Iterable[Missing]:
    node, transforms = step.step.node, table.flow.pipes[pipe].transforms
    seen_by: Node = "expel" if node == "retrier" else "transform" if transforms and node == "expel" else "ingest"
    again = step.missing & table.book.lost(step.step) if node == "expel" else Origins()
    held = again & table.book.rounds.is_held(step.step)
    places: tuple[tuple[Origins, Node], ...] = (
        (step.missing - again, seen_by),
        (again - held, "retrier"),
        (held, "expel"),
    )
    for those, last in places:
        for origin in those.first(MAX_NAMED):
            yield Missing(origin.pack().decode(), node, step.step.destination, last)


async def _search_output(search: Search, admin: Admin, topic: str, minute: int, wanted: set[bytes]) -> None:
    """By the records' time: nobody reports offsets of what a transform wrote."""
    first = datetime.fromtimestamp((minute - 1) * 60, UTC)
    starts = await admin.offsets_at(topic, first)
    ends = await admin.offsets_at(topic, first + timedelta(minutes=SPAN_MINUTES))
    for partition, start in starts.items():
        end = ends.get(partition)
        await search.read(topic, partition, start, end if end != start else None, wanted, read_origin)


async def _partitions(admin: Admin, topic: str) -> dict[int, PartitionRange]:
    try:
        return await admin.describe(topic)
    except UnknownTopic:
        return {}
