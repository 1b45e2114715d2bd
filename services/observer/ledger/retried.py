"""Where an event that waited for another attempt was last seen: in the retrier's topics, or given back to expel."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pyroaring import BitMap

from services.core.broker.contract import Admin
from services.core.broker.errors import UnknownTopic
from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin
from services.core.ledger.due import Span, longest_wait_s
from services.core.pipes import DELAYS_S, RETRY_IN, delay_topic, retry_topic
from services.core.retry_state import BadRetryRecord, read_wait
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, Run
from services.observer.ledger.rounds import Rounds
from services.observer.ledger.search import Search
from services.observer.ledger.spans import Spans

EARLY_S = 60
"""Clocks differ."""

Key = tuple[bytes, str | None]
"""An origin and the destination for which it waited."""


async def search_retrier(search: Search, admin: Admin, rounds: Rounds, pipe: str, wanted: Sequence[Key]) -> None:
    """Put into `search` where these are, of the round that was told of last. Raises BrokerError kinds.

    From the end of their way backwards: what was given back, the delays from the shortest on, what was handed over. The records'
    time is when they were written there.
    """
    spans = _find_spans(rounds, pipe, wanted)
    if not spans:
        return
    origins = {origin for origin, _ in spans}

    def key_of(record: Record) -> Key | None:
        origin = record.header(ORIGIN)
        if origin not in origins:
            return None
        try:
            whose, destination, due = read_wait(record)
        except BadRetryRecord:
            return None
        span = spans.get((origin, destination)) if whose == pipe else None
        return (origin, destination) if span is not None and span[0] <= due // 1000 < span[1] else None

    first = min(span[0] - longest_wait_s(span) for span in spans.values()) - EARLY_S
    for topic in _topics(pipe, max(map(longest_wait_s, spans.values()))):
        left = spans.keys() - search.found.keys()
        if not left or not search.complete:
            return
        try:
            starts = await admin.offsets_at(topic, datetime.fromtimestamp(first, UTC))
        except UnknownTopic:
            continue
        for partition, start in starts.items():
            await search.read(topic, partition, start, None, left, key_of)


def _topics(pipe: str, wait_s: int) -> Iterator[str]:
    yield retry_topic(pipe)
    yield from (delay_topic(delay) for delay in DELAYS_S if delay <= wait_s)
    yield RETRY_IN


def _find_spans(rounds: Rounds, pipe: str, wanted: Sequence[Key]) -> dict[Key, Span]:
    """When each was due last."""
    found: dict[Key, Span] = {}
    for destination in {destination for _, destination in wanted}:
        mine = Origins()
        for origin in (Origin.unpack(key[0]) for key in wanted if key[1] == destination):
            mine.add(Run(origin.incarnation, origin.partition), BitMap([origin.sequence]))
        for span, origins in rounds.handed_over.get(Step("expel", pipe, destination), Spans()).items():
            found |= {(origin.pack(), destination): span for origin in (origins & mine).first(len(wanted))}
    return found
