"""The table's state as records: it survives the reports behind it.

A snapshot is cut into parts, which are appended to one topic. The newest complete one counts.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec
import zstandard
from pyroaring import BitMap

from services.core.broker.contract import Reader
from services.core.broker.reading import scan
from services.core.broker.record import Record
from services.core.ledger.report import SNAPSHOTS, Node, Outcome, PackedOffset, Span, pack_offset
from services.observer.alarms import Alarm
from services.observer.ledger.flow import Step
from services.observer.ledger.liveness import Heartbeat
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Table
from services.observer.payload_fields import DriftKey
from services.observer.planned import PlannedWindows, Window

PART_BYTES = 512 * 1024
MAX_BYTES = 256 << 20
_RECENT = timedelta(minutes=30)
_VERSION = 1
"""Of the required fields. Fields that are added at the end have a default and need no new version."""

Packed = list[tuple[str, int, bytes]]
"""(incarnation, partition, bitmap)."""


class SnapshotState(msgspec.Struct, array_like=True):
    """The content of a Table, PlannedWindows and AlarmQueue. offset: of the telemetry topic, where reading continues.

    final: minutes of which every part is final, and the missing events of all parts; open: minutes with final and open parts.
    Old snapshots have no parts: without an entry in `final_missing`, the events that are missing now were missing when it
    became final. They have no `begun` either: the destinations that reported anything have begun.
    """

    version: int
    offset: PackedOffset
    accepted: list[tuple[int, Node, str, Packed]]
    reported: list[tuple[Node, str, str | None, Outcome, Packed]]
    floors: list[tuple[str, int, int]]
    gone: Packed
    kept: Packed
    folded: list[int]
    last_named: dict[str, int]
    first_named: dict[str, int]
    final: list[tuple[str, int, int]]
    base: list[Row]
    heartbeats: list[tuple[Node, str, str | None, dict[str, Heartbeat]]]
    reported_offsets: list[tuple[str, str, int, PackedOffset]]
    marks: dict[str, dict[int, dict[int, PackedOffset]]]
    runs: list[tuple[str, str, list[str]]]
    windows: tuple[Window, ...]
    retries: list[tuple[Node, str, str | None, Outcome, Span, Packed]] = []
    released_by: int = 0
    returns: list[tuple[Node, str, str | None, tuple[int, int, int]]] = []
    untold: list[tuple[str, bytes]] = []
    read_all_ms: int = 0
    found: list[tuple[str, int, int]] = []
    drifting: list[tuple[str, Node, str, str | None, str, str, int]] = []
    open: list[tuple[str, int, list[str]]] = []
    final_missing: list[tuple[str, int, str | None, int]] = []
    given_up: list[tuple[str, int, str | None]] = []
    lost: list[tuple[Node, str, str | None, Packed]] = []
    unread: list[tuple[Node, str, str | None, Packed]] = []
    held: list[tuple[Node, str, str | None, int, Packed]] = []
    begun: list[tuple[Node, str, str | None, int]] | None = None


class FollowerState(NamedTuple):
    """The state beside the table. offset: where reading of telemetry continues. read_all_ms: when everything before it had been
    read.

    drifting: when each drift was last seen, in ms.
    """

    planned: PlannedWindows
    offset: int
    untold: tuple[Alarm, ...] = ()
    read_all_ms: int = 0
    drifting: Mapping[DriftKey, int] = {}


def dump(table: Table, beside: FollowerState) -> bytes:
    origin_sets, offsets, finality = table.origin_sets, table.offsets, table.finality
    retries = origin_sets.retries
    state = SnapshotState(
        _VERSION,
        pack_offset(beside.offset),
        [(m, *place, _pack(held)) for m, places in origin_sets.held.items() for place, held in places.items()],
        [(*step, outcome, _pack(origins)) for (step, outcome), origins in origin_sets.reported_sets.items()],
        [(*run, floor) for run, floor in origin_sets.floors.items()],
        _pack(origin_sets.gone),
        _pack(origin_sets.kept),
        sorted(origin_sets.folded),
        origin_sets.last_named,
        origin_sets.first_named,
        [
            (*key, sum(finality.final_missing.get(key, {}).values()))
            for key, parts in finality.open.items()
            if not parts
        ],
        list(table.base.values()),
        [(*step, heartbeats) for step, heartbeats in table.liveness.heartbeats().items()],
        [
            (stream, *run, pack_offset(at))
            for stream, reported in offsets.reported.items()
            for run, at in reported.items()
        ],
        {
            stream: {one: {m: pack_offset(at) for m, at in marks.items()} for one, marks in partitions.items()}
            for stream, partitions in offsets.marks.items()
        },
        [(*key, sorted(runs)) for key, runs in offsets.runs.items()],
        beside.planned.all(),
        [(*step, outcome, due, _pack(origins)) for outcome, step, due, origins in retries.spans()],
        table.released_by,
        [(*step, seen) for step, seen in table.returns.items()],
        [(alarm.id, msgspec.json.encode(alarm.body)) for alarm in beside.untold],
        beside.read_all_ms,
        [(*key, at) for key, at in table.found.items()],
        [(pipe, *step, field, what, at) for (pipe, step, field, what), at in beside.drifting.items()],
        [(*key, sorted(parts)) for key, parts in finality.open.items() if parts],
        [(*key, part, missing) for key, then in finality.final_missing.items() for part, missing in then.items()],
        [(*key, part) for key, parts in finality.given_up.items() for part in parts],
        [(*step, _pack(origins)) for step, origins in retries.lost.items()],
        [(*step, _pack(origins)) for step, origins in retries.unread.items()],
        [(*step, at, _pack(origins)) for step, (at, origins) in retries.held_at.items()],
        [(*step, at) for step, at in table.begun.items()],
    )
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(state))


def restore(data: bytes, table: Table) -> FollowerState:
    """Fill an empty table; returns the rest. State of former names goes to the present ones. Raises ValueError."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_BYTES)
        state = msgspec.msgpack.decode(raw, type=SnapshotState)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(f"no snapshot: {error}") from error
    if state.version != _VERSION:
        raise ValueError(f"snapshot of version {state.version}, not {_VERSION}")
    origin_sets, offsets, retries = table.origin_sets, table.offsets, table.origin_sets.retries
    step_of = table.flow.current
    for minute, node, name, packed in state.accepted:
        origin_sets.held.setdefault(minute, {})[node, name] = _unpack(packed)
    for n, p, d, outcome, packed in state.reported:
        origin_sets.reported_sets.setdefault((step_of(n, p, d), outcome), Origins()).update(_unpack(packed))
    origin_sets.last_named, origin_sets.first_named, origin_sets.folded = (
        state.last_named,
        state.first_named,
        set(state.folded),
    )
    origin_sets.floors = {SequenceKey(incarnation, partition): floor for incarnation, partition, floor in state.floors}
    origin_sets.gone, origin_sets.kept = _unpack(state.gone), _unpack(state.kept)
    table.base = {(row.pipe, row.minute): row for row in state.base}
    heartbeats: dict[Step, dict[str, Heartbeat]] = {}
    for n, p, d, found in state.heartbeats:
        heartbeats.setdefault(step_of(n, p, d), {}).update(found)
    table.liveness.load(heartbeats)
    for stream, incarnation, partition, offset in state.reported_offsets:
        offsets.reported.setdefault(stream, {})[SequenceKey(incarnation, partition)] = int(offset)
    for node, pipe, destination, outcome, due, packed in state.retries:
        retries.load(step_of(node, pipe, destination), outcome, due, _unpack(packed))
    for known, stored in ((retries.lost, state.lost), (retries.unread, state.unread)):
        for n, p, d, packed in stored:
            known.setdefault(step_of(n, p, d), Origins()).update(_unpack(packed))
    retries.held_at = {step_of(n, p, d): (at, _unpack(packed)) for n, p, d, at, packed in state.held}
    table.released_by = state.released_by
    table.returns = {step_of(n, p, d): seen for n, p, d, seen in state.returns}
    heard = {*heartbeats, *(step for step, _ in origin_sets.reported_sets)}
    table.begun = {step: 0 for step in heard if step.node == "expel"} if state.begun is None else {}
    table.begun |= {step_of(n, p, d): at for n, p, d, at in state.begun or ()}
    offsets.marks = {
        stream: {one: {m: int(at) for m, at in marks.items()} for one, marks in partitions.items()}
        for stream, partitions in state.marks.items()
    }
    offsets.runs = {(stream, instance): set(runs) for stream, instance, runs in state.runs}
    untold = tuple(Alarm(name, msgspec.json.decode(body, type=dict[str, object])) for name, body in state.untold)
    table.found = {(pipe, minute): at for pipe, minute, at in state.found}
    _restore_finality(state, table)
    drifting = {(pipe, Step(n, p, d), field, what): at for pipe, n, p, d, field, what, at in state.drifting}
    return FollowerState(PlannedWindows(state.windows), int(state.offset), untold, state.read_all_ms, drifting)


