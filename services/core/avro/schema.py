"""The types of an Avro schema as a tree of nodes. A named type that is used twice is one node, so trees may have cycles.

Nodes are made by `parsing.py` and `idl.py`, and do not change afterwards. `pointer` is the place of a node in the text that
defines it, as a JSON pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from services.core.avro import forms
from services.core.avro.json_document import Json

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NO_DEFAULT: Final = object()
"""The default of a field that has none: null is a default."""


@dataclass(frozen=True, slots=True)
class Logical:
    """A logical type that is valid for its node. precision, scale: of a decimal, otherwise 0."""

    name: str
    precision: int = 0
    scale: int = 0


@dataclass(eq=False, frozen=True)
class Origin:
    """The text of a root. document: its JSON. again: reads a changed document, and gives its type of that name, or its root."""

    document: Json
    again: Callable[[Json, str], Schema]


@dataclass(eq=False)
class Schema:
    """A type. The root of a parsed text has its identity: `fingerprint` is that of everything below it.

    type: record, enum, fixed, array, map, union, or a primitive. properties: all other attributes as written, logicalType among
    them. origin: of a root and of named types, the text that they are from.
    """

    type: str
    pointer: str
    properties: dict[str, Json] = field(default_factory=dict, kw_only=True)
    logical: Logical | None = field(default=None, kw_only=True)
    origin: Origin | None = field(default=None, kw_only=True)

    @property
    def full_name(self) -> str:
        """The name with its namespace; of an unnamed type the word for it."""
        return self.type

    @cached_property
    def resolution_form(self) -> str:
        """Our canonical text: everything that decides which value a reader gets. ADR 0021 defines it."""
        return forms.resolution_form(self)

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the schema: SHA-256 of the resolution form, in hexadecimal."""
        return forms.sha256(self.resolution_form)

    @cached_property
    def parsing_form(self) -> str:
        """Avro's parsing canonical form. Without defaults, aliases and logical types."""
        return forms.parsing_form(self)

    @cached_property
    def parsing_sha256(self) -> str:
        """SHA-256 of the parsing form, in hexadecimal."""
        return forms.sha256(self.parsing_form)

    @cached_property
    def crc64(self) -> int:
        """CRC-64-AVRO of the parsing form, unsigned."""
        return forms.crc64(self.parsing_form.encode())

    def inner(self) -> Sequence[Schema]:
        """The types directly inside of this one."""
        return ()

    def to_json(self) -> Json:
        """The whole schema as JSON, with documentation and all attributes. Types from other texts are written out once."""
        return forms.to_json(self)


@dataclass(eq=False)
class Array(Schema):
    """A list."""

    items: Schema

    def inner(self) -> Sequence[Schema]:
        return (self.items,)


@dataclass(eq=False)
class Map(Schema):
    """Values by strings."""

    values: Schema

    def inner(self) -> Sequence[Schema]:
        return (self.values,)


@dataclass(eq=False)
class Union(Schema):
    """One of several types."""

    branches: list[Schema]

    def inner(self) -> Sequence[Schema]:
        return self.branches


@dataclass(eq=False)
class Named(Schema):
    """A type with a name. name: the full one. aliases: full names. references: pointers of the uses of this type in its text."""

    name: str
    aliases: tuple[str, ...] = ()
    doc: str | None = None
    references: list[str] = field(default_factory=list)

    @property
    def full_name(self) -> str:
        return self.name

    @property
    def short_name(self) -> str:
        """The name without its namespace."""
        return self.name.rpartition(".")[2]

    @property
    def namespace(self) -> str:
        """The part before the last dot, or empty."""
        return self.name.rpartition(".")[0]


@dataclass(eq=False)
class Field:
    """A field of a record. default: JSON, or NO_DEFAULT. order: of sorting; ascending unless written."""

    name: str
    type: Schema
    pointer: str
    default: object = NO_DEFAULT
    aliases: tuple[str, ...] = ()
    doc: str | None = None
    order: str = "ascending"
    properties: dict[str, Json] = field(default_factory=dict)

    @property
    def has_default(self) -> bool:
        """Whether a reader has a value for this field when the writer has none."""
        return self.default is not NO_DEFAULT


@dataclass(eq=False)
class Record(Named):
    """Fields in order. is_error: declared as an error of a protocol; the data is the same."""

    fields: list[Field] = field(default_factory=list)
    is_error: bool = False

    def inner(self) -> Sequence[Schema]:
        return [item.type for item in self.fields]

    @cached_property
    def by_name(self) -> dict[str, Field]:
        return {item.name: item for item in self.fields}


@dataclass(eq=False)
class Enum(Named):
    """One of several symbols. default: what a reader gets for a symbol that it does not have, or None."""

    symbols: tuple[str, ...] = ()
    default: str | None = None


@dataclass(eq=False)
class Fixed(Named):
    """size: in bytes."""

    size: int = 0


def logical_of(kind: str, properties: dict[str, Json], size: int = 0) -> Logical | None:
    """The logical type of a node, or None when there is none, or one that does not fit: Avro then ignores it."""
    name = properties.get("logicalType")
    if not isinstance(name, str):
        return None
    if name == "decimal":
        return _decimal(kind, properties, size)
    if name == "uuid":
        return Logical(name) if kind == "string" or (kind == "fixed" and size == 16) else None
    if name == "duration":
        return Logical(name) if kind == "fixed" and size == 12 else None
    wanted = _UNDERLYING.get(name)
    return Logical(name) if wanted is None or wanted == kind else None


_UNDERLYING: Final = {
    "big-decimal": "bytes",
    "date": "int",
    "time-millis": "int",
    "time-micros": "long",
    "timestamp-millis": "long",
    "timestamp-micros": "long",
    "timestamp-nanos": "long",
    "local-timestamp-millis": "long",
    "local-timestamp-micros": "long",
    "local-timestamp-nanos": "long",
}


def _decimal(kind: str, properties: dict[str, Json], size: int) -> Logical | None:
    precision, scale = properties.get("precision"), properties.get("scale", 0)
    if type(precision) is not int or type(scale) is not int or precision <= 0 or not 0 <= scale <= precision:
        return None
    if kind == "bytes" or (kind == "fixed" and precision <= _digits(size)):
        return Logical("decimal", precision, scale)
    return None


def _digits(size: int) -> int:
    """The decimal digits that a signed number of so many bytes always holds."""
    if size > 1000:
        return size * 2  # fewer than it holds, and more than anyone asks for
    return max(len(str((1 << (8 * size - 1)) - 1)) - 1, 0) if size else 0
