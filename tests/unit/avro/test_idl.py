"""Avro IDL: what a text means, and where a mistake is. tests/integration/test_avro_java.py compares it with Avro's own reader."""

import json
from typing import Any, cast

import pytest

from services.core.avro.idl import parse_idl
from services.core.avro.idl_context import MAX_FILES
from services.core.avro.json_document import MAX_BYTES, SchemaError
from services.core.avro.protocol import Protocol, parse_protocol

SHOP = """
/**
 * What the shop tells.
 *  In two lines.
 */
@namespace("com.acme") @owner("shop")
protocol Shop {
  import schema "money.avsc";
  /** An order. */
  @aliases(["Purchase"])
  record Order {
    /** Its number. */ long id;
    string @order("ignore") @aliases(["mail"]) `protocol` = "none", city = "";
    Kind kind = "ONLINE";           // defined below
    decimal(9, 2) price;
    timestamp_ms at;
    uuid? customer = null;
    int? count = 3;
    array<union { null, Money }> paid = [];
    @logicalType("timestamp-micros") long settled;
    map<Order> parts = {};
  }
  enum Kind { ONLINE, SHOP } = SHOP;
  @namespace("com.acme.errors") error Refused { string reason; }
  Order find(long id, /** Deep. */ boolean deep = false) throws com.acme.errors.Refused;
  void tell(Order told) oneway;
}
"""
FILES = {"money.avsc": '{"type": "fixed", "name": "com.acme.Money", "size": 8}'}


def refusal(text: str, files: dict[str, str] | None = None) -> SchemaError:
    """The mistake of a text."""
    with pytest.raises(SchemaError) as raised:
        parse_idl(text, load=(files or {}).__getitem__)
    return raised.value


def fields(protocol: Protocol, index: int) -> dict[str, Any]:
    """The fields of one type, by their names."""
    types = cast(Any, protocol.to_json())["types"]
    return {field["name"]: field for field in types[index]["fields"]}


