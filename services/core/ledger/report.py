"""A report: the events that one node settled since its last one. The records of the telemetry topic.

A report is a set of origins. It may come twice, late, and in any order: the observer computes unions.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from pyroaring import BitMap

from services.core.ledger.fields import FieldSet
from services.core.version import newer_format

Span = tuple[int, int]
"""[from, until) in seconds since the epoch: every event of the set is due in it."""


_GRAINS = tuple(1 << power for power in range(20))
"""For waits of more than a month."""


def due_span(due_ms: int, wait_ms: int) -> Span:
    """The span of an event that is handed over to the retrier and waits so long: an eighth of the wait, at least a second.

    The next wait of an event begins after this due time and is about as long or longer, so its span comes after this one.
    """
    grain = 1 << max(0, (wait_ms // 8000).bit_length() - 1)
    first = due_ms // 1000 // grain * grain
    return first, first + grain


def spans_around(second: int) -> list[Span]:
    """Every `due_span` of an event that is due in this second."""
    return [(second // grain * grain, second // grain * grain + grain) for grain in _GRAINS]


def longest_wait_s(span: Span) -> int:
    """The longest wait of an event with this `due_span`."""
    return 16 * (span[1] - span[0])


def released_span(due_ms: int) -> Span:
    """The span of an event that the retrier gives back: its due second. How long it waited is not known any more."""
    return due_ms // 1000, due_ms // 1000 + 1


def is_back(released: Span, handed_over: Span) -> bool:
    """Whether events with these spans were given back after they were handed over."""
    return released[1] > handed_over[0]


def since_span(now_ms: int, due_ms: int = 0) -> Span:
    """The second since which an event is parked, dead or redriven: not before it was due by another instance's clock."""
    second = max(now_ms, due_ms) // 1000
    return second, second + 1


TELEMETRY = "penstock.telemetry"
"""One partition; key: the reporter's name, so that a reader can distinguish them without decoding."""
SNAPSHOTS = "penstock.observer"
"""One partition: the observer's state, which survives the reports behind it."""

Node = Literal["ingest", "transform", "expel", "retrier"]
Outcome = Literal[
    "accepted", "refused", "passed", "filtered", "delivered", "retrying", "parked", "released", "dead", "redriven",
    "skipped", "unknown",
]  # fmt: skip
"""The outcome of an event at a node.

ingest: accepted | refused (not stored) | unknown (may be stored; only in `Report.in_doubt`). transform: passed | filtered |
dead. expel: delivered | filtered (in other outputs than the destination's) | retrying | parked | dead | skipped (by an operator;
the observer counts events from before a late start so). retrier: released | dead | redriven (by an operator).

A reader takes a word that it does not know for unknown: a newer version wrote it, and the event is not missing. Penstock 0.1
drops the whole report with such a word. So no version writes a new word here as long as 0.1 may read it (docs/upgrading.md).
"""

Breaker = Literal["closed", "half-open", "open"]
Backlog = Literal["sources", "returned", "held"]
"""The unprocessed records of a node: of its sources; those that the retrier gave back; all that come back, also after a
pause."""

MAX_NUMBER = 1 << 31
"""An incarnation ends before its numbers exceed this: the bitmaps hold 32 bits."""
MAX_REPORT_BYTES = 512 * 1024
"""Larger reports are cut before they are sent; a reader refuses them."""
_VERSION = 1


class BadReport(ValueError):
    """A record of the telemetry topic is not a report; the message says why."""


