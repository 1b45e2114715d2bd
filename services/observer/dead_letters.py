"""Follows the dead-letter topics from their beginning, and shows the causes of failures on the API.

Without a group: a restart reads them again. One page at a time, topic after topic, so memory does not grow with the stored
records, and no topic waits long for another. A topic that cannot be read is tried again at every turn.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Batch
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import dead_letter_topic, lane_name, renames_of
from services.core.process.lifecycle import wait_for_stop
from services.core.times import format_time
from services.core.undelivered.causes import Causes
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.observer import problems
from services.observer.http import Refused, json_answer, read_query, read_time

CAUSES = 50
"""Of each destination, by name; rarer ones are counted together."""

Name = tuple[str, str]
"""Pipe and destination."""


@dataclass(slots=True)
class Failures:
    """Of one destination. last: when its newest dead letter was written, in ms; None without dead letters."""

    causes: Causes = field(default_factory=lambda: Causes(CAUSES))
    last: int | None = None


class FailureTable:
    """By destination of the pipe file; dead letters of a former name count for the present one. Other names take no memory."""

    def __init__(self, pipes: PipeFile) -> None:
        self._renames = renames_of(pipes)
        self._by_name = {
            (name, destination.name): Failures()
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
        }

    def count(self, letter: DeadLetter) -> str:
        """Count one; "", or why it counts for no destination: `no_destination` (a transform gave up), `unknown_destination`."""
        if not letter.destination:
            return "no_destination"
        lane = lane_name(letter.pipe, letter.destination)
        pipe, _, destination = self._renames.get(lane, lane).partition("/")
        failures = self._by_name.get((pipe, destination))
        if failures is None:
            return "unknown_destination"
        failures.causes.add(letter)
        failures.last = max(failures.last or letter.dead_since, letter.dead_since)
        return ""

    def all(self) -> Mapping[Name, Failures]:
        """Every destination, in the pipe file's order."""
        return self._by_name


log = structlog.get_logger()

PAGE = 500
TURN_S = 1.0
"""Between two turns over all topics, when none of them had a new record."""


@dataclass(slots=True)
class ReadPosition:
    """next: the offset in each partition of a topic, usually one; None: their beginnings. Partitions that are added later are
    read after a restart. caught_up: the ends were reached once."""

    next: dict[int, int] | None = None
    caught_up: bool = False
    problem: str | None = None


