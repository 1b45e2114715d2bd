"""Runs the transform of a pipe on a sample: reads the sample, starts ingest's and Spark's part as processes, sums up the result.

Nothing of the fleet is started, and nothing is stored but scratch in a temporary folder, which is removed.
"""

import io
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from services.core.broker.reading import read_tail
from services.core.broker.record import Record
from services.core.event import ID, OUTPUTS, read_arrival, read_id
from services.core.pipe_file.pipes import Pipe, PipeFile
from services.core.sample import (
    AbsentField,
    RefusedEvent,
    Sample,
    SampleEvent,
    SampleRecord,
    TrialResult,
    find_absent,
)
from services.core.temporary import temporary_folder
from services.core.times import format_time
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.core.yaml_source import BadConfiguration
from services.fleet.access import opened
from services.fleet.pipes.spark_child import LIMIT_S, TooSlow, last_lines, run_spark
from services.fleet.problem import CommandFailed, unreadable_file
from services.fleet.sending.event_source import STDIN, BadInput, InputFile, read_events, without_place

MOST_EVENTS = 10_000
"""Of a sample."""


class FileSample(NamedTuple):
    """The events of files, those that no ingest would read, and the files with more events than MOST_EVENTS."""

    events: list[SampleEvent]
    refused: list[RefusedEvent]
    cut: list[str]


def read_files(files: Mapping[str, str]) -> FileSample:
    """The first MOST_EVENTS events of each of these files (by stream; `-`: standard input). Blocking. Raises CommandFailed."""
    found = FileSample([], [], [])
    for stream, file in files.items():
        name = "stdin" if file == "-" else Path(file).name
        try:
            with InputFile(STDIN if file == "-" else Path(file)) as raw, io.BufferedReader(raw) as source:
                events = read_events(source)
                for event in itertools.islice(events, MOST_EVENTS):
                    place = f"{name}:{event.position}" if event.unit == "line" else f"{name}, event {event.position}"
                    if event.fault:
                        found.refused.append(RefusedEvent(place, "bad-json", event.fault))
                    else:
                        found.events.append(SampleEvent(place, stream, event.payload))
                if next(events, None) is not None:
                    found.cut.append(file)
        except OSError as error:
            raise unreadable_file(Path(file), error) from error
        except BadInput as error:
            raise CommandFailed(f"{file}: {error}", "a JSON array, or one JSON object per line", status=2) from error
    return found


async def read_streams(url: str, pipes: PipeFile, streams: Sequence[str], most: int) -> list[SampleRecord]:
    """About the newest `most` records of each stream by arrival; the oldest where offsets are not contiguous (Kinesis).

    Reads without a group and commits nothing. Damaged records are left out. Raises CommandFailed.
    """
    found: list[SampleRecord] = []
    async with opened(url, pipes) as broker:
        for stream in streams:
            newest = broker.is_contiguous(stream)
            records: list[SampleRecord] = []
            async for batch in read_tail(broker, stream, 0, most, skips_damage=True):
                if batch.damage is None:
                    for offset, record in zip(batch.offsets, batch.records, strict=True):
                        place = f"{stream}:{batch.partition}:{offset}"
                        records.append(SampleRecord(place, stream, batch.partition, str(offset), record))
                if len(records) > 2 * most:  # a stream has many partitions
                    records = _cut(records, most, newest=newest)
            found += _cut(records, most, newest=newest)
    return found


def find_absent_fields(pipes: PipeFile, records: Sequence[SampleRecord]) -> list[AbsentField]:
    """Of the stored events of each stream that are JSON objects: the fields for id, key and time that they lack. An event of a
    topic of others lacks nothing: the record has what a field does not."""
    payloads: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        if pipes.streams[one.topic].topic is not None:
            continue
        with suppress(msgspec.DecodeError, RecursionError):
            payloads.setdefault(one.topic, []).append(msgspec.json.decode(one.record.value or b"", type=dict[str, Any]))
    return [one for name, found in payloads.items() for one in find_absent(name, pipes.streams[name], found)]


def _cut(records: list[SampleRecord], most: int, *, newest: bool) -> list[SampleRecord]:
    """The newest or the oldest of them, by arrival."""
    records = sorted(records, key=_arrival)
    return records[-most:] if newest else records[:most]


def _arrival(one: SampleRecord) -> int:
    arrival = read_arrival(one.record)
    return one.record.timestamp if arrival is None else arrival


