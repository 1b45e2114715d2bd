"""Avro IDL (.avdl): a protocol, or a schema with the types that it needs, from a text and the files that it imports.

The result is that of Avro's own `org.apache.avro:avro-idl` 1.12.1. It is whole or refused: every mistake has its file, line and
column. Types may be used before their definition. The grammar is in `idl.lark`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

import lark

from services.core.avro.idl_context import Context, Forward, Load, Place
from services.core.avro.idl_text import Documentation, float_of, integer_of, string_of, tree_of
from services.core.avro.json_document import Json, SchemaError, decode, read_json
from services.core.avro.parsing import Parser, located
from services.core.avro.protocol import Message, Protocol, read_protocol
from services.core.avro.schema import (
    NO_DEFAULT,
    Array,
    Enum,
    Field,
    Fixed,
    Map,
    Origin,
    Record,
    Schema,
    Union,
    logical_of,
)

_Tree: TypeAlias = "lark.Tree[lark.Token]"
_LOGICAL: Final = {
    "date": ("int", "date"),
    "time_ms": ("int", "time-millis"),
    "timestamp_ms": ("long", "timestamp-millis"),
    "local_timestamp_ms": ("long", "local-timestamp-millis"),
    "uuid": ("string", "uuid"),
}
_NO_TYPE_NAMES: Final = frozenset({"boolean", "int", "long", "float", "double", "bytes", "string", "null", *_LOGICAL})
_SCHEMA_RESERVED: Final = frozenset(
    {"doc", "fields", "items", "name", "namespace", "size", "symbols", "values", "type", "aliases"}
)
_RESERVED: Final = {
    "protocol": frozenset({"namespace", "protocol", "doc", "messages", "types", "errors"}),
    "message": frozenset({"doc", "response", "request", "errors", "one-way"}),
    "variable": frozenset({"default", "doc", "name", "order", "type", "aliases"}),
    "enum": _SCHEMA_RESERVED | {"default"},
}


def parse_idl(text: str | bytes, *, load: Load | None = None, file: str = "") -> Protocol:
    """The protocol or schema of an IDL text. load: for imports; without it they are refused. file: the text's own path, for
    mistakes and for imports relative to it. Raises SchemaError."""
    context = Context(load)
    context.read.add(posixpath.normpath(file) if file else "")
    reader = _File(context, decode(text), file)
    reader.read()
    return context.finish(reader)


class _Optional(Union):
    """`type?`: null comes first, unless a default is not null."""


@dataclass
class _Properties:
    """The annotations of one thing. values: those without a meaning of their own."""

    values: dict[str, Json] = field(default_factory=dict)
    namespace: str | None = None
    aliases: tuple[str, ...] = ()
    order: str = "ascending"


class _File:
    """One IDL text."""

    def __init__(self, context: Context, text: str, path: str) -> None:
        self._context = context
        self._text = text
        self._path = path
        self._docs = Documentation(text, path)
        self.name = ""
        self.doc: str | None = None
        self.properties: dict[str, Json] = {}
        self.main: Schema | None = None

    def read(self) -> None:
        """Add everything in the text to the context. Raises SchemaError."""
        [top] = cast("list[_Tree]", tree_of(self._text, self._path).children)
        children = cast("list[_Tree]", list(top.children))
        space = ""
        if top.data == "protocol":
            annotations = self._annotations(children[0], "protocol", namespace=True)
            identifier = _name(children[1])
            space = _space(identifier, annotations.namespace or "")
            short = self._type_name(identifier, children[1])
            self.name = f"{space}.{short}" if space else short
            self.doc = self._docs.comment_at(top.meta.start_pos)
            self.properties = annotations.values
            children = children[2:]
        for child in children:
            if child.data == "namespace":
                space = _name(cast(_Tree, child.children[0]))
            else:
                self._read_statement(child, space)
        self._context.warnings += [f"{self._path}: {one}" if self._path else one for one in self._docs.warnings()]

    def _read_statement(self, tree: _Tree, space: str) -> None:
        match tree.data:
            case "main":
                self.main = self._full_type(cast(_Tree, tree.children[0]), space)
            case "import":
                self._import(tree)
            case "record":
                self._record(tree, space)
            case "enum":
                self._enum(tree, space)
            case "fixed":
                self._fixed(tree, space)
            case _:
                self._message(tree, space)

    def _place(self, node: _Tree | lark.Token) -> Place:
        meta = node if isinstance(node, lark.Token) else node.meta
        return Place(self._path, meta.line or 1, meta.column or 1)

    def _import(self, tree: _Tree) -> None:
        kind, token = str(cast(_Tree, tree.children[0]).children[0]), cast(lark.Token, tree.children[1])
        place = self._place(token)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self._path), string_of(token)))
        if path in self._context.read:
            return
        text = self._context.load(path, place)
        self._context.read.add(path)
        if kind == "idl":
            _File(self._context, text, path).read()
            return
        try:
            value = read_json(text)
            with located(text):
                self._import_json(kind, value, place)
        except SchemaError as error:
            if error.file:
                raise
            raise SchemaError(error.path, error.message, error.line, error.column, path) from None

    def _import_json(self, kind: str, value: Json, place: Place) -> None:
        if kind == "protocol":
            protocol = read_protocol(value, self._context.types)
            types, messages = protocol.types, protocol.messages
        else:
            parser = Parser(self._context.types, Origin(value, lambda _document, _name: Schema("null", "")))
            parser.parse(value, "", "")
            parser.finish()
            types, messages = tuple(parser.finished), {}
        for schema in types:
            self._context.define(schema, place)
        self._context.messages.update(messages)

    def _annotations(
        self, tree: _Tree, of: str, *, namespace: bool = False, aliases: bool = False, order: bool = False
    ) -> _Properties:
        found = _Properties()
        for item in cast("list[_Tree]", tree.children):
            name, value = _name(cast(_Tree, item.children[0])), self._json(item.children[1])
            place = self._place(item)
            if namespace and name == "namespace":
                if not isinstance(value, str):
                    place.fail("@namespace(…) has a string.")
                found.namespace = value
            elif aliases and name == "aliases":
                if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
                    place.fail("@aliases(…) has a list of strings.")
                found.aliases = tuple(dict.fromkeys(cast("list[str]", value)))
            elif order and name == "order":
                if not isinstance(value, str) or value.lower() not in ("ascending", "descending", "ignore"):
                    place.fail('@order(…) has "ascending", "descending" or "ignore".')
                found.order = value.lower()
            elif name in _RESERVED.get(of, _SCHEMA_RESERVED):
                place.fail(f"@{name} cannot be an annotation here: Avro has a meaning for it.")
            else:
                found.values[name] = value
        return found

    def _json(self, node: _Tree | lark.Token) -> Json:
        if isinstance(node, lark.Token):
            match node.type:
                case "STRING":
                    return string_of(node)
                case "FLOAT":
                    return float_of(node)
            try:
                return integer_of(node)
            except ValueError:
                self._place(node).fail("The number has more than 64 bits.")
        match node.data:
            case "constant":
                return {"true": True, "false": False, "null": None}[str(node.children[0])]
            case "list":
                return [self._json(child) for child in node.children]
        pairs = cast("list[_Tree]", node.children)
        return {string_of(cast(lark.Token, pair.children[0])): self._json(pair.children[1]) for pair in pairs}

    def _type_name(self, identifier: str, node: _Tree) -> str:
        short = identifier.rpartition(".")[2]
        if short in _NO_TYPE_NAMES:
            self._place(node).fail(f"{short!r} is a type of Avro itself. Try: another name.")
        return short

    def _full_name(self, node: _Tree, annotations: _Properties, space: str) -> str:
        identifier = _name(node)
        short = self._type_name(identifier, node)
        own = _space(identifier, space if annotations.namespace is None else annotations.namespace)
        return f"{own}.{short}" if own else short

    def _record(self, tree: _Tree, space: str) -> None:
        properties, kind, name, *fields = cast("list[_Tree]", tree.children)
        annotations = self._annotations(properties, "record", namespace=True, aliases=True)
        full = self._full_name(name, annotations, space)
        record = Record(
            "record",
            "",
            full,
            _full_aliases(annotations, full),
            self._docs.comment_at(tree.meta.start_pos),
            is_error=str(kind.children[0]) == "error",
            properties=_completed("record", annotations.values),
        )
        for item in fields:
            record.fields += self._fields(item, record.namespace, ("field", full))
        self._context.define(record, self._place(name))

    def _fields(self, tree: _Tree, space: str, owner: tuple[str, ...]) -> Iterator[Field]:
        """The variables of one declaration, which share type and documentation."""
        kind, *variables = cast("list[_Tree]", tree.children)
        doc = self._docs.comment_at(tree.meta.start_pos)
        schema = self._full_type(kind, space)
        for variable in variables:
            properties, name, *default = variable.children
            annotations = self._annotations(cast(_Tree, properties), "variable", aliases=True, order=True)
            value: object = self._json(default[0]) if default else NO_DEFAULT
            own = schema
            if isinstance(own, _Optional):
                null_last = value is not NO_DEFAULT and value is not None
                own = Union("union", "", own.branches[::-1] if null_last else list(own.branches))
            own_doc = self._docs.comment_at(variable.meta.start_pos)
            label = _name(cast(_Tree, name))
            self._context.places[(*owner, label)] = self._place(cast(_Tree, name))
            yield Field(
                label,
                own,
                "",
                value,
                annotations.aliases,
                doc if own_doc is None else own_doc,
                annotations.order,
                annotations.values,
            )

    def _enum(self, tree: _Tree, space: str) -> None:
        properties, name, *rest = cast("list[_Tree]", tree.children)
        annotations = self._annotations(properties, "enum", namespace=True, aliases=True)
        full = self._full_name(name, annotations, space)
        symbols, default = [], None
        for item in rest:
            if item.data == "symbol":
                self._annotations(cast(_Tree, item.children[0]), "symbol")
                symbols.append(_name(cast(_Tree, item.children[1])))
            else:
                default = _name(cast(_Tree, item.children[0]))
        enum = Enum(
            "enum",
            "",
            full,
            _full_aliases(annotations, full),
            self._docs.comment_at(tree.meta.start_pos),
            symbols=tuple(symbols),
            default=default,
            properties=_completed("enum", annotations.values),
        )
        self._context.define(enum, self._place(name))

    def _fixed(self, tree: _Tree, space: str) -> None:
        properties, name, size = tree.children
        annotations = self._annotations(cast(_Tree, properties), "fixed", namespace=True, aliases=True)
        full = self._full_name(cast(_Tree, name), annotations, space)
        length = cast(int, self._json(size))
        fixed = Fixed(
            "fixed",
            "",
            full,
            _full_aliases(annotations, full),
            self._docs.comment_at(tree.meta.start_pos),
            size=length,
            properties=_completed("fixed", annotations.values, length),
        )
        self._context.define(fixed, self._place(cast(_Tree, name)))

    def _message(self, tree: _Tree, space: str) -> None:
        properties, result, name, *rest = cast("list[_Tree]", tree.children)
        annotations = self._annotations(properties, "message")
        label = _name(name)
        doc = self._docs.comment_at(tree.meta.start_pos)
        response = self._type(result.children[0], space, annotated=False) if result.children else Schema("null", "")
        message = Message(label, [], response, [], one_way=False, doc=doc, properties=annotations.values)
        for item in rest:
            if item.data == "parameter":
                message.request += self._fields(item, space, ("parameter", label))
            elif item.data == "throws":
                message.errors = [self._reference(error, space) for error in cast("list[_Tree]", item.children)]
            else:
                message.one_way = True
        if message.one_way and response.type != "null":
            self._place(name).fail(f"The one-way message {label!r} returns something. Try: void")
        self._context.places["message", label] = self._place(name)
        self._context.messages[label] = message

    def _full_type(self, tree: _Tree, space: str) -> Schema:
        """A type with its annotations, which are those of the type inside of `type?`."""
        properties, kind = tree.children
        annotations = self._annotations(cast(_Tree, properties), "type")
        schema = self._type(kind, space, annotated=bool(annotations.values))
        if annotations.values:
            target = schema.branches[1] if isinstance(schema, _Optional) else schema
            if isinstance(target, Union):
                place = self._place(tree)
                self._context.warnings.append(
                    f"line {place.line}, column {place.column}: annotations of a union are ignored."
                )
            target.properties = _completed(target.type, {**target.properties, **annotations.values})
        return schema

    def _type(self, node: _Tree | lark.Token, space: str, *, annotated: bool) -> Schema:
        tree = cast(_Tree, node)
        children = cast("list[_Tree]", tree.children)
        match tree.data:
            case "array":
                return Array("array", "", self._full_type(children[0], space))
            case "map":
                return Map("map", "", self._full_type(children[0], space))
            case "union":
                return Union("union", "", [self._full_type(child, space) for child in children])
            case "optional":
                return _Optional("union", "", [Schema("null", ""), self._type(children[0], space, annotated=annotated)])
            case "decimal":
                precision, *scale = (cast(int, self._json(child)) for child in children)
                values: dict[str, Json] = {
                    "logicalType": "decimal",
                    "precision": precision,
                    "scale": scale[0] if scale else 0,
                }
                if logical_of("bytes", values) is None:
                    self._place(tree).fail("A decimal has a precision above 0, and a scale from 0 to the precision.")
                return Schema("bytes", "", properties=values)
            case "primitive":
                kind, logical = _LOGICAL.get(str(children[0]), (str(children[0]), ""))
                return Schema(kind, "", properties={"logicalType": logical} if logical else {})
        if annotated:
            self._place(tree).fail(
                "The use of a named type has no annotations. Try: annotate its definition, or the field's name."
            )
        return self._reference(tree, space)

    def _reference(self, tree: _Tree, space: str) -> Schema:
        name = _name(tree)
        full = name if "." in name or not space else f"{space}.{name}"
        found = self._context.types.get(full)
        if found is not None:
            return found
        use = f"{self._path}:{tree.meta.start_pos}"
        self._context.places["use", use] = self._place(tree)
        return Forward(full, use)


def _name(tree: _Tree) -> str:
    return str(tree.children[0]).replace("`", "")


def _space(identifier: str, otherwise: str) -> str:
    return identifier.rpartition(".")[0] if "." in identifier else otherwise


def _full_aliases(annotations: _Properties, full: str) -> tuple[str, ...]:
    space = full.rpartition(".")[0]
    return tuple(f"{space}.{alias}" if space and "." not in alias else alias for alias in annotations.aliases)


def _completed(kind: str, values: dict[str, Json], size: int = 0) -> dict[str, Json]:
    """Annotations as Avro writes them: a decimal without a scale has scale 0."""
    if "scale" not in values and values.get("logicalType") == "decimal" and logical_of(kind, values, size) is not None:
        return {**values, "scale": 0}
    return values
