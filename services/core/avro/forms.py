"""Canonical texts of a schema and their fingerprints: the resolution form (ours, ADR 0021), Avro's parsing form, and whole JSON.

The resolution form of a node, without whitespace, attributes in this order and only those that are there:

    primitive                "long", or {"type":"long","logicalType":…,"precision":…,"scale":…}
    array, map               {"type":"array","items":…,logical…}  {"type":"map","values":…,logical…}
    union                    […]
    fixed                    {"name":…,"type":"fixed","size":…,"aliases":[…],logical…}
    enum                     {"name":…,"type":"enum","symbols":[…],"default":…,"aliases":[…],logical…}
    record, error            {"name":…,"type":"record","fields":[…],"aliases":[…],logical…}
    field                    {"name":…,"type":…,"default":…,"aliases":[…]}

Names and aliases are full names; the second use of a named type is its name. Aliases are sorted. `logicalType` is kept as
written, also one that no reader knows. `precision`, and `scale` unless it is 0, are kept beside `"logicalType":"decimal"`.
Defaults are JSON by RFC 8785 (shortest numbers, least escapes), with two differences: integers of int and long have all their
digits, and the keys of a record's default have the order of its fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Final, cast

from services.core.avro import schema as nodes
from services.core.avro.json_document import Json

_EMPTY: Final = 0xC15D213AA4D7A795


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_EMPTY if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE: Final = _crc_table()


def crc64(data: bytes) -> int:
    """CRC-64-AVRO, unsigned."""
    value = _EMPTY
    table = _CRC_TABLE
    for byte in data:
        value = (value >> 8) ^ table[(value ^ byte) & 0xFF]
    return value


def sha256(text: str) -> str:
    """SHA-256 of the text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def quote(text: str) -> str:
    """A JSON string with the escapes that JSON demands and no other."""
    return json.dumps(text, ensure_ascii=False)


def parsing_form(schema: nodes.Schema) -> str:
    """Avro's parsing canonical form."""
    return _written(schema, full=False)


def resolution_form(schema: nodes.Schema) -> str:
    """Our canonical text, see the top of this module."""
    return _written(schema, full=True)


def _written(schema: nodes.Schema, *, full: bool) -> str:
    """full: with defaults, aliases and logical types, which the parsing form does not have."""
    parts: list[str] = []
    _write(schema, set(), parts, full=full)
    return "".join(parts)


def _write(schema: nodes.Schema, known: set[str], parts: list[str], *, full: bool) -> None:
    add = parts.append
    logical = _logical(schema) if full else ""
    match schema:
        case nodes.Union():
            add("[")
            for index, branch in enumerate(schema.branches):
                if index:
                    add(",")
                _write(branch, known, parts, full=full)
            add("]")
        case nodes.Array():
            add('{"type":"array","items":')
            _write(schema.items, known, parts, full=full)
            add(logical + "}")
        case nodes.Map():
            add('{"type":"map","values":')
            _write(schema.values, known, parts, full=full)
            add(logical + "}")
        case nodes.Named():
            if schema.name in known:
                add(f'"{schema.name}"')
                return
            known.add(schema.name)
            add(f'{{"name":"{schema.name}","type":"{schema.type}"')
            _write_body(schema, known, parts, full=full)
            add(f"{_aliases(schema.aliases) if full else ''}{logical}}}")
        case _:
            add(f'{{"type":"{schema.type}"{logical}}}' if logical else f'"{schema.type}"')


def _write_body(schema: nodes.Named, known: set[str], parts: list[str], *, full: bool) -> None:
    match schema:
        case nodes.Enum():
            default = f',"default":{quote(schema.default)}' if full and schema.default is not None else ""
            parts.append(f',"symbols":[{",".join(quote(symbol) for symbol in schema.symbols)}]{default}')
        case nodes.Fixed():
            parts.append(f',"size":{schema.size}')
        case nodes.Record():
            parts.append(',"fields":[')
            for index, item in enumerate(schema.fields):
                parts.append(f'{"," if index else ""}{{"name":"{item.name}","type":')
                _write(item.type, known, parts, full=full)
                if full and item.has_default:
                    parts.append(f',"default":{canonical_default(item.type, cast(Json, item.default))}')
                parts.append(f"{_aliases(item.aliases) if full else ''}}}")
            parts.append("]")


def _aliases(aliases: tuple[str, ...]) -> str:
    if not aliases:
        return ""
    return f',"aliases":[{",".join(quote(alias) for alias in sorted(set(aliases)))}]'


def _logical(schema: nodes.Schema) -> str:
    name = schema.properties.get("logicalType")
    if not isinstance(name, str):
        return ""
    text = f',"logicalType":{quote(name)}'
    if name == "decimal":
        precision, scale = schema.properties.get("precision"), schema.properties.get("scale")
        text += f',"precision":{precision}' if type(precision) is int else ""
        text += f',"scale":{scale}' if type(scale) is int and scale != 0 else ""
    return text