def make_records(events: Sequence[SampleEvent], pipes: Path) -> Sample:
    """The records that ingest would store. Blocking: half a second. Raises CommandFailed."""
    command = [sys.executable, "-m", "services.ingest.sample", "--pipes", str(pipes)]
    content = msgspec.msgpack.encode(events)
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=LIMIT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"the sample was not read within {LIMIT_S / 60:.0f} minutes", "a smaller sample") from None
    if done.returncode:
        raise CommandFailed("\n".join(last_lines(done.stderr)), status=2 if done.returncode == 2 else 1)
    found = msgspec.msgpack.decode(done.stdout, type=Sample)
    refused = [replace(one, detail=without_place(one.detail)) for one in found.refused]
    return replace(found, refused=refused)


def run_transform(pipes: Path, pipe: str, records: Sequence[SampleRecord], broker: str | None) -> TrialResult:
    """Run the transform in a Spark of its own. Blocking: Spark starts in about six seconds.

    broker: for the size limit of records. Raises BadConfiguration with the transform's mistakes, and CommandFailed.
    """
    with temporary_folder("try") as scratch:
        (scratch / "sample").write_bytes(msgspec.msgpack.encode(records))
        arguments: list[str | Path] = ["--pipes", pipes, "--only", pipe, "--data", scratch]
        arguments += ["--sample", scratch / "sample", "--result", scratch / "result"]
        arguments += ["--broker", broker] if broker is not None else []
        try:
            run_spark("spark.trial", arguments, scratch, "a smaller sample")
        except TooSlow:
            raise CommandFailed(
                f"the transform of {pipe} has not ended within {LIMIT_S / 60:.0f} minutes",
                "a smaller sample; live, such a batch would end the transform service",
            ) from None
        result = msgspec.msgpack.decode((scratch / "result").read_bytes(), type=TrialResult)
    if result.problems:
        raise BadConfiguration(result.problems)
    if result.failed:
        raise CommandFailed(result.failed)
    return result


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a pipe's transform on a sample, in the words of the command line.

    refused: events that ingest would refuse. late: events that are behind the watermark of the events before them, with ms.
    newest_ms: the time of each stream's newest event; dead letters, here and in `late`, move no watermark.
    repeated: ids that several outputs have. filtered: the number of events in no output; None where outputs are new events.
    shared: ids that events of the sample with different payloads have. A dead letter does not count: no receiver gets it.
    absent: as in `Sample`; a stream without a field for the time only where the pipe has a watermark.
    beside: of `id` and `key`, those that the transform makes as fields of the payload, while the events keep their own.
    """

    pipe: str
    records: Sequence[SampleRecord]
    refused: Sequence[RefusedEvent]
    result: TrialResult
    outputs: Sequence[Record]
    dead: Sequence[DeadLetter]
    late: Mapping[str, int]
    newest_ms: Mapping[str, int]
    repeated: Sequence[str]
    filtered: int | None
    absent: Sequence[AbsentField] = ()
    shared: Sequence[str] = ()
    beside: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Whether each event was accepted and passed, or was dropped on purpose, and no id is repeated."""
        return not (self.refused or self.dead or self.repeated or self.result.broken)

    @property
    def events(self) -> int:
        return len(self.records) + len(self.refused)

    def place_of(self, letter: DeadLetter) -> str:
        return self._places.get(letter.source, letter.source)

    @property
    def _places(self) -> dict[str, str]:
        return {_position_of(one): one.place for one in self.records}

    def as_json(self) -> dict[str, Any]:
        """Everything; times in RFC 3339. A payload that is not UTF-8 has replacement characters."""
        places = self._places
        return {
            "pipe": self.pipe,
            "in": self.events,
            "out": len(self.outputs),
            "filtered": self.filtered,
            "dead": len(self.dead),
            "refused": len(self.refused),
            "duplicates": len(self.result.duplicates),
            "broken": self.result.broken or None,
            "outputs": [output_json(record) for record in self.outputs],
            "dead_letters": [
                {
                    "from": places.get(letter.source, letter.source),
                    "id": letter.event_id,
                    "reason": letter.reason,
                    "detail": letter.detail,
                    "payload": decode(letter.record.value),
                }
                for letter in self.dead
            ],
            "refusals": [{"from": one.place, "reason": one.reason, "detail": one.detail} for one in self.refused],
            "late": [{"from": place, "behind_ms": behind} for place, behind in self.late.items()],
            "repeated_ids": list(self.repeated),
            "shared_ids": list(self.shared),
            "absent_fields": [msgspec.structs.asdict(one) for one in self.absent],
            "undeclared_fields": [msgspec.structs.asdict(one) for one in self.result.undeclared],
        }


