"""Request bodies, joined from bytes: a payload is checked to be one JSON value and then spliced, never parsed.

A format renders each record to its `part` when the record is taken, and joins parts when a request leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.broker.record import Batch, Damage, Record
from services.core.event import ARRIVAL, CONTENT_TYPE, ID, MAX_MILLIS_DIGITS, ORIGIN, read_arrival
from services.expel.delivery import Unreadable
from services.expel.json_check import are_json, is_json

BAD_RECORD = "bad_record"
OVERSIZE = "oversize"
DAMAGED_BATCH = "damaged_batch"


class BadRecord(ValueError):
    """This record cannot stand in a body; the message is for a person."""


class Renderer(Protocol):
    """Renders the records of one topic for one destination."""

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        """Any record. Raises BadRecord."""

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        """Records that carry just id, arrival and origin, all at once; None when one of them needs `part`."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The deliverable records of a batch, as parallel lists, and the others."""

    offsets: Sequence[int]
    records: Sequence[Record]
    parts: Sequence[bytes]
    ids: Sequence[bytes]
    arrivals: Sequence[int]
    unreadable: Sequence[Unreadable] = ()


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How a destination's bodies look. `renderer_for` a topic."""

    content_type: str
    renderer_for: Callable[[str], Renderer]
    join: Callable[[Sequence[bytes]], bytes]


def join_array(parts: Sequence[bytes]) -> bytes:
    """A JSON array."""
    return b"[" + b",".join(parts) + b"]"


def join_lines(parts: Sequence[bytes]) -> bytes:
    """NDJSON."""
    return b"\n".join(parts) + b"\n"


def render(batch: Batch, renderer: Renderer, max_part: int) -> Rendered:
    """Records whose part is longer than max_part bytes are `oversize`, those that have none `bad_record`."""
    return _render_usual(batch, renderer, max_part) or _render_each(batch, renderer, max_part)


def render_damaged(batch: Batch, damage: Damage) -> Rendered:
    """For a batch that stands for damaged records: nothing to deliver, their stored bytes go to the dead letters."""
    detail = f"offsets {damage.first} to {damage.last} cannot be read: {damage.detail}"
    bad = Unreadable(batch.offsets[0], batch.records[0], DAMAGED_BATCH, detail, damage.last - damage.first + 1)
    return Rendered((), (), (), (), (), [bad])


def _render_usual(batch: Batch, renderer: Renderer, max_part: int) -> Rendered | None:
    """All at once when all records look as ingest writes them, which halves the cost; else None."""
    records = batch.records
    try:
        pairs = [
            (event_id, arrival)
            for (first, event_id), (second, arrival), (third, _) in [record.headers for record in records]
            if first == ID and second == ARRIVAL and third == ORIGIN
        ]
    except ValueError:  # more headers or fewer
        return None
    if len(pairs) != len(records):
        return None
    ids, arrivals = zip(*pairs, strict=True)
    if (
        not b"".join(arrivals).isdigit()
        or not all(ids)
        or not all(arrivals)
        or max(map(len, arrivals)) > MAX_MILLIS_DIGITS
    ):
        return None
    parts = renderer.usual_parts(records, ids, arrivals)
    if parts is None or max(map(len, parts)) > max_part:
        return None
    return Rendered(batch.offsets, records, parts, ids, list(map(int, arrivals)))


def _render_each(batch: Batch, renderer: Renderer, max_part: int) -> Rendered:
    """One by one: what is not deliverable is sorted out with its reason."""
    kept: list[int] = []
    parts: list[bytes] = []
    ids: list[bytes] = []
    arrivals: list[int] = []
    unreadable: list[Unreadable] = []
    for index, record in enumerate(batch.records):
        headers = dict(reversed(record.headers))  # the first of a name counts
        event_id = headers.get(ID)
        try:
            if not event_id:
                raise BadRecord(f"the header {ID} is missing")
            part = renderer.part(record, headers, event_id)
        except BadRecord as error:
            unreadable.append(Unreadable(batch.offsets[index], record, BAD_RECORD, str(error)))
            continue
        if len(part) > max_part:
            detail = f"{len(part)} bytes in the body, {max_part} fit. Try: a larger batch.max_bytes"
            unreadable.append(Unreadable(batch.offsets[index], record, OVERSIZE, detail))
            continue
        kept.append(index)
        parts.append(part)
        ids.append(event_id)
        arrivals.append(read_arrival(record) or 0)
    offsets = [batch.offsets[index] for index in kept]
    return Rendered(offsets, [batch.records[index] for index in kept], parts, ids, arrivals, unreadable)


def checked(value: bytes | None) -> bytes:
    """The value, when it is JSON. Raises BadRecord."""
    if value is None:
        raise BadRecord("the value is null")
    if not is_json(value):
        raise BadRecord("the value is not JSON in UTF-8")
    return value


def is_json_type(content_type: bytes | None) -> bool:
    """Whether a payload of this media type is JSON; without one it is."""
    if content_type is None:
        return True
    media = content_type.partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json") or media == b"text/json"


class PlainRenderer:
    """The payload itself. on_lines: it must not contain line breaks."""

    def __init__(self, *, on_lines: bool) -> None:
        self._on_lines = on_lines

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        """As in Renderer."""
        if not is_json_type(headers.get(CONTENT_TYPE)):
            raise BadRecord("a payload that is not JSON cannot stand in this body. Try: body: cloudevents")
        value = checked(record.value)
        return _flatten(value) if self._on_lines else value

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        """As in Renderer."""
        values = [record.value for record in records]
        if not are_json(values):
            return None
        return [_flatten(value or b"") for value in values] if self._on_lines else values  # type: ignore[return-value]


def _flatten(value: bytes) -> bytes:
    """Valid JSON has line breaks only between its tokens."""
    return value.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in value or b"\r" in value else value
