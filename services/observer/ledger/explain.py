"""The missing events of a minute, one by one: which they are, and where each was last seen."""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec

from services.core.broker.contract import Admin
from services.core.broker.errors import UnknownTopic
from services.core.broker.record import Batch
from services.core.event import ORIGIN, read_id
from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Node
from services.core.pipes import output_topic
from services.observer.ledger.scan import scan
from services.observer.ledger.settlement import StepSets
from services.observer.ledger.table import Table

MAX_NAMED = 1_000
SPAN_MINUTES = 15
"""Of event time, from before the minute on: where its events lie in what a transform wrote."""
MAX_READ = 300_000
"""Records that one answer reads at most."""


class Missing(msgspec.Struct, frozen=True):
    """One event. missing_at, destination: the step that did not settle it. seen_by: the last step that did.

    topic, partition, offset, event_id: the record as it was last seen; None when it was not found there.
    """

    origin: str
    missing_at: Node
    destination: str | None
    seen_by: Node
    event_id: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


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
    missing = [one for step in settlement.steps for one in _name(step, table.flow.pipes[pipe].transforms)]
    named = missing[:MAX_NAMED]
    wanted = {one.origin.encode() for one in named}
    search = _Search(admin, wanted)
    if wanted:
        for stream in table.flow.pipes[pipe].sources:
            for partition in await _partitions(admin, stream):
                start = table.reaches.before(stream, partition, minute)
                end = table.reaches.after(stream, partition, minute + (BEHIND_MS + MINUTE_MS) // MINUTE_MS)
                await search.read(stream, partition, start, end)
        if behind := {one.origin.encode() for one in named if one.seen_by == "transform"}:
            await _search_output(search, admin, output_topic(pipe), minute, behind)
    return Explanation(
        pipe,
        minute,
        len(settlement.missing()),
        tuple(search.place(one) for one in named),
        search.count,
        search.complete,
    )


def _name(step: StepSets, transforms: bool) -> Iterable[Missing]:
    seen_by: Node = "transform" if transforms and step.step.node == "expel" else "ingest"
    for origin in step.missing.first(MAX_NAMED):
        yield Missing(origin.pack().decode(), step.step.node, step.step.destination, seen_by)


async def _search_output(search: "_Search", admin: Admin, topic: str, minute: int, wanted: set[bytes]) -> None:
    """By the records' time: nobody reports offsets of what a transform wrote."""
    first = datetime.fromtimestamp((minute - 1) * 60, UTC)
    starts = await admin.offsets_at(topic, first)
    ends = await admin.offsets_at(topic, first + timedelta(minutes=SPAN_MINUTES))
    for partition, start in starts.items():
        end = ends.get(partition)
        await search.read(topic, partition, start, end if end != start else None, wanted)


async def _partitions(admin: Admin, topic: str) -> list[int]:
    try:
        return sorted(await admin.describe(topic))
    except UnknownTopic:
        return []


class _Search:
    """Records by origin. What is found later, further down the pipe, counts."""

    def __init__(self, admin: Admin, wanted: set[bytes]) -> None:
        self._admin, self._wanted = admin, wanted
        self._found: dict[str, tuple[str | None, str, int, int]] = {}
        self.count = 0
        self.complete = True

    async def read(
        self, topic: str, partition: int, start: int | None, end: int | None, wanted: set[bytes] | None = None
    ) -> None:
        """Look for them in this stretch, as far as the bound allows."""
        left = self._wanted if wanted is None else wanted
        async for batch in scan(self._admin, topic, partition, start, end):
            if self.count >= MAX_READ:
                self.complete = False
                return
            self.count += len(batch.records)
            self._take(batch, left)
            if all(origin.decode() in self._found and self._found[origin.decode()][1] == topic for origin in left):
                return
            await asyncio.sleep(0)

    def _take(self, batch: Batch, left: set[bytes]) -> None:
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            raw = record.header(ORIGIN)
            if raw is not None and raw in left:
                self._found[raw.decode()] = (read_id(record), batch.topic, batch.partition, offset)

    def place(self, missing: Missing) -> Missing:
        """With what was found."""
        found = self._found.get(missing.origin)
        if found is None:
            return missing
        event_id, topic, partition, offset = found
        return msgspec.structs.replace(missing, event_id=event_id, topic=topic, partition=partition, offset=offset)
