"""What all files of one IDL text share: imports, types by name, and where each thing was written.

A type may be used before its definition, also of another file. `finish` puts the types in the places of their uses, and checks
the whole as a protocol of JSON is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias, cast
from typing import Protocol as Shape

from services.core.avro.json_document import MAX_BYTES, Fault, Json, SchemaError, decode
from services.core.avro.protocol import Message, Protocol, read_protocol
from services.core.avro.schema import Array, Map, Named, Record, Schema, Union

Load: TypeAlias = Callable[[str], "str | bytes"]
"""Gives the text of an imported file by its path, relative to the first file. Raises LookupError or OSError without one."""

MAX_FILES: Final = 100
MAX_ALL_BYTES: Final = 4 * MAX_BYTES
_MAIN: Final = "main"


@dataclass
class Place:
    """Where something was written; from 1."""

    file: str
    line: int
    column: int

    def fail(self, message: str) -> NoReturn:
        """Raises SchemaError for a mistake here."""
        raise SchemaError("", message, self.line, self.column, self.file)


class Forward(Schema):
    """The use of a type that is not defined yet. type: its full name. pointer: where, for a mistake."""


class Root(Shape):
    """The first file. main: its schema, if it has one and no protocol."""

    name: str
    doc: str | None
    properties: dict[str, Json]
    main: Schema | None


class Context:
    """read: the paths of the files so far. places: of types, fields, messages, uses, for mistakes that only the whole shows."""

    def __init__(self, load: Load | None) -> None:
        self._load = load
        self._bytes = 0
        self.read: set[str] = set()
        self.types: dict[str, Named] = {}
        self.messages: dict[str, Message] = {}
        self.places: dict[tuple[str, ...], Place] = {}
        self.warnings: list[str] = []

    def load(self, path: str, place: Place) -> str:
        """The text of an import. Fails at the import statement."""
        if self._load is None:
            place.fail(f"{path!r} is imported, and there are no other files here. Try: put its types into this file.")
        if len(self.read) > MAX_FILES:
            place.fail(f"There are more than {MAX_FILES} files.")
        try:
            text = self._load(path)
        except (LookupError, OSError) as error:
            place.fail(
                f"The import {path!r} cannot be read: {type(error).__name__}. Try: a path relative to this file."
            )
        try:
            decoded = decode(text)
        except SchemaError as error:
            raise SchemaError("", error.message, error.line, error.column, path) from None
        self._bytes += len(decoded)
        if self._bytes > MAX_ALL_BYTES:
            place.fail(f"The imported files have more than {MAX_ALL_BYTES:,} characters.")
        return decoded

    def define(self, schema: Named, place: Place) -> None:
        """Add a type. Fails when there is another one of its name."""
        if schema.name in self.types:
            place.fail(f"{schema.name!r} is already defined. Try: another name.")
        self.places["type", schema.name] = place
        self.types[schema.name] = schema

    def finish(self, root: Root) -> Protocol:
        """The whole, with every use of a type resolved, and checked as a protocol of JSON is."""
        self._settle_all(root)
        draft = Protocol(root.name, tuple(self.types.values()), self.messages, None, root.doc, root.properties)
        if root.main is not None:
            # A message of a protocol without a name keeps the main schema while it is checked.
            draft.messages = {_MAIN: Message(_MAIN, [], root.main, [], one_way=False)}
        document = self._document(draft)
        try:
            whole = read_protocol(document, {})
        except Fault as fault:
            self._place_of(document, fault.path).fail(fault.message)
        by_name = {schema.name: schema for schema in whole.types}
        types = tuple(by_name[name] for name in self.types)
        main = whole.messages.pop(_MAIN).response if root.main is not None else None
        return Protocol(
            root.name,
            types,
            whole.messages,
            document,
            root.doc,
            root.properties,
            schema=main,
            warnings=tuple(self.warnings),
        )

    def _document(self, draft: Protocol) -> dict[str, Json]:
        named = draft.name
        draft.name = named or "_"
        try:
            return cast("dict[str, Json]", draft.to_json())
        except RecursionError:
            raise SchemaError(
                "", "Types are nested too deeply. Try: define inner types before outer ones.", 1, 1
            ) from None
        finally:
            draft.name = named

    def _place_of(self, document: Json, path: str) -> Place:
        """The place of the type, field or message around a JSON pointer."""
        best = Place("", 1, 1)
        node, space, owner = document, "", ""
        for part in path.split("/")[1:]:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                break
            if not isinstance(node, dict):
                continue
            name = node.get("name")
            space = cast(str, node.get("namespace", space if "protocol" not in node else ""))
            full = f"{space}.{name}" if space else str(name)
            if ("type", full) in self.places and "type" in node:
                best, owner = self.places["type", full], full
            else:
                best = self.places.get(("field", owner, str(name)), self.places.get(("message", part), best))
        return best

    def _settle_all(self, root: Root) -> None:
        for schema in self.types.values():
            if isinstance(schema, Record):
                for item in schema.fields:
                    item.type = self._settle(item.type)
        for message in self.messages.values():
            for item in message.request:
                item.type = self._settle(item.type)
            message.response = self._settle(message.response)
            message.errors = [self._settle(error) for error in message.errors]
        if root.main is not None:
            root.main = self._settle(root.main)

    def _settle(self, schema: Schema) -> Schema:
        match schema:
            case Forward():
                found = self.types.get(schema.type)
                if found is None:
                    self.places["use", schema.pointer].fail(f"There is no type {schema.type!r}.")
                return found
            case Array():
                schema.items = self._settle(schema.items)
            case Map():
                schema.values = self._settle(schema.values)
            case Union():
                schema.branches = [self._settle(branch) for branch in schema.branches]
        return schema
