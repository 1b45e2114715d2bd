"""Finds the facts about an event id and makes its story."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from services.core.audit import RESET, Entry, decode_entry
from services.core.broker.contract import Broker
from services.core.broker.errors import UnknownTopic
from services.core.broker.reading import scan
from services.core.control.pauses import list_paused
from services.core.event import ID, ORIGIN, Origin
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import (
    AUDIT,
    DELAYS_S,
    RETRIER_DEAD,
    RETRY_IN,
    dead_letter_topic,
    delay_topic,
    delivery_group,
    delivery_topics,
    lane_name,
    output_topic,
    parked_topic,
    renames_of,
    retry_topic,
)
from services.core.story.event_story import make_event_story
from services.core.story.facts import Event, Facts, lane_of
from services.core.story.model import EventStory, Searched, SearchedTopic, Story
from services.core.story.reports import Reports, read_reports
from services.core.story.search import (
    EARLY_MS,
    Budget,
    Found,
    Header,
    Limits,
    Search,
    Show,
    TimeRange,
    TopicResult,
    time_of,
)
from services.core.times import format_time
from services.core.undelivered.dead_letter import Position

DAY_MS = 86_400_000
_V7_BEFORE_MS, _V7_AFTER_MS = 120_000, 3_600_000
_LATE_MS = 600_000
"""A transform's output may be out of the order of arrival by this time."""
_FIND, _REPORTS, _OUTPUTS, _SIDE = 0.5, 0.2, 0.1, 0.2
"""The share of the limits that each step may use."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where to search. streams: of the pipe file. pipes: whose outputs and outcomes count. span: when the event was accepted."""

    streams: tuple[str, ...]
    pipes: tuple[str, ...]
    span: TimeRange


def time_of_id(event_id: str) -> int | None:
    """The time in an id, ms: of a UUIDv7; None for others."""
    digits = event_id.replace("-", "")
    is_uuid = len(event_id) == 36 and [at for at, sign in enumerate(event_id) if sign == "-"] == [8, 13, 18, 23]
    if not is_uuid or len(digits) != 32 or digits[12] != "7" or digits[16] not in "89abAB":
        return None
    try:
        return int(digits, 16) >> 80
    except ValueError:
        return None


def make_scope(
    pipes: PipeFile,
    event_id: str,
    now_ms: int,
    *,
    stream: str | None = None,
    pipe: str | None = None,
    since: int | None = None,
    until: int | None = None,
) -> Scope:
    """since, until: ms. Absent: the hour after the time in a UUIDv7; of other ids, the last 24 hours.

    Raises KeyError for a stream or pipe that the pipe file does not have.
    """
    if stream is not None and stream not in pipes.streams:
        raise KeyError(stream)
    streams = list(pipes.streams) if stream is None else [stream]
    if pipe is not None:
        streams = [one for one in streams if one in pipes.pipes[pipe].sources]
    names = [
        name
        for name, one in pipes.pipes.items()
        if pipe in (None, name) and any(source in streams for source in one.sources)
    ]
    own = time_of_id(event_id) if since is None and until is None else None
    if own is not None and own <= now_ms + DAY_MS:
        span = TimeRange(own - _V7_BEFORE_MS, own + _V7_AFTER_MS)
    else:
        last = now_ms if until is None else until
        span = TimeRange(min(last, now_ms) - DAY_MS if since is None else since, last)
    return Scope(tuple(streams), tuple(names), span)


async def find_story(
    broker: Broker, pipes: PipeFile, event_id: str, scope: Scope, limits: Limits, show: Show = lambda _progress: None
) -> Story:
    """The story of every event with this id. Reads on the event loop in slices, within the limits; writes nothing.

    Raises BrokerError kinds.
    """
    return await _Finder(Search(broker, limits, show), broker, pipes, event_id, scope).find()


