"""Snapshots of version 1, which Penstock 0.1 wrote: the whole state in one piece. They are only read."""

import msgspec
import zstandard

from services.core.broker.record import Record
from services.core.ledger.report import Node, Outcome, PackedOffset, Span
from services.observer.ledger.liveness import Heartbeat
from services.observer.ledger.origins import PackedOrigins
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Table
from services.observer.planned import Window
from services.observer.snapshot import FollowerState, Loader, Packed, Part, SetKey, unpack

_VERSION = 1


class SnapshotState(msgspec.Struct, array_like=True):
    """The content. folded: minutes of which only the events in `kept` are unsettled.

    Old snapshots have no parts (`final_missing`): the events that are missing now were missing when the minute became final.
    They have no `begun` either: the destinations that reported anything have begun.
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


def restore_v1(data: bytes, table: Table) -> FollowerState:
    """Fill an empty table from the pieces of a snapshot, joined; returns the rest. Raises ValueError."""
    try:
        raw = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        state = msgspec.msgpack.decode(raw, type=SnapshotState)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(f"no snapshot: {error}") from error
    if state.version != _VERSION:
        raise ValueError(f"snapshot of version {state.version}, not {_VERSION}")
    part = _convert(state)
    kept, folded = unpack(state.kept), set(state.folded)
    for minute, node, name, packed in state.accepted:
        if minute in folded:
            old = PackedOrigins.of(unpack(packed) & kept)
            part.folded.append((minute, node, name, list(old.runs)))
            young = unpack(packed) - kept
            packed = [(*run, numbers.serialize()) for run, numbers in young.runs()]
        part.accepted.append((minute, node, name, packed))
    loader = Loader(table)
    loader.load(part)
    found = loader.finish()
    table.origin_sets.pack_all()
    if state.begun is None:
        steps = {*table.liveness.heartbeats(), *(step for step, _ in table.origin_sets.reported_sets)}
        table.begun = {step: 0 for step in steps if step.node == "expel"}
    return found


def _convert(state: SnapshotState) -> Part:
    """As a part of the present version, without the accepted events."""
    sets: list[tuple[SetKey, Packed]] = [(("gone", "ingest", "", None, None, None), state.gone)]
    sets += [(("reported", n, p, d, outcome, None), packed) for n, p, d, outcome, packed in state.reported]
    sets += [(("span", n, p, d, outcome, due), packed) for n, p, d, outcome, due, packed in state.retries]
    sets += [(("lost", n, p, d, None, None), packed) for n, p, d, packed in state.lost]
    sets += [(("unread", n, p, d, None, None), packed) for n, p, d, packed in state.unread]
    sets += [(("held", n, p, d, None, None), packed) for n, p, d, _, packed in state.held]
    return Part(
        offset=state.offset,
        released_by=state.released_by,
        read_all_ms=state.read_all_ms,
        blocks=[(key, name, partition, False, data) for key, packed in sets for name, partition, data in packed],
        floors=state.floors,
        named=[(name, state.first_named.get(name, at), at) for name, at in state.last_named.items()],
        final=state.final,
        open=state.open,
        final_missing=state.final_missing,
        given_up=state.given_up,
        found=state.found,
        base=state.base,
        heartbeats=state.heartbeats,
        reported_offsets=state.reported_offsets,
        marks=[
            (stream, partition, marks)
            for stream, partitions in state.marks.items()
            for partition, marks in partitions.items()
        ],
        runs=state.runs,
        windows=list(state.windows),
        returns=state.returns,
        untold=state.untold,
        drifting=state.drifting,
        held=[(n, p, d, at) for n, p, d, at, _ in state.held],
        begun=state.begun or [],
    )


class JoinedParts:
    """Joins the records of snapshots of version 1, which are cut into pieces."""

    def __init__(self) -> None:
        self._pieces: dict[bytes, dict[int, bytes]] = {}

    def add(self, record: Record) -> bytes | None:
        """The whole snapshot, if this is its last piece. Other records are ignored."""
        name, piece, of = record.header("snapshot"), record.header("part"), record.header("parts")
        if name is None or piece is None or of is None or record.value is None or not (piece + of).isdigit():
            return None
        mine = self._pieces.setdefault(name, {})
        mine[int(piece)] = record.value
        if len(mine) < int(of):
            return None
        self._pieces.clear()
        return b"".join(value for _, value in sorted(mine.items()))
