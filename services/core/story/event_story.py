"""The story of one event: its acceptance, its transforms, and what became of it at each destination."""

from collections.abc import Collection

from services.core.event import read_arrival
from services.core.security.masking import mask_text
from services.core.story.facts import Event, Facts, lane_of
from services.core.story.lane_story import SILENT, LaneStory
from services.core.story.model import EventStory, Passage, PipeStory
from services.core.story.moments import dead_letter_moments, when
from services.core.story.search import EARLY_MS, time_of
from services.core.times import format_time

_SHOWN_OUTPUTS = 20
_SHOWN_ORIGIN = 100  # bytes; other programs may write any


def make_event_story(event: Event, facts: Facts, wanted: Collection[str]) -> EventStory:
    """The story of one event, in those of the wanted pipes that read its stream, and in those that have records of it."""
    found = event.record
    names = _pipes_of(event, facts, wanted)
    record = None if found is None else found.record
    arrival = None if record is None else read_arrival(record)
    return EventStory(
        stream=None if found is None else found.position.topic,
        partition=None if found is None else found.position.partition,
        offset=None if found is None else str(found.position.offset),
        accepted=None if arrival is None else format_time(arrival),
        event_time=None if record is None else format_time(record.timestamp),
        origin=None if event.origin is None else event.origin[:_SHOWN_ORIGIN].decode(errors="replace"),
        bytes=None if record is None else len(record.value or b""),
        made_by=event.made_by,
        copied_by=(),
        pipes=tuple(_make_pipe_story(name, event, facts) for name in names),
    )


def _pipes_of(event: Event, facts: Facts, wanted: Collection[str]) -> list[str]:
    stream = None if event.record is None else event.record.position.topic
    reads = [name for name in wanted if event.made_by == name or stream in facts.pipes.pipes[name].sources]
    named = {lane_of(one, facts.renames)[0] for one in event.side} - {""}
    is_all = len(wanted) == len(facts.pipes.pipes)  # then also pipes that were removed from the file
    named = {name for name in named if name in wanted or (is_all and name not in facts.pipes.pipes)}
    return [*reads, *sorted(named - set(reads))]


def _make_pipe_story(name: str, event: Event, facts: Facts) -> PipeStory:
    pipe = facts.pipes.pipes.get(name)
    passage = None if pipe is None or pipe.transform is None else _make_passage(name, event, facts)
    known = {} if pipe is None else {one.name: one for one in pipe.destinations}
    found = sorted(
        {lane[1] for one in event.side if (lane := lane_of(one, facts.renames))[0] == name and lane[1]} - known.keys()
    )
    lanes = [LaneStory(name, one, known.get(one), event, facts, passage).make() for one in (*known, *found)]
    return PipeStory(name, passage, tuple(lanes))


def _make_passage(pipe: str, event: Event, facts: Facts) -> Passage:
    step = ("transform", pipe, None)
    outputs = tuple(str(found.position) for found in event.outputs.get(pipe, []))[:_SHOWN_OUTPUTS]
    letters = [found for found in event.side if lane_of(found, facts.renames) == (pipe, "")]
    moments = [one for found in letters for one in dead_letter_moments(found, facts.acts, letters)]
    history = tuple(one.moment for one in sorted(moments, key=when))
    if event.made_by == pipe:
        return Passage("passed", "made by the transform", None, outputs, history)
    passed = facts.reports.first(event.run, step, "passed")
    filtered = facts.reports.first(event.run, step, "filtered")
    if outputs or passed is not None:
        where = f"passed on to {', '.join(outputs[:3])}" if outputs else "passed on; its output was not found"
        more = f" and {len(outputs) - 3} more" if len(outputs) > 3 else ""
        return Passage("passed", where + more, _format(passed), outputs, history)
    if moments:
        newest = max(moments, key=when)
        return Passage("dead", newest.now, newest.moment.at, outputs, history)
    if facts.reports.first(event.run, step, "dead") is not None:
        return Passage("dead", "dead; the dead letter was not found", None, outputs, history)
    if filtered is not None:
        return Passage("filtered", _why_no_output(pipe, facts), _format(filtered), outputs, history)
    if facts.reports.complete and event.run is not None and step in facts.reports.heard:
        behind, pause = facts.reports.behind.get(step), facts.paused.get(pipe)
        stored = None if event.record is None else time_of(event.record.record)
        if stored is not None and facts.reports.done_ms.get(step, 0) > stored + EARLY_MS:
            return Passage(None, "the transform is past it, and no report has an outcome", None, outputs, history)
        late = f"; the transform is {behind / 1000:.0f} s behind" if behind else ""
        late = late if pause is None else f"; the transform is {mask_text(pause.text)}"
        return Passage(None, f"not transformed yet{late}", None, outputs, history)
    if facts.reports.complete and event.run is not None:
        return Passage(None, f"not known: {SILENT.format('transform')}", None, outputs, history)
    return Passage(None, "not recorded: reports are kept for a day", None, outputs, history)


def _why_no_output(pipe: str, facts: Facts) -> str:
    """Of an event that the transform has read, and whose origin no output has."""
    if facts.joins_events(pipe):
        return "read by a transform over several events: it is part of a result, which names no event, or was dropped"
    return "filtered: the transform returned nothing for this event"


def _format(millis: int | None) -> str | None:
    return None if millis is None else format_time(millis)
