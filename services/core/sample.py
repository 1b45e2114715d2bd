"""A sample of events on which `penstock try` runs a transform: the messages between its processes, as msgpack.

The command line reads the sample, ingest makes records of it, and Spark runs the transform. None of them imports another.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from services.core.broker.record import Record
from services.core.pipe_file.field_path import field_reader
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_of_others import Place
from services.core.yaml_source import Problem

PHASE = "phase"
"""The file beside the sample in which Spark's process says what it is doing, for a person who waits for it."""


class SampleEvent(msgspec.Struct, frozen=True):
    """One event of a file. place: for a person, e.g. `orders.json:3`. stream: to which it would be sent."""

    place: str
    stream: str
    payload: bytes


class SampleRecord(msgspec.Struct, frozen=True):
    """One record of a stream. offset: a decimal number; it has up to 206 bits on Kinesis. place: as in `SampleEvent`."""

    place: str
    topic: str
    partition: int
    offset: str
    record: Record


class RefusedEvent(msgspec.Struct, frozen=True):
    """An event that ingest would refuse. reason: the name of its problem type. detail: for a person."""

    place: str
    reason: str
    detail: str


class AbsentField(msgspec.Struct, frozen=True):
    """The accepted events of a stream, `of` in number, of which `events` lack the payload field for their id, key or time.

    field: None: the stream names none.
    """

    stream: str
    use: Literal["id", "key", "time"]
    field: str | None
    events: int
    of: int


def find_absent(name: str, stream: Stream, payloads: Sequence[dict[str, Any]]) -> Iterator[AbsentField]:
    """The fields of this stream that its events lack; those that all of them have are left out."""
    fields: tuple[tuple[Literal["id", "key", "time"], Place | None], ...]
    fields = (("id", stream.id), ("key", stream.key), ("time", stream.time))
    for use, field in fields:
        if isinstance(field, str) and (events := field_reader(field)(payloads).count(None)):
            yield AbsentField(name, use, field, events, len(payloads))


class Sample(msgspec.Struct, frozen=True):
    """The records that ingest would store, in the order of the sample, and the events that it would refuse.

    absent: of each stream with events; a stream without a field for the time is among them, one without id or key is not.
    """

    records: list[SampleRecord]
    refused: list[RefusedEvent]
    absent: list[AbsentField] = []


class UndeclaredField(msgspec.Struct, frozen=True):
    """A field that `events` of the `of` payloads of a stream have, no column declares, and no result has.

    field: its path, e.g. `items[].sku`.
    """

    stream: str
    field: str
    events: int
    of: int


class TrialResult(msgspec.Struct, frozen=True):
    """The result of a transform on a sample.

    outputs: the records of its output. dead: its dead letters, as records. duplicates: places of the events that
    `deduplicate_within` drops. broken: why no event is a dead letter although the transform fails; empty when it works.
    keeps_events: whether outputs are events of the sample, rather than new ones. row_by_row: whether each result comes from one
    event. gives_times: whether new events get times from the transform. undeclared: fields that got lost; empty where outputs are
    new events. problems: mistakes in the pipe file, or failed:
    why Spark did not run; then all else is empty.
    """

    outputs: list[Record] = []
    dead: list[Record] = []
    duplicates: list[str] = []
    broken: str = ""
    keeps_events: bool = True
    row_by_row: bool = True
    gives_times: bool = True
    undeclared: list[UndeclaredField] = []
    problems: list[Problem] = []
    failed: str = ""
