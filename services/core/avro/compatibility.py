"""Compares a new schema with earlier ones, as a level demands. `repair.py` offers changes that make it compatible.

BACKWARD: the new schema reads what the last one wrote. FORWARD: the last schema reads what the new one writes. FULL: both.
TRANSITIVE: not only with the last schema, but with all of them. NONE: anything goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from services.core.avro.differences import Finding, find, fragment
from services.core.avro.json_document import Json
from services.core.avro.patch import Operation
from services.core.avro.schema import Schema

Directed: TypeAlias = tuple[Finding, bool]
"""A finding, and whether the new schema is the reader."""


class Level(StrEnum):
    """What a new version must be compatible with."""

    NONE = "NONE"
    BACKWARD = "BACKWARD"
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    FORWARD = "FORWARD"
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL = "FULL"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"

    @property
    def transitive(self) -> bool:
        """Whether all earlier versions count, not only the last one."""
        return self.value.endswith("_TRANSITIVE")

    @property
    def new_reads(self) -> bool:
        """Whether the new schema must read what earlier ones wrote."""
        return self.value.startswith(("BACKWARD", "FULL"))

    @property
    def old_reads(self) -> bool:
        """Whether earlier schemas must read what the new one writes."""
        return self.value.startswith(("FORWARD", "FULL"))


@dataclass(frozen=True, slots=True)
class Difference:
    """Why two schemas are not compatible, in one place.

    path: a JSON pointer into the new schema. rule: an id of `rules.py`. reader, writer: what does not fit, None for nothing.
    Where breaks is not FORWARD, the reader is the new one. breaks: BACKWARD, FORWARD, FULL, or empty: nothing. fix: a JSON
    Patch (RFC 6902) of the new schema that makes it compatible. None when there is none, and beside other differences: one patch
    ends all of them (`repair.Comparison`). against: the index of the earlier schema.
    """

    path: str
    rule: str
    reader: Json
    writer: Json
    breaks: str
    message: str
    fix: list[Operation] | None
    against: int = 0

    def to_json(self) -> dict[str, Json]:
        """The difference as an API gives it, without the index."""
        fix: Json = None if self.fix is None else list(self.fix)
        return {
            "path": self.path,
            "rule": self.rule,
            "reader": self.reader,
            "writer": self.writer,
            "breaks": self.breaks,
            "message": self.message,
            "fix": fix,
        }


def check(level: Level, new: Schema, existing: Sequence[Schema]) -> list[Difference]:
    """What the level forbids in the new schema, without fixes; empty when it is compatible. existing: earlier versions, the
    oldest first.

    Raises TooComplex.
    """
    differences: dict[tuple[str, str, str], Difference] = {}
    for index, old in versions_that_count(level, existing):
        for group in groups_of(findings(new, old, level)):
            difference = _difference(group, index)
            differences.setdefault((difference.path, difference.message, difference.breaks), difference)
    return list(differences.values())


def compatible(level: Level, new: Schema, existing: Sequence[Schema]) -> bool:
    """Whether `check` finds nothing. It ends at the first difference, so it is quicker. Raises TooComplex."""
    return not any(findings(new, old, level) for _, old in versions_that_count(level, existing))


def versions_that_count(level: Level, existing: Sequence[Schema]) -> Iterable[tuple[int, Schema]]:
    """The earlier versions that the level compares with, each with its index."""
    if level is Level.NONE or not existing:
        return ()
    return enumerate(existing) if level.transitive else [(len(existing) - 1, existing[-1])]


def findings(new: Schema, old: Schema, level: Level) -> list[Directed]:
    """What the level forbids between two schemas. Raises TooComplex."""
    found = [(finding, True) for finding in find(new, old, new_reads=True)] if level.new_reads else []
    return found + ([(finding, False) for finding in find(old, new, new_reads=False)] if level.old_reads else [])


def groups_of(found: list[Directed]) -> list[list[Directed]]:
    """The findings of one pair, those of one place and rule together: they are one difference."""
    places: dict[tuple[str, str, str], list[Directed]] = {}
    for finding, new_reads in found:
        places.setdefault((finding.site, finding.rule, finding.subject), []).append((finding, new_reads))
    return list(places.values())


def _difference(group: list[Directed], against: int) -> Difference:
    finding = group[0][0]
    directions = {"BACKWARD" if new_reads else "FORWARD" for _, new_reads in group}
    return Difference(
        finding.site,
        finding.rule,
        fragment(finding.reader, finding.field),
        None if finding.rule == "FIELD_NEEDS_DEFAULT" else fragment(finding.writer, None),
        "FULL" if len(directions) == 2 else directions.pop(),
        finding.message,
        None,
        against,
    )
