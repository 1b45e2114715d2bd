"""A report: what one node settled since its last one. The records of the telemetry topic.

A report is a set of origins and may come twice, late, and in any order: the observer takes unions.
"""

from typing import Annotated, Literal, get_args

import msgspec
from pyroaring import BitMap

from services.core.ledger.fields import FieldSet

Span = tuple[int, int]
"""[from, until) in seconds since the epoch: everything in the set is due in it."""


_GRAINS = tuple(1 << power for power in range(20))
"""Of waits up to a month and more."""


def due_span(due_ms: int, wait_ms: int) -> Span:
    """The span of an event that is handed over and waits so long: about an eighth of the wait, a second at least.

    An event's next round begins after this one was due and lasts about as long or longer, so its span lies behind this one.
    """
    grain = 1 << max(0, (wait_ms // 8000).bit_length() - 1)
    first = due_ms // 1000 // grain * grain
    return first, first + grain


def spans_around(second: int) -> list[Span]:
    """All that `due_span` may give for an event that is due in this second."""
    return [(second // grain * grain, second // grain * grain + grain) for grain in _GRAINS]


def longest_wait_s(span: Span) -> int:
    """How long events of this `due_span` waited, at most."""
    return 16 * (span[1] - span[0])


def released_span(due_ms: int) -> Span:
    """The span of an event that is given back, which does not say any more how long it waited: its second."""
    return due_ms // 1000, due_ms // 1000 + 1


def is_back(released: Span, handed_over: Span) -> bool:
    """Whether who was given back so had been handed over so, and not again since."""
    return released[1] > handed_over[0]


def since_span(now_ms: int, due_ms: int = 0) -> Span:
    """The second since when an event is parked, dead or redriven: not before it was due, which was by another's clock."""
    second = max(now_ms, due_ms) // 1000
    return second, second + 1


TELEMETRY = "penstock.telemetry"
"""One partition; key: the reporter's name, so that a reader may tell them apart without decoding."""
SNAPSHOTS = "penstock.observer"
"""One partition: what the observer made of the reports, so that it survives them."""

Node = Literal["ingest", "transform", "expel", "retrier"]
Outcome = Literal[
    "accepted", "refused", "passed", "filtered", "delivered", "retrying", "parked", "released", "dead", "redriven",
    "unknown",
]  # fmt: skip
"""What became of an event at a node.

ingest: accepted | refused (not stored) | unknown (may be stored; only in `Report.in_doubt`). transform: passed | filtered |
dead. expel: delivered | retrying | parked | dead. retrier: released | dead, and redriven: an operator gave a dead letter back to
expel.
"""

Breaker = Literal["closed", "half-open", "open"]

MAX_NUMBER = 1 << 31
"""An incarnation ends before its numbers grow beyond this: the bitmaps hold 32 bits."""
MAX_REPORT_BYTES = 512 * 1024
"""Larger ones are cut in two before they are sent; a reader refuses them."""
_VERSION = 1


class BadReport(ValueError):
    """A record of the telemetry topic that is no report; the message says why."""


class OriginSet(msgspec.Struct, frozen=True, array_like=True):
    """Origins of one incarnation and partition with one outcome.

    minute: of the event time, in minutes since the epoch; only in sets of ingest. numbers: `pack_numbers`. due: of expel and the
    retrier, what orders an event's ups and downs: when it is due (retrying, released), or since when it is so (parked, dead,
    redriven: `since_span`). None: nobody knows.
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
    """How far ingest's reports go: all that this incarnation put into this partition up to `offset` has been told.

    The first one of an incarnation says where the partition ended before it sent anything (-1: it was empty); where partitions
    are read as shards, where each shard ended.
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


class Report(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The report of one instance of one node.

    instance: one process, from its start to its end. pipe: its name; for ingest that of the stream. destination: of expel and the
    retrier. at_ms: wall clock when it was made. behind_ms: age of the oldest record that the instance has not processed, 0 when
    there is none, None when it is unknown. reaches: only of ingest. closed: the instance drained; no report follows. breaker: of
    expel, of the destination's circuit breaker. fields: of ingest and expel, what the payloads of a sample were like.
    returned_ms: only of expel, as behind_ms, of what the retrier gave back. held_ms: the same of all that comes back: what was
    parked or redriven, too. in_doubt: only of ingest, the sets with the outcome unknown: the table needs none of them, and
    readers of before this field pass it over.

    The retrier's behind_ms stands in a report of its own, without a pipe: everything that was due so long before has left it.
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

    def encode(self) -> bytes:
        """As the record's value."""
        return _ENCODER.encode(self)


def decode_report(value: bytes | None) -> Report:
    """Raises BadReport for anything else, also for one of another version."""
    if value is None or len(value) > MAX_REPORT_BYTES:
        raise BadReport("no value" if value is None else f"{len(value)} bytes are more than {MAX_REPORT_BYTES}")
    try:
        report = _DECODER.decode(value)
    except msgspec.MsgspecError as error:
        raise BadReport(str(error)) from error
    if report.version != _VERSION:
        raise BadReport(f"version {report.version} is not {_VERSION}")
    return report


def pack_numbers(numbers: BitMap) -> bytes:
    """As an `OriginSet` carries them; runs take a few bytes."""
    numbers.run_optimize()
    return numbers.serialize()


def unpack_numbers(data: bytes) -> BitMap:
    """Raises BadReport when these are no packed numbers."""
    try:
        return BitMap.deserialize(data)
    except (ValueError, MemoryError) as error:
        raise BadReport(f"no bitmap: {error}") from error


OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Report)
