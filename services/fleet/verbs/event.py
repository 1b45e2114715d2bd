"""`penstock event`: what happened to one event, and where it is now."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn
from rich.text import Text

from services.core.pipe_file.pipes import PipeFile
from services.core.story.find import Scope, find_story, make_scope
from services.core.story.model import EventStory, Lane, Moment, Passage, PipeStory, Searched, Story
from services.core.story.search import Limits, Progress
from services.core.times import format_time, parse_time
from services.fleet.access import find_broker, load_found_pipes, opened
from services.fleet.console import ERR, OUT, print_note
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed, unknown_name
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example

LIMITS = Limits(seconds=60.0, records=20_000_000, bytes=8_000_000_000)
SHOWN_ID = 80
_Outcome = tuple[str, str | None, list[str]]


@APP.command(epilog=example("penstock event o-88121\npenstock event o-88121 --stream orders --since 3d --json"))
def event(
    event_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The event's id, as a receiver or a dead letter shows it. A sender gets the ids that ingest makes "
            "with `Prefer: return=representation`.",
        ),
    ],
    stream: Annotated[str | None, typer.Option("--stream", help="Only events of this stream.")] = None,
    pipe: Annotated[str | None, typer.Option("--pipe", help="Only the sources of this pipe, and its outcomes.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Only events accepted at or after this time: 2h (ago), or RFC 3339. Default: the time in the id (UUIDv7), "
            "else 24 hours ago.",
        ),
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Only events accepted before this time.")] = None,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show the story of an event: when it was accepted, its outcome at each step, its attempts, and where it is now.

    Searches the topics for its id. Needs no running fleet. Status 1 when the id was not found.
    """
    file, now = load_found_pipes(pipes, data), time.time()
    try:
        first, last = (None if text is None else parse_time(text, now) for text in (since, until))
    except (ValueError, OverflowError) as error:
        raise CommandFailed(str(error), status=2) from error
    for kind, name, known in (("stream", stream, file.streams), ("pipe", pipe, file.pipes)):
        if name is not None and name not in known:
            raise unknown_name(f"the pipe file has no {kind} {plain(name, SHOWN_ID)}", name, known)
    scope = make_scope(file, event_id, int(now * 1000), stream=stream, pipe=pipe, since=first, until=last)
    story = uvloop.run(_find(find_broker(broker, data), file, event_id, scope))
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(story)))
    else:
        print_events(story.events)
    _print_search(story)
    if not story.events:
        raise typer.Exit(1)


