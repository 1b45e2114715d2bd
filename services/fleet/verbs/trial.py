"""`penstock try`: run the transform of a pipe on a sample."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.table import Table
from rich.text import Text

from services.core.pipe_file.pipes import Pipe, PipeFile, load_pipes
from services.core.pipe_file.stream import NO_SINGLE_FIELD
from services.core.sample import AbsentField, RefusedEvent, SampleRecord, TrialResult, UndeclaredField
from services.core.times import format_time
from services.core.units import format_count, format_duration
from services.core.yaml_source import BadConfiguration
from services.fleet.access import find_broker
from services.fleet.console import OUT, make_table, print_note
from services.fleet.dead.view import plain
from services.fleet.pipes.trial import (
    MOST_EVENTS,
    Trial,
    find_absent_fields,
    make_records,
    output_json,
    read_files,
    read_streams,
    run_transform,
    sum_up,
)
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, example
from services.fleet.verbs.pipes import PipeFilePath

SHOWN = 20
SHOWN_PAYLOAD = 1000
SHOWN_FIELDS = 8

FromFile = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        help="A JSON array, NDJSON, or either gzipped; -: standard input. With several sources: STREAM=FILE, repeatable.",
    ),
]
FromStream = Annotated[
    int | None,
    typer.Option(
        "--from-stream",
        min=1,
        max=MOST_EVENTS,
        help="The newest N events of each source (on Kinesis the oldest). The fleet need not run.",
    ),
]


@APP.command(
    "try",
    epilog=example(
        "penstock try large-orders --sample orders.json\n"
        "penstock try large-orders --from-stream 100 --json | jq .dead_letters\n"
        "penstock try joined --sample orders=orders.ndjson --sample payments=payments.ndjson.gz"
    ),
)
def try_pipe(
    pipe: Annotated[str, typer.Argument(help="The pipe's name.")],
    sample: FromFile = None,
    from_stream: FromStream = None,
    pipes: PipeFilePath = Path("pipes.yaml"),
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Run the transform of a pipe on a sample, and print its outputs and its dead letters. Starts and stores nothing.

    Without a transform it shows the id, key and time that the events get.

    Status 0 when every event passes or is filtered by the transform. 1 for dead letters, refused events, results that repeat the
    id of another result, and a broken transform.
    """
    try:
        trial, chosen = _try(pipe, sample or [], from_stream, pipes, broker, data)
    except BadConfiguration as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"problems": [problem.as_json() for problem in error.problems]}))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(trial.as_json()))
    else:
        _print(trial, chosen)
    if not trial.is_good:
        raise typer.Exit(1)


def _try(
    name: str, sample: Sequence[str], from_stream: int | None, pipes: Path, broker: str | None, data: Path
) -> tuple[Trial, Pipe]:
    """Raises BadConfiguration and CommandFailed."""
    if bool(sample) == (from_stream is not None):
        raise CommandFailed("exactly one of --sample and --from-stream is needed", "--sample orders.json", status=2)
    pipe_file = load_pipes(pipes)
    pipe = _find_pipe(pipe_file, name, pipes)
    refused: Sequence[RefusedEvent] = []
    absent: Sequence[AbsentField] = []
    if from_stream is not None:
        url: str | None = find_broker(broker, data)
        records: Sequence[SampleRecord] = uvloop.run(read_streams(url or "", pipe_file, pipe.sources, from_stream))
        absent = find_absent_fields(pipe_file, records)
    else:
        url = broker
        read = read_files(_match(sample, pipe.sources))
        for file in read.cut:
            print_note(f"{file}: only the first {MOST_EVENTS} events are tried", "yellow")
        found = make_records(read.events, pipes)
        records, refused, absent = found.records, [*read.refused, *found.refused], found.absent
    if not records and not refused:
        where = ", ".join(sample) if sample else ", ".join(pipe.sources)
        raise CommandFailed(f"the sample has no events: {where}", "--sample with a file of events", status=2)
    without = f", without {len(refused)} that ingest would refuse" if refused else ""
    if pipe.transform is None:
        result = TrialResult(outputs=[one.record for one in records])
    else:
        print_note(
            f"Spark starts, and runs {name} on {format_count(len(records), 'event')}{without} (10 s to two minutes)",
            "dim",
        )
        result = run_transform(pipes, name, records, url)
    return sum_up(name, pipe, records, refused, result, absent), pipe