def canonical_default(schema: nodes.Schema, value: Json) -> str:
    """A default as canonical JSON. The value is valid for the type (parsing.py has checked it)."""
    match schema:
        case nodes.Record() if isinstance(value, dict):
            return (
                "{"
                + ",".join(
                    f"{quote(item.name)}:{canonical_default(item.type, value[item.name])}"
                    for item in schema.fields
                    if item.name in value
                )
                + "}"
            )
        case nodes.Map() if isinstance(value, dict):
            return (
                "{"
                + ",".join(f"{quote(key)}:{canonical_default(schema.values, value[key])}" for key in sorted(value))
                + "}"
            )
        case nodes.Array() if isinstance(value, list):
            return "[" + ",".join(canonical_default(schema.items, item) for item in value) + "]"
        case nodes.Union():
            # The kind of the value decides about its text, except for numbers, which may be those of a floating type.
            for branch in schema.branches:
                if _fits_roughly(branch, value):
                    return canonical_default(branch, value)
            return _plain(value)
        case _ if (
            schema.type in ("float", "double") and not isinstance(value, bool | str) and isinstance(value, int | float)
        ):
            return number(float(value))
        case _:
            return _plain(value)


def _fits_roughly(schema: nodes.Schema, value: Json) -> bool:
    match value:
        case bool():
            return schema.type == "boolean"
        case None:
            return schema.type == "null"
        case int():
            return schema.type in ("int", "long", "float", "double")
        case float():
            return schema.type in ("float", "double")
        case str():
            return schema.type in ("string", "bytes", "enum", "fixed")
        case list():
            return schema.type == "array"
        case _:
            return schema.type == "map" or (isinstance(schema, nodes.Record) and value.keys() <= schema.by_name.keys())


def _plain(value: Json) -> str:
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def number(value: float) -> str:
    """A number as ECMAScript and RFC 8785 write it: 1, 0.1, 1e+21, 1e-7."""
    if not math.isfinite(value):
        return '"NaN"' if math.isnan(value) else f'"{"-" if value < 0 else ""}Infinity"'
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = int(power or 0) + len(whole) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{rest}e{'+' if point > 0 else '-'}{abs(point - 1)}"


def to_json(schema: nodes.Schema, known: set[str] | None = None, namespace: str = "") -> Json:
    """The schema as Avro's Java writes it: its order of attributes, relative names. known: names already written."""
    known = set() if known is None else known
    match schema:
        case nodes.Union():
            return [to_json(branch, known, namespace) for branch in schema.branches]
        case nodes.Array():
            return {"type": "array", "items": to_json(schema.items, known, namespace), **schema.properties}
        case nodes.Map():
            return {"type": "map", "values": to_json(schema.values, known, namespace), **schema.properties}
        case nodes.Named():
            if schema.name in known:
                return reference(schema, namespace)
            known.add(schema.name)
            return _named(schema, known, namespace)
        case _:
            return {"type": schema.type, **schema.properties} if schema.properties else schema.type


def reference(schema: nodes.Named, namespace: str) -> str:
    """The name of a type as it is written inside of a namespace."""
    return schema.short_name if schema.namespace == namespace else schema.name


def _named(schema: nodes.Named, known: set[str], namespace: str) -> dict[str, Json]:
    kind = "error" if isinstance(schema, nodes.Record) and schema.is_error else schema.type
    written: dict[str, Json] = {"type": kind, "name": schema.short_name}
    if schema.namespace != namespace:
        written["namespace"] = schema.namespace
    if schema.doc is not None:
        written["doc"] = schema.doc
    match schema:
        case nodes.Record():
            written["fields"] = [field_json(item, known, schema.namespace) for item in schema.fields]
        case nodes.Enum():
            written["symbols"] = list(schema.symbols)
            if schema.default is not None:
                written["default"] = schema.default
        case nodes.Fixed():
            written["size"] = schema.size
    written.update(schema.properties)
    if schema.aliases:
        own = schema.namespace
        written["aliases"] = [
            alias.rpartition(".")[2] if alias.rpartition(".")[0] == own else alias for alias in schema.aliases
        ]
    return written


def field_json(item: nodes.Field, known: set[str], namespace: str) -> dict[str, Json]:
    """A field, or a parameter of a message, as `to_json` writes it."""
    written: dict[str, Json] = {"name": item.name, "type": to_json(item.type, known, namespace)}
    if item.doc is not None:
        written["doc"] = item.doc
    if item.has_default:
        written["default"] = cast(Json, item.default)
    if item.order != "ascending":
        written["order"] = item.order
    if item.aliases:
        written["aliases"] = list(item.aliases)
    written.update(item.properties)
    return written