class NewerReport(BadReport):
    """A newer version wrote the report, and nothing of it can be understood. reason: a stable word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OriginSet(msgspec.Struct, frozen=True, array_like=True):
    """Origins of one incarnation and partition with one outcome.

    minute: of the event time, in minutes since the epoch; only in sets of ingest. numbers: `pack_numbers`. due: of expel and
    the retrier; orders the attempts of an event: when it is due (retrying, released), or since when it has the outcome (parked,
    dead, redriven: `since_span`). None: unknown.
    """

    outcome: Outcome
    incarnation: str
    partition: int
    minute: int | None
    numbers: bytes
    due: Span | None = None


PackedOffset = int | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,80}$")]
"""An offset in a report or a snapshot: text where it does not fit into 64 bits."""


def pack_offset(offset: int) -> PackedOffset:
    """For a report or a snapshot; `int` gives it back."""
    return offset if offset < 1 << 63 else str(offset)


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """Everything that this incarnation wrote to this partition up to `offset` has been reported.

    The first one of an incarnation has the end of the partition before the incarnation wrote anything (-1: it was empty). Where
    partitions are read as shards, it has the end of each shard.
    """

    incarnation: str
    partition: int
    offset: PackedOffset


class LagSet(msgspec.Struct, frozen=True, array_like=True):
    """Lags of one kind measured in one minute of the wall clock, as the buckets of `services.core.lag` hold them.

    kind: lag_in, lag_out (from event time); e2e, ingest_time, transit_time, expel_time, process_time (from arrival, or of
    the node).
    """

    kind: str
    minute: int
    count: int
    total_ms: int
    buckets: dict[int, int]


class SparkFigures(msgspec.Struct, frozen=True, array_like=True):
    """A transform's work in the `seconds` before the report.

    events: read. batch_ms, longest_ms: of all batches, of the longest. state_rows, state_bytes: kept over batches, as of the last
    one. executors: of a cluster; 0 on one machine. ui: the address of Spark's own pages; empty when they are off. real_time:
    whether it ran in real-time mode, where a batch is the time between two commits.
    """

    seconds: float
    events: int
    batches: int
    batch_ms: int
    longest_ms: int
    state_rows: int = 0
    state_bytes: int = 0
    executors: int = 0
    ui: str = ""
    real_time: bool = False


class FailureSet(msgspec.Struct, frozen=True, array_like=True):
    """Origins of one incarnation and partition that were delivered after the same failed attempts of their last round.

    failures: as `failed_attempts.pack_attempts`. numbers: `pack_numbers`.
    """

    failures: str
    incarnation: str
    partition: int
    numbers: bytes


class Report(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The report of one instance of one node.

    instance: one process, from its start to its end. pipe: its name; for ingest, the name of the stream. destination: only of
    expel and the retrier. at_ms: wall clock when the report was made. behind_ms: the age of the oldest record that the instance
    has not processed; 0: there is none; None: unknown. reaches: only of ingest. closed: the instance drained, and no report
    follows. breaker: only of expel; the state of the destination's circuit breaker. fields: of ingest and expel; statistics of
    sampled payloads. returned_ms, held_ms: only of expel; as behind_ms, of the `Backlog` of that name. in_doubt: only of
    ingest; the sets with the outcome unknown. The loss table does not need them, and older readers ignore them. spark: only of
    transform, in a report every ten seconds. failures: only of expel; which of the delivered events had failed attempts in their
    last round. None: it is not recorded, because they were too many, or an earlier version made the report.

    The retrier reports its behind_ms without a pipe: every event that was due before that has left the retrier.
    """

    version: int = _VERSION
    node: Node
    instance: str
    pipe: str
    destination: str | None = None
    at_ms: int
    behind_ms: int | None = None
    sets: tuple[OriginSet, ...] = ()
    lags: tuple[LagSet, ...] = ()
    reaches: tuple[Reach, ...] = ()
    closed: bool = False
    breaker: Breaker | None = None
    fields: tuple[FieldSet, ...] = ()
    returned_ms: int | None = None
    held_ms: int | None = None
    in_doubt: tuple[OriginSet, ...] = ()
    spark: SparkFigures | None = None
    failures: tuple[FailureSet, ...] | None = None

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


class Decoded(NamedTuple):
    """unknown: the parts of the report that are left out of `report`, or `unknown` in it, because a newer version wrote them: the
    name of the field, or `outcome`; one entry for each."""

    report: Report
    unknown: Sequence[str] = ()


