"""What ingest answered to each case, and what must therefore be in its log."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from services.core import event
from services.core.broker.connect import open_broker
from services.core.broker.record import Record
from tests.fuzz import bodies, heads, reference
from tests.fuzz.corpus import GOOD
from tests.fuzz.exchange import Answer, BadAnswer
from tests.integration.ingest_process import log_url


@dataclass
class Ledger:
    """One run. The two kinds of cases have numbers of their own, from 1.

    stored: by number of a body case, (events, their digests added up); absent: nothing may be stored. taken: events by number of
    a head case. unknown_bodies, unknown_heads: cases whose outcome nobody knows.
    """

    seed: int
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)
    taken: Counter[int] = field(default_factory=Counter)
    unknown_bodies: set[int] = field(default_factory=set)
    unknown_heads: set[int] = field(default_factory=set)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    def note_body(self, case: bodies.Body, answer: Answer) -> None:
        """What this answer obliges to. Raises BadAnswer, ValueError, LookupError where the answer itself is wrong."""
        self.statuses["body", answer.status] += 1
        if answer.status in (200, 207):
            self.stored[case.number] = _expected(case, answer)
        elif answer.document.get("outcome") == "unknown":
            self.unknown_bodies.add(case.number)
        if case.number <= len(GOOD) and answer.status != 200:
            raise BadAnswer(f"a good body got {answer.status} {answer.document}")

    def note_head(self, case: heads.Head, answer: Answer) -> None:
        """The same for one of the answers on a connection."""
        self.statuses["head", answer.status] += 1
        self.taken[case.number] += int(answer.document.get("accepted", 0))

    async def check_bodies(self, folder: Path) -> None:
        """Every accepted event is in the log as it was sent, and nothing else is."""
        found: dict[int, tuple[int, int]] = {}
        async for record in _read(folder, bodies.STREAM):
            number = bodies.number_in(record.header(event.TRACEPARENT) or b"")
            count, total = found.get(number, (0, 0))
            found[number] = count + 1, total + _digest(record.value or b"", (event.read_id(record) or "").encode())
        expected = {number: one for number, one in self.stored.items() if one[0]}
        wrong = {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)} - self.unknown_bodies
        shown = [(bodies.make_body(self.seed, n), found.get(n), expected.get(n)) for n in sorted(wrong)[:3]]
        assert not wrong, f"{len(wrong)} cases are not in the log as answered: (case, stored, expected) {shown}"

    async def check_heads(self, folder: Path) -> None:
        """The same for the events behind mutated heads, each of which is known to the byte."""
        found: Counter[int] = Counter()
        async for record in _read(folder, heads.STREAM):
            number = heads.payload_number(record.value or b"")
            assert record.value == heads.make_head(self.seed, number).payload, f"{record.value!r} was never sent"
            found[number] += 1
        wrong = {n for n in self.taken.keys() | found.keys() if self.taken[n] != found[n]} - self.unknown_heads
        shown = [(heads.make_head(self.seed, n), found[n], self.taken[n]) for n in sorted(wrong)[:3]]
        assert not wrong, f"{len(wrong)} cases are not in the log as answered: (case, stored, accepted) {shown}"


def _expected(case: bodies.Body, answer: Answer) -> tuple[int, int]:
    """(events, their digests added up) that an accepted case stored. Raises ValueError, LookupError."""
    document = answer.document
    refused = {one["index"] for one in document.get("refused", [])}
    values = reference.stored_values(case.body, case.encoding, case.media, binary=case.is_binary, refused=refused)
    ids = document["ids"]
    if not len(values) == len(ids) == document["accepted"]:
        raise ValueError(f"{len(values)} events are not refused, {document['accepted']} accepted, {len(ids)} ids")
    for value, event_id in zip(values, ids, strict=True):
        own = None if case.is_binary else reference.id_of(value)
        if own is not None and own != event_id:
            raise ValueError(f"an event with the id {own!r} got {event_id!r}")
    return len(values), sum(_digest(value, one.encode()) for value, one in zip(values, ids, strict=True))


def _digest(value: bytes, event_id: bytes) -> int:
    """Digests of a case's events are added up, so that their order does not count."""
    return int.from_bytes(hashlib.blake2b(b"%d %b%b" % (len(event_id), event_id, value), digest_size=8).digest())


async def _read(folder: Path, topic: str) -> AsyncIterator[Record]:
    """Every record of a topic in the log."""
    async with open_broker(log_url(folder)) as broker:
        left = sum(one.end - one.start for one in (await broker.reader.describe(topic)).values())

        async def nothing(_: object) -> None:
            return

        async with broker.consumer(f"fuzz-{uuid4()}", [topic], start="earliest", on_revoke=nothing) as consumer:
            async with asyncio.timeout(600):
                while left:
                    for batch in await consumer.poll(max_records=10_000, max_wait=0.5):
                        left -= len(batch.records)
                        for record in batch.records:
                            yield record