def _find_pipe(file: PipeFile, name: str, path: Path) -> Pipe:
    """Raises CommandFailed."""
    if (pipe := file.pipes.get(name)) is not None:
        return pipe
    raise CommandFailed(f"{path} has no pipe {name}", f"one of: {', '.join(file.pipes)}", status=2)


def _match(sample: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """File by stream. Raises CommandFailed."""
    found: dict[str, str] = {}
    for text in sample:
        stream, equals, file = text.partition("=")
        if not equals or stream not in sources:
            stream, file = sources[0], text
            if len(sources) > 1:
                names = " ".join(f"--sample {source}=FILE" for source in sources)
                raise CommandFailed(f"{text}: the pipe has several streams, and none of them is named", names, status=2)
        if stream in found:
            raise CommandFailed(f"--sample names {stream} twice", "one file for each stream", status=2)
        found[stream] = file
    if list(found.values()).count("-") > 1:
        raise CommandFailed("standard input is one file", "a file for each other stream", status=2)
    return found


def trial_tables(trial: Trial) -> Iterator[Table]:
    """The outputs, the dead letters and the refused events; of each the first SHOWN."""
    if trial.outputs:
        rows = [output_json(record) for record in trial.outputs[:SHOWN]]
        named = ["outputs"] if "outputs" in rows[0] else []
        outputs = make_table("id", "key", "time", *named, "payload", text=[*named, "payload"], title="outputs")
        for row in rows:
            in_outputs = [Text(", ".join(row["outputs"]) or "none")] if named else []
            *first, payload = [Text(plain(row[name] or "", SHOWN_PAYLOAD)) for name in ("id", "key", "time", "payload")]
            outputs.add_row(*first, *in_outputs, payload)
        yield outputs
    if trial.dead:
        dead = make_table("from", "id", "reason", "detail", text=["detail"], title="dead letters")
        for letter in trial.dead[:SHOWN]:
            words = [Text(plain(text)) for text in (trial.place_of(letter), letter.event_id or "")]
            dead.add_row(*words, Text(plain(letter.reason), style="red"), Text(plain(letter.detail)))
        yield dead
    if trial.refused:
        refused = make_table("from", "reason", "detail", text=["detail"], title="refused by ingest")
        for one in trial.refused[:SHOWN]:
            refused.add_row(Text(plain(one.place)), Text(plain(one.reason), style="red"), Text(plain(one.detail)))
        yield refused


def _print(trial: Trial, pipe: Pipe) -> None:
    """The tables on stdout, the rest on stderr."""
    for table in trial_tables(trial):
        OUT.print(table)
    for found, what in ((trial.outputs, "outputs"), (trial.dead, "dead letters"), (trial.refused, "refused events")):
        if len(found) > SHOWN:
            print_note(f"{len(found) - SHOWN} more {what} are not shown. Try: --json")
    for line in _warnings(trial, pipe):
        print_note(line, "yellow")
    print_note(", ".join(_counts(trial, pipe)), "green" if trial.is_good else "red")


def _counts(trial: Trial, pipe: Pipe) -> list[str]:
    new = "" if trial.result.keeps_events else " (new events: from which events they come is not known)"
    counts = [f"{format_count(trial.events, 'event')} in", f"{len(trial.outputs)} out{new}"]
    counts += [f"{trial.filtered} filtered by the transform"] if pipe.transform and trial.filtered is not None else []
    counts += [format_count(len(trial.dead), "dead letter")]
    counts += [f"{len(trial.refused)} refused by ingest"] if trial.refused else []
    return counts


def _warnings(trial: Trial, pipe: Pipe) -> Iterator[str]:
    """Everything else that a person should know of the result."""
    result = trial.result
    yield from map(_absent, trial.absent)
    if trial.shared:
        yield (
            f"different events have the same id, and receivers drop all but the first as duplicates: {_places(trial.shared)}. "
            "An id must name one event, not the thing that the event is about. Try: another field for `id` in the stream. "
            f"Where no single field names an event: {NO_SINGLE_FIELD}"
        )
    if result.undeclared:
        yield from _undeclared(result.undeclared)
    if result.broken:
        yield f"the transform is broken: {result.broken}. Live, its query stops, and no event is a dead letter"
    if trial.repeated:
        yield f"several outputs have the same id, and receivers take them for duplicates: {_places(trial.repeated)}"
    yield from _identities(trial)
    if result.duplicates:
        yield f"dropped by deduplicate_within: {_places(result.duplicates)}"
    delay = None if pipe.transform is None else pipe.transform.watermark
    if not result.row_by_row:
        yield "the transform is over several events: all results are shown, as if the watermark had passed them"
    if not result.row_by_row and delay is not None:
        yield _when_live(trial, pipe.sources, delay)
    if trial.late and delay is not None:
        yield (
            f"{format_duration(delay)} or more older than an earlier event: {_places(list(trial.late))}. Here they count: "
            "the sample is one batch. Live, each is a dead letter (late) if the earlier event was in an earlier batch"
        )


def _identities(trial: Trial) -> Iterator[str]:
    """What the results have of ids, keys and times that a person may have meant otherwise."""
    for name in trial.beside:
        yield (
            f"the column `{name}` beside `event` is only a field of the payload: the events keep their own {name}s. "
            f"For new events, with {name}s that the transform makes, return `id`, `key` and `time`, and no `event` "
            "(docs/transforms.md#what-a-transform-returns)"
        )
    if not trial.result.gives_times:
        yield (
            "the transform returns no `time`: its new events get the time at which they are computed. "
            "To keep the time of an event: event.time AS time"
        )


def _when_live(trial: Trial, sources: Sequence[str], delay: float) -> str:
    """When the results of windows come from a running fleet. delay: the watermark, s."""
    text = f"live, a window's result comes only when an event is {format_duration(delay)} or more later than the window's end"
    known = [time_ms for topic in sources if (time_ms := trial.newest_ms.get(topic)) is not None]
    if len(known) < len(sources):
        return f"{text}, in each source"
    return f"{text}. This sample alone would bring windows that ended by {format_time(min(known) - int(delay * 1000))} at most"


_INSTEAD = {"id": "they get new ids", "key": "they have no key", "time": "they get the time of their arrival"}


def _absent(one: AbsentField) -> str:
    if one.field is None:
        return f"{one.stream} has no time field in the pipe file: its events get the time of this trial. Try: --from-stream"
    events = f"{one.events} of {format_count(one.of, 'event')} of {one.stream}"
    absent = f"no field '{plain(one.field)}' for the {one.use} in {events}: {_INSTEAD[one.use]}"
    if one.events < one.of:
        return absent
    remedy = f". Where no single field names an event: {NO_SINGLE_FIELD}" if one.use == "id" else ""
    return f"{absent}. Try: another field for `{one.use}` in the stream{remedy}"


def _undeclared(found: Sequence[UndeclaredField]) -> Iterator[str]:
    """A line for each stream."""
    for stream in dict.fromkeys(one.stream for one in found):
        fields = [one for one in found if one.stream == stream]
        shown = ", ".join(f"{plain(one.field, 100)} ({one.events} of {one.of})" for one in fields[:SHOWN_FIELDS])
        rest = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
        yield (
            f"fields of {stream} that no column declares, and no result has: {shown}{rest}. "
            "Try: declare them in `columns`, or keep the rest of the payload (docs/transforms.md#keep-the-rest)"
        )


def _places(found: Sequence[str]) -> str:
    """The first few of these, and their number if there are more."""
    rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(plain(one, 100) for one in found[:3]) + rest
