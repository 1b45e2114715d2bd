"""What makes two schemas incompatible: each reason once, at its place, with its rule.

A walk over the pairs that `resolution.py` has judged. It goes into unions: where a union lacks a type, it looks for the branch
that was meant, and says what is wrong inside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.core.avro.forms import to_json
from services.core.avro.json_document import Json
from services.core.avro.resolution import PROMOTIONS, Resolution, same_name, unknown_symbols, writer_fields
from services.core.avro.schema import PRIMITIVES, Array, Enum, Field, Fixed, Map, Named, Record, Schema, Union

_NUMBERS: Final = ("int", "long", "float", "double")


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason. site: where the new schema has it, a JSON pointer. use: where it uses the type around it. owned: whether these
    are in the new schema's own text.

    reader, writer: the two types, or the record around a field. field: of the reader. names: symbols, or fields of the writer.
    """

    rule: str
    site: str
    use: str
    owned: bool
    reader: Schema
    writer: Schema
    message: str
    field: Field | None = None
    names: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """What tells this finding from others of its rule at its site: a field, symbols, or the type that a union lacks."""
        if self.field is not None:
            return self.field.name
        return self.writer.full_name if self.rule.startswith("UNION_") else ",".join(self.names)


def find(reader: Schema, writer: Schema, *, new_reads: bool) -> list[Finding]:
    """All reasons, in the order of the reader's schema; empty when compatible. new_reads: whether the new schema is the reader.

    Raises TooComplex.
    """
    walk = _Walk(reader if new_reads else writer, new_reads)
    walk.explain(reader, writer, "", owned=True)
    return walk.findings


