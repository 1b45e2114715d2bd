"""The table's state in parts: it survives the reports behind it.

`make_parts` cuts the state into parts of bounded size, each with a name that stays. So a part whose content did not change need
not be written again (`snapshot_log.py`). `Loader` builds the state from all parts, in any order.

Most of the memory of a fleet whose events wait for days are the unsettled events of folded minutes (`OriginSets.kept`). They are
written once, by minute. The other sets are written in blocks of numbers. A block that equals the kept events is only named,
and a block that is close to them has only the difference.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from pyroaring import BitMap

from services.core.ledger.report import Node, Outcome, PackedOffset, Span, pack_offset
from services.observer.alarms import Alarm
from services.observer.ledger.flow import Step
from services.observer.ledger.liveness import Heartbeat
from services.observer.ledger.origin_sets import OriginSets
from services.observer.ledger.origins import Origins, PackedRun, SequenceKey, clip, span
from services.observer.ledger.reported_origins import ReportedOrigins
from services.observer.ledger.settlement import Row, StepRow
from services.observer.ledger.table import Table
from services.observer.payload_fields import DriftKey
from services.observer.planned import PlannedWindows, Window

BLOCK = 1 << 18
"""Numbers of a run in one part: 32 kB at most."""
_BATCH_MINUTES = 64
_BATCH_ROWS = 16
_BATCH_PARTITIONS = 32
_SLICE = 200

Packed = list[tuple[str, int, bytes]]
"""(incarnation, partition, bitmap)."""
SetKey = tuple[str, Node, str, str | None, Outcome | None, Span | None]
"""Of a set of origins: kind, step, outcome, span. kind: reported, span, lost, unread, held or gone."""
_GONE: SetKey = ("gone", "ingest", "", None, None, None)


class Part(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A part of the content of a Table, PlannedWindows and AlarmQueue; most fields are empty in each.

    offset: of the telemetry topic, where reading continues. blocks: (set, incarnation, partition, whether it is the difference
    from the kept events, bitmap). same: (set, incarnation, partition, blocks that equal the kept events). folded: by minute and
    place, the kept events. final: minutes of which every part is final, and the missing events of all parts; open: minutes with
    final and open parts. awaited, fed_ms: minutes whose results come late, as in `Finality`; of a snapshot without them none is
    known to.
    """

    offset: PackedOffset | None = None
    newer_from: PackedOffset | None = None
    newer_ms: int = 0
    released_by: int = 0
    read_all_ms: int = 0
    accepted: list[tuple[int, Node, str, Packed]] = []
    folded: list[tuple[int, Node, str, list[PackedRun]]] = []
    blocks: list[tuple[SetKey, str, int, bool, bytes]] = []
    same: list[tuple[SetKey, str, int, list[int]]] = []
    floors: list[tuple[str, int, int]] = []
    named: list[tuple[str, int, int]] = []
    final: list[tuple[str, int, int]] = []
    open: list[tuple[str, int, list[str]]] = []
    final_missing: list[tuple[str, int, str | None, int]] = []
    given_up: list[tuple[str, int, str | None]] = []
    awaited: list[tuple[str, int, int]] = []
    fed_ms: list[tuple[str, int, int]] = []
    found: list[tuple[str, int, int]] = []
    base: list[Row] = []
    heartbeats: list[tuple[Node, str, str | None, dict[str, Heartbeat]]] = []
    reported_offsets: list[tuple[str, str, int, PackedOffset]] = []
    marks: list[tuple[str, int, dict[int, PackedOffset]]] = []
    runs: list[tuple[str, str, list[str]]] = []
    windows: list[Window] = []
    returns: list[tuple[Node, str, str | None, tuple[int, int, int]]] = []
    untold: list[tuple[str, bytes]] = []
    drifting: list[tuple[str, Node, str, str | None, str, str, int]] = []
    held: list[tuple[Node, str, str | None, int]] = []
    begun: list[tuple[Node, str, str | None, int]] = []


class FollowerState(NamedTuple):
    """The state beside the table. offset: where reading of telemetry continues. read_all_ms: when everything before it had been
    read.

    drifting: when each drift was last seen, in ms. newer_from, newer_ms: the first report that this version cannot read, and
    the time of the last one.
    """

    planned: PlannedWindows
    offset: int
    untold: tuple[Alarm, ...] = ()
    read_all_ms: int = 0
    drifting: Mapping[DriftKey, int] = {}
    newer_from: int | None = None
    newer_ms: int = 0


NamedPart = tuple[str, bytes]


