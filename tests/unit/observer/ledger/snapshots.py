"""Snapshots for tests: of the present version in any order of the parts, and of version 1 as Penstock 0.1 wrote them."""

import random
from collections.abc import Iterable

import msgspec
import zstandard

from services.core.broker.record import Record
from services.core.ledger.report import Outcome, pack_offset
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.origin_sets import OriginSets
from services.observer.ledger.origins import Origins
from services.observer.ledger.settlement import union
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows
from services.observer.snapshot import FollowerState, Loader, Packed, make_parts
from services.observer.snapshot_v1 import SnapshotState


def dump(table: Table, state: FollowerState, seed: int = 1) -> list[bytes]:
    """The parts, in any order."""
    parts = dict(make_parts(table, state))
    assert len(parts) == len(list(make_parts(table, state))), "each name once"
    found = list(parts.values())
    random.Random(seed).shuffle(found)
    return found


def restore(parts: Iterable[bytes], table: Table) -> FollowerState:
    """Fill an empty table with all of these parts; returns the rest."""
    loader = Loader(table)
    for part in parts:
        loader.add(part)
    return loader.finish()


def restarted(table: Table, flow: Flow | None = None) -> Table:
    """What the next observer, with this flow, makes of the table's snapshot."""
    other = Table(flow or table.flow)
    restore(dump(table, FollowerState(PlannedWindows(), 0)), other)
    return other


def dump_v1(table: Table, beside: FollowerState) -> bytes:
    """As version 0.1 did."""
    sets, offsets, finality = table.origin_sets, table.offsets, table.finality
    retries = sets.retries
    state = SnapshotState(
        1,
        pack_offset(beside.offset),
        [(m, *place, _pack(held)) for m in sets.minutes() for place, held in sets.accepted(m).items()],
        [(*step, outcome, _pack(list_all(sets, step, outcome))) for step, outcome in sets.reported_sets],
        [(*run, floor) for run, floor in sets.floors.items()],
        _pack(sets.gone),
        _pack(union(packed.unpack() for places in sets.packed.values() for packed in places.values())),
        sorted(sets.packed),
        sets.last_named,
        sets.first_named,
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
    return zstandard.compress(msgspec.msgpack.encode(state))


def list_all(sets: OriginSets, step: Step, outcome: Outcome) -> Origins:
    """Everything that the step reported with this outcome, and that is not forgotten."""
    reported = sets.reported(step, outcome)
    kept = union(packed.unpack() for places in sets.packed.values() for packed in places.values())
    return Origins(reported.listed()) | (reported & kept)


def _pack(origins: Origins) -> Packed:
    return [(run.incarnation, run.partition, numbers.serialize()) for run, numbers in origins.runs()]


def records_v1(data: bytes, name: str) -> list[Record]:
    """A snapshot of version 1 in two records of the topic."""
    cut = len(data) // 2
    head = [(("snapshot", name.encode()), ("part", b"%d" % number), ("parts", b"2")) for number in (0, 1)]
    return [Record(b"ledger", data[:cut], 0, head[0]), Record(b"ledger", data[cut:], 0, head[1])]