@dataclass(slots=True)
class _Finder:
    search: Search
    broker: Broker
    pipes: PipeFile
    event_id: str
    scope: Scope
    events: list[Event] = field(default_factory=list)
    renames: Mapping[str, str] = field(init=False)
    has_all: bool = True
    is_reset: bool = False
    """Whether an operator moved a group back over one of the events: it may be delivered again after its first delivery."""

    def __post_init__(self) -> None:
        self.renames = renames_of(self.pipes)

    async def find(self) -> Story:
        await self._find_records()
        committed = await self._read_committed()
        acts = await self._read_acts()
        self.is_reset = any(entry.action == RESET for entry in acts)
        reports = await self._read_reports()
        await self._find_outputs(reports)
        await self._find_side_records(reports)
        for pipe in self.scope.pipes:
            for topic in (retry_topic(pipe), parked_topic(pipe)):
                if any(found.position.topic == topic for event in self.events for found in event.side):
                    committed |= await self._committed_in(pipe, [topic])
        paused = await list_paused(self.broker.reader, self.renames) if self.events else {}
        if any(event.side or event.outputs for event in self.events):
            acts = await self._read_acts()
        facts = Facts(
            self.pipes,
            reports,
            committed,
            self.renames,
            paused,
            acts,
            self.broker.is_contiguous,
            self.has_all,
        )
        stories = [make_event_story(event, facts, self.scope.pipes) for event in self.events]
        events = sorted(_with_copies(stories, self.pipes), key=lambda one: (one.accepted or "", bool(one.copied_by)))
        return Story(self.event_id, tuple(events), self._searched(reports))

    def _searched(self, reports: Reports) -> Searched:
        first, last = map(format_time, self.scope.span)
        topics = tuple(
            SearchedTopic(topic, one.complete, None if one.back_to is None else format_time(one.back_to))
            for topic, one in self.search.by_topic.items()
        )
        is_complete = all(topic.complete for topic in topics)
        return Searched(first, last, self.search.records, is_complete, reports.complete, topics)

    async def _find_records(self) -> None:
        """The records with this id in streams and outputs, and the records in the streams behind those outputs."""
        outputs = {
            output_topic(name): name for name in self.scope.pipes if self.pipes.pipes[name].transform is not None
        }
        wanted = {(ID, self.event_id.encode(errors="replace"))}
        budget = self.search.budget(_FIND)
        topics = [*self.scope.streams, *outputs]
        found = await self.search.by_arrival(topics, wanted, self.scope.span, budget, lingers=True)
        for one in sorted(found, key=lambda one: (time_of(one.record), one.position)):
            if one.position.topic not in outputs:
                self.events.append(Event(one, one.record.header(ORIGIN)))
        budget = self.search.budget(_OUTPUTS)
        for one in found:
            if (pipe := outputs.get(one.position.topic)) is not None:
                await self._add_output(pipe, one, budget)

    async def _add_output(self, pipe: str, found: Found, budget: Budget) -> None:
        origin, arrived = found.record.header(ORIGIN), time_of(found.record)
        sources = self.pipes.pipes[pipe].sources
        mine = [event for event in self.events if event.origin == origin and self._is_in(event, pipe)]
        if not mine and origin is not None:
            span = TimeRange(arrived, arrived)
            behind = await self.search.by_arrival(sources, {(ORIGIN, origin)}, span, budget)
            mine = [Event(one, origin) for one in behind[:1]]
            self.events += mine
        if not mine:
            mine = [Event(found, origin, made_by=pipe)]
            self.events += mine
        for event in mine:
            known = event.outputs.setdefault(pipe, [])
            if found.position not in [one.position for one in known]:
                known.append(found)

    def _is_in(self, event: Event, pipe: str) -> bool:
        if event.made_by is not None:
            return event.made_by == pipe
        return event.record is not None and event.record.position.topic in self.pipes.pipes[pipe].sources

    async def _read_committed(self) -> dict[tuple[str, str], Mapping[int, int]]:
        committed: dict[tuple[str, str], Mapping[int, int]] = {}
        for pipe in self.scope.pipes:
            if any(self._is_in(event, pipe) for event in self.events):
                committed |= await self._committed_in(pipe, delivery_topics(pipe, self.pipes.pipes[pipe]))
        return committed

    async def _committed_in(self, pipe: str, topics: Iterable[str]) -> dict[tuple[str, str], Mapping[int, int]]:
        groups = [delivery_group(pipe, destination.name) for destination in self.pipes.pipes[pipe].destinations]
        found: dict[tuple[str, str], Mapping[int, int]] = {}
        for topic in topics:
            for group in groups:
                try:
                    found[group, topic] = await self.broker.admin.committed(group, topic)
                except UnknownTopic:
                    break
        return found

    async def _read_reports(self) -> Reports:
        origins = self._origins()
        if not origins:
            return Reports()
        since = min(time_of(event.record.record) for event in self.events if event.record is not None)
        budget = self.search.budget(_REPORTS)
        return await read_reports(self.search, self.broker.reader, origins, since, budget, self._is_done, self.renames)

    def _origins(self) -> list[Origin]:
        return [origin for event in self.events if (origin := event.run) is not None]

    def _is_done(self, reports: Reports) -> bool:
        """Whether every destination of every event has delivered it, for good. Of several outputs, one may have been delivered.

        Before the pipe had its transform, it may have delivered the event as it was: then the transform's report comes later.
        """
        return not self.is_reset and all(
            event.run is not None
            and len(event.outputs.get(pipe, ())) < 2
            and (
                reports.first(event.run, ("transform", pipe, None), "filtered") is not None
                or (
                    (self.pipes.pipes[pipe].transform is None or pipe in event.outputs)
                    and all(
                        reports.first(event.run, ("expel", pipe, one.name), "delivered") is not None
                        for one in self.pipes.pipes[pipe].destinations
                    )
                )
            )
            for event in self.events
            for pipe in self.scope.pipes
            if self._is_in(event, pipe)
        )

    async def _find_outputs(self, reports: Reports) -> None:
        """The outputs that have another id than their event."""
        budget = self.search.budget(_OUTPUTS)
        for event in self.events:
            for pipe in self.scope.pipes:
                missing = self._is_in(event, pipe) and pipe not in event.outputs and event.made_by is None
                if not missing or event.origin is None or event.record is None:
                    continue
                if self.pipes.pipes[pipe].transform is None or _is_filtered(reports, event, pipe):
                    continue
                arrived = time_of(event.record.record)
                span = TimeRange(arrived - _LATE_MS, arrived + _LATE_MS)
                found = await self.search.by_arrival([output_topic(pipe)], {(ORIGIN, event.origin)}, span, budget)
                if found:
                    event.outputs[pipe] = found

    async def _find_side_records(self, reports: Reports) -> None:
        if (
            self.events
            and self._is_done(reports)
            and not any(self._has_waited(reports, event) for event in self.events)
        ):
            return
        wanted: set[Header] = {(ID, self.event_id.encode(errors="replace"))}
        wanted |= {(ORIGIN, event.origin) for event in self.events if event.origin is not None}
        known = [time_of(event.record.record) for event in self.events if event.record is not None]
        first = min(known, default=self.scope.span.first) - EARLY_MS
        own = await self._side_topics()
        topics = [*own, RETRIER_DEAD, RETRY_IN, *(delay_topic(seconds) for seconds in reversed(DELAYS_S))]
        found = await self.search.by_timestamp(topics, wanted, first, self.search.budget(_SIDE))
        self.has_all = all(self.search.by_topic[topic].complete for topic in topics if topic in self.search.by_topic)
        for one in found:
            mine = [event for event in self.events if event.owns(one)]
            if not mine:
                if (ID, self.event_id.encode(errors="replace")) not in one.record.headers:
                    continue
                mine = [Event(None, one.record.header(ORIGIN))]
                self.events += mine
            pipe = lane_of(one, self.renames)[0]
            readers = [event for event in mine if pipe in self.pipes.pipes and self._is_in(event, pipe)]
            for event in readers or mine:  # not of the copies that destinations wrote to other streams
                event.side.append(one)

    async def _side_topics(self) -> list[str]:
        """Of the pipes in the scope, by all their names. Where the scope is everything, also of pipes that were removed."""
        kinds = (dead_letter_topic, parked_topic, retry_topic)
        former = {
            old.partition("/")[0] for old, now in self.renames.items() if now.partition("/")[0] in self.scope.pipes
        }
        known = [topic(pipe) for pipe in dict.fromkeys([*self.scope.pipes, *sorted(former)]) for topic in kinds]
        if len(self.scope.pipes) < len(self.pipes.pipes):
            return known
        ends = tuple(topic("") for topic in kinds)
        stored = sorted(topic for topic in await self.broker.admin.topics() if topic.endswith(ends))
        return [*known, *(topic for topic in stored if topic not in known and topic != RETRIER_DEAD)]

    def _has_waited(self, reports: Reports, event: Event) -> bool:
        """Whether any destination has reported anything but the delivery."""
        return event.run is None or any(
            reported.outcome not in ("delivered", "passed", "filtered", "accepted")
            for step in reports.by_event.get(event.run, {}).values()
            for reported in step
        )

    async def _read_acts(self) -> list[Entry]:
        """The audit entries about these records, oldest first."""
        records = [found for event in self.events for found in (*event.side, *chain(*event.outputs.values()))]
        records += [event.record for event in self.events if event.record is not None]
        places = {found.position for found in records}
        acts: list[Entry] = []
        if not places:
            return acts
        budget = self.search.budget(_SIDE)
        try:
            async for batch in scan(self.broker.reader, AUDIT, 0, None, None):
                self.search.count(batch, budget)
                for record in batch.records:
                    try:
                        entry = decode_entry(record.value)
                    except ValueError:
                        continue
                    if any(_names(entry, place) for place in places):
                        acts.append(entry)
                if budget.is_spent:
                    self.search.by_topic[AUDIT] = TopicResult(complete=False)
                    break
        except UnknownTopic:
            pass
        return acts


