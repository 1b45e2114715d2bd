"""The formats of a body: which one a request has, and how its events are read, large bodies slice by slice.

No request may hold the event loop for long, so a body over SLICE_BYTES is read in slices. A slice is a few dozen kilobytes
of whole events, or one event. Brackets suggest where an array may be cut, and parsing proves it: when `[` + piece + `]` is valid
JSON, the piece is whole elements, because the text before the cut is the same either way. Where the suggestion is wrong (brackets
in strings, large events) a regular expression finds the cut.

The number of containers in an event and in a body is bounded: three bytes of containers cost as much as a hundred other bytes.
"""

import enum
import re
from collections.abc import Callable, Iterator
from email.message import Message
from functools import lru_cache
from typing import Any

import orjson
from aiohttp import hdrs
from aiohttp.http import RawRequestMessage

from services.ingest import cloudevents, json_events, problems
from services.ingest.json_events import MAX_DEPTH, WHITESPACE, Items, Limits, count_brackets
from services.ingest.problems import Refused


class Format(enum.Enum):
    """What a body is, as far as its Content-Type says."""

    JSON = enum.auto()
    LINES = enum.auto()
    CLOUDEVENT = enum.auto()
    CLOUDEVENTS_BATCH = enum.auto()


MAX_MEDIA_TYPE = 256

MEDIA_TYPES = {
    "application/json": Format.JSON,
    "application/x-ndjson": Format.LINES,
    "application/jsonl": Format.LINES,
    "application/cloudevents+json": Format.CLOUDEVENT,
    "application/cloudevents-batch+json": Format.CLOUDEVENTS_BATCH,
}
_READERS = {
    Format.JSON: json_events.read_json,
    Format.LINES: json_events.read_lines,
    Format.CLOUDEVENT: cloudevents.read_structured,
    Format.CLOUDEVENTS_BATCH: cloudevents.read_batch,
}


@lru_cache(maxsize=256)
def find_format(content_type: str) -> Format | None:
    """The format of a Content-Type; None when it is none of ours or not in UTF-8."""
    if (
        len(content_type) > MAX_MEDIA_TYPE or not content_type.isascii()
    ):  # the parser takes quadratic time, and ASCII only
        return None
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_param("charset", "utf-8")
    if not isinstance(charset, str) or charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        return None
    return MEDIA_TYPES.get(content_type.partition(";")[0].strip().lower())


def check_format(message: RawRequestMessage) -> tuple[str, Format | None]:
    """The Content-Type and its format; None for a CloudEvent in binary mode. Raises Refused for what is neither."""
    content_type = message.headers.get(hdrs.CONTENT_TYPE, "")
    chosen = find_format(content_type)
    if chosen in (Format.CLOUDEVENT, Format.CLOUDEVENTS_BATCH):
        return content_type, chosen
    if "ce-specversion" in message.headers:
        return content_type, None
    if chosen is None:
        known = ", ".join(MEDIA_TYPES)
        raise Refused(problems.UNSUPPORTED_MEDIA_TYPE, f"One of {known}, in UTF-8, is supported; or ce- headers.")
    return content_type, chosen