def make_parts(table: Table, beside: FollowerState) -> Iterator[NamedPart]:
    """The parts by name, encoded; each name once. Do not change the table between two of them."""
    for name, part in _name_parts(table, beside):
        yield name, _ENCODER.encode(part)


def _name_parts(table: Table, beside: FollowerState) -> Iterator[tuple[str, Part]]:
    sets = table.origin_sets
    position = Part(offset=pack_offset(beside.offset), read_all_ms=beside.read_all_ms, released_by=table.released_by)
    if beside.newer_from is not None:
        position.newer_from, position.newer_ms = pack_offset(beside.newer_from), beside.newer_ms
    yield "position", position
    for minute, places in sorted(sets.unfolded.items()):
        for place, origins in sorted(places.items()):
            runs = [(*run, _serialize(numbers.copy())) for run, numbers in sorted(origins.runs())]
            for number, some in _slice(runs, 8):
                yield f"accepted {minute} {place} {number}", Part(accepted=[(minute, *place, some)])
    for minute, packed in sorted(sets.packed.items()):
        for place, one in sorted(packed.items()):
            for number, several in _slice(one.runs, 8):
                yield f"folded {minute} {place} {number}", Part(folded=[(minute, *place, several)])
    yield from _cut_sets(sets)
    yield from _small_parts(table, beside)


