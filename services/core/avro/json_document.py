"""JSON text that strangers send: read within limits, and the line and column of any value in it.

`read_json` runs at the speed of Python's C scanner. Only after a mistake is the text scanned a second time, to find its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import NoReturn, TypeAlias

import orjson

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_BYTES = 1 << 20
"""The longest text, in bytes. Confluent's registry refuses more than Kafka's largest message, which is 1 MB by default."""
MAX_JSON_DEPTH = 256
"""How deep arrays and objects may be nested. A type inside of a record takes three levels."""
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class SchemaError(ValueError):
    """A schema, protocol or IDL file has a mistake.

    path: a JSON pointer to it (RFC 6901), "" for the whole text and for IDL. message: what is wrong, and what to try.
    line, column: from 1. file: the imported file with the mistake, or "".
    """

    def __init__(self, path: str, message: str, line: int, column: int, file: str = "") -> None:
        place = f"line {line}, column {column}" + (f" ({path})" if path else "")
        super().__init__(f"{file}: {place}: {message}" if file else f"{place}: {message}")
        self.path = path
        self.message = message
        self.line = line
        self.column = column
        self.file = file


class Fault(Exception):
    """A mistake at a JSON pointer, before its line is known. Becomes a SchemaError at the edge of this package."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(path, message)
        self.path = path
        self.message = message


class _DuplicateKey(Exception):
    """The arguments: the key that an object has twice."""


def decode(text: str | bytes) -> str:
    """The text within MAX_BYTES. Raises SchemaError for a longer one, and for what is not UTF-8."""
    size = len(text)
    if size > MAX_BYTES or (isinstance(text, str) and len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES):
        raise SchemaError(
            "", f"The text has more than {MAX_BYTES:,} bytes. Try: split it into several named types.", 1, 1
        )
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        before = text[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise SchemaError("", f"The text is not UTF-8: byte {error.start}.", before.count(b"\n") + 1, column) from None


def read_json(text: str) -> Json:
    """The value of the text. Raises SchemaError for a mistake, a key that is there twice, and for nesting that is too deep."""
    try:
        value: Json = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_float
        )
    except json.JSONDecodeError as error:
        raise SchemaError("", f"The text is not JSON: {error.msg}.", error.lineno, error.colno) from None
    except _DuplicateKey as error:
        path = next(_duplicates(text), "")
        line, column = locate(text, path)
        raise SchemaError(
            path, f"The key {error.args[0]!r} is there twice. Try: remove one of them.", line, column
        ) from None
    except RecursionError:
        raise SchemaError("", _too_deep(), 1, 1) from None
    except ValueError as error:  # a number of thousands of digits, or NaN
        raise SchemaError("", f"The text has a number that JSON or Avro does not have: {error}.", 1, 1) from None
    _check_depth(value)
    if _SURROGATE.search(text) is not None or not text.isascii():
        _check_encodable(value)
    return value


class _Infinite(float):
    """1e999 and the like: JSON has no infinity."""


def _float(text: str) -> float:
    value = float(text)
    return _Infinite(value) if math.isinf(value) else value


def to_text(value: object) -> str:
    """The compact JSON text of a value that `read_json` gave, alone or inside of others: with integers of any size, and
    infinities as the strings that Avro has for them. Of half a surrogate pair, which no text may have, the name is there."""
    try:
        return orjson.dumps(value, default=_avros_infinity).decode()
    except orjson.JSONEncodeError:  # more than 64 bits or 254 levels, or half a surrogate pair
        text = json.dumps(_without_infinities(value), ensure_ascii=False, separators=(",", ":"))
        return _HALF.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text)


def _avros_infinity(value: object) -> str:
    if not isinstance(value, _Infinite):
        raise TypeError(f"no JSON: {type(value).__name__}")
    return "Infinity" if value > 0 else "-Infinity"


def _without_infinities(value: object) -> object:
    match value:
        case _Infinite():
            return _avros_infinity(value)
        case dict():
            return {key: _without_infinities(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_without_infinities(inner) for inner in value]
        case _:
            return value


def locate(text: str, path: str) -> tuple[int, int]:
    """The line and column of the value at a JSON pointer, from 1; of its nearest ancestor when there is no such value."""
    best, offset = -1, 0
    for pointer, start in _values(text):
        if len(pointer) > best and (path == pointer or path.startswith(pointer + "/")):
            best, offset = len(pointer), start
            if path == pointer:
                break
    return place_of(text, offset)


def place_of(text: str, offset: int) -> tuple[int, int]:
    """The line and column of an offset, from 1."""
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1


def escape(name: str) -> str:
    """A key as one part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _too_deep() -> str:
    return f"The text is nested deeper than {MAX_JSON_DEPTH} levels. Try: give inner types a definition of their own."


def _check_depth(value: Json) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise SchemaError("", _too_deep(), 1, 1)
        inner: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, dict | list)]


def _check_encodable(value: Json) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise SchemaError(
            "", "A string has half of a surrogate pair (\\ud800 to \\udfff), which is no character.", 1, 1
        ) from None


def _values(text: str) -> Iterator[tuple[str, int]]:
    """The pointer and offset of every value, in the order of the text. Ends where the text stops being JSON."""
    path: list[str | int] = []  # of each open array the index, of each open object the key
    keyed: list[bool] = []  # whether the open container is an object
    want_key = False
    for match in _TOKEN.finditer(text):
        symbol = match[0]
        if symbol in "}]":
            if not keyed:
                return
            keyed.pop()
            path.pop()
            want_key = False
        elif symbol == ",":
            if not keyed:
                return
            want_key = keyed[-1]
            if not want_key:
                index = path[-1]
                path[-1] = index + 1 if isinstance(index, int) else 0
        elif symbol == ":":
            continue
        elif want_key:
            path[-1] = _unquote(symbol)
            want_key = False
        else:
            yield "".join(f"/{escape(str(part))}" for part in path), match.start()
            if symbol in "{[":
                keyed.append(symbol == "{")
                path.append("" if symbol == "{" else 0)
                want_key = symbol == "{"


def _duplicates(text: str) -> Iterator[str]:
    seen: set[str] = set()
    for pointer, _ in _values(text):
        if pointer in seen:
            yield pointer
        seen.add(pointer)


def _unquote(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token
