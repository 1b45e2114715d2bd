"""Bodies of plain JSON: an array of events, one event, or a line per event (NDJSON)."""

import codecs
from typing import Any

import orjson

from services.core.problem_type import ProblemType
from services.ingest import problems
from services.ingest.items import Items, Limits
from services.ingest.json_text import TOO_DEEP_DETAIL, WHITESPACE, describe, is_too_deep, parse, split_array
from services.ingest.problems import Refusal, Refused

_ONE = range(1)


def read_json(body: bytes, limits: Limits) -> Items:
    """An array of objects, or one object. Raises Refused when the text as a whole cannot be used."""
    document = parse(body)
    if type(document) is dict:
        value = body.strip(WHITESPACE)
        check_single(value, document, limits)
        return Items([value], [document], _ONE)
    if type(document) is not list:
        raise Refused(problems.BAD_JSON, "An array of objects, or one object, is needed.")
    check_count(len(document), limits)
    return read_elements(body, document, 0, limits)


def read_elements(text: bytes, documents: list[Any], first: int, limits: Limits) -> Items:
    """The elements of an array, parsed before as `documents`, of which the first has this index in the request."""
    return choose(split_array(text, documents), documents, range(first, first + len(documents)), limits)


def read_lines(body: bytes, limits: Limits) -> Items:
    """One object a line; empty lines are skipped but counted. A bad line is that event's fault alone."""
    check_start(body, limits)
    items = read_piece(body, 0, limits)
    if not items.values and not items.refused:
        raise Refused(problems.EMPTY_BODY, "There is no event in it.")
    return items


def check_start(body: bytes, limits: Limits) -> None:
    """Raises Refused for a byte order mark, and for too many lines."""
    if body.startswith(codecs.BOM_UTF8):
        raise Refused(problems.BAD_JSON, "A byte order mark is not allowed.")
    check_count(body.count(b"\n"), limits)


def read_piece(piece: bytes, first: int, limits: Limits) -> Items:
    """Whole lines of a body, of which the first has this number; maybe none that is an event."""
    lines = piece.split(b"\n")
    numbers = [number for number, line in enumerate(lines, first) if line.strip(WHITESPACE)]
    check_count(len(numbers), limits)
    texts = [lines[number - first].strip(WHITESPACE) for number in numbers]
    try:
        documents = [orjson.loads(text) if len(text) <= limits.event_bytes else stand_in(text) for text in texts]
    except orjson.JSONDecodeError:
        documents = [_parse_line(text) for text in texts]
    items = choose(texts, documents, numbers, limits, by_line=True)
    items.by_line = True
    return items


def stand_in(text: bytes) -> Any:
    """In place of an event that is too large to be parsed, and is refused: an object for one, None for what is none."""
    return {} if text[:1] == b"{" else None


def check_count(count: int, limits: Limits) -> None:
    """Raises Refused when these are too many events for one request."""
    if count > limits.events:
        raise Refused(problems.TOO_MANY_EVENTS, f"At most {limits.events} events are allowed in one request.")


def check_single(text: bytes, value: Any, limits: Limits) -> None:
    """Raises Refused when the one event of a request is too large or nested too deeply."""
    if len(text) > limits.event_bytes:
        raise Refused(problems.EVENT_TOO_LARGE, too_large(limits))
    if is_too_deep(text, value):
        raise Refused(problems.TOO_DEEP, TOO_DEEP_DETAIL)


def too_large(limits: Limits) -> str:
    """The detail for an event over the limit."""
    return f"An event has at most {limits.event_bytes} bytes."


def choose(texts: list[bytes], documents: list[Any], indexes: Any, limits: Limits, *, by_line: bool = False) -> Items:
    """The elements that are objects of an allowed size; the others refused, one by one."""
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
        return problems.NOT_AN_OBJECT, "An event is a JSON object."
    if len(text) > limits.event_bytes:
        return problems.EVENT_TOO_LARGE, too_large(limits)
    if by_line and is_too_deep(text, document):
        return problems.TOO_DEEP, TOO_DEEP_DETAIL
    return None


class _BadLine:
    """Stands among the parsed lines for one that is not JSON."""

    def __init__(self, detail: str) -> None:
        self.detail = detail


def _parse_line(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _BadLine(describe(error))
