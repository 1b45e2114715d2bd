"""Bodies of plain JSON: an array of events, one event, or one event per line (NDJSON). The events are columns, in `Items`.

The text of a payload is checked once and kept byte for byte. orjson checks it, and msgspec.Raw cuts an array into the bytes of
its elements. orjson refuses everything that RFC 8259 or I-JSON forbids: text that is not UTF-8, a byte order
mark, NaN and Infinity, numbers beyond a double such as 1e400, lone surrogates, control characters in strings, trailing commas,
anything after the end. orjson reads integers beyond 64 bits as floats. That changes no payload, because payloads travel as bytes.
Of duplicate keys the last one counts for the fields that ingest reads; the payload keeps both.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from services.core.http.problem_type import ProblemType
from services.ingest import problems
from services.ingest.problems import Refusal, Refused, kind_of

MAX_DEPTH = 128
WHITESPACE = b" \t\r\n"
TOO_DEEP_DETAIL = f"An event has more than {MAX_DEPTH} levels of nested arrays and objects."
NO_EVENT = "The body is empty, or has only white space. Send at least one event."
_CONTAINERS = frozenset((dict, list))
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])


def parse(text: bytes) -> Any:
    """The parsed text. Raises Refused when it is empty or not valid JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if not text.strip(WHITESPACE):
            raise Refused(problems.EMPTY_BODY, NO_EVENT) from None
        raise Refused(problems.BAD_JSON, describe(error)) from None


def describe(error: orjson.JSONDecodeError) -> str:
    """The fault and its place. orjson's messages are constant texts that never repeat the input."""
    return f"The JSON is not valid at line {error.lineno}, column {error.colno}: {error.msg}."


def split_array(text: bytes, values: list[Any]) -> list[bytes]:
    """The bytes of each element of a valid JSON array, parsed before as `values`. Raises Refused when one is too deep."""
    try:
        elements = [bytes(element) for element in _ELEMENTS.decode(text)]
    except RecursionError:
        raise Refused(problems.TOO_DEEP, TOO_DEEP_DETAIL) from None
    # The array and each container in it have a bracket. In nearly every text the other brackets are too few for a deep nesting.
    kinds = list(map(type, values))
    if count_brackets(text) > MAX_DEPTH + kinds.count(dict) + kinds.count(list):
        for element, value in zip(elements, values, strict=True):
            if is_too_deep(element, value):
                raise Refused(problems.TOO_DEEP, TOO_DEEP_DETAIL)
    return elements


def is_too_deep(text: bytes, value: Any) -> bool:
    """Whether `value`, parsed from `text`, is nested deeper than MAX_DEPTH. Nearly every text has too few brackets for that."""
    if len(text) <= 2 * MAX_DEPTH or count_brackets(text) <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def count_brackets(text: bytes) -> int:
    """The number of opening brackets, including those in strings.

    To remove them and compare lengths is five times as fast as `bytes.count`.
    """
    return 2 * len(text) - len(text.replace(b"{", b"")) - len(text.replace(b"[", b""))


Attributes = dict[str, str]
"""CloudEvents attributes of one event by name, `data` not among them."""


class Items(msgspec.Struct):
    """The well-formed events of a body as columns: one list per property, a row per event. Every body format ends here.

    values: payloads, byte for byte as the client sent them. documents: the parsed payloads, {} for one that is not a JSON object.
    indexes: the position of each event in the request. attributes: by event; None unless the request is CloudEvents.
    refused: malformed events, which are not in these columns. by_line: NDJSON, where a malformed event refuses only its line.
    """

    values: list[bytes]
    documents: list[dict[str, Any]]
    indexes: Sequence[int]
    attributes: list[Attributes] | None = None
    refused: list[Refusal] = []
    by_line: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """events: in one request. event_bytes: the text of one event in the body. body_bytes: before and after unpacking."""

    events: int
    event_bytes: int
    body_bytes: int


_ONE = range(1)


def read_json(body: bytes, limits: Limits) -> Items:
    """An array of objects, or one object. Raises Refused for the whole body."""
    document = parse(body)
    if type(document) is dict:
        value = body.strip(WHITESPACE)
        check_single(value, document, limits)
        return Items([value], [document], _ONE)
    if type(document) is not list:
        detail = f"The body is {kind_of(document)}. Send a JSON object, or an array of JSON objects."
        raise Refused(problems.BAD_JSON, detail)
    check_count(len(document), limits)
    return read_elements(body, document, 0, limits)