def _restore_finality(state: SnapshotState, table: Table) -> None:
    """To be called last: it reads the rows."""
    finality = table.finality

    def part_of(pipe: str, part: str | None) -> tuple[str, str | None]:
        return table.flow.current("expel", pipe, part)[1:]

    for pipe, minute, parts in state.open:
        for name, part in (part_of(pipe, each) for each in parts):
            if part is not None:
                finality.open.setdefault((name, minute), set()).add(part)
    finality.open |= {(pipe, minute): set() for pipe, minute, _ in state.final}
    for pipe, minute, each in state.given_up:
        name, part = part_of(pipe, each)
        finality.given_up.setdefault((name, minute), set()).add(part)
    for pipe, minute, each, missing in state.final_missing:
        name, part = part_of(pipe, each)
        finality.record_missing((name, minute), {part: missing})
    for pipe, minute, missing in state.final:
        if missing and (pipe, minute) not in finality.final_missing and pipe in table.flow.pipes:
            now = table.row(pipe, minute, 0).missing_by_part()
            finality.record_missing(
                (pipe, minute), {**now, None: now.get(None, 0) + max(0, missing - sum(now.values()))}
            )


def _pack(origins: Origins) -> Packed:
    return [(run.incarnation, run.partition, numbers.serialize()) for run, numbers in origins.runs()]