def _small_parts(table: Table, beside: FollowerState) -> Iterator[tuple[str, Part]]:
    sets, offsets = table.origin_sets, table.offsets
    lists: dict[str, list[Any]] = {
        "floors": [(*run, floor) for run, floor in sorted(sets.floors.items())],
        "named": [(name, sets.first_named.get(name, at), at) for name, at in sorted(sets.last_named.items())],
        "reported_offsets": [
            (stream, *run, pack_offset(at))
            for stream, reported in sorted(offsets.reported.items())
            for run, at in sorted(reported.items())
        ],
        "runs": [(*key, sorted(runs)) for key, runs in sorted(offsets.runs.items())],
        "windows": list(beside.planned.all()),
        "returns": sorted(((*step, seen) for step, seen in table.returns.items()), key=str),
        "untold": [(alarm.id, msgspec.json.encode(alarm.body)) for alarm in beside.untold],
        "drifting": sorted(
            ((pipe, *step, field, what, at) for (pipe, step, field, what), at in beside.drifting.items()), key=str
        ),
        "held": sorted(((*step, at) for step, (at, _) in sets.retries.held_at.items()), key=str),
        "begun": sorted(((*step, at) for step, at in table.begun.items()), key=str),
        "heartbeats": [
            (*step, dict(some))
            for step, heartbeats in sorted(table.liveness.heartbeats().items(), key=str)
            for _, some in _slice(sorted(heartbeats.items()), 20)
        ],
    }
    for field, items in lists.items():
        for number, some in _slice(items, _SLICE):
            yield f"{field} {number}", _part_of(field, some)
    finality = table.finality
    by_minute: dict[str, list[tuple[Any, ...]]] = {
        "final": [
            (*key, sum(finality.final_missing.get(key, {}).values()))
            for key, parts in finality.open.items()
            if not parts
        ],
        "open": [(*key, sorted(parts)) for key, parts in finality.open.items() if parts],
        "final_missing": [
            (*key, part, missing) for key, then in finality.final_missing.items() for part, missing in then.items()
        ],
        "given_up": [(*key, part) for key, parts in finality.given_up.items() for part in parts],
        "awaited": [(*key, missing) for key, missing in finality.awaited.items()],
        "fed_ms": [(*key, at) for key, at in finality.fed_ms.items()],
        "found": [(*key, at) for key, at in table.found.items()],
    }
    for field, rows in by_minute.items():
        for key, some in _group(rows, lambda row: (row[0], row[1] // _BATCH_MINUTES)):
            yield f"{field} {key}", _part_of(field, sorted(some, key=str))
    for key, some in _group(table.base.values(), lambda row: (row.pipe, row.minute // _BATCH_ROWS)):
        yield f"base {key}", Part(base=sorted(some, key=lambda row: row.minute))
    yield from _cut_marks(table)


def _part_of(field: str, items: list[Any]) -> Part:
    part = Part()
    setattr(part, field, items)
    return part


def _cut_marks(table: Table) -> Iterator[tuple[str, Part]]:
    for stream, partitions in sorted(table.offsets.marks.items()):
        places = ((partition, minute) for partition, marks in partitions.items() for minute in marks)
        for key, some in _group(places, lambda at: (at[0] // _BATCH_PARTITIONS, at[1] // _BATCH_MINUTES)):
            found: dict[int, dict[int, PackedOffset]] = {}
            for partition, minute in sorted(some):
                found.setdefault(partition, {})[minute] = pack_offset(partitions[partition][minute])
            yield f"marks {stream} {key}", Part(marks=[(stream, *one) for one in found.items()])


def _cut_sets(sets: OriginSets) -> Iterator[tuple[str, Part]]:
    """All sets of origins but those of the minutes."""
    spans: dict[tuple[Outcome, Step], dict[int, list[tuple[Span, Origins]]]] = {}
    for outcome, step, due, origins in sets.retries.spans():
        if origins:
            spans.setdefault((outcome, step), {}).setdefault(due[0] // 1024, []).append((due, origins))
    retries = sets.retries
    found: list[tuple[str, _Members]] = [("gone", [(_GONE, sets.gone)])]
    for (step, outcome), reported in sets.reported_sets.items():
        found.append((f"reported {outcome} {step}", [(("reported", *step, outcome, None), reported)]))
    for kind, known in (("lost", retries.lost), ("unread", retries.unread)):
        found += [(f"{kind} {step}", [((kind, *step, None, None), origins)]) for step, origins in known.items()]
    found += [(f"held {step}", [(("held", *step, None, None), one)]) for step, (_, one) in retries.held_at.items()]
    for (spanned, step), by_time in spans.items():
        for time, some in by_time.items():
            in_order = sorted(some, key=lambda one: one[0])
            found.append(
                (f"span {spanned} {step} {time}", [(("span", *step, spanned, due), one) for due, one in in_order])
            )
    yield from _cut_blocks(found, sets)


_Members = Sequence[tuple[SetKey, Origins | ReportedOrigins]]


def _cut_blocks(found: Sequence[tuple[str, _Members]], sets: OriginSets) -> Iterator[tuple[str, Part]]:
    """Sets by the name of the parts in which they are stored together: a part for each run and block, and one for the blocks
    that equal the kept events."""
    same: dict[str, list[tuple[SetKey, str, int, list[int]]]] = {}
    blocks = _find_blocks(one for _, members in found for _, one in members)
    for run in sorted(blocks):
        equal: dict[tuple[str, SetKey], list[int]] = {}
        for block in sorted(blocks[run]):
            base = sets.kept(run, span(block * BLOCK, (block + 1) * BLOCK))
            for name, members in found:
                parts = _cut_block(run, block, base, members)
                for key in parts.equal:
                    equal.setdefault((name, key), []).append(block)
                for number, some in _slice(parts.different, 8):
                    yield f"{name} {run} {block} {number}", Part(blocks=some)
        for (name, key), equal_ones in equal.items():
            same.setdefault(name, []).append((key, *run, equal_ones))
    for name, items in same.items():
        for number, some_of_it in _slice(items, 20):
            yield f"{name} same {number}", Part(same=some_of_it)


def _find_blocks(sets: Iterable[Origins | ReportedOrigins]) -> dict[SequenceKey, set[int]]:
    """By run, the indexes of the blocks in which any number of any set may be."""
    found: dict[SequenceKey, set[int]] = {}
    for origins in sets:
        for run, numbers in origins.bounds() if isinstance(origins, ReportedOrigins) else origins.runs():
            found.setdefault(run, set()).update(_blocks(numbers))
    return found


class _BlockSets(NamedTuple):
    """equal: the sets that equal the kept events in the block. different: as `Part.blocks`."""

    equal: list[SetKey]
    different: list[tuple[SetKey, str, int, bool, bytes]]


def _cut_block(run: SequenceKey, block: int, base: BitMap, members: _Members) -> _BlockSets:
    """base: the kept events of the block."""
    found = _BlockSets([], [])
    for key, origins in members:
        first, end = block * BLOCK, (block + 1) * BLOCK
        if isinstance(origins, ReportedOrigins):
            numbers = origins.clip(run, first, end, base)
        else:
            numbers = clip(origins.numbers(run), first, end)
        if base and numbers == base:
            found.equal.append(key)
        elif numbers:
            differs = 2 * numbers.intersection_cardinality(base) > len(base)
            found.different.append((key, *run, differs, _serialize(numbers ^ base if differs else numbers)))
    return found


def _blocks(numbers: BitMap) -> Iterator[int]:
    """The indexes of the blocks in which any of the numbers is."""
    block = numbers.min() // BLOCK if numbers else -1
    while block >= 0:
        yield block
        following = (block + 1) * BLOCK
        block = numbers.next_set_bit(following) // BLOCK if following <= numbers.max() else -1


_T = TypeVar("_T")


def _slice(items: Sequence[_T], size: int) -> Iterator[tuple[int, list[_T]]]:
    for start in range(0, len(items), size):
        yield start // size, list(items[start : start + size])


def _group(items: Iterable[_T], key: Callable[[_T], tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], list[_T]]]:
    found: dict[tuple[Any, ...], list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    yield from found.items()


def _serialize(numbers: BitMap) -> bytes:
    """Equal numbers have equal bytes. Changes how the bitmap is stored, not its numbers."""
    numbers.run_optimize()
    return numbers.serialize()


class Loader:
    """Fills an empty table from parts, which may be added in any order. State of former names goes to the present ones."""

    def __init__(self, table: Table) -> None:
        self._table, self._step_of, self._pipe_of = table, table.flow.current, table.flow.current_pipe
        self._blocks: list[tuple[SetKey, SequenceKey, bool, BitMap]] = []
        self._same: list[tuple[SetKey, SequenceKey, list[int]]] = []
        self._finality: list[Part] = []
        self._held: dict[Step, int] = {}
        self._heartbeats: dict[Step, dict[str, Heartbeat]] = {}
        self._position = Part(offset=0)
        self._windows: list[Window] = []
        self._untold: list[Alarm] = []
        self._drifting: dict[DriftKey, int] = {}

    def add(self, data: bytes) -> None:
        """One part. Raises ValueError; then the table is not to be used."""
        try:
            self.load(_DECODER.decode(data))
        except msgspec.MsgspecError as error:
            raise ValueError(f"no part of a snapshot: {error}") from error

    def load(self, part: Part) -> None:
        """One part. Raises ValueError."""
        table, step_of = self._table, self._step_of
        sets, offsets = table.origin_sets, table.offsets
        if part.offset is not None:
            self._position = part
        for minute, node, name, packed in part.accepted:
            sets.unfolded.setdefault(minute, {}).setdefault((node, name), Origins()).update(unpack(packed))
        for minute, node, name, runs in part.folded:
            sets.load_packed(minute, (node, name), runs)
        for key, incarnation, partition, differs, data in part.blocks:
            self._blocks.append((key, SequenceKey(incarnation, partition), differs, BitMap.deserialize(data)))
        for key, incarnation, partition, blocks in part.same:
            self._same.append((key, SequenceKey(incarnation, partition), blocks))
        sets.floors |= {SequenceKey(name, partition): floor for name, partition, floor in part.floors}
        sets.first_named |= {name: first for name, first, _ in part.named}
        sets.last_named |= {name: last for name, _, last in part.named}
        self._load_rows(part)
        for n, p, d, found in part.heartbeats:
            self._heartbeats.setdefault(step_of(n, p, d), {}).update(found)
        for stream, incarnation, partition, offset in part.reported_offsets:
            offsets.reported.setdefault(stream, {})[SequenceKey(incarnation, partition)] = int(offset)
        for stream, partition, marks in part.marks:
            known = offsets.marks.setdefault(stream, {}).setdefault(partition, {})
            known |= {minute: int(at) for minute, at in marks.items()}
        offsets.runs |= {(stream, instance): set(runs) for stream, instance, runs in part.runs}
        table.returns |= {step_of(n, p, d): seen for n, p, d, seen in part.returns}
        table.begun |= {step_of(n, p, d): at for n, p, d, at in part.begun}
        self._held |= {step_of(n, p, d): at for n, p, d, at in part.held}
        self._windows += part.windows
        self._untold += [Alarm(name, msgspec.json.decode(body, type=dict[str, object])) for name, body in part.untold]
        self._drifting |= {
            (self._pipe_of(pipe), step_of(n, p, d), field, what): at for pipe, n, p, d, field, what, at in part.drifting
        }
        if part.final or part.open or part.final_missing or part.given_up or part.awaited or part.fed_ms:
            self._finality.append(part)

    def finish(self) -> FollowerState:
        """After the last part: gives the rest."""
        needed: dict[tuple[SequenceKey, int], list[tuple[SetKey, BitMap]]] = {}
        for key, run, differs, numbers in self._blocks:
            if differs:
                needed.setdefault((run, numbers.min() // BLOCK), []).append((key, numbers))
            else:
                self._add(key, run, numbers)
        for key, run, blocks in self._same:
            for block in blocks:
                needed.setdefault((run, block), []).append((key, BitMap()))
        for (run, block), some in needed.items():
            first, end = block * BLOCK, (block + 1) * BLOCK
            base = self._table.origin_sets.kept(run, span(first, end))
            for key, difference in some:
                self._add(key, run, difference ^ base)
            self._table.origin_sets.pack(run, first, end, base)
        self._blocks, self._same = [], []
        for step, at in self._held.items():
            held = self._table.origin_sets.retries.held_at
            held[step] = at, held[step][1] if step in held else Origins()
        self._table.liveness.load(self._heartbeats)
        self._table.released_by = self._position.released_by
        _load_finality(self._table, self._finality)
        return FollowerState(
            PlannedWindows(tuple(self._windows)),
            int(self._position.offset or 0),
            tuple(self._untold),
            self._position.read_all_ms,
            self._drifting,
            int(self._position.newer_from) if self._position.newer_from is not None else None,
            self._position.newer_ms,
        )

    def _load_rows(self, part: Part) -> None:
        base, found = self._table.base, self._table.found
        for row in map(self._rename, part.base):
            place = row.pipe, row.minute  # some events of a minute may have been counted under each name
            base[place] = row + base[place] if place in base else row
        for pipe, minute, at in part.found:
            place = self._pipe_of(pipe), minute
            found[place] = max(at, found.get(place, at))

    def _rename(self, row: Row) -> Row:
        """With the present names; steps that have the same one now are one."""
        steps: dict[Step, StepRow] = {}
        for one in row.steps:
            step = self._step_of(one.node, row.pipe, one.destination)
            renamed = msgspec.structs.replace(one, destination=step.destination)
            steps[step] = steps[step] + renamed if step in steps else renamed
        return msgspec.structs.replace(row, pipe=self._pipe_of(row.pipe), steps=tuple(steps.values()))

    def _add(self, key: SetKey, run: SequenceKey, numbers: BitMap) -> None:
        kind, node, pipe, destination, outcome, due = key
        sets, step = self._table.origin_sets, self._step_of(node, pipe, destination)
        one = Origins([(run, numbers)])
        if kind == "span" and due is not None and outcome is not None:
            sets.retries.load(step, outcome, due, one)
        elif kind == "gone":
            sets.gone.update(one)
        elif kind == "held":
            _, known = sets.retries.held_at.setdefault(step, (0, Origins()))
            known.update(one)
        elif kind == "reported" and outcome is not None:
            sets.reported_sets.setdefault((step, outcome), ReportedOrigins()).update(one)
        else:
            known_ones = sets.retries.lost if kind == "lost" else sets.retries.unread
            known_ones.setdefault(step, Origins()).update(one)


def _load_finality(table: Table, parts: Sequence[Part]) -> None:
    """To be called last: it reads the rows."""
    finality, pipe_of = table.finality, table.flow.current_pipe

    def part_of(pipe: str, part: str | None) -> str | None:
        return table.flow.current("expel", pipe, part).destination

    for found in parts:
        for pipe, minute, names in found.open:
            parts_here = {part for each in names if (part := part_of(pipe, each)) is not None}
            finality.open.setdefault((pipe_of(pipe), minute), set()).update(parts_here)
        for pipe, minute, _ in found.final:
            finality.open.setdefault((pipe_of(pipe), minute), set())
        finality.awaited |= {(pipe_of(pipe), minute): missing for pipe, minute, missing in found.awaited}
        finality.fed_ms |= {(pipe_of(pipe), minute): at_ms for pipe, minute, at_ms in found.fed_ms}
        for pipe, minute, each in found.given_up:
            finality.given_up.setdefault((pipe_of(pipe), minute), set()).add(part_of(pipe, each))
        for pipe, minute, each, missing in found.final_missing:
            finality.record_missing((pipe_of(pipe), minute), {part_of(pipe, each): missing})
    finals = [(pipe_of(pipe), minute, missing) for found in parts for pipe, minute, missing in found.final]
    _find_missing_parts(table, finals)


def _find_missing_parts(table: Table, finals: Iterable[tuple[str, int, int]]) -> None:
    """Where the missing events of a final minute are known and those of its parts are not (old snapshots): they were missing
    where the events are that are missing now."""
    for pipe, minute, missing in finals:
        if missing and (pipe, minute) not in table.finality.final_missing and pipe in table.flow.pipes:
            now = table.row(pipe, minute, 0).missing_by_part()
            more = max(0, missing - sum(now.values()))
            table.finality.record_missing((pipe, minute), {**now, None: now.get(None, 0) + more})


def unpack(packed: Packed) -> Origins:
    return Origins((SequenceKey(name, partition), BitMap.deserialize(data)) for name, partition, data in packed)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Part)