def read_items(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Items:
    """The events in a body. Raises Refused when it cannot be used as a whole."""
    if chosen is None:
        return cloudevents.read_binary(body, message.headers.items(), content_type, limits)
    return _READERS[chosen](body, limits)


SLICE_BYTES = 1 << 16
"""A body up to here is read in one go."""
MAX_CONTAINERS = 100_000
"""Arrays and objects in one event."""
MAX_IN_BODY = 400_000
"""In all events of a body."""
_MAX_GUESSES = 256
_loads = orjson.loads

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+'
_SCALAR = rb"(?:" + _STRING + rb'|[^"{}\[\], \t\r\n]++)'
_SPACE = rb"[ \t\r\n]*+"


def _container(depth: int) -> bytes:
    """A pattern for an array or object of at most so many levels, whose texts are closed. It never goes back."""
    found = rb"[{\[]" + _FLAT + rb"[}\]]"
    for _ in range(depth - 1):
        found = rb"[{\[]" + _FLAT + rb"(?:" + found + _FLAT + rb")*+[}\]]"
    return found


_ELEMENT = _SPACE + rb"(?:" + _container(MAX_DEPTH) + rb"|" + _SCALAR + rb")" + _SPACE
_ONE = re.compile(_ELEMENT + rb"(?=[,\]])", re.DOTALL)
_EMPTY = re.compile(_SPACE + rb"\]")
_SOME = re.compile(rb"(?:" + _ELEMENT + rb",)++", re.DOTALL)
_STRINGS = re.compile(_STRING, re.DOTALL)

_Read = Callable[[bytes, list[Any], int, Limits], Items]
"""Makes events of an array's text and its parsed elements, of which the first has this index in the body."""


def read_slices(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Iterator[Items]:
    """As `read_items`, a slice at a time. Raises Refused at any of them, for the body as a whole."""
    if chosen is Format.LINES:
        return _read_lines(body, limits)
    if chosen is Format.CLOUDEVENTS_BATCH:
        return _read_array(body, cloudevents.read_elements, limits)
    if chosen is Format.JSON and body.lstrip(WHITESPACE)[:1] == b"[":
        return _read_array(body, json_events.read_elements, limits)
    return _read_one(body, content_type, chosen, message, limits)


def _read_one(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Iterator[Items]:
    if chosen is not None and len(body.strip(WHITESPACE)) > limits.event_bytes:
        raise Refused(problems.EVENT_TOO_LARGE, json_events.too_large(limits))
    if chosen is not None or cloudevents.is_json(content_type):
        _Containers().add(body)
    yield read_items(body, content_type, chosen, message, limits)


def _read_lines(body: bytes, limits: Limits) -> Iterator[Items]:
    json_events.check_start(body, limits)
    containers, at, line, found = _Containers(), 0, 0, False
    while at <= len(body):
        end = body.rfind(b"\n", at, at + SLICE_BYTES) if len(body) - at > SLICE_BYTES else len(body)
        if end < 0:
            end = body.find(b"\n", at + SLICE_BYTES)
        piece = body[at:end] if end >= 0 else body[at:]
        containers.add(piece)
        items = json_events.read_piece(piece, line, limits)
        found = found or bool(items.values or items.refused)
        yield items
        line += piece.count(b"\n") + 1
        at += len(piece) + 1
    if not found:
        raise Refused(problems.EMPTY_BODY, "There is no event in it.")


def _read_array(body: bytes, read: _Read, limits: Limits) -> Iterator[Items]:
    first, containers = 0, _Containers()
    for text, documents in _cut(body, limits, containers):
        json_events.check_count(first + len(documents), limits)
        yield read(text, documents, first, limits)
        first += len(documents)


def _cut(body: bytes, limits: Limits, containers: "_Containers") -> Iterator[tuple[bytes, list[Any]]]:
    """Texts of arrays, and what they are parsed, which together have the elements of this one."""
    at = body.index(b"[") + 1 if body.lstrip(WHITESPACE)[:1] == b"[" else 0
    if not at:
        raise Refused(problems.BAD_JSON, "An array is needed.")
    if (empty := _EMPTY.match(body, at)) is not None:
        _check_end(body[empty.end() :])
        yield b"[]", []
        return
    while len(body) - at > SLICE_BYTES:
        text = _guess(body, at)
        documents = None if text is None else _try_parse(text, containers)
        if text is not None and documents is not None:
            end = at + len(text) - 2
        else:
            found = _find_end(body, at, at + limits.event_bytes + SLICE_BYTES)
            if found is None:  # an event that is far too large, or no JSON
                yield b"[]", []  # the search may have taken some time
            end = _find_far_end(body, at) if found is None else found
            piece = body[at:end].strip(WHITESPACE)
            text = b"[" + piece + b"]"
            # One element that is too large is refused for its size: it need not be parsed.
            too_large = len(piece) > max(limits.event_bytes, SLICE_BYTES)
            documents = [json_events.unparsed(piece)] if too_large else _parse(text, at, containers)
        yield text, documents
        at = end + 1
        if body[end:at] == b"]":
            _check_end(body[at:])
            return
    text = b"[" + body[at:]
    documents = _parse(text, at, containers)
    if not documents and body[at - 1 : at] == b",":
        raise Refused(problems.BAD_JSON, "There is a comma before the end of the array.")
    yield text, documents


def _check_end(rest: bytes) -> None:
    if rest.strip(WHITESPACE):
        raise Refused(problems.BAD_JSON, "Something follows the array.")


def _guess(body: bytes, at: int) -> bytes | None:
    """The text of an array of the elements up to the last `},` of a slice behind which all brackets seem to be closed."""
    cut = body.rfind(b"},", at, at + SLICE_BYTES)
    curly, square = _balance(body[at : cut + 1])
    for _ in range(_MAX_GUESSES):
        if cut < at:
            return None
        if curly == square == 0:
            return b"[" + body[at : cut + 1] + b"]"
        before = body.rfind(b"},", at, cut)
        less_curly, less_square = _balance(body[before + 1 : cut + 1])
        curly, square, cut = curly - less_curly, square - less_square, before
    return None


def _balance(piece: bytes) -> tuple[int, int]:
    """How many more of each kind of brackets open than close."""
    return piece.count(b"{") - piece.count(b"}"), piece.count(b"[") - piece.count(b"]")


def _find_end(body: bytes, at: int, limit: int) -> int | None:
    """The place of the comma or bracket behind some elements, at least one; None when none ends before `limit`."""
    some = _SOME.match(body, at, at + SLICE_BYTES)
    if some is not None:
        return some.end() - 1
    one = _ONE.match(body, at, limit)
    return None if one is None else one.end()


def _find_far_end(body: bytes, at: int) -> int:
    """The place of the comma or bracket behind an element of any size. Raises Refused."""
    if count_brackets(body[at:]) > MAX_CONTAINERS:
        raise _too_many()
    one = _ONE.match(body, at)
    if one is None:
        raise Refused(problems.BAD_JSON, f"Not valid from byte {at} on, or nested deeper than {MAX_DEPTH} levels.")
    return one.end()


def _too_many() -> Refused:
    detail = f"At most {MAX_CONTAINERS} arrays and objects are allowed in an event, {MAX_IN_BODY} in a request."
    return Refused(problems.TOO_MANY_CONTAINERS, detail)


def _try_parse(text: bytes, containers: "_Containers") -> list[Any] | None:
    before = containers.count
    containers.add(text)
    try:
        found: list[Any] = _loads(text)
    except orjson.JSONDecodeError:
        containers.count = before
        return None
    return found


def _parse(text: bytes, at: int, containers: "_Containers") -> list[Any]:
    found = _try_parse(text, containers)
    if found is None:
        raise Refused(problems.BAD_JSON, f"Not valid within {len(text)} bytes from byte {at} on.")
    return found


class _Containers:
    """How many arrays and objects a body has, so far. Brackets in texts count only while there are few."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: bytes) -> None:
        """Before a text is parsed. Raises Refused for too many."""
        brackets = count_brackets(text)
        if brackets > MAX_CONTAINERS or self.count + brackets > MAX_IN_BODY:
            brackets = count_brackets(_STRINGS.sub(b"", text))
        self.count += brackets
        if brackets > MAX_CONTAINERS or self.count > MAX_IN_BODY:
            raise _too_many()