def output_json(record: Record) -> dict[str, Any]:
    """One result. outputs: the names of its outputs, where the transform has several."""
    outputs = record.header(OUTPUTS)
    return {
        "id": read_id(record),
        "key": decode(record.key),
        "time": format_time(record.timestamp),
        "payload": decode(record.value),
        **({} if outputs is None else {"outputs": [name for name in outputs.decode().split(",") if name]}),
    }


def decode(value: bytes | None) -> str | None:
    """As text, for a person."""
    return None if value is None else value.decode(errors="replace")


def sum_up(
    name: str,
    pipe: Pipe,
    records: Sequence[SampleRecord],
    refused: Sequence[RefusedEvent],
    result: TrialResult,
    absent: Sequence[AbsentField] = (),
) -> Trial:
    """The trial. Outputs that are events of the sample are in its order. absent: as in `Sample`."""
    dead = [DeadLetter.of(Position(f"{name}.dead", 0, number), record) for number, record in enumerate(result.dead)]
    gone = {letter.source for letter in dead}
    duplicates = set(result.duplicates)
    tried = [one for one in records if one.place not in duplicates]
    ids = [read_id(one.record) for one in tried]
    order = {event_id: number for number, event_id in reversed([*enumerate(ids)])}
    outputs = sorted(result.outputs, key=lambda one: order.get(read_id(one), 0) if result.keeps_events else 0)
    counts = Counter(read_id(one) for one in outputs)
    expected = Counter(ids) if result.keeps_events else Counter(dict.fromkeys(counts, 1))
    repeated = sorted(str(event_id) for event_id, count in counts.items() if count > max(1, expected[event_id]))
    filtered = None
    if result.keeps_events and not result.broken:
        filtered = sum(read_id(one.record) not in counts for one in tried if _position_of(one) not in gone)
    windowed = pipe.transform is not None and pipe.transform.watermark is not None
    absent = [one for one in absent if one.field is not None or windowed]
    living = [one for one in records if _position_of(one) not in gone]
    late, newest_ms = _find_late(pipe, living)
    shared = _find_shared(living)
    beside = [] if pipe.transform is None or not result.keeps_events else _find_beside(tried, outputs)
    return Trial(
        name, records, refused, result, outputs, dead, late, newest_ms, repeated, filtered, absent, shared, beside
    )


def _find_beside(records: Sequence[SampleRecord], outputs: Sequence[Record]) -> list[str]:
    """Of `id` and `key`: fields of outputs that their events do not have, with values that the transform made. A value that is
    in the event, as its id or anywhere in its payload, is only a copy."""
    sources = {read_id(one.record): one.record for one in records}
    found: dict[str, None] = {}
    for output in outputs:
        source = sources.get(read_id(output))
        made = _fields_of(output)
        if source is None or not made.keys() & {"id", "key"}:
            continue
        own, text = _fields_of(source), b"\n".join((source.value or b"", source.key or b"", source.header(ID) or b""))
        for name in ("id", "key"):
            value = made.get(name)
            if isinstance(value, str | int) and name not in own and str(value).encode() not in text:
                found[name] = None
    return list(found)


def _fields_of(record: Record) -> dict[str, Any]:
    """Of its payload; empty when this is no JSON object."""
    try:
        return msgspec.json.decode(record.value or b"", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _find_shared(records: Sequence[SampleRecord]) -> list[str]:
    """The ids that several different events of one stream have. Such an id may name the thing that these events are about."""
    payloads: dict[tuple[str, str], bytes | None] = {}
    found: dict[str, None] = {}
    for one in records:
        event_id = read_id(one.record)
        if event_id is not None and payloads.setdefault((one.topic, event_id), one.record.value) != one.record.value:
            found[event_id] = None
    return list(found)


def _position_of(one: SampleRecord) -> str:
    """As a dead letter names its source."""
    return f"{one.topic}:{one.partition}:{one.offset}"


def _find_late(pipe: Pipe, records: Sequence[SampleRecord]) -> tuple[dict[str, int], dict[str, int]]:
    """By place: how far an event is behind the newest one before it in its stream, ms, if that is more than the watermark.
    By stream: the time of its newest event, ms."""
    delay = pipe.transform.watermark if pipe.transform is not None else None
    found: dict[str, int] = {}
    newest: dict[str, int] = {}
    for one in records:
        time_ms = one.record.timestamp
        behind = newest.get(one.topic, time_ms) - time_ms
        if delay is not None and behind >= delay * 1000:
            found[one.place] = behind
        newest[one.topic] = max(time_ms, newest.get(one.topic, time_ms))
    return found, newest
