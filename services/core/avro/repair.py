"""Offers one change of a new schema that ends all its differences with earlier ones.

Candidates (`fixes.py`) are applied, read as if a client had sent the changed schema, and compared again. So a patch that is
offered makes the schema compatible. The search is bounded in tries, time and size, so it does not find every patch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from services.core.avro.compatibility import (
    Difference,
    Directed,
    Level,
    check,
    findings,
    groups_of,
    versions_that_count,
)
from services.core.avro.fixes import candidates, fields_put_back
from services.core.avro.json_document import Fault, SchemaError, decode, read_json, to_text
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


def diff(old: Schema, new: Schema, level: Level = Level.FULL) -> Comparison:
    """Every change from the old schema to the new one: first what breaks a direction, then what breaks nothing (`breaks` empty).

    The patch is for the level, so a difference that the level allows has no fix. Raises TooComplex.
    """
    found = check(Level.FULL, new, [old])
    patch = compare(level, new, [old]).repair
    if len(found) == 1:
        found = [replace(found[0], fix=patch)]
    known = {
        (finding.site, finding.field.name if finding.field else "") for finding, _ in findings(new, old, Level.FULL)
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
            for _, old in versions_that_count(level, existing):
                while not budget.is_over and (found := findings(schema, old, level)):
                    is_compatible = False
                    step = _Pair(level, old, budget, schema, found).step()
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

    def spend(self) -> bool:
        """Whether one more try may be made."""
        self.tries -= 1
        return self.tries >= 0 and not self.is_over


@dataclass(frozen=True, slots=True)
class _Pair:
    """A new schema beside an earlier one, with what the level forbids between them (`found`)."""

    level: Level
    old: Schema
    budget: _Budget
    new: Schema
    found: list[Directed]

    def step(self) -> list[Operation] | None:
        """A patch that ends the first difference for which there is one, or all of fields at once. None when there is none."""
        groups = groups_of(self.found)
        if (patch := self._fields(groups)) is not None:
            return patch
        for group in groups if len(groups) <= self.budget.tries else []:  # each one takes a try at least
            patch = self._ending(group)
            if patch is not None:
                return patch
        return None

    def _fields(self, groups: list[list[Directed]]) -> list[Operation] | None:
        """The best candidates for all new and lost fields together, in one try: a schema may have hundreds of them."""
        if self.new.origin is None:
            return None
        fields = [group for group in groups if group[0][0].rule == "FIELD_NEEDS_DEFAULT"]
        if not 1 < len(fields) <= MAX_OPERATIONS or not self.budget.spend():
            return None
        known, document = _names(self.new), self.new.origin.document
        lost = [group[0][0] for group in fields if not group[0][1]]
        patch = fields_put_back(lost, known, MAX_OPERATIONS)
        for group in fields:
            if group[0][1] and not self.budget.is_over:
                patch += next(candidates(group[0][0], document, new_reads=True, known=known), [])
        ended = sum(map(len, fields))
        changed = self._changed(patch)
        return patch if changed is not None and len(changed.found) <= len(self.found) - ended else None

    def _ending(self, group: list[Directed]) -> list[Operation] | None:
        """The first candidate that ends all findings of the group, otherwise the first that ends one. None when there is none."""
        best: list[Operation] | None = None
        for patch, changed in self._tried(group):
            left = len(changed.found)
            if left <= len(self.found) - len(group):
                return patch
            if left < len(self.found):
                best = best or patch
            elif best is None and left == len(self.found):
                best = self._with_second(patch, changed)
        return best

    def _with_second(self, patch: list[Operation], changed: _Pair) -> list[Operation] | None:
        """A patch that ended one finding and brought another one, with a second patch for that one. None when there is none."""
        known = {(finding.site, finding.rule, finding.subject) for finding, _ in self.found}
        brought = [item for item in changed.found if (item[0].site, item[0].rule, item[0].subject) not in known]
        for more, last in changed._tried(brought[:1]):
            if len(last.found) < len(self.found):
                return [*patch, *more]
        return None

    def _tried(self, group: list[Directed]) -> Iterator[tuple[list[Operation], _Pair]]:
        """Each candidate that makes a schema that can be read and compared, with the pair that it makes."""
        if self.new.origin is None:
            return
        known = _names(self.new)
        for finding, new_reads in group:
            for patch in candidates(finding, self.new.origin.document, new_reads=new_reads, known=known):
                if not self.budget.spend():
                    return
                with suppress(TooComplex):
                    if (changed := self._changed(patch)) is not None:
                        yield patch, changed

    def _changed(self, patch: list[Operation]) -> _Pair | None:
        """The pair with the patch applied. None when the patch makes no schema. Raises TooComplex."""
        schema = _apply(self.new, patch)
        return None if schema is None else replace(self, new=schema, found=findings(schema, self.old, self.level))


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
