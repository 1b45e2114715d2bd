"""Text to schema, within limits that hold before any work is done: no text makes the parser slow, deep or large.

It accepts what Avro's Java accepts, and refuses more: defaults that do not fit (a symbol that the enum lacks, bytes of the wrong
length), a key that is there twice, a name used before its definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NoReturn, cast

from services.core.avro.defaults import DefaultCheck
from services.core.avro.json_document import Fault, Json, SchemaError, decode, locate, read_json
from services.core.avro.schema import (
    NO_DEFAULT,
    PRIMITIVES,
    Array,
    Enum,
    Field,
    Fixed,
    Map,
    Named,
    Origin,
    Record,
    Schema,
    Union,
    logical_of,
)

MAX_TYPE_DEPTH: Final = 64
"""How deep types may be nested in one another."""
MAX_REACH: Final = 200
"""The same with types of other texts. Forms and comparisons are recursive."""
MAX_NODES: Final = 50_000
"""The most types, fields, symbols and aliases of one text, together."""
MAX_NAME: Final = 1_000
"""The longest name with its namespace, in characters."""
_SCHEMA_KEYS: Final = frozenset(
    {"type", "name", "namespace", "doc", "fields", "items", "values", "size", "symbols", "aliases"}
)
_FIELD_KEYS: Final = frozenset({"name", "type", "doc", "default", "order", "aliases"})
_ORDERS: Final = ("ascending", "descending", "ignore")


def parse_schema(text: str | bytes, *, named: Mapping[str, Schema] | None = None) -> Schema:
    """The schema of a JSON text. named: types of other texts that this one may use, by full name. Raises SchemaError."""
    source = decode(text)
    value = read_json(source)
    with located(source):
        return _parse_document(value, named or {})


def _parse_document(value: Json, named: Mapping[str, Schema]) -> Schema:
    parser = Parser(named, Origin(value, lambda document, _: _parse_document(document, named)))
    schema = parser.parse(value, "", "")
    parser.finish()
    if named:
        _check_reach(schema)
    if isinstance(schema, Named) and schema.origin is not parser.origin:
        return replace(schema, origin=None)  # the text is only the name of a type from elsewhere
    schema.origin = parser.origin
    return schema


def _check_reach(root: Schema) -> None:
    """Types of other texts are within their own bounds; together they must be, too. Raises Fault."""
    seen: set[str] = set()
    rest, nodes = [(root, 0)], 0
    while rest:
        node, depth = rest.pop()
        if isinstance(node, Named):
            if node.full_name in seen:
                continue
            seen.add(node.full_name)
        nodes += 1
        if depth > MAX_REACH or nodes > MAX_NODES:
            limit = (
                f"is more than {MAX_REACH} levels deep" if depth > MAX_REACH else f"has more than {MAX_NODES:,} types"
            )
            raise Fault("", f"With its references, the schema {limit}. Try: fewer references.")
        rest += [(inner, depth + 1) for inner in reversed(node.inner())]


@contextmanager
def located(source: str) -> Iterator[None]:
    """Gives faults inside of the block their line and column in the source."""
    try:
        yield
    except Fault as fault:
        line, column = locate(source, fault.path)
        raise SchemaError(fault.path, fault.message, line, column) from None


def check_name(name: str, path: str) -> None:
    """A full name: parts that begin with a letter or `_` and go on with letters, digits and `_`. Raises Fault."""
    if len(name) > MAX_NAME:
        raise Fault(path, f"The name has {len(name):,} characters. The most are {MAX_NAME:,}.")
    for part in name.split("."):
        if not part.isidentifier():
            raise Fault(
                path, f"{name!r} is not a name. Names have letters, digits and `_`, and do not begin with a digit."
            )


class Parser:
    """One text, or one protocol: its types know each other. `finish` is the end of the work."""

    def __init__(self, named: Mapping[str, Schema], origin: Origin) -> None:
        self.origin = origin
        self.named: dict[str, Named] = {name: schema for name, schema in named.items() if isinstance(schema, Named)}
        self.defined: dict[str, Named] = {}
        self.finished: list[Named] = []  # in the order of their ends: inner types first
        self._nodes = 0
        self._defaults: list[Field] = []

    def finish(self) -> None:
        """Check the defaults, which may be of types that were defined later. Raises Fault."""
        check = DefaultCheck()
        for item in self._defaults:
            check.check(item.type, cast(Json, item.default), f"{item.pointer}/default", item.name)

    def parse(self, value: Json, path: str, namespace: str, depth: int = 0) -> Schema:
        """A type at a pointer, inside of a namespace. Raises Fault."""
        if depth > MAX_TYPE_DEPTH:
            raise Fault(
                path,
                f"Types are nested deeper than {MAX_TYPE_DEPTH} levels. Try: give inner types a definition of their own.",
            )
        self.count(path)
        if isinstance(value, str):
            return Schema(value, path) if value in PRIMITIVES else self.find(value, path, namespace)
        if isinstance(value, dict):
            return self._parse_object(value, path, namespace, depth)
        if isinstance(value, list):
            return self._parse_union(value, path, namespace, depth)
        raise Fault(path, f"A type is a name, an object or a list of types, not {_kind(value)}.")

    def count(self, path: str) -> None:
        """One more type, field, symbol or alias. Raises Fault when there are too many."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise Fault(
                path, f"There are more than {MAX_NODES:,} types, fields, symbols and aliases. Try: split the schema."
            )

    def find(self, name: str, path: str, namespace: str) -> Named:
        """The type of a name that is used at `path`. Raises Fault."""
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self.defined.get(full) or self.named.get(full) or self.defined.get(name) or self.named.get(name)
        if found is None:
            self._unknown(full, path)
        if found.name in self.defined:
            found.references.append(path)
        return found

    def _unknown(self, full: str, path: str) -> NoReturn:
        short = full.rpartition(".")[2]
        alike = next(
            (known for known in (*self.defined, *self.named) if known.rpartition(".")[2].lower() == short.lower()), None
        )
        if alike is not None:
            raise Fault(path, f"There is no type {full!r} here. Try: {alike!r}.")
        raise Fault(
            path, f"There is no type {full!r}. A named type is defined before it is used, or is in the references."
        )

    def _parse_object(self, value: dict[str, Json], path: str, namespace: str, depth: int) -> Schema:
        kind = value.get("type")
        if not isinstance(kind, str):
            raise Fault(
                f"{path}/type" if "type" in value else path, "A type in an object needs `type`, the name of a type."
            )
        properties = {key: item for key, item in value.items() if key not in _SCHEMA_KEYS}
        if kind in PRIMITIVES:
            return Schema(kind, path, properties=properties, logical=logical_of(kind, properties))
        if kind == "array":
            items = self.parse(_required(value, "items", path, "An array"), f"{path}/items", namespace, depth + 1)
            return Array(kind, path, items, properties=properties, logical=logical_of(kind, properties))
        if kind == "map":
            values = self.parse(_required(value, "values", path, "A map"), f"{path}/values", namespace, depth + 1)
            return Map(kind, path, values, properties=properties, logical=logical_of(kind, properties))
        if kind in ("record", "error"):
            return self._parse_record(value, properties, path, namespace, depth)
        if kind == "enum":
            return self._parse_enum(value, properties, path, namespace)
        if kind == "fixed":
            return self._parse_fixed(value, properties, path, namespace)
        return self.find(kind, f"{path}/type", namespace)

    def _parse_union(self, value: list[Json], path: str, namespace: str, depth: int) -> Schema:
        branches: list[Schema] = []
        seen: set[str] = set()
        for index, item in enumerate(value):
            inner = f"{path}/{index}"
            branch = self.parse(item, inner, namespace, depth + 1)
            if isinstance(branch, Union):
                raise Fault(
                    inner,
                    "A union cannot be directly inside of another union. Try: put its types into the outer union.",
                )
            if branch.full_name in seen:
                raise Fault(
                    inner, f"The union has {branch.full_name!r} twice. Try: remove one, or give named types to both."
                )
            seen.add(branch.full_name)
            branches.append(branch)
        return Union("union", path, branches)

    def _name(self, value: dict[str, Json], path: str, namespace: str) -> str:
        name = _required(value, "name", path, "A named type")
        space = value.get("namespace")
        if not isinstance(name, str):
            raise Fault(f"{path}/name", "A name is a string.")
        if space is not None and not isinstance(space, str):
            raise Fault(f"{path}/namespace", "A namespace is a string.")
        if "." not in name:
            space = namespace if space is None else space
            full = f"{space}.{name}" if space else name
        else:
            full = name
        check_name(full, f"{path}/name")
        if name in PRIMITIVES:
            raise Fault(f"{path}/name", f"{name!r} is a type of Avro itself. Try: another name.")
        if full in self.defined or full in self.named:
            raise Fault(
                f"{path}/name",
                f"{full!r} is already defined. Try: another name, or only the name where the same type is meant.",
            )
        return full

    def _define(self, schema: Named) -> None:
        schema.origin = self.origin
        self.defined[schema.name] = schema

    def _aliases(self, value: dict[str, Json], path: str, namespace: str, *, full: bool) -> tuple[str, ...]:
        written = value.get("aliases")
        if written is None:
            return ()
        if not isinstance(written, list):
            raise Fault(f"{path}/aliases", f"Aliases are a list of names, not {_kind(written)}.")
        names: list[str] = []
        for index, alias in enumerate(written):
            inner = f"{path}/aliases/{index}"
            self.count(inner)
            if not isinstance(alias, str):
                raise Fault(inner, f"An alias is a name, not {_kind(alias)}.")
            name = f"{namespace}.{alias}" if full and namespace and "." not in alias else alias
            check_name(name, inner)
            names.append(name)
        return tuple(dict.fromkeys(names))

    def _parse_record(
        self, value: dict[str, Json], properties: dict[str, Json], path: str, namespace: str, depth: int
    ) -> Schema:
        name = self._name(value, path, namespace)
        space = name.rpartition(".")[0]
        record = Record(
            "record",
            path,
            name,
            self._aliases(value, path, space, full=True),
            _doc(value, path),
            is_error=value["type"] == "error",
            properties=properties,
            logical=logical_of("record", properties),
        )
        self._define(record)
        written = _required(value, "fields", path, "A record")
        if not isinstance(written, list):
            raise Fault(f"{path}/fields", f"Fields are a list, not {_kind(written)}.")
        record.fields = self.parse_fields(written, f"{path}/fields", space, depth)
        self.finished.append(record)
        return record

    def parse_fields(self, written: list[Json], path: str, namespace: str, depth: int) -> list[Field]:
        """The fields of a record, or the parameters of a message. Raises Fault."""
        fields: list[Field] = []
        seen: set[str] = set()
        for index, item in enumerate(written):
            inner = f"{path}/{index}"
            self.count(inner)
            if not isinstance(item, dict):
                raise Fault(inner, f"A field is an object with `name` and `type`, not {_kind(item)}.")
            made = self._parse_field(item, inner, namespace, depth)
            if made.name in seen:
                raise Fault(f"{inner}/name", f"The record has the field {made.name!r} twice. Try: another name.")
            seen.add(made.name)
            fields.append(made)
        return fields

    def _parse_field(self, value: dict[str, Json], path: str, namespace: str, depth: int) -> Field:
        name = _required(value, "name", path, "A field")
        if not isinstance(name, str):
            raise Fault(f"{path}/name", "A name is a string.")
        if "." in name:
            raise Fault(f"{path}/name", f"{name!r} is not the name of a field: it has a dot.")
        check_name(name, f"{path}/name")
        kind = self.parse(_required(value, "type", path, f"The field {name!r}"), f"{path}/type", namespace, depth + 1)
        order = value.get("order", "ascending")
        if not isinstance(order, str) or order.lower() not in _ORDERS:
            raise Fault(f"{path}/order", f"The order is one of {', '.join(_ORDERS)}.")
        made = Field(
            name,
            kind,
            path,
            value.get("default", NO_DEFAULT),
            self._aliases(value, path, "", full=False),
            _doc(value, path),
            order.lower(),
            {key: item for key, item in value.items() if key not in _FIELD_KEYS},
        )
        if made.has_default:
            self._defaults.append(made)
        return made

    def _parse_enum(self, value: dict[str, Json], properties: dict[str, Json], path: str, namespace: str) -> Schema:
        name = self._name(value, path, namespace)
        written = _required(value, "symbols", path, "An enum")
        if not isinstance(written, list):
            raise Fault(f"{path}/symbols", f"Symbols are a list of names, not {_kind(written)}.")
        symbols: dict[str, None] = {}
        for index, symbol in enumerate(written):
            inner = f"{path}/symbols/{index}"
            self.count(inner)
            if not isinstance(symbol, str) or "." in symbol:
                raise Fault(inner, "A symbol is a name without dots.")
            check_name(symbol, inner)
            if symbol in symbols:
                raise Fault(inner, f"The enum has the symbol {symbol!r} twice. Try: remove one.")
            symbols[symbol] = None
        default = properties.pop("default", None)
        if default is not None and (not isinstance(default, str) or default not in symbols):
            raise Fault(
                f"{path}/default", f"The enum's default is not one of its symbols: {', '.join(list(symbols)[:20])}."
            )
        enum = Enum(
            "enum",
            path,
            name,
            self._aliases(value, path, name.rpartition(".")[0], full=True),
            _doc(value, path),
            symbols=tuple(symbols),
            default=default if isinstance(default, str) else None,
            properties=properties,
            logical=logical_of("enum", properties),
        )
        self._define(enum)
        self.finished.append(enum)
        return enum

    def _parse_fixed(self, value: dict[str, Json], properties: dict[str, Json], path: str, namespace: str) -> Schema:
        name = self._name(value, path, namespace)
        size = _required(value, "size", path, "A fixed type")
        if type(size) is not int or not 0 <= size < 2**31:
            raise Fault(f"{path}/size", "The size of a fixed type is a number of bytes, from 0 to 2147483647.")
        fixed = Fixed(
            "fixed",
            path,
            name,
            self._aliases(value, path, name.rpartition(".")[0], full=True),
            _doc(value, path),
            size=size,
            properties=properties,
            logical=logical_of("fixed", properties, size),
        )
        self._define(fixed)
        self.finished.append(fixed)
        return fixed


def _required(value: dict[str, Json], key: str, path: str, what: str) -> Json:
    found = value.get(key)
    if found is None:
        raise Fault(path, f"{what} needs `{key}`.")
    return found


def _doc(value: dict[str, Json], path: str) -> str | None:
    doc = value.get("doc")
    if doc is not None and not isinstance(doc, str):
        raise Fault(f"{path}/doc", f"The documentation is a string, not {_kind(doc)}.")
    return doc


def _kind(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
