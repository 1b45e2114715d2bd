"""Finding dead letters by filter or position. What is buried after the finding began is left for the next time."""

from collections.abc import AsyncIterator, Sequence
from typing import Self

from services.core.audit import digest_of
from services.core.broker.contract import Admin, PartitionRange
from services.core.broker.errors import OffsetOutOfRange, UnknownTopic
from services.core.broker.pages import read_topic
from services.core.broker.record import Batch, Record
from services.core.letter import DeadLetter, Position
from services.core.pipes import RETRIER_DEAD, dead_letter_topic
from services.fleet.console import note
from services.fleet.dead.audit import Fates
from services.fleet.dead.filter import Filter
from services.fleet.problem import CommandFailed

DEAD_SUFFIX = dead_letter_topic("")

Held = dict[tuple[str, int], PartitionRange]
"""What is looked through, by topic and partition."""


class Found:
    """The letters that `where` matches, in the topics' order; or those at `positions`, whatever became of them.

    `pages` may be read several times and gives the same letters, but for what retention takes.
    """

    def __init__(
        self,
        admin: Admin,
        where: Filter,
        positions: Sequence[Position],
        fates: Fates,
        held: Held,
        *,
        settled: bool,
    ) -> None:
        self._admin, self._where, self._positions, self._fates = admin, where, positions, fates
        self.held, self._settled = held, settled

    @classmethod
    async def look(
        cls,
        admin: Admin,
        where: Filter,
        positions: Sequence[Position] = (),
        *,
        settled: bool = False,
        held: Held | None = None,
    ) -> Self:
        """settled: also what was redriven or discarded. held: as an earlier look found it, to find the same again.

        Raises CommandFailed for a pipe without dead letters.
        """
        if held is None:
            held = {} if positions else await _survey(admin, where.pipe)
        return cls(admin, where, sorted(set(positions)), await Fates.read(admin), held, settled=settled)

    async def pages(self) -> AsyncIterator[list[DeadLetter]]:
        """At most 500 at a time, none empty."""
        for position in self._positions:
            yield [await self._read_one(position)]
        for (topic, partition), held in self.held.items():
            async for batch in read_topic(self._admin, topic, partition, held):
                if page := self._pick(batch):
                    yield page

    async def count(self) -> int:
        """How many there are. Reads them all."""
        return sum([len(page) async for page in self.pages()])

    def _pick(self, batch: Batch) -> list[DeadLetter]:
        if batch.damage is not None:
            lost = (
                f"{batch.topic}:{batch.partition}: letters {batch.damage.first} to {batch.damage.last} cannot be read"
            )
            note(f"{lost}: {batch.damage.detail}", "red")
            return []
        page = []
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            position = Position(batch.topic, batch.partition, offset)
            letter = self._letter(position, record)
            if (self._settled or not letter.fate) and self._where.matches(letter):
                page.append(letter)
        return page

    async def _read_one(self, position: Position) -> DeadLetter:
        if not position.topic.endswith(DEAD_SUFFIX):
            raise CommandFailed(
                f"{position.topic} holds no dead letters", "a position from penstock dead list", status=2
            )
        try:
            batch = await self._admin.read(*position, max_records=1)
        except (OffsetOutOfRange, UnknownTopic) as error:
            raise CommandFailed(f"there is no letter at {position}: {error}") from error
        if batch is None or batch.offsets[0] != position.offset or batch.damage is not None:
            raise CommandFailed(f"there is no readable letter at {position}", "penstock dead list")
        return self._letter(position, batch.records[0])

    def _letter(self, position: Position, record: Record) -> DeadLetter:
        digest = digest_of(record)
        return DeadLetter.of(position, record, self._fates.fate(position, digest), digest)


async def _survey(admin: Admin, pipe: str | None) -> Held:
    topics = sorted(topic for topic in await admin.topics() if topic.endswith(DEAD_SUFFIX))
    if pipe is not None:
        mine = dead_letter_topic(pipe)
        if mine not in topics:
            known = ", ".join(topic.removesuffix(DEAD_SUFFIX) for topic in topics if topic != RETRIER_DEAD)
            raise CommandFailed(f"there is no topic {mine}", f"one of these pipes: {known or 'none yet'}", status=2)
        topics = [topic for topic in topics if topic in (mine, RETRIER_DEAD)]
    return {(topic, part): kept for topic in topics for part, kept in (await admin.describe(topic)).items()}
