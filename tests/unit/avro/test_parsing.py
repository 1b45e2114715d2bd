"""Schemas from text: what is accepted, where a mistake is, and that no text costs more than its size."""

import json
import time

import pytest

from services.core.avro.json_document import MAX_BYTES, SchemaError
from services.core.avro.parsing import MAX_NODES, MAX_REACH, parse_schema
from services.core.avro.schema import Enum, Fixed, Record, Union


def refusal(text: str | bytes) -> SchemaError:
    """The mistake of a text."""
    with pytest.raises(SchemaError) as raised:
        parse_schema(text)
    return raised.value


def record(*fields: object, **more: object) -> str:
    """A record R as text."""
    return json.dumps({"type": "record", "name": "R", "fields": list(fields), **more})


def field(name: str, kind: object, **more: object) -> dict[str, object]:
    """A field as JSON."""
    return {"name": name, "type": kind, **more}


def test_types_are_nodes_with_full_names() -> None:
    """Broken: every comparison and fingerprint is of something else."""
    schema = parse_schema(
        record(
            field("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"], "default": "A"}),
            field("hash", {"type": "fixed", "name": "other.Hash", "size": 16}),
            field("next", ["null", "R"], default=None),
            namespace="com.acme",
            aliases=["Old", "com.other.Older"],
        )
    )
    assert isinstance(schema, Record)
    assert schema.full_name == "com.acme.R"
    assert schema.aliases == ("com.acme.Old", "com.other.Older")
    kind, hashed, following = (item.type for item in schema.fields)
    assert isinstance(kind, Enum)
    assert kind.full_name == "com.acme.Kind"
    assert isinstance(hashed, Fixed)
    assert hashed.full_name == "other.Hash"
    assert isinstance(following, Union)
    assert following.branches[1] is schema
    assert json.loads(json.dumps(schema.to_json())) == json.loads(
        record(
            field("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"], "default": "A"}),
            field("hash", {"type": "fixed", "name": "Hash", "namespace": "other", "size": 16}),
            field("next", ["null", "R"], default=None),
            namespace="com.acme",
            aliases=["Old", "com.other.Older"],
        )
    )


def test_a_reference_is_a_type_of_another_text() -> None:
    """Broken: a schema with references is refused, or has a fingerprint that does not say what it refers to."""
    money = parse_schema('{"type": "fixed", "name": "com.acme.Money", "size": 8}')
    text = record(field("price", "Money"), namespace="com.acme")
    schema = parse_schema(text, named={money.full_name: money})
    other = parse_schema('{"type": "fixed", "name": "com.acme.Money", "size": 9}')
    assert schema.fingerprint != parse_schema(text, named={other.full_name: other}).fingerprint
    whole = parse_schema(json.dumps(schema.to_json()))
    assert whole.fingerprint == schema.fingerprint
    assert refusal(text).path == "/fields/0/type"


def test_references_have_a_bound_together() -> None:
    """Broken: types of other texts, each within its own bounds, end in a RecursionError."""
    last = parse_schema('{"type": "record", "name": "R0", "fields": []}')
    for n in range(1, MAX_REACH + 1):
        last = parse_schema(record(field("inner", f"R{n - 1}"), name=f"R{n}"), named={last.full_name: last})
    assert last.fingerprint
    with pytest.raises(SchemaError, match="levels deep"):
        parse_schema(record(field("inner", f"R{MAX_REACH}"), name="R"), named={last.full_name: last})


