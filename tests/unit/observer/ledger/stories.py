"""Reports about made-up events, for tests of the join."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from pyroaring import BitMap

from services.core.ledger.report import Node, OriginSet, Outcome, Reach, Report, Span, pack_numbers, pack_offset
from services.observer.ledger.flow import Flow, PipeFlow
from services.observer.ledger.table import Table

MINUTE = 30_000_000
"""The minute in which the stories begin."""
MINUTE_MS = 60_000
START_MS = MINUTE * MINUTE_MS
PLAIN = Flow({"late": PipeFlow(("flights",), transforms=True, destinations={"ops": None})})
"""A stream, a transform, a webhook."""


def hear(table: Table, report: Report) -> None:
    """As soon as it was made, where all clocks agree."""
    table.apply(report, report.at_ms)


def tell(
    node: Node,
    pipe: str,
    outcome: Outcome,
    numbers: Collection[int],
    *,
    destination: str | None = None,
    minute: int | None = None,
    incarnation: str = "a",
    partition: int = 0,
    at_ms: int = START_MS,
    behind_ms: int | None = 0,
    instance: str = "one",
) -> Report:
    """A report of one set."""
    told = OriginSet(outcome, incarnation, partition, minute, pack_numbers(BitMap(numbers)))
    return Report(
        node=node,
        instance=instance,
        pipe=pipe,
        destination=destination,
        at_ms=at_ms,
        behind_ms=behind_ms,
        sets=(told,),
    )


def with_due(report: Report, due: Span | None) -> Report:
    """Of events that are due then."""
    return msgspec.structs.replace(report, sets=tuple(msgspec.structs.replace(one, due=due) for one in report.sets))


def accept(numbers: Collection[int], *, stream: str = "flights", minute: int = MINUTE, **more: Any) -> Report:
    """Ingest accepted these."""
    return tell("ingest", stream, "accepted", numbers, minute=minute, **more)


def reach(stream: str, offsets: Mapping[int, int], *, incarnation: str = "a", at_ms: int = START_MS) -> Report:
    """Ingest told everything up to these offsets, by partition."""
    reaches = tuple(Reach(incarnation, partition, pack_offset(offset)) for partition, offset in offsets.items())
    return Report(node="ingest", instance="one", pipe=stream, at_ms=at_ms, reaches=reaches)


def beat(node: Node, pipe: str, destination: str | None = None, *, at_ms: int, behind_ms: int | None = 0) -> Report:
    """A heartbeat."""
    return Report(node=node, instance="one", pipe=pipe, destination=destination, at_ms=at_ms, behind_ms=behind_ms)


def split(report: Report, cuts: Sequence[int]) -> list[Report]:
    """The same said in several reports: each number goes to the piece that `cuts` names for it, in turn."""
    pieces: list[Report] = []
    for told in report.sets:
        numbers = list(BitMap.deserialize(told.numbers))
        for piece in sorted(set(cuts)):
            mine = BitMap([number for index, number in enumerate(numbers) if cuts[index % len(cuts)] == piece])
            one = OriginSet(told.outcome, told.incarnation, told.partition, told.minute, pack_numbers(mine))
            pieces.append(
                Report(
                    node=report.node,
                    instance=report.instance,
                    pipe=report.pipe,
                    destination=report.destination,
                    at_ms=report.at_ms + piece,
                    behind_ms=report.behind_ms,
                    sets=(one,),
                )
            )
    return pieces
