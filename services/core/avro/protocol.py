"""Whole protocols: named types and messages in one text. A protocol is read as a whole or refused as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.core.avro.forms import field_json, to_json
from services.core.avro.json_document import Fault, Json, decode, escape, read_json
from services.core.avro.parsing import Parser, check_name, located
from services.core.avro.schema import Field, Named, Origin, Schema

_PROTOCOL_KEYS: Final = frozenset({"protocol", "namespace", "doc", "types", "messages"})
_MESSAGE_KEYS: Final = frozenset({"doc", "request", "response", "errors", "one-way"})


@dataclass(eq=False)
class Message:
    """One call. request: its parameters. errors: what it may raise beside a string. one_way: nobody waits for an answer."""

    name: str
    request: list[Field]
    response: Schema
    errors: list[Schema]
    one_way: bool
    doc: str | None = None
    properties: dict[str, Json] = field(default_factory=dict)


@dataclass(eq=False)
class Protocol:
    """name: the full one; empty for an IDL file with the syntax of a schema. types: all named types, in the order of the text.

    schema: the main schema of such a file. warnings: what was ignored, one sentence each. document: the text's JSON.
    """

    name: str
    types: tuple[Named, ...]
    messages: dict[str, Message]
    document: Json
    doc: str | None = None
    properties: dict[str, Json] = field(default_factory=dict)
    schema: Schema | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """The protocol as Avro's Java writes it. Of an IDL file with the syntax of a schema: that schema, or a list of types."""
        if not self.name:
            known: set[str] = set()
            return (
                to_json(self.schema)
                if self.schema
                else [to_json(item, known) for item in self.types if item.name not in known]
            )
        space, _, short = self.name.rpartition(".")
        written: dict[str, Json] = {"protocol": short}
        if space:
            written["namespace"] = space
        if self.doc is not None:
            written["doc"] = self.doc
        written.update(self.properties)
        known = set()
        written["types"] = [to_json(item, known, space) for item in self.types if item.name not in known]
        written["messages"] = {name: _message_json(message, known, space) for name, message in self.messages.items()}
        return written


def parse_protocol(text: str | bytes, *, named: Mapping[str, Schema] | None = None) -> Protocol:
    """The protocol of a JSON text (.avpr). named: types of other texts that this one may use. Raises SchemaError."""
    source = decode(text)
    value = read_json(source)
    with located(source):
        return read_protocol(value, named or {})


def read_protocol(value: Json, named: Mapping[str, Schema]) -> Protocol:
    """The protocol of a JSON value. Raises Fault."""
    if not isinstance(value, dict):
        raise Fault("", "A protocol is an object with `protocol`, `types` and `messages`.")
    name, space = value.get("protocol"), value.get("namespace")
    if not isinstance(name, str):
        raise Fault("/protocol", "A protocol needs `protocol`, its name.")
    if space is not None and not isinstance(space, str):
        raise Fault("/namespace", "A namespace is a string.")
    full = name if "." in name or not space else f"{space}.{name}"
    check_name(full, "/protocol")
    parser = Parser(named, Origin(value, lambda document, wanted: _type_of(read_protocol(document, named), wanted)))
    namespace = full.rpartition(".")[0]
    _read_types(parser, value.get("types", []), namespace)
    messages = _read_messages(parser, value.get("messages", {}), namespace)
    parser.finish()
    return Protocol(
        full,
        tuple(parser.finished),
        messages,
        value,
        _text(value, "doc", ""),
        {key: item for key, item in value.items() if key not in _PROTOCOL_KEYS},
    )


def _type_of(protocol: Protocol, name: str) -> Schema:
    for item in protocol.types:
        if item.name == name:
            return item
    raise Fault("/types", f"The protocol has no type {name!r} any more.")


def _read_types(parser: Parser, types: Json, namespace: str) -> None:
    if not isinstance(types, list):
        raise Fault("/types", "Types are a list.")
    for index, item in enumerate(types):
        if not isinstance(parser.parse(item, f"/types/{index}", namespace), Named):
            raise Fault(f"/types/{index}", "The types of a protocol have names: record, error, enum or fixed.")


def _read_messages(parser: Parser, messages: Json, namespace: str) -> dict[str, Message]:
    if not isinstance(messages, dict):
        raise Fault("/messages", "Messages are an object, by their names.")
    read = {}
    for name, item in messages.items():
        path = f"/messages/{escape(name)}"
        check_name(name, path)
        if "." in name or not isinstance(item, dict):
            raise Fault(path, "A message has a name without dots, and is an object with `request` and `response`.")
        read[name] = _read_message(parser, name, item, path, namespace)
    return read


def _read_message(parser: Parser, name: str, value: dict[str, Json], path: str, namespace: str) -> Message:
    request = value.get("request")
    if not isinstance(request, list):
        raise Fault(f"{path}/request", "A message needs `request`, a list of its parameters.")
    fields = parser.parse_fields(request, f"{path}/request", namespace, 0)
    one_way = value.get("one-way", False)
    if not isinstance(one_way, bool):
        raise Fault(f"{path}/one-way", "`one-way` is true or false.")
    response = parser.parse(value.get("response", "null" if one_way else None), f"{path}/response", namespace)
    errors = value.get("errors", [])
    if not isinstance(errors, list):
        raise Fault(f"{path}/errors", "Errors are a list of types.")
    if one_way and (response.type != "null" or errors):
        raise Fault(path, f"The one-way message {name!r} has a response or errors. Nobody waits for them.")
    read = [parser.parse(item, f"{path}/errors/{index}", namespace) for index, item in enumerate(errors)]
    properties = {key: item for key, item in value.items() if key not in _MESSAGE_KEYS}
    return Message(name, fields, response, read, one_way, _text(value, "doc", path), properties)


def _text(value: dict[str, Json], key: str, path: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise Fault(f"{path}/{key}", f"`{key}` is a string.")
    return text


def _message_json(message: Message, known: set[str], namespace: str) -> Json:
    written: dict[str, Json] = {} if message.doc is None else {"doc": message.doc}
    written.update(message.properties)
    written["request"] = [field_json(item, known, namespace) for item in message.request]
    written["response"] = to_json(message.response, known, namespace)
    if message.one_way:
        written["one-way"] = True
    if message.errors:
        written["errors"] = [to_json(item, known, namespace) for item in message.errors]
    return written
