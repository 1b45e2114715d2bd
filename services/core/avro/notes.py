"""Changes between two versions of a schema that break nothing by themselves: for people who compare versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from services.core.avro.differences import describe
from services.core.avro.forms import canonical_default
from services.core.avro.json_document import Json
from services.core.avro.resolution import MAX_PAIRS, PROMOTIONS, TooComplex
from services.core.avro.schema import Array, Enum, Field, Map, Named, Record, Schema, Union


@dataclass(frozen=True, slots=True)
class Note:
    """One change. path: a JSON pointer into the new schema. subject: the field, symbol or type. old, new: what it was and is."""

    path: str
    rule: str
    subject: str
    old: Json
    new: Json
    message: str


def notes(old: Schema, new: Schema) -> list[Note]:
    """All changes, in the order of the new schema. Raises TooComplex."""
    walk = _Walk()
    walk.compare(old, new, "")
    return walk.found


@dataclass
class _Walk:
    found: list[Note] = field(default_factory=list)
    visited: set[tuple[int, int]] = field(default_factory=set)

    def compare(self, old: Schema, new: Schema, site: str) -> None:
        """A pair of types. site: where the new schema uses its one."""
        pair = (id(old), id(new))
        if pair in self.visited:
            return
        if len(self.visited) >= MAX_PAIRS:
            raise TooComplex(f"The comparison needs more than {MAX_PAIRS:,} pairs of types.")
        self.visited.add(pair)
        if isinstance(old, Union) or isinstance(new, Union):
            self._unions(old, new, site)
        elif old.type == new.type:
            self._same_type(old, new, site)
        elif old.type in PROMOTIONS.get(new.type, ()):
            self._add(site, "TYPE_WIDENED", "", old.type, new.type, f"{old.type} has become {new.type}.")

    def _same_type(self, old: Schema, new: Schema, site: str) -> None:
        match old, new:
            case Array(), Array():
                self.compare(old.items, new.items, f"{new.pointer}/items")
            case Map(), Map():
                self.compare(old.values, new.values, f"{new.pointer}/values")
            case Record(), Record():
                self._names(old, new)
                self._fields(old, new)
            case Enum(), Enum():
                self._names(old, new)
                self._enum(old, new)
            case Named(), Named():
                self._names(old, new)
        if (old.logical is None) != (new.logical is None):
            rule = "LOGICAL_TYPE_ADDED" if old.logical is None else "LOGICAL_TYPE_REMOVED"
            self._add(site, rule, "", describe(old), describe(new), f"{describe(old)} has become {describe(new)}.")

    def _add(self, path: str, rule: str, subject: str, old: Json, new: Json, message: str) -> None:
        self.found.append(Note(path, rule, subject, old, new, message))

    def _names(self, old: Named, new: Named) -> None:
        if old.name != new.name:
            self._add(
                f"{new.pointer}/name", "NAME_MOVED", new.name, old.name, new.name, f"{old.name} has become {new.name}."
            )
        self._aliases(f"{new.pointer}/aliases", new.name, old.aliases, new.aliases)
        self._doc(f"{new.pointer}/doc", new.name, old.doc, new.doc)

    def _aliases(self, path: str, name: str, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        if set(old) != set(new):
            shown = ", ".join(new) or "none"
            self._add(
                path,
                "ALIASES_CHANGED",
                name,
                cast(Json, list(old)),
                cast(Json, list(new)),
                f"Aliases of {name}: {shown}.",
            )

    def _doc(self, path: str, name: str, old: str | None, new: str | None) -> None:
        if old != new:
            self._add(path, "DOC_CHANGED", name, old, new, f"The documentation of {name} has changed.")

    def _fields(self, old: Record, new: Record) -> None:
        kept: set[str] = set()
        for item in new.fields:
            before = next((old.by_name[name] for name in (item.name, *item.aliases) if name in old.by_name), None)
            if before is None:
                self._add(item.pointer, "FIELD_ADDED", item.name, None, describe(item.type), f"{item.name} is new.")
                continue
            kept.add(before.name)
            if before.name != item.name:
                message = f"{before.name} has become {item.name}."
                self._add(f"{item.pointer}/name", "FIELD_RENAMED", item.name, before.name, item.name, message)
            self._field(before, item)
        for item in old.fields:
            if item.name not in kept:
                message = f"{item.name} is gone."
                self._add(f"{new.pointer}/fields", "FIELD_REMOVED", item.name, describe(item.type), None, message)

    def _field(self, old: Field, new: Field) -> None:
        before, after = _default(old), _default(new)
        if before != after:
            message = f"The default of {new.name} was {before or 'not there'} and is {after or 'not there'}."
            self._add(f"{new.pointer}/default", "FIELD_DEFAULT_CHANGED", new.name, before, after, message[:500])
        self._aliases(f"{new.pointer}/aliases", new.name, old.aliases, new.aliases)
        self._doc(f"{new.pointer}/doc", new.name, old.doc, new.doc)
        self.compare(old.type, new.type, f"{new.pointer}/type")

    def _enum(self, old: Enum, new: Enum) -> None:
        before, after = set(old.symbols), set(new.symbols)
        added = [symbol for symbol in new.symbols if symbol not in before]
        removed = [symbol for symbol in old.symbols if symbol not in after]
        path = f"{new.pointer}/symbols"
        if added:
            shown = ", ".join(added[:10])
            self._add(
                path, "ENUM_SYMBOLS_ADDED", new.name, None, cast(Json, added), f"{new.name} has new symbols: {shown}."
            )
        if removed:
            shown = ", ".join(removed[:10])
            self._add(
                path,
                "ENUM_SYMBOLS_REMOVED",
                new.name,
                cast(Json, removed),
                None,
                f"{new.name} has lost symbols: {shown}.",
            )
        if old.default != new.default:
            message = f"The default of {new.name} was {old.default or 'not there'} and is {new.default or 'not there'}."
            self._add(f"{new.pointer}/default", "ENUM_DEFAULT_CHANGED", new.name, old.default, new.default, message)

    def _unions(self, old: Schema, new: Schema, site: str) -> None:
        before = old.branches if isinstance(old, Union) else [old]
        after = new.branches if isinstance(new, Union) else [new]
        for index, branch in enumerate(after):
            inner = f"{new.pointer}/{index}" if isinstance(new, Union) else site
            same = next((other for other in before if _same(other, branch)), None)
            if same is None:
                self._add(
                    inner, "UNION_BRANCH_ADDED", describe(branch), None, describe(branch), f"{describe(branch)} is new."
                )
            else:
                self.compare(same, branch, inner)
        for branch in before:
            if not any(_same(branch, other) for other in after):
                self._add(
                    site,
                    "UNION_BRANCH_REMOVED",
                    describe(branch),
                    describe(branch),
                    None,
                    f"{describe(branch)} is gone.",
                )


def _same(old: Schema, new: Schema) -> bool:
    if isinstance(old, Named) and isinstance(new, Named):
        return old.type == new.type and (old.short_name == new.short_name or old.name in new.aliases)
    return old.type == new.type


def _default(item: Field) -> str | None:
    return canonical_default(item.type, cast(Json, item.default)) if item.has_default else None
