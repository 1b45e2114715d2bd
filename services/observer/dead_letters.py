"""Reading the dead-letter topics from their beginning, and then on for ever, without a group: who restarts reads them again.

A page of at most PAGE records at a time, topic after topic: memory does not grow with what is stored, and no topic waits long
for another. A topic that cannot be read is tried again at every turn, and the others go on.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from aiohttp import web

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Batch
from services.core.causes import Cause, Causes
from services.core.dead_letter import DeadLetter, Position
from services.core.pipes import PipeFile, dead_letter_topic
from services.core.times import format_time, parse_time
from services.observer import problems
from services.observer.http import Refused, json_answer, read_query

CAUSES = 50
"""Kept by name for each destination; the rarest of more are counted together."""

Name = tuple[str, str]
"""Pipe and destination."""


@dataclass(slots=True)
class Failures:
    """Of one destination. last: ms, the newest first failure; None without letters."""

    causes: Causes = field(default_factory=lambda: Causes(CAUSES))
    last: int | None = None

    @property
    def letters(self) -> int:
        """How many were read."""
        return self.causes.letters

    def since(self, when: int) -> list[Cause]:
        """The causes that were seen at or after `when` (ms), the most frequent first. Their counts are of all times."""
        return [cause for cause in self.causes.most_common() if cause.last >= when]


class FailureTable:
    """By destination of the pipe file, and no other: what else a letter may name takes no memory."""

    def __init__(self, pipes: PipeFile) -> None:
        self._by_name = {
            (name, destination.name): Failures()
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
        }

    def note(self, letter: DeadLetter) -> str:
        """Count one letter; "", or why it is no destination's: `no_destination` (a transform gave up), `unknown_destination`."""
        if not letter.destination:
            return "no_destination"
        failures = self._by_name.get((letter.pipe, letter.destination))
        if failures is None:
            return "unknown_destination"
        failures.causes.add(letter)
        failures.last = max(failures.last or letter.first_failure, letter.first_failure)
        return ""

    def all(self) -> Mapping[Name, Failures]:
        """Every destination, in the pipe file's order."""
        return self._by_name


log = structlog.get_logger()

PAGE = 500
TURN_S = 1.0
"""Between two turns over all topics when there was nothing new in any."""


@dataclass(slots=True)
class Place:
    """Where a topic's only partition is read on; None: from its beginning. caught_up: its end was reached once."""

    next: int | None = None
    caught_up: bool = False
    problem: str | None = None