def read_elements(text: bytes, documents: list[Any], first: int, limits: Limits) -> Items:
    """The elements of an array, parsed before as `documents`, of which the first has this index in the request."""
    return choose(split_array(text, documents), documents, range(first, first + len(documents)), limits)


def read_lines(body: bytes, limits: Limits) -> Items:
    """One object per line. Empty lines are skipped and counted. A malformed line refuses only its event."""
    check_start(body, limits)
    items = read_piece(body, 0, limits)
    if not items.values and not items.refused:
        raise Refused(problems.EMPTY_BODY, NO_EVENT)
    return items


def check_start(body: bytes, limits: Limits) -> None:
    """Raises Refused for a byte order mark, and for too many lines."""
    if body.startswith(codecs.BOM_UTF8):
        raise Refused(problems.BAD_JSON, "The body begins with a byte order mark. Send UTF-8 without it.")
    check_count(body.count(b"\n"), limits)


def read_piece(piece: bytes, first: int, limits: Limits) -> Items:
    """The events of some whole lines of a body, maybe none. first: the number of the first line."""
    lines = piece.split(b"\n")
    numbers = [number for number, line in enumerate(lines, first) if line.strip(WHITESPACE)]
    check_count(len(numbers), limits)
    texts = [lines[number - first].strip(WHITESPACE) for number in numbers]
    try:
        documents = [orjson.loads(text) if len(text) <= limits.event_bytes else unparsed(text) for text in texts]
    except orjson.JSONDecodeError:
        documents = [_parse_line(text) for text in texts]
    items = choose(texts, documents, numbers, limits, by_line=True)
    items.by_line = True
    return items


_BY_FIRST_BYTE: dict[bytes, Any] = {b"{": {}, b"[": [], b'"': "text", b"t": True, b"f": False, b"n": None}
_BY_FIRST_BYTE |= dict.fromkeys((b"-", *(b"%d" % digit for digit in range(10))), 0.5)


def unparsed(text: bytes) -> Any:
    """The document of an event that is too large to be parsed, and will be refused: some value of the same kind."""
    return _BY_FIRST_BYTE.get(text[:1], _BadLine)


def check_count(count: int, limits: Limits) -> None:
    """Raises Refused when these are too many events for one request."""
    if count > limits.events:
        raise Refused(
            problems.TOO_MANY_EVENTS, f"The request has more than {limits.events} events. Send fewer in one request."
        )


def check_single(text: bytes, value: Any, limits: Limits) -> None:
    """Raises Refused when the one event of a request is too large or nested too deeply."""
    if len(text) > limits.event_bytes:
        raise Refused(problems.EVENT_TOO_LARGE, too_large(len(text), limits))
    if is_too_deep(text, value):
        raise Refused(problems.TOO_DEEP, TOO_DEEP_DETAIL)


def too_large(size: int, limits: Limits) -> str:
    """The detail for an event of so many bytes, over the limit."""
    return f"The event has {size} bytes. An event may have at most {limits.event_bytes}."


def choose(texts: list[bytes], documents: list[Any], indexes: Any, limits: Limits, *, by_line: bool = False) -> Items:
    """The elements that are objects within the limits. The others are in `refused`."""
    fine = set(map(type, documents)) <= {dict} and max(map(len, texts), default=0) <= limits.event_bytes
    if fine and not (by_line and any(map(is_too_deep, texts, documents))):
        return Items(texts, documents, indexes)
    items = Items([], [], [])
    kept: list[int] = []
    for text, document, index in zip(texts, documents, indexes, strict=True):
        fault = _fault(text, document, limits, by_line=by_line)
        if fault is None:
            items.values.append(text)
            items.documents.append(document)
            kept.append(index)
        else:
            items.refused.append(Refusal(index, *fault))
    items.indexes = kept
    return items


def _fault(text: bytes, document: Any, limits: Limits, *, by_line: bool) -> tuple[ProblemType, str] | None:
    if isinstance(document, _BadLine):
        return problems.BAD_JSON, document.detail
    if type(document) is not dict:
        return problems.NOT_AN_OBJECT, f"The event is {kind_of(document)}. Send a JSON object."
    if len(text) > limits.event_bytes:
        return problems.EVENT_TOO_LARGE, too_large(len(text), limits)
    if by_line and is_too_deep(text, document):
        return problems.TOO_DEEP, TOO_DEEP_DETAIL
    return None


class _BadLine:
    """The document of a line that is not JSON."""

    def __init__(self, detail: str) -> None:
        self.detail = detail


def _parse_line(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _BadLine(f"The JSON of this line is not valid at column {error.colno}: {error.msg}.")