MISTAKES = {
    "not a type": ("12", ""),
    "unknown type": (record(field("a", "strnig")), "/fields/0/type"),
    "no name": ('{"type": "record", "fields": []}', ""),
    "no fields": ('{"type": "record", "name": "R"}', ""),
    "path as a name": (json.dumps({"type": "record", "name": "../x", "fields": []}), "/name"),
    "empty part of a namespace": (json.dumps({"type": "record", "name": "a..x", "fields": []}), "/name"),
    "right-to-left mark in a name": (json.dumps({"type": "record", "name": "a\u202eb", "fields": []}), "/name"),
    "name of 1,001 characters": (json.dumps({"type": "record", "name": "a" * 1001, "fields": []}), "/name"),
    "name of a primitive": (json.dumps({"type": "record", "name": "string", "fields": []}), "/name"),
    "field twice": (record(field("a", "int"), field("a", "long")), "/fields/1/name"),
    "field with a dot": (record(field("a.b", "int")), "/fields/0/name"),
    "type twice": (record(field("a", json.loads(record())), field("b", json.loads(record()))), "/fields/0/type/name"),
    "symbol twice": ('{"type": "enum", "name": "E", "symbols": ["A", "A"]}', "/symbols/1"),
    "enum default": ('{"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}', "/default"),
    "union in a union": ('["null", ["int"]]', "/1"),
    "type twice in a union": ('["null", "int", "null"]', "/2"),
    "fixed size": ('{"type": "fixed", "name": "F", "size": -1}', "/size"),
    "fixed size true": ('{"type": "fixed", "name": "F", "size": true}', "/size"),
    "order": (record(field("a", "int", order="up")), "/fields/0/order"),
    "alias": (record(field("a", "int", aliases=["a b"])), "/fields/0/aliases/0"),
    "documentation": (record(field("a", "int", doc=7)), "/fields/0/doc"),
    "default of int": (record(field("a", "int", default="x")), "/fields/0/default"),
    "default of int, a boolean": (record(field("a", "int", default=True)), "/fields/0/default"),
    "default of int, too large": (record(field("a", "int", default=2**31)), "/fields/0/default"),
    "default of long, with a point": (record(field("a", "long", default=1.0)), "/fields/0/default"),
    "default of a union": (record(field("a", ["null", "int"], default="x")), "/fields/0/default"),
    "default of bytes": (record(field("a", "bytes", default="€")), "/fields/0/default"),
    "default of fixed": (
        record(field("a", {"type": "fixed", "name": "F", "size": 2}, default="x")),
        "/fields/0/default",
    ),
    "default of enum": (
        record(field("a", {"type": "enum", "name": "E", "symbols": ["A"]}, default="B")),
        "/fields/0/default",
    ),
    "default in a list": (record(field("a", {"type": "array", "items": "int"}, default=[1, "x"])), "/fields/0/default"),
    "default of a record": (
        record(field("a", {"type": "record", "name": "I", "fields": [field("x", "int")]}, default={})),
        "/fields/0/default",
    ),
    "default that contains itself": (record(field("a", ["R"], default={})), "/fields/0/default"),
    "key twice": ('{"type": "fixed", "name": "F", "size": 1, "size": 2}', "/size"),
    "half a character": ('{"type": "fixed", "name": "F", "size": 1, "note": "\\ud800"}', ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_place(name: str) -> None:
    """Broken: a schema that other readers refuse is registered, or nobody finds the mistake."""
    text, path = MISTAKES[name]
    assert refusal(text).path == path


def test_a_mistake_has_line_and_column() -> None:
    """Broken: an editor shows the wrong place."""
    error = refusal('{"type": "record", "name": "R",\n "fields": [\n  {"name": "a\\"b", "type": "int"}]}')
    assert (error.line, error.column) == (3, 12)
    error = refusal('{"type": "record",\n "name": }')
    assert (error.line, error.column) == (2, 10)
    error = refusal(b'{"type":\n "\xff"}')
    assert (error.line, error.column) == (2, 3)


def nested(depth: int) -> str:
    """Arrays in arrays."""
    return '{"type": "array", "items": ' * depth + '"int"' + "}" * depth


BOMBS = {
    "deep": nested(100_000)[:MAX_BYTES],
    "deeper than types may be": nested(65),
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep default": record(field("a", "int", default=json.loads("[" * 300 + "]" * 300))),
    "long": " " * MAX_BYTES + '"int"',
    "wide": json.dumps({"type": "enum", "name": "E", "symbols": [f"S{index}" for index in range(MAX_NODES)]}),
    "long number": '{"type": "fixed", "name": "F", "size": ' + "9" * 100_000 + "}",
    "long name": json.dumps({"type": "record", "name": "a." * 400_000, "fields": []}),
    "default with many values": record(field("a", {"type": "array", "items": ["null", "int"]}, default=[0] * 110_000)),
    "default that two types take, again and again": record(
        field(
            "a",
            [
                "null",
                {"type": "record", "name": "A", "fields": [field("n", ["null", "A"]), field("x", "int")]},
                {"type": "record", "name": "B", "fields": [field("n", ["null", "A", "B"]), field("y", "int")]},
            ],
            default=json.loads('{"n":' * 80 + "1" + "}" * 80),
        )
    ),
    "quotes": '"' * 200_000,
    "backslashes": '"' + "\\" * 300_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    """Broken: one request keeps a registry busy, or ends it. The limit of time is a hundred times what a slow machine needs."""
    begin = time.process_time()
    refusal(BOMBS[name])
    assert time.process_time() - begin < 60