def _names(entry: Entry, place: Position) -> bool:
    is_there = (entry.topic, entry.partition) == (place.topic, place.partition)
    return is_there and any(first <= place.offset <= last for first, last in entry.ranges)


def _is_filtered(reports: Reports, event: Event, pipe: str) -> bool:
    step = ("transform", pipe, None)
    return reports.first(event.run, step, "filtered") is not None and reports.first(event.run, step, "passed") is None


def _redriven_to_stream(event: EventStory) -> list[str]:
    """When dead letters of its transforms were redriven, the oldest first."""
    passages = [pipe.transform for pipe in event.pipes if pipe.transform is not None]
    return sorted(moment.at for passage in passages for moment in passage.history if moment.what == "redriven")


def _with_copies(events: Sequence[EventStory], pipes: PipeFile) -> Iterator[EventStory]:
    """Each with the destinations that wrote it to its stream from the stream of another one with the same origin.

    Several in one stream with the same origin are copies, each after the first written by a redrive or a producer's repetition.
    """
    copies: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.stream is not None and event.origin is not None and event.made_by is None:
            copies[event.stream, event.origin] += 1
            if (number := copies[event.stream, event.origin]) > 1:
                redriven = _redriven_to_stream(event)[number - 2 : number - 1]
                event = msgspec.structs.replace(event, copy=number, redriven=next(iter(redriven), None))
        others = {one.stream for one in events if one.origin == event.origin is not None and one is not event}
        writers = tuple(
            lane_name(name, destination.name)
            for name, pipe in pipes.pipes.items()
            for destination in pipe.destinations
            if destination.stream is not None and destination.stream == event.stream and others & set(pipe.sources)
        )
        yield msgspec.structs.replace(event, copied_by=writers)