def test_a_protocol_with_everything() -> None:
    """Broken: a schema that was written as IDL is registered as something else."""
    protocol = parse_idl(SHOP, load=FILES.__getitem__)
    assert protocol.name == "com.acme.Shop"
    assert protocol.doc == "What the shop tells.\n In two lines."
    assert protocol.properties == {"owner": "shop"}
    assert [schema.full_name for schema in protocol.types] == [
        "com.acme.Money",
        "com.acme.Order",
        "com.acme.Kind",
        "com.acme.errors.Refused",
    ]
    order = fields(protocol, 1)
    assert order["id"] == {"name": "id", "type": "long", "doc": "Its number."}
    assert order["protocol"] == {
        "name": "protocol",
        "type": "string",
        "default": "none",
        "order": "ignore",
        "aliases": ["mail"],
    }
    assert order["kind"]["type"]["default"] == "SHOP"
    assert order["price"]["type"] == {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    assert order["customer"]["type"] == ["null", {"type": "string", "logicalType": "uuid"}]
    assert order["count"] == {"name": "count", "type": ["int", "null"], "default": 3}
    assert order["paid"]["type"] == {"type": "array", "items": ["null", "Money"]}
    assert order["settled"]["type"] == {"type": "long", "logicalType": "timestamp-micros"}
    find, tell = protocol.messages["find"], protocol.messages["tell"]
    assert [item.name for item in find.request] == ["id", "deep"]
    assert find.request[1].doc == "Deep."
    assert [error.full_name for error in find.errors] == ["com.acme.errors.Refused"]
    assert tell.one_way
    # What it writes is what it reads.
    again = parse_protocol(json.dumps(protocol.to_json()))
    assert {schema.full_name: schema.fingerprint for schema in again.types} == {
        schema.full_name: schema.fingerprint for schema in protocol.types
    }


def test_a_schema_with_its_types() -> None:
    """Broken: the newer syntax, a schema without a protocol, is refused."""
    found = parse_idl("namespace a.b; schema array<Click?>; record Click { string page; }")
    assert found.name == ""
    assert found.schema is not None
    assert found.schema.parsing_form == (
        '{"type":"array","items":["null",{"name":"a.b.Click","type":"record","fields":[{"name":"page","type":"string"}]}]}'
    )
    assert [schema.full_name for schema in found.types] == ["a.b.Click"]


def test_numbers_and_strings() -> None:
    """Broken: a default has another value than the one that was written."""
    text = r"""protocol P { record R {
        int a = 0x1F; int b = 017; long c = -12L; double d = 1e3; double e = NaN; float f = -Infinity; double g = 0x1p4;
        string h = "é\u00e9\n\"\ud83d\ude00\101"; map<int> i = {"x": 1, "y": -2}; float j = 2; } }"""
    defaults = {name: field["default"] for name, field in fields(parse_idl(text), 0).items()}
    assert defaults == {
        "a": 31,
        "b": 15,
        "c": -12,
        "d": 1000.0,
        "e": "NaN",
        "f": "-Infinity",
        "g": 16.0,
        "h": 'éé\n"😀A',
        "i": {"x": 1, "y": -2},
        "j": 2,
    }


def test_comments_that_document_nothing_are_named() -> None:
    """Broken: documentation vanishes and nobody learns of it."""
    protocol = parse_idl("protocol P {\n  record /** lost */ R { int a; }\n  /** also lost */\n}")
    assert [warning.partition(":")[0] for warning in protocol.warnings] == ["line 2, column 10", "line 3, column 3"]


MISTAKES = {
    "no name": ("protocol {}", 1, 10),
    "end": ("protocol P {\n record R {", 2, 12),
    "unknown character": ("protocol P {\n % }", 2, 2),
    "unknown type": ("protocol P {\n record R { Nothing a; } }", 2, 13),
    "type twice": ("protocol P {\n enum E { A }\n enum E { B } }", 3, 7),
    "field twice": ("protocol P { record R {\n int a;\n int a; } }", 3, 6),
    "bad default": ('protocol P { record R {\n int a;\n int b = "x"; } }', 3, 6),
    "default of a later enum": ('protocol P { record R {\n E e = "X"; }\n enum E { A } }', 2, 4),
    "bad enum default": ("protocol P {\n enum E { A } = B; }", 2, 7),
    "annotated reference": ('protocol P { enum E { A }\n record R { @x("y") E a; } }', 2, 21),
    "reserved annotation": ('protocol P {\n @doc("x") enum E { A } }', 2, 2),
    "order": ('protocol P { record R { int\n @order("up") a; } }', 2, 2),
    "decimal": ("protocol P { record R {\n decimal(2, 3) a; } }", 2, 2),
    "union twice": ("protocol P { record R {\n union { int, int } a; } }", 2, 21),
    "union in a union": ("protocol P { record R {\n union { int? } a; } }", 2, 17),
    "one-way with an answer": ("protocol P {\n int a() oneway; }", 2, 6),
    "name of a primitive": ("protocol P {\n record `int` {} }", 2, 9),
    "import without files": ('protocol P {\n import idl "x.avdl"; }', 2, 13),
    "number": ("protocol P { record R {\n long a = 99999999999999999999; } }", 2, 11),
    "fixed": ("protocol P {\n fixed F(-1); }", 2, 8),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_line_and_column(name: str) -> None:
    """Broken: somebody searches a protocol of a thousand lines."""
    text, line, column = MISTAKES[name]
    error = refusal(text)
    assert (error.line, error.column) == (line, column), str(error)


def test_a_mistake_in_an_import_names_its_file() -> None:
    """Broken: the line is searched in the wrong file."""
    text = 'protocol P { import idl "types/a.avdl"; }'
    files = {"types/a.avdl": 'protocol A { import schema "b.avsc"; }', "types/b.avsc": '{"type": "recrd", "name": "R"}'}
    error = refusal(text, files)
    assert (error.file, error.path) == ("types/b.avsc", "/type")
    files["types/b.avsc"] = '"int"'
    files["types/a.avdl"] = "protocol A {\n record }"
    error = refusal(text, files)
    assert (error.file, error.line) == ("types/a.avdl", 2)


def test_imports_are_read_once_and_may_be_circular() -> None:
    """Broken: two files that import each other are refused, or never end."""
    files = {
        "a.avdl": 'protocol A { import idl "b.avdl"; record A { b.B? b = null; } }',
        "b.avdl": '@namespace("b") protocol B { import idl "a.avdl"; record B { int x; } void ping(); }',
    }
    protocol = parse_idl(files["a.avdl"], load=files.__getitem__, file="a.avdl")
    assert [schema.full_name for schema in protocol.types] == ["b.B", "A"]
    assert list(protocol.messages) == ["ping"]


BOMBS = {
    "deep": "protocol P { record R { " + "array<" * 100_000 + "int" + ">" * 100_000 + " a; } }",
    "deep default": "protocol P { record R { int a = " + "[" * 50_000 + "]" * 50_000 + "; } }",
    "deep forward references": "protocol P { "
    + "".join(f"record R{i} {{ R{i + 1} a; }} " for i in range(500))
    + "record R500 {} }",
    "long": " " * (MAX_BYTES + 1),
    "open comment": "protocol P { /" + "* " * 200_000,
    "open documentation": "/**" * 50_000,
    "open string": 'protocol P { record R { string a = "' + "\\" * 100_001,
    "quotes": '"' * 200_000,
    "wide": "protocol P { enum E { " + ", ".join(f"S{i}" for i in range(60_000)) + "} }",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    """Broken: one request keeps a registry busy, or ends it."""
    refusal(BOMBS[name])


def test_endless_imports_are_refused() -> None:
    """Broken: a loader that always finds a file is asked for ever."""
    count = 0

    def load(_: str) -> str:
        nonlocal count
        count += 1
        return f'protocol P{count} {{ import idl "{count}.avdl"; }}'

    with pytest.raises(SchemaError, match="more than"):
        parse_idl('protocol P { import idl "0.avdl"; }', load=load)
    assert count <= MAX_FILES + 1
