"""Compares a new schema with earlier ones, as a level demands, and offers changes that make it compatible.

BACKWARD: the new schema reads what the last one wrote. FORWARD: the last schema reads what the new one writes. FULL: both.
TRANSITIVE: not only with the last schema, but with all of them. NONE: anything goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from services.core.avro.differences import Finding, find, fragment
from services.core.avro.fixes import candidates, fields_put_back
from services.core.avro.json_document import Fault, Json, SchemaError, decode, read_json, to_text
from services.core.avro.notes import notes
from services.core.avro.patch import Operation, PatchError, apply_patch
from services.core.avro.resolution import TooComplex
from services.core.avro.schema import Named, Schema

MAX_TRIES: Final = 200
"""How many candidates of changes a repair tries."""
MAX_CPU_S: Final = 2.0
"""The CPU seconds of its thread after which it tries no more. One try of the largest schemas takes a second or two."""
MAX_OPERATIONS: Final = 1000
"""The most operations of a patch."""
MAX_PASSES: Final = 3
"""How often a repair goes through all versions: a change for a later one may break an earlier one."""


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
    ends all of them (`Comparison.repair`). against: the index of the earlier schema.
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """differences: what does not fit. repair: one JSON Patch of the new schema that makes it compatible. None: it is already, or
    no such patch was found."""

    differences: list[Difference]
    repair: list[Operation] | None


def compare(level: Level, new: Schema, existing: Sequence[Schema]) -> Comparison:
    """As `check`, with the patch, which is also the fix of an only difference. Raises TooComplex."""
    found = check(level, new, existing)
    patch = repair(level, new, existing) if found else None
    return Comparison(found if len(found) != 1 else [replace(found[0], fix=patch)], patch)


def check(level: Level, new: Schema, existing: Sequence[Schema]) -> list[Difference]:
    """What the level forbids in the new schema, without fixes; empty when it is compatible. existing: earlier versions, the
    oldest first.

    Raises TooComplex.
    """
    differences: dict[tuple[str, str, str], Difference] = {}
    for index, old in _counted(level, existing):
        for group in _groups(_findings(new, old, level)):
            difference = _difference(group, index)
            differences.setdefault((difference.path, difference.message, difference.breaks), difference)
    return list(differences.values())


def compatible(level: Level, new: Schema, existing: Sequence[Schema]) -> bool:
    """Whether `check` finds nothing. It ends at the first difference, so it is quicker. Raises TooComplex."""
    return not any(_findings(new, old, level) for _, old in _counted(level, existing))


def diff(old: Schema, new: Schema, level: Level = Level.FULL) -> Comparison:
    """Every change from the old schema to the new one: first what breaks a direction, then what breaks nothing (`breaks` empty).

    The patch is for the level, so a difference that the level allows has no fix. Raises TooComplex.
    """
    found = check(Level.FULL, new, [old])
    patch = compare(level, new, [old]).repair
    if len(found) == 1:
        found = [replace(found[0], fix=patch)]
    known = {
        (finding.site, finding.field.name if finding.field else "") for finding, _ in _findings(new, old, Level.FULL)
    }
    rest = [note for note in notes(old, new) if (note.path, "") not in known and (note.path, note.subject) not in known]
    more = [Difference(note.path, note.rule, note.new, note.old, "", note.message, None) for note in rest]
    return Comparison(found + more, patch)


def repair(level: Level, new: Schema, existing: Sequence[Schema]) -> list[Operation] | None:
    """One JSON Patch of the new schema that makes it compatible. None when there is none among the candidates that are tried.

    It is made of steps, each of which ends a difference of one pair, or all new and lost fields at once.
    """
    patch: list[Operation] = []
    schema, budget = new, _Budget()
    with suppress(TooComplex):
        for _ in range(MAX_PASSES):
            is_compatible = True
            for _, old in _counted(level, existing):
                while not budget.is_over and (found := _findings(schema, old, level)):
                    is_compatible = False
                    step = _step(schema, old, level, found, budget)
                    changed = None if step is None else _apply(schema, step)
                    if step is None or changed is None or len(patch) + len(step) > MAX_OPERATIONS:
                        return None
                    patch += step
                    schema = changed
                if budget.is_over:
                    return None
            if is_compatible:
                return patch
    return None


class _Budget:
    """Of one repair, on the thread that makes it."""

    def __init__(self) -> None:
        self.tries = MAX_TRIES
        self._until = time.thread_time() + MAX_CPU_S

    @property
    def is_over(self) -> bool:
        """Whether its time is used up."""
        return time.thread_time() > self._until

    def take(self) -> bool:
        """Whether one more try may be made."""
        self.tries -= 1
        return self.tries >= 0 and not self.is_over


def _counted(level: Level, existing: Sequence[Schema]) -> Iterable[tuple[int, Schema]]:
    if level is Level.NONE or not existing:
        return ()
    return enumerate(existing) if level.transitive else [(len(existing) - 1, existing[-1])]


def _findings(new: Schema, old: Schema, level: Level) -> list[tuple[Finding, bool]]:
    found = [(finding, True) for finding in find(new, old, new_reads=True)] if level.new_reads else []
    return found + ([(finding, False) for finding in find(old, new, new_reads=False)] if level.old_reads else [])


def _groups(found: list[tuple[Finding, bool]]) -> list[list[tuple[Finding, bool]]]:
    """The findings of one pair, those of one place and rule together: they are one difference."""
    places: dict[tuple[str, str, str], list[tuple[Finding, bool]]] = {}
    for finding, new_reads in found:
        places.setdefault((finding.site, finding.rule, finding.subject), []).append((finding, new_reads))
    return list(places.values())


def _difference(group: list[tuple[Finding, bool]], against: int) -> Difference:
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


def _step(
    new: Schema, old: Schema, level: Level, found: list[tuple[Finding, bool]], budget: _Budget
) -> list[Operation] | None:
    """A patch that ends the first difference for which there is one, or all of fields at once. None when there is none."""
    groups = _groups(found)
    if (patch := _fields(groups, new, old, level, found, budget)) is not None:
        return patch
    for group in groups if len(groups) <= budget.tries else []:  # each one takes a try at least
        patch = _ending(group, new, old, level, found, budget)
        if patch is not None:
            return patch
    return None


def _fields(
    groups: list[list[tuple[Finding, bool]]],
    new: Schema,
    old: Schema,
    level: Level,
    before: list[tuple[Finding, bool]],
    budget: _Budget,
) -> list[Operation] | None:
    """The best candidates for all new and lost fields together, in one try: a schema may have hundreds of them."""
    if new.origin is None:
        return None
    fields = [group for group in groups if group[0][0].rule == "FIELD_NEEDS_DEFAULT"]
    if not 1 < len(fields) <= MAX_OPERATIONS or not budget.take():
        return None
    known, document = _names(new), new.origin.document
    lost = [group[0][0] for group in fields if not group[0][1]]
    patch = fields_put_back(lost, document, known, MAX_OPERATIONS)
    for group in fields:
        if group[0][1] and not budget.is_over:
            patch += next(candidates(group[0][0], document, new_reads=True, known=known), [])
    ended = sum(map(len, fields))
    changed = _apply(new, patch)
    return patch if changed is not None and len(_findings(changed, old, level)) <= len(before) - ended else None


def _ending(
    group: list[tuple[Finding, bool]],
    new: Schema,
    old: Schema,
    level: Level,
    before: list[tuple[Finding, bool]],
    budget: _Budget,
) -> list[Operation] | None:
    """The first candidate that ends all findings of the group, otherwise the first that ends one. None when there is none."""
    best: list[Operation] | None = None
    for patch, after in _tried(group, new, old, level, budget):
        if len(after) <= len(before) - len(group):
            return patch
        if len(after) < len(before):
            best = best or patch
        elif best is None and len(after) == len(before):
            best = _both(patch, before, new, old, level, budget)
    return best


def _both(
    patch: list[Operation], before: list[tuple[Finding, bool]], new: Schema, old: Schema, level: Level, budget: _Budget
) -> list[Operation] | None:
    """A patch that ended one finding and brought another one, with a second patch for that one. None when there is none."""
    changed = _apply(new, patch)
    if changed is None:
        return None
    known = {(finding.site, finding.rule, finding.subject) for finding, _ in before}
    after = _findings(changed, old, level)
    brought = [item for item in after if (item[0].site, item[0].rule, item[0].subject) not in known]
    for more, left in _tried(brought[:1], changed, old, level, budget):
        if len(left) < len(before):
            return [*patch, *more]
    return None


def _tried(
    group: list[tuple[Finding, bool]], new: Schema, old: Schema, level: Level, budget: _Budget
) -> Iterator[tuple[list[Operation], list[tuple[Finding, bool]]]]:
    """Each candidate that makes a schema that can be read and compared, with the findings that are left."""
    if new.origin is None:
        return
    known = _names(new)
    for finding, new_reads in group:
        for patch in candidates(finding, new.origin.document, new_reads=new_reads, known=known):
            if not budget.take():
                return
            changed = _apply(new, patch)
            with suppress(TooComplex):
                if changed is not None:
                    yield patch, _findings(changed, old, level)


def _apply(schema: Schema, patch: Sequence[Operation]) -> Schema | None:
    """The changed schema. None when it is none."""
    origin = schema.origin
    if origin is None:
        return None
    try:
        text = to_text(apply_patch(origin.document, patch))
        return origin.again(read_json(decode(text)), schema.full_name)  # as if somebody had sent it
    except (PatchError, Fault, SchemaError, RecursionError):
        return None


def _names(schema: Schema) -> set[str]:
    """The named types of a schema."""
    names: set[str] = set()
    open_: list[Schema] = [schema]
    while open_:
        node = open_.pop()
        if isinstance(node, Named):
            if node.name in names:
                continue
            names.add(node.name)
        open_.extend(node.inner())
    return names