class _Walk:
    def __init__(self, root: Schema, new_reads: bool) -> None:
        self.findings: list[Finding] = []
        self._origin = root.origin
        self._new_reads = new_reads
        self._resolution = Resolution()
        self._visited: set[tuple[int, int]] = set()

    def explain(self, reader: Schema, writer: Schema, site: str, *, owned: bool) -> None:
        """Add the findings of a pair. site: the place of the new one's use."""
        if reader.type == writer.type and reader.type in PRIMITIVES:
            self._explain_logical(reader, writer, _Place(site, owned))
            return
        self._resolution.reads(reader, writer)
        pair = (id(reader), id(writer))
        if pair in self._visited:
            return
        self._visited.add(pair)
        new = reader if self._new_reads else writer
        owned = owned and (not isinstance(new, Named) or new.origin is self._origin)
        place = _Place(site, owned)
        if isinstance(writer, Union):
            self._explain_writer_union(reader, writer, place)
        elif isinstance(reader, Union):
            self._explain_reader_union(reader, writer, place)
        elif reader.type != writer.type:
            self._explain_types(reader, writer, place)
        else:
            self._explain_same(reader, writer, place)

    def _explain_same(self, reader: Schema, writer: Schema, place: _Place) -> None:
        match reader, writer:
            case Array(), Array():
                self.explain(
                    reader.items, writer.items, self._inside(reader, writer, place, "items"), owned=place.owned
                )
            case Map(), Map():
                self.explain(
                    reader.values, writer.values, self._inside(reader, writer, place, "values"), owned=place.owned
                )
            case Record(), Record():
                self._explain_names(reader, writer, place)
                self._explain_record(reader, writer, place)
            case Enum(), Enum():
                self._explain_names(reader, writer, place)
                missing = unknown_symbols(reader, writer)
                if missing:
                    shown = ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
                    self._add(
                        "ENUM_SYMBOL_UNKNOWN",
                        self._inside(reader, writer, place, "symbols"),
                        place,
                        reader,
                        writer,
                        f"The reader's enum {reader.name} lacks {shown}, and has no default.",
                        names=tuple(missing),
                    )
            case Fixed(), Fixed():
                self._explain_names(reader, writer, place)
                if reader.size != writer.size:
                    message = f"The reader's {reader.name} has {reader.size} bytes, the writer's {writer.size}."
                    self._add(
                        "FIXED_SIZE_CHANGED",
                        self._inside(reader, writer, place, "size"),
                        place,
                        reader,
                        writer,
                        message,
                    )
        self._explain_logical(reader, writer, place)

    def _inside(self, reader: Schema, writer: Schema, place: _Place, key: str) -> str:
        new = reader if self._new_reads else writer
        return f"{new.pointer}/{key}" if place.owned else place.site

    def _add(
        self,
        rule: str,
        site: str,
        place: _Place,
        reader: Schema,
        writer: Schema,
        message: str,
        field: Field | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        self.findings.append(Finding(rule, site, place.site, place.owned, reader, writer, message, field, names))

    def _explain_types(self, reader: Schema, writer: Schema, place: _Place) -> None:
        if writer.type in PROMOTIONS.get(reader.type, ()):
            self._explain_logical(reader, writer, place)
        elif reader.type in _NUMBERS and writer.type in _NUMBERS:
            message = f"The reader's {reader.type} is smaller than the writer's {writer.type}."
            self._add("TYPE_NARROWED", place.site, place, reader, writer, message)
        else:
            message = f"The reader has {describe(reader)}, the writer {describe(writer)}."
            self._add("TYPE_CHANGED", place.site, place, reader, writer, message)

    def _explain_names(self, reader: Named, writer: Named, place: _Place) -> None:
        if not same_name(reader, writer):
            message = (
                f"The reader's {reader.type} is {reader.name}, without an alias for the writer's name {writer.name}."
            )
            self._add("NAME_CHANGED", self._inside(reader, writer, place, "name"), place, reader, writer, message)

    def _explain_record(self, reader: Record, writer: Record, place: _Place) -> None:
        for item in reader.fields:
            sources = writer_fields(item, writer)
            own = item.pointer if self._new_reads else f"{writer.pointer}/fields"
            if len(sources) == 1:
                new = item if self._new_reads else sources[0]
                site = f"{new.pointer}/type" if place.owned else place.site
                self.explain(item.type, sources[0].type, site, owned=place.owned)
            elif sources:
                names = tuple(source.name for source in sources)
                message = f"The reader's field {item.name} of {reader.name} matches several of the writer's: {', '.join(names)}."
                self._add(
                    "FIELD_AMBIGUOUS", own if place.owned else place.site, place, reader, writer, message, item, names
                )
            elif not item.has_default:
                message = (
                    f"The reader's field {item.name} of {reader.name} has no default, and the writer lacks the field."
                )
                self._add(
                    "FIELD_NEEDS_DEFAULT", own if place.owned else place.site, place, reader, writer, message, item
                )

    def _explain_writer_union(self, reader: Schema, writer: Union, place: _Place) -> None:
        """Each type of the writer's union must be readable."""
        for index, branch in enumerate(writer.branches):
            inner = _Place(
                place.site if self._new_reads or not place.owned else f"{writer.pointer}/{index}", place.owned
            )
            if isinstance(reader, Union):
                self._explain_branch(reader, branch, inner, alone=_only(writer) is branch)
            elif self._resolution.reads(reader, branch) or _alike(reader, branch) or _only(writer) is branch:
                self.explain(reader, branch, inner.site, owned=inner.owned)
            else:
                message = (
                    f"The writer's union has {describe(branch)}, which {describe(reader)} of the reader cannot hold."
                )
                self._add("UNION_NARROWED", inner.site, inner, reader, branch, message)

    def _explain_reader_union(self, reader: Union, writer: Schema, place: _Place) -> None:
        self._explain_branch(reader, writer, place, alone=True)

    def _explain_branch(self, reader: Union, writer: Schema, place: _Place, *, alone: bool) -> None:
        """One type that a reader's union must hold. alone: the writer has no other type beside null."""
        chosen = self._choose(reader, writer, alone=alone)
        if chosen is None:
            message = f"The reader has {describe(reader)}, without {describe(writer)}."
            self._add("UNION_BRANCH_UNKNOWN", place.site, place, reader, writer, message)
            return
        index, branch = chosen
        site = f"{reader.pointer}/{index}" if self._new_reads and place.owned else place.site
        self.explain(branch, writer, site, owned=place.owned)

    def _choose(self, reader: Union, writer: Schema, *, alone: bool) -> tuple[int, Schema] | None:
        """The branch that reads the writer's type, or else the one that was probably meant to."""
        numbered = list(enumerate(reader.branches))
        readable = [(index, branch) for index, branch in numbered if self._resolution.reads(branch, writer)]
        exact = [(index, branch) for index, branch in readable if branch.type == writer.type]
        if readable:
            return (exact or readable)[0]
        alike = [(index, branch) for index, branch in numbered if _alike(branch, writer)]
        if alike:
            return alike[0]
        only = _only(reader)
        if alone and only is not None and writer.type != "null":
            return next((index, branch) for index, branch in numbered if branch is only)
        return None

    def _explain_logical(self, reader: Schema, writer: Schema, place: _Place) -> None:
        ours, theirs = reader.logical, writer.logical
        new, old = (reader, writer) if self._new_reads else (writer, reader)
        if new.logical is None and old.logical is not None and isinstance(new.properties.get("logicalType"), str):
            message = f"The new logical type does not fit the type {new.type}, or its precision or scale is not valid. "
            message += f"So readers ignore it. The earlier values are {old.logical.name}."
            self._add("LOGICAL_TYPE_CHANGED", place.site, place, reader, writer, message)
        if ours is None or theirs is None or ours == theirs:
            return
        if ours.name != theirs.name:
            message = f"The reader's values are {ours.name}, the writer's {theirs.name}: the reader gets wrong values."
            self._add("LOGICAL_TYPE_CHANGED", place.site, place, reader, writer, message)
        elif ours.scale != theirs.scale:
            message = f"The reader's decimal has scale {ours.scale}, the writer's {theirs.scale}: the reader gets wrong values."
            self._add("DECIMAL_SCALE_CHANGED", place.site, place, reader, writer, message)
        elif ours.precision < theirs.precision:
            message = f"The reader's decimal has {ours.precision} digits, the writer's {theirs.precision}."
            self._add("DECIMAL_PRECISION_REDUCED", place.site, place, reader, writer, message)


@dataclass(frozen=True, slots=True)
class _Place:
    site: str
    owned: bool


def _alike(reader: Schema, writer: Schema) -> bool:
    """Whether two types are meant to be the same: the same kind, and of named types the same name."""
    if reader.type != writer.type:
        return False
    if not isinstance(reader, Named) or not isinstance(writer, Named):
        return True
    return same_name(reader, writer) or same_name(writer, reader)


def _only(union: Union) -> Schema | None:
    """The one type beside null, if it is one."""
    others = [branch for branch in union.branches if branch.type != "null"]
    return others[0] if len(others) == 1 else None


def describe(schema: Schema) -> str:
    """A type in a message: `long (timestamp-millis)`, `record Click`."""
    if isinstance(schema, Union):
        return f"a union of {', '.join(describe(branch) for branch in schema.branches[:20])}"
    name = f"{schema.type} {schema.full_name}" if isinstance(schema, Named) else schema.type
    return f"{name} ({schema.logical.name})" if schema.logical else name


def fragment(schema: Schema, field: Field | None) -> Json:
    """A type, or a field of it, as JSON for people, one level deep: inner named types are their names."""
    if field is not None:
        return {"name": field.name, "type": fragment(field.type, None)}
    match schema:
        case Named():
            return f"{schema.type} {schema.name}"
        case _:
            return to_json(schema, _Everything())


class _Everything(set[str]):
    """The names that were written: all."""

    def __contains__(self, _: object) -> bool:
        return True