class DeadLetterReader:
    """count: called once with every dead letter; returns as `FailureTable.count`."""

    def __init__(self, reader: Reader, topics: Sequence[str], count: Callable[[DeadLetter], str]) -> None:
        self._reader, self._count = reader, count
        self._positions = {topic: ReadPosition() for topic in topics}

    @property
    def catching_up(self) -> bool:
        """Whether the end of a topic was not reached yet since the start."""
        return not all(position.caught_up for position in self._positions.values())

    @property
    def problems(self) -> dict[str, str]:
        """By topic, why it cannot be read now."""
        return {topic: one.problem for topic, one in self._positions.items() if one.problem is not None}

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`. Raises no BrokerError."""
        while not stopping.is_set():
            moved = [await self.advance(topic) for topic in self._positions if not stopping.is_set()]
            if not any(moved):
                await wait_for_stop(stopping, TURN_S)

    async def advance(self, topic: str) -> bool:
        """Read one page of each partition of this topic. False: there was none."""
        position = self._positions[topic]
        try:
            moved = await self._read_pages(topic, position)
        except UnknownTopic:  # without retries a fleet has no dead letters of the retrier
            moved, position.caught_up, position.next = False, True, None
        except BrokerError as error:
            if position.problem is None:
                log.warning("dead_letters_unreadable", topic=topic, error=str(error), hint="the topic is read again")
            position.problem = str(error)
            metrics.OBSERVER_TOPIC_UP.labels(topic).set(0)
            return False
        position.problem = None
        metrics.OBSERVER_TOPIC_UP.labels(topic).set(1)
        return moved

    async def _read_pages(self, topic: str, position: ReadPosition) -> bool:
        if position.next is None:
            stored = await self._reader.describe(topic)
            position.next = {partition: one.start for partition, one in stored.items()}
        moved = [await self._read_page(topic, partition, position.next) for partition in position.next]
        position.caught_up |= not any(moved)
        return any(moved)

    async def _read_page(self, topic: str, partition: int, following: dict[int, int]) -> bool:
        """following: the next offset by partition."""
        try:
            batch = await self._reader.read(topic, partition, following[partition], max_records=PAGE)
        except OffsetOutOfRange as error:
            log.warning("dead_letters_gone", topic=topic, wanted=following[partition], start=error.start, end=error.end)
            following[partition] = error.start  # retention deleted records, or the topic was created again
            return True
        if batch is None:
            return False
        self._count_batch(batch)
        following[partition] = batch.offsets[-1] + 1
        return True

    def _count_batch(self, batch: Batch) -> None:
        metrics.OBSERVER_LETTERS.labels(batch.topic).inc(len(batch.records))
        if batch.damage is not None:
            log.error("dead_letters_damaged", topic=batch.topic, first=batch.damage.first, last=batch.damage.last)
            metrics.OBSERVER_PASSED_OVER.labels(batch.topic, "damaged").inc()
            return
        passed: Counter[str] = Counter()
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            passed[self._count(DeadLetter.of(Position(batch.topic, batch.partition, offset), record))] += 1
        for reason, count in passed.items():
            if reason:
                metrics.OBSERVER_PASSED_OVER.labels(batch.topic, reason).inc(count)


OPENAPI = Path(__file__).with_name("openapi.json")
LIMIT, MOST = 20, 100
_read_since = partial(read_time, example="since: 2h (ago), or 2026-11-21T08:00:00Z.")

LaneState = Callable[[str, str], str | None]
"""By pipe and destination: active or paused, or the state of the circuit breaker. None: unknown."""


class Api:
    """Answers from the records that were read so far; no request waits for a broker."""

    def __init__(
        self,
        failures: FailureTable,
        reader: DeadLetterReader,
        state: LaneState,
        openapi: bytes,
        breaker: LaneState = lambda _pipe, _destination: None,
    ) -> None:
        self._failures, self._reader, self._openapi = failures, reader, openapi
        self._state, self._breaker = state, breaker

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/destinations", self.destinations),
            web.get("/v1/destinations/{pipe}/{name}/failures", self.failures),
            web.get("/openapi.json", self.openapi),
        ]

    async def destinations(self, request: web.Request) -> web.Response:
        read_query(request, {})
        found = [self._summary(pipe, name, failures) for (pipe, name), failures in self._failures.all().items()]
        return json_answer({"destinations": found, **self._how_complete()})

    async def failures(self, request: web.Request) -> web.Response:
        query = read_query(request, {"since": _read_since, "limit": _limit})
        pipe, name = request.match_info["pipe"], request.match_info["name"]
        failures = self._failures.all().get((pipe, name))
        if failures is None:
            raise Refused(problems.DESTINATION_NOT_FOUND, "GET /v1/destinations lists the destinations.")
        since = query.get("since", -(2**63))
        causes = [cause for cause in failures.causes.most_common() if cause.last >= since]
        shown = [cause.as_json() for cause in causes[: query.get("limit", LIMIT)]]
        more = len(causes) - len(shown)
        return json_answer(
            {**self._summary(pipe, name, failures), "causes": shown, "more": more, **self._how_complete(pipe)}
        )

    async def openapi(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    def _summary(self, pipe: str, name: str, failures: Failures) -> dict[str, object]:
        return {
            "pipe": pipe,
            "destination": name,
            "state": self._state(pipe, name),
            "breaker": self._breaker(pipe, name),
            "letters": failures.causes.letters,
            "last_failure": None if failures.last is None else format_time(failures.last),
        }

    def _how_complete(self, pipe: str | None = None) -> dict[str, object]:
        unread = self._reader.problems
        if pipe is not None:
            unread = {topic: problem for topic, problem in unread.items() if topic == dead_letter_topic(pipe)}
        return {"catching_up": self._reader.catching_up, "unread": unread}


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise Refused(problems.BAD_PARAMETER, f"limit is a number from 1 to {MOST}.")
    return int(text)