def decode_report(value: bytes | None) -> Report:
    """Everything in the report that this version knows. Raises BadReport; NewerReport when its version or node is newer."""
    return decode_known(value).report


def decode_known(value: bytes | None) -> Decoded:
    """As `decode_report`, with the names of what is unknown."""
    if value is None or len(value) > MAX_REPORT_BYTES:
        raise BadReport("no value" if value is None else f"{len(value)} bytes are more than {MAX_REPORT_BYTES}")
    try:
        report = _DECODER.decode(value)
    except msgspec.ValidationError as error:
        return _decode_items(value, error)
    except msgspec.MsgspecError as error:
        raise BadReport(str(error)) from error
    if report.version > _VERSION:
        raise NewerReport("version", newer_format("the report", report.version, _VERSION))
    if report.version != _VERSION:
        raise BadReport(f"version {report.version} is not {_VERSION}")
    return Decoded(report)


_LISTS: dict[str, type] = {
    "sets": OriginSet,
    "lags": LagSet,
    "reaches": Reach,
    "fields": FieldSet,
    "in_doubt": OriginSet,
}
_OPTIONAL: dict[str, Any] = {
    "behind_ms": int | None,
    "breaker": Breaker | None,
    "returned_ms": int | None,
    "held_ms": int | None,
    "spark": SparkFigures | None,
    "failures": tuple[FailureSet, ...] | None,
}
_HEAD = 6
"""The fields before `behind_ms`. Without one of them nothing is understood."""


def _decode_items(value: bytes, error: msgspec.ValidationError) -> Decoded:
    """A report that has a value which this version does not know, or is none at all. Raises BadReport."""
    try:
        found = msgspec.msgpack.decode(value)
    except msgspec.MsgspecError as again:
        raise BadReport(str(again)) from again
    if not isinstance(found, list) or len(found) < _HEAD or not isinstance(found[0], int):
        raise BadReport(str(error)) from error
    if found[0] > _VERSION:
        raise NewerReport("version", newer_format("the report", found[0], _VERSION)) from error
    if isinstance(found[1], str) and found[1] not in get_args(Node):
        raise NewerReport(
            "node", f"a report of the node {found[1][:40]!r}, which this version does not have"
        ) from error
    raw = dict(zip(Report.__struct_fields__, found, strict=False))
    unknown: list[str] = []
    for name in _LISTS.keys() & raw.keys():
        raw[name] = _keep_known(name, raw[name], unknown)
    for name in _OPTIONAL.keys() & raw.keys():
        try:
            msgspec.convert(raw[name], _OPTIONAL[name])
        except msgspec.ValidationError:
            unknown.append(name)
            raw[name] = None
    try:
        return Decoded(msgspec.convert(list(raw.values()), Report), sorted(unknown))
    except msgspec.ValidationError as again:
        raise BadReport(str(again)) from again


def _keep_known(name: str, items: Any, unknown: list[str]) -> list[Any]:
    """The items of a list that are of its type. Sets with an unknown outcome get the outcome `unknown`."""
    if not isinstance(items, list):
        unknown.append(name)
        return []
    kept = []
    for item in items:
        if _LISTS[name] is OriginSet and isinstance(item, list) and _is_new_word(item[:1]):
            unknown.append("outcome")
            item = ["unknown", *item[1:5]]  # without the time, which orders known outcomes
        try:
            msgspec.convert(item, _LISTS[name])
        except msgspec.ValidationError:
            unknown.append(name)
        else:
            kept.append(item)
    return kept


def _is_new_word(outcome: list[Any]) -> bool:
    return any(isinstance(word, str) and word not in get_args(Outcome) for word in outcome)


def pack_numbers(numbers: BitMap) -> bytes:
    """As an `OriginSet` carries them; a run takes a few bytes."""
    numbers.run_optimize()
    return numbers.serialize()


def unpack_numbers(data: bytes) -> BitMap:
    """Raises BadReport when these are not packed numbers."""
    try:
        return BitMap.deserialize(data)
    except (ValueError, MemoryError) as error:
        raise BadReport(f"no bitmap: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Report)
