"""Letters that were too large for the broker with their reason on, and lie there without payload: their source has it."""

from collections.abc import AsyncIterator
from dataclasses import replace

from services.core import dead_letter
from services.core.broker.contract import Admin
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.letter import DeadLetter, Position


async def restore(admin: Admin, letter: DeadLetter) -> DeadLetter:
    """With the event as its source has it; as it is when it has its payload, or its source has the event no more.

    Raises Unavailable.
    """
    if letter.record.value is not None:
        return letter
    try:
        source = Position.parse(letter.source)
        batch = await admin.read(*source, max_records=1)
    except (ValueError, UnknownTopic, OffsetOutOfRange, DataDamaged):
        return letter
    if batch is None or batch.damage is not None or batch.offsets[0] != source.offset:
        return letter
    found = batch.records[0]
    if not _is_same(letter, found):
        return letter
    said = tuple(header for header in letter.record.headers if header[0].startswith(dead_letter.PREFIX))
    return replace(letter, record=Record(found.key, found.value, letter.record.timestamp, said + found.headers))


def _is_same(letter: DeadLetter, found: Record) -> bool:
    """A topic that was made anew has another event at this offset."""
    return dead_letter.event_time(letter.record) == found.timestamp and letter.event_id in (None, read_id(found))


async def with_payloads(admin: Admin, pages: AsyncIterator[list[DeadLetter]]) -> AsyncIterator[list[DeadLetter]]:
    """Every page, restored where it can be. What is restored loses its detail: it was too large by no more than letters add."""
    async for page in pages:
        whole = [await restore(admin, letter) for letter in page]
        yield [
            one if one.record is letter.record else replace(one, detail="")
            for one, letter in zip(whole, page, strict=True)
        ]