def _unpack(packed: Packed) -> Origins:
    return Origins((SequenceKey(name, partition), BitMap.deserialize(data)) for name, partition, data in packed)


def cut(data: bytes, name: str) -> Iterator[Record]:
    """The records of one snapshot. name: of the snapshot."""
    parts = range(0, len(data), PART_BYTES)
    for number, start in enumerate(parts):
        head = (("snapshot", name.encode()), ("part", b"%d" % number), ("parts", b"%d" % len(parts)))
        yield Record(b"ledger", data[start : start + PART_BYTES], int(time.time() * 1000), head)


def join(records: Sequence[Record]) -> bytes | None:
    """The newest complete snapshot in these records, which are in order; None without one."""
    parts: dict[bytes, dict[int, bytes]] = {}
    newest = None
    for record in records:
        name, part, of = record.header("snapshot"), record.header("part"), record.header("parts")
        if name is None or part is None or of is None or record.value is None or not (part + of).isdigit():
            continue
        mine = parts.setdefault(name, {})
        mine[int(part)] = record.value
        if len(mine) == int(of):
            newest = b"".join(value for _, value in sorted(mine.items()))
            parts = {}
    return newest


async def find_snapshot(reader: Reader) -> bytes | None:
    """The newest complete snapshot. Raises BrokerError kinds."""
    recent = (await reader.offsets_at(SNAPSHOTS, datetime.now(UTC) - _RECENT))[0]
    for start in (recent, None):
        records = [record async for batch in scan(reader, SNAPSHOTS, 0, start, None) for record in batch.records]
        if (found := join(records)) is not None:
            return found
    return None
