"""Finds dead letters by filter or position. A search ignores those that are written after it began."""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from services.core.audit import digest_of
from services.core.broker.contract import Broker, PartitionRange, Reader
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.reading import read_topic
from services.core.broker.record import Batch, Record
from services.core.event import read_id
from services.core.pipe_file.topic_names import RETRIER_DEAD, dead_letter_topic, lane_name
from services.core.times import format_time
from services.core.undelivered.dead_letter import PREFIX, DeadLetter, Position, event_time
from services.fleet.console import print_note
from services.fleet.dead.audit import AuditedActions
from services.fleet.problem import CommandFailed, unknown_name


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects dead letters; None: any. since, until: ms, of the time at which they became dead letters, since <= time < until.

    renames: the lane of each former name (`pipes.renames_of`). A destination's dead letters of that time are found, too.
    lanes: of a person's filter: those that the pipe file has, or names as removed. None: nobody can have misspelt a name.
    """

    pipe: str | None = None
    destination: str | None = None
    reason: str | None = None
    since: int | None = None
    until: int | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    lanes: Collection[str] | None = None

    def __bool__(self) -> bool:
        return bool(self._given())

    def matches(self, letter: DeadLetter) -> bool:
        return (
            self.has(lane_name(letter.pipe, letter.destination))
            and self.reason in (None, letter.reason)
            and (self.since is None or self.since <= letter.dead_since)
            and (self.until is None or letter.dead_since < self.until)
        )

    def has(self, lane: str) -> bool:
        """Whether the pipe and the destination are those of this lane, by its present or its former name."""
        names = zip(lane.partition("/"), self.renames.get(lane, lane).partition("/"), strict=True)
        pipes, _, destinations = names
        return self.pipe in (None, *pipes) and self.destination in (None, *destinations)

    def as_json(self) -> dict[str, str]:
        """The filter as the audit records it."""
        times = {"since", "until"}
        return {name: format_time(value) if name in times else value for name, value in self._given().items()}

    def pipes(self) -> set[str]:
        """The pipe and its former names; empty: any."""
        if self.pipe is None:
            return set()
        return {self.pipe} | {
            old.partition("/")[0] for old, new in self.renames.items() if new.startswith(f"{self.pipe}/")
        }

    def _given(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name not in ("renames", "lanes")
        }


async def restore(reader: Reader, letter: DeadLetter) -> DeadLetter:
    """The dead letter with the event from its source. Unchanged when it has a payload, or the source no longer has the event.

    Raises Unavailable.
    """
    if letter.record.value is not None:
        return letter
    try:
        source = Position.parse(letter.source)
        batch = await reader.read(*source, max_records=1)
    except (ValueError, UnknownTopic, OffsetOutOfRange, DataDamaged):
        return letter
    if batch is None or batch.damage is not None or batch.offsets[0] != source.offset:
        return letter
    found = batch.records[0]
    if not _is_same(letter, found):
        return letter
    added = tuple(header for header in letter.record.headers if header[0].startswith(PREFIX))
    return replace(letter, record=Record(found.key, found.value, letter.record.timestamp, added + found.headers))


def _is_same(letter: DeadLetter, found: Record) -> bool:
    """Whether this is the event of the dead letter. A topic that was created again has another event at this offset."""
    return event_time(letter.record) == found.timestamp and letter.event_id in (None, read_id(found))


async def with_payloads(reader: Reader, pages: AsyncIterator[list[DeadLetter]]) -> AsyncIterator[list[DeadLetter]]:
    """Each page, restored where possible. A restored dead letter loses its detail, so that the record is not too large."""
    async for page in pages:
        whole = [await restore(reader, letter) for letter in page]
        yield [
            one if one.record is letter.record else replace(one, detail="")
            for one, letter in zip(whole, page, strict=True)
        ]


DEAD_SUFFIX = dead_letter_topic("")

StoredRanges = dict[tuple[str, int], PartitionRange]
"""The ranges that a search reads, by topic and partition."""


@dataclass(frozen=True, slots=True)
class DeadLetterSearch:
    """The dead letters that `where` selects, in the order of the topics; or those at `positions`, whatever their fate.

    `pages` may be read several times. It gives the same dead letters, except for those that retention deletes.
    """

    broker: Broker
    where: Filter
    positions: Sequence[Position]
    fates: AuditedActions
    stored: StoredRanges
    settled: bool

    @classmethod
    async def open(
        cls,
        broker: Broker,
        where: Filter,
        positions: Sequence[Position] = (),
        *,
        settled: bool = False,
        stored: StoredRanges | None = None,
    ) -> Self:
        """settled: include redriven and discarded ones. stored: those of an earlier search, to find the same dead letters.

        Raises CommandFailed for a pipe without a topic of dead letters, and for a person's destination that neither the pipe file
        nor a dead letter has: none found would read as all is well.
        """
        if stored is None:
            stored = {} if positions else await _survey(broker, where.pipes())
            if where.destination is not None and where.lanes is not None:
                await _require_destination(broker.reader, where, stored)
        fates = await AuditedActions.read(broker.reader)
        return cls(broker, where, sorted(set(positions)), fates, stored, settled)

    async def pages(self) -> AsyncIterator[list[DeadLetter]]:
        """Pages of at most 500 dead letters; none is empty."""
        for position in self.positions:
            yield [await self._read_one(position)]
        for (topic, partition), stored in self.stored.items():
            async for batch in read_topic(self.broker.reader, topic, partition, stored):
                if page := self._pick(batch):
                    yield page

    async def count(self) -> int:
        """The number of dead letters. Reads them all."""
        return (await self.count_reasons()).total()

    async def count_reasons(self) -> Counter[str]:
        """The number of dead letters by reason. Reads them all."""
        return Counter([letter.reason async for page in self.pages() for letter in page])

    def _pick(self, batch: Batch) -> list[DeadLetter]:
        if batch.damage is not None:
            damage, place = batch.damage, f"{batch.topic}:{batch.partition}"
            print_note(f"{place}: offsets {damage.first} to {damage.last} cannot be read: {damage.detail}", "red")
            return []
        page = []
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            position = Position(batch.topic, batch.partition, offset)
            letter = self._letter(position, record)
            if (self.settled or not letter.fate) and self.where.matches(letter):
                page.append(letter)
        return page

    async def _read_one(self, position: Position) -> DeadLetter:
        if not position.topic.endswith(DEAD_SUFFIX):
            raise CommandFailed(
                f"{position.topic} holds no dead letters", "a position from penstock dead list", status=2
            )
        try:
            batch = await self.broker.reader.read(*position, max_records=1)
        except (OffsetOutOfRange, UnknownTopic) as error:
            raise CommandFailed(f"there is no dead letter at {position}: {error}") from error
        if batch is None or batch.offsets[0] != position.offset or batch.damage is not None:
            raise CommandFailed(f"there is no readable dead letter at {position}", "penstock dead list")
        return self._letter(position, batch.records[0])

    def _letter(self, position: Position, record: Record) -> DeadLetter:
        digest = digest_of(record)
        return DeadLetter.of(position, record, self.fates.fate(position, digest), digest)


async def _survey(broker: Broker, pipes: Collection[str]) -> StoredRanges:
    """pipes: with their former names; empty: any."""
    topics = sorted(topic for topic in await broker.admin.topics() if topic.endswith(DEAD_SUFFIX))
    if pipes:
        mine = [topic for topic in topics if topic in map(dead_letter_topic, pipes)]
        if not mine and not await _retrier_has(broker.reader, topics, pipes):
            known = [topic.removesuffix(DEAD_SUFFIX) for topic in topics if topic != RETRIER_DEAD]
            missing = " and ".join(map(dead_letter_topic, sorted(pipes)))
            raise unknown_name(f"there is no topic {missing}", " ".join(sorted(pipes)), known)
        topics = [topic for topic in topics if topic in mine or topic == RETRIER_DEAD]
    return {(topic, part): kept for topic in topics for part, kept in (await broker.reader.describe(topic)).items()}


async def _retrier_has(reader: Reader, topics: Collection[str], pipes: Collection[str]) -> bool:
    """Whether the retrier wrote dead letters of these pipes: those of a pipe that is gone are in its own topic."""
    if RETRIER_DEAD not in topics:
        return False
    for part, kept in (await reader.describe(RETRIER_DEAD)).items():
        async for batch in read_topic(reader, RETRIER_DEAD, part, kept, skips_damage=True):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                if DeadLetter.of(Position(RETRIER_DEAD, part, offset), record).pipe in pipes:
                    return True
    return False


async def _require_destination(reader: Reader, where: Filter, stored: StoredRanges) -> None:
    """Raises CommandFailed unless the pipe file or a dead letter has the pipe and destination of the filter."""
    known = {*(where.lanes or ()), *where.renames}
    if any(map(where.has, known)):
        return
    for (topic, partition), kept in stored.items():
        async for batch in read_topic(reader, topic, partition, kept, skips_damage=True):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                letter = DeadLetter.of(Position(topic, partition, offset), record)
                lane = lane_name(letter.pipe, letter.destination)
                if where.has(lane):
                    return
                known |= {lane} if letter.destination else set()
    name = where.destination or ""
    if where.pipe is None:
        raise unknown_name(f"there is no destination {name}", name, sorted({lane.partition("/")[2] for lane in known}))
    lane = lane_name(where.pipe, name)
    raise unknown_name(f"there is no destination {lane}", lane, sorted(known))