async def _find(url: str, file: PipeFile, event_id: str, scope: Scope) -> Story:
    async with opened(url, file) as broker:
        with _progress() as show:
            return await find_story(broker, file, event_id, scope, LIMITS, show)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """On a terminal, one line that shows how far the search is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bar:
        task = bar.add_task("searching")

        def show(progress: Progress) -> None:
            back = "" if progress.back_to is None else f", back to {format_time(progress.back_to)}"
            bar.update(task, description=f"searching {progress.topic}: {progress.records:,} records{back}")

        yield show


def print_events(events: Sequence[EventStory]) -> None:
    """The stories. Of a copy, only the pipes whose outcome is not that of an earlier copy."""
    for index, one in enumerate(events):
        copies = [earlier for earlier in events[:index] if one.copy > 1 and earlier.origin == one.origin]
        _print_event(one, [_outcome(pipe) for earlier in copies for pipe in earlier.pipes])
    shown = [pipe for one in events for pipe in one.pipes]
    if any(
        (pipe.transform and _reported(pipe.transform)) or any(_is_reported(lane) for lane in pipe.destinations)
        for pipe in shown
    ):
        _print(0, Text("A reported time is about a second after the answer, at most.", style="dim"))


def _print_event(one: EventStory, known: Sequence[_Outcome]) -> None:
    if one.stream is None:
        _print(0, Text("The event's own record was not found; these records name it:", style="bold"))
    else:
        place = f"{one.stream}, partition {one.partition}, offset {one.offset}"
        by = f", made by the transform of {one.made_by}" if one.made_by else ""
        copied = f", written by {' or '.join(one.copied_by)}" if one.copied_by else ""
        if one.copy > 1:
            copied += ", second copy" if one.copy == 2 else f", copy {one.copy}"
            copied += f", redriven at {one.redriven}" if one.redriven else ""
        _print(0, Text.assemble((f"accepted {one.accepted or 'at an unknown time'}", "bold"), f"  {place}{by}{copied}"))
        about = f"event time {one.event_time}, {one.bytes} bytes, origin {one.origin or 'none'}"
        _print(2, Text(plain(about), style="dim"))
    rest = [pipe for pipe in one.pipes if _outcome(pipe) not in known]
    if len(rest) < len(one.pipes):
        _print(2, Text(f"{'otherwise ' if rest else ''}as above: reports do not tell copies apart"))
    for pipe in rest:
        _print(2, Text(plain(pipe.pipe), style="bold cyan"))
        if pipe.transform is not None:
            _print_transform(pipe.transform)
        for lane in pipe.destinations:
            _print_lane(lane)
    if not one.pipes:
        _print(2, Text("no pipe reads this stream"))


def _print(indent: int, text: Text) -> None:
    """One line. On a terminal that is narrower, the rest is below it, further in."""
    width = OUT.width - indent - 2
    lines = text.wrap(OUT, width) if OUT.is_terminal and text.cell_len > width + 2 else [text]
    for number, line in enumerate(lines):
        OUT.print(Text(" " * (indent + (2 if number else 0))).append_text(line))


def _is_reported(lane: Lane) -> bool:
    return any(moment.what in ("delivered", "reported") for moment in lane.history)


def _reported(passage: Passage) -> str | None:
    """The time of the report. Of dead letters, the history has the times."""
    return None if passage.outcome == "dead" else passage.at


def _outcome(pipe: PipeStory) -> _Outcome:
    now = None if pipe.transform is None else pipe.transform.now
    return pipe.pipe, now, [lane.now for lane in pipe.destinations]


def _print_transform(passage: Passage) -> None:
    at = f"  (reported {reported})" if (reported := _reported(passage)) else ""
    style = {"passed": "green", "dead": "red"}.get(passage.outcome or "", "yellow")
    _print(4, Text.assemble("transform: ", (plain(passage.now), style), (at, "dim")))
    _print_history(passage.history)


_STYLES = {
    "delivered": "green",
    "dead": "red",
    "dropped": "red",
    "skipped": "red",
    "unknown": "yellow",
    "waiting": "yellow",
}


def _print_lane(lane: Lane) -> None:
    is_said = len(lane.history) == 1 and lane.history[0].text == lane.now
    at = f"  ({lane.history[0].at})" if is_said else ""
    _print(
        4, Text.assemble(f"{plain(lane.destination)}: ", (plain(lane.now), _STYLES.get(lane.state, "")), (at, "dim"))
    )
    if not is_said and (lane.state != "delivered" or len(lane.history) > 1):
        _print_history(lane.history)


def _print_history(history: tuple[Moment, ...]) -> None:
    for moment in history:
        where = f"  [{moment.position}]" if moment.position else ""
        _print(6, Text.assemble((f"{moment.at}  ", "dim"), plain(moment.text), (plain(where), "dim")))


def _print_search(story: Story) -> None:
    """Which part of the topics was searched, where the answer depends on it."""
    searched: Searched = story.searched
    span = f"events accepted from {searched.first} to {searched.last}"
    partly = [topic for topic in searched.topics if not topic.complete]
    if not story.events:
        print_note(
            f"{plain(story.id, SHOWN_ID)} was not found: {len(searched.topics)} topics and {searched.records} records were "
            f"searched, for {span}. An event that ingest refused is not stored: the answer to its sender has the reason. "
            "An event without the field that the pipe file names for the id got another id: penstock doctor names such fields. "
            "Try: --since 7d, or --since and --until around its time",
            "yellow",
        )
    for topic in partly:
        back = f"back to {topic.back_to}" if topic.back_to else "in part"
        print_note(
            f"{topic.topic} was searched {back}; older records may exist. Try: --since and --until for another range",
            "yellow",
        )
    named = any(event.origin is not None for event in story.events)  # reports name no others
    if named and not searched.reports_complete:
        print_note(
            "The reports of this time are not stored any more, or were not read in full. Deliveries may be unknown.",
            "yellow",
        )