class DeadLetterReader:
    """`note` gets every letter once and says "", or the reason for which it counts for nobody."""

    def __init__(self, reader: Reader, topics: Sequence[str], note: Callable[[DeadLetter], str]) -> None:
        self._reader, self._note = reader, note
        self._places = {topic: Place() for topic in topics}

    @property
    def catching_up(self) -> bool:
        """Whether some topic's end was not reached yet since the start."""
        return not all(place.caught_up for place in self._places.values())

    @property
    def problems(self) -> dict[str, str]:
        """By topic, why it cannot be read now."""
        return {topic: place.problem for topic, place in self._places.items() if place.problem is not None}

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`. Raises nothing of the broker."""
        while not stopping.is_set():
            moved = [await self.advance(topic) for topic in self._places if not stopping.is_set()]
            if not any(moved):
                with suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S):
                        await stopping.wait()

    async def advance(self, topic: str) -> bool:
        """One page of this topic; whether there was any."""
        place = self._places[topic]
        try:
            moved = await self._read_page(topic, place)
        except UnknownTopic:  # nothing was ever buried there: a fleet without a schedule has no letters of the retrier
            moved, place.caught_up, place.next = False, True, None
        except BrokerError as error:
            if place.problem is None:
                log.warning("letters_unreadable", topic=topic, error=str(error), hint="it is tried again, others go on")
            place.problem = str(error)
            metrics.OBSERVER_TOPIC_UP.labels(topic).set(0)
            return False
        place.problem = None
        metrics.OBSERVER_TOPIC_UP.labels(topic).set(1)
        return moved

    async def _read_page(self, topic: str, place: Place) -> bool:
        if place.next is None:
            place.next = (await self._reader.describe(topic))[0].start
        try:
            batch = await self._reader.read(topic, 0, place.next, max_records=PAGE)
        except OffsetOutOfRange as error:
            log.warning("letters_gone", topic=topic, wanted=place.next, start=error.start, end=error.end)
            place.next = error.start  # retention was quicker, or the topic was made anew
            return True
        if batch is None:
            place.caught_up = True
            return False
        self._take(batch)
        place.next = batch.offsets[-1] + 1
        return True

    def _take(self, batch: Batch) -> None:
        metrics.OBSERVER_LETTERS.labels(batch.topic).inc(len(batch.records))
        if batch.damage is not None:
            log.error("letters_damaged", topic=batch.topic, first=batch.damage.first, last=batch.damage.last)
            metrics.OBSERVER_PASSED_OVER.labels(batch.topic, "damaged").inc()
            return
        passed: Counter[str] = Counter()
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            passed[self._note(DeadLetter.of(Position(batch.topic, batch.partition, offset), record))] += 1
        for reason, count in passed.items():
            if reason:
                metrics.OBSERVER_PASSED_OVER.labels(batch.topic, reason).inc(count)


OPENAPI = Path(__file__).with_name("openapi.json")
LIMIT, MOST = 20, 100

State = Callable[[str], str | None]
"""Of `<pipe>/<destination>`: whether it is paused, or how its breaker is. None while it is not known."""


class Api:
    """Answers from what was read so far; nothing here waits for a broker."""

    def __init__(
        self,
        book: FailureTable,
        reader: DeadLetterReader,
        state: State,
        openapi: bytes,
        breaker: State = lambda _lane: None,
    ) -> None:
        self._book, self._reader, self._openapi = book, reader, openapi
        self._state, self._breaker = state, breaker

    def routes(self) -> list[web.RouteDef]:
        """What there is."""
        return [
            web.get("/v1/destinations", self.destinations),
            web.get("/v1/destinations/{pipe}/{name}/failures", self.failures),
            web.get("/openapi.json", self.openapi),
        ]

    async def destinations(self, request: web.Request) -> web.Response:
        """All of them."""
        read_query(request, {})
        found = [self._summary(pipe, name, failures) for (pipe, name), failures in self._book.all().items()]
        return json_answer({"destinations": found, **self._how_complete()})

    async def failures(self, request: web.Request) -> web.Response:
        """The causes of one destination's failures."""
        query = read_query(request, {"since": _since, "limit": _limit})
        pipe, name = request.match_info["pipe"], request.match_info["name"]
        failures = self._book.all().get((pipe, name))
        if failures is None:
            raise Refused(problems.DESTINATION_NOT_FOUND, "GET /v1/destinations lists those that there are.")
        causes = failures.since(query.get("since", -(2**63)))
        shown = [cause.as_json() for cause in causes[: query.get("limit", LIMIT)]]
        more = len(causes) - len(shown)
        return json_answer(
            {**self._summary(pipe, name, failures), "causes": shown, "more": more, **self._how_complete(pipe)}
        )

    async def openapi(self, _request: web.Request) -> web.Response:
        """The description of this API."""
        return web.Response(body=self._openapi, content_type="application/json")

    def _summary(self, pipe: str, name: str, failures: Failures) -> dict[str, object]:
        last = None if failures.last is None else format_time(failures.last)
        standing = {"state": self._state(f"{pipe}/{name}"), "breaker": self._breaker(f"{pipe}/{name}")}
        return {"pipe": pipe, "destination": name, **standing, "letters": failures.letters, "last_failure": last}

    def _how_complete(self, pipe: str | None = None) -> dict[str, object]:
        unread = self._reader.problems
        if pipe is not None:
            unread = {topic: problem for topic, problem in unread.items() if topic == dead_letter_topic(pipe)}
        return {"catching_up": self._reader.catching_up, "unread": unread}


def _since(text: str) -> int:
    try:
        return parse_time(text, time.time())
    except (ValueError, OverflowError):
        raise Refused(problems.BAD_PARAMETER, "since: 2h (ago), or 2026-11-21T08:00:00Z.") from None


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise Refused(problems.BAD_PARAMETER, f"limit: a number from 1 to {MOST}.")
    return int(text)
