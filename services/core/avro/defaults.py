"""Whether a default fits its type, and which default a field could have."""

from __future__ import annotations

import json
from typing import Final

from services.core.avro.json_document import Fault, Json
from services.core.avro.schema import NO_DEFAULT, Array, Enum, Field, Fixed, Map, Record, Schema, Union

MAX_WORK: Final = 100_000
"""The most values of defaults that are compared with a type, in one text."""
_RANGES: Final = {"int": 31, "long": 63}
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")
MAX_OFFERED_VALUES: Final = 100
MAX_OFFERED_BYTES: Final = 64
"""The largest fixed type for which a default is offered."""


class DefaultCheck:
    """Compares the defaults of one text with their types. Each pair of type and value is looked at once, so deep unions end."""

    def __init__(self) -> None:
        self._work = 0
        self._known: dict[tuple[int, int], bool] = {}

    def check(self, schema: Schema, value: Json, path: str, name: str) -> None:
        """Raises Fault when the default of the field `name` is not a value of its type."""
        if not self._fits(schema, value, path):
            text = json.dumps(value, ensure_ascii=False)
            shown = text if len(text) <= 80 else text[:77] + "..."
            raise Fault(path, f"The default of {name!r} is not {_described(schema)}: {shown}.")

    def _fits(self, schema: Schema, value: Json, path: str) -> bool:
        self._work += 1
        if self._work > MAX_WORK:
            raise Fault(
                path, f"Defaults have more than {MAX_WORK:,} values, types of unions counted. Try: smaller defaults."
            )
        if not isinstance(schema, Record | Array | Map | Union):
            return _fits_leaf(schema, value)
        pair = (id(schema), id(value))
        known = self._known.get(pair)
        if known is None:
            self._known[pair] = False  # a default that needs itself has no end
            known = self._known[pair] = self._fits_inner(schema, value, path)
        return known

    def _fits_inner(self, schema: Schema, value: Json, path: str) -> bool:
        match schema:
            case Union():
                return any(self._fits(branch, value, path) for branch in schema.branches)
            case Array():
                return isinstance(value, list) and all(self._fits(schema.items, item, path) for item in value)
            case Map():
                return isinstance(value, dict) and all(self._fits(schema.values, item, path) for item in value.values())
            case Record():
                return isinstance(value, dict) and all(self._fits_field(item, value, path) for item in schema.fields)
            case _:
                return False

    def _fits_field(self, item: Field, value: dict[str, Json], path: str) -> bool:
        given: object = value.get(item.name, item.default) if item.name in value or item.has_default else NO_DEFAULT
        return given is not NO_DEFAULT and self._fits(item.type, given, path)  # type: ignore[arg-type]  # JSON, if there


def _fits_leaf(schema: Schema, value: Json) -> bool:
    match schema.type:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            return type(value) is int and -(1 << _RANGES[schema.type]) <= value < 1 << _RANGES[schema.type]
        case "float" | "double":
            return (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NOT_FINITE
        case "string":
            return isinstance(value, str)
        case "bytes":
            return isinstance(value, str) and _is_bytes(value)
        case "fixed":
            return (
                isinstance(schema, Fixed) and isinstance(value, str) and len(value) == schema.size and _is_bytes(value)
            )
        case _:
            return isinstance(schema, Enum) and value in schema.symbols


def _is_bytes(text: str) -> bool:
    return not text or max(text) <= "\xff"


def _described(schema: Schema) -> str:
    match schema:
        case Enum():
            return f"a symbol of {schema.name}"
        case Fixed():
            return f"a string of {schema.size} characters up to \\u00ff (fixed {schema.name})"
        case Union():
            return f"of one of the types {', '.join(branch.full_name for branch in schema.branches[:20])}"
        case _:
            return f"of type {schema.full_name}"


def offered_default(schema: Schema) -> object:
    """The emptiest value of a type: null where it fits, otherwise 0, "", false, [], {}. NO_DEFAULT when there is none, or when it
    has more than MAX_OFFERED_VALUES values."""
    return _emptiest(schema, (), [MAX_OFFERED_VALUES])


def _emptiest(schema: Schema, inside: tuple[Schema, ...], left: list[int]) -> object:
    """left: how many more values it may have. Records of records of records would have billions."""
    left[0] -= 1
    if left[0] < 0 or schema in inside or len(inside) > 8:
        return NO_DEFAULT
    match schema:
        case Union():
            if any(branch.type == "null" for branch in schema.branches):
                return None
            return _emptiest(schema.branches[0], inside, left) if schema.branches else NO_DEFAULT
        case Enum():
            return schema.default or (schema.symbols[0] if schema.symbols else NO_DEFAULT)
        case Fixed():
            return "\0" * schema.size if schema.size <= MAX_OFFERED_BYTES else NO_DEFAULT
        case Record():
            values: dict[str, object] = {}
            for item in schema.fields:
                if not item.has_default:
                    value = values[item.name] = _emptiest(item.type, (*inside, schema), left)
                    if value is NO_DEFAULT:
                        return NO_DEFAULT
            return values
        case _:
            return _EMPTY_VALUES.get(schema.type, NO_DEFAULT)


_EMPTY_VALUES: Final[dict[str, object]] = {
    "null": None,
    "boolean": False,
    "int": 0,
    "long": 0,
    "float": 0,
    "double": 0,
    "bytes": "",
    "string": "",
    "array": [],
    "map": {},
}
