"""The formats of a body: its encoding, its media type, and how its events are read, large bodies slice by slice.

A packed body must be complete, with a matching checksum and nothing behind its end. A gzip body may have several members
(RFC 1952; parallel compressors make them), at most MAX_MEMBERS. A zstd body is one frame with a window of at most 8 MiB
(RFC 8878 asks every decoder to support that size).

No request may hold the event loop for long, so a body over SLICE_BYTES is read in slices. A slice is a few dozen kilobytes
of whole events, or one event. Brackets suggest a place to cut an array, and parsing proves it: when `[` + piece + `]` is valid
JSON, the piece is whole elements, because the text before the cut is the same in both. Where the suggestion is wrong (brackets
in strings) a regular expression finds the cut. The end of an event that is larger than a slice is searched in slices, too.

The number of containers in an event and in a body is bounded: three bytes of containers cost as much as a hundred other bytes.
"""

import enum
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from email.message import Message
from functools import lru_cache
from typing import Any

import orjson
import zstandard
from aiohttp import hdrs
from aiohttp.http import RawRequestMessage

from services.ingest import cloudevents, json_events, problems
from services.ingest.json_events import MAX_DEPTH, WHITESPACE, Items, Limits
from services.ingest.json_scan import MAX_CONTAINERS, Containers, Scan, too_many
from services.ingest.problems import Refused, body_too_large

MAX_WINDOW_BYTES = 8 << 20
MAX_MEMBERS = 1000
ENCODINGS = frozenset(("gzip", "x-gzip", "zstd"))
_GZIP = 16 + zlib.MAX_WBITS
_UNKNOWN_SIZE = zstandard.CONTENTSIZE_UNKNOWN
_DAMAGED = "The compressed body is cut off or altered, or bytes follow its end."


def choose_encoding(values: list[str]) -> str | None:
    """The encoding in a request's Content-Encoding headers, or None. Raises Refused for an unknown one and for several."""
    if not values or values == ["identity"]:
        return None
    encoding = values[0].strip().lower()
    if len(values) > 1 or encoding not in ENCODINGS:
        raise Refused(
            problems.UNSUPPORTED_ENCODING,
            "The Content-Encoding is neither gzip nor zstd, or there is more than one. Compress the body once.",
        )
    return encoding


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """The unpacked body, at most `limit` bytes. Blocks: up to 20 ms for 5 MB. Raises Refused."""
    return _unpack_zstd(body, limit) if encoding == "zstd" else _unpack_gzip(body, limit)


def _unpack_gzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(wbits=_GZIP)
        try:
            part = member.decompress(body, limit - size + 1)
        except zlib.error:
            raise Refused(problems.BAD_COMPRESSION, _DAMAGED) from None
        parts.append(part)
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        if not member.eof:
            raise Refused(problems.BAD_COMPRESSION, _DAMAGED)
        body = member.unused_data
        if not body:
            return b"".join(parts)
    raise Refused(
        problems.BAD_COMPRESSION, f"The gzip body has more than {MAX_MEMBERS} members. Compress it in larger pieces."
    )


def _unpack_zstd(body: bytes, limit: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.window_size > MAX_WINDOW_BYTES:
            raise Refused(
                problems.BODY_TOO_LARGE,
                f"The zstd window has more than {MAX_WINDOW_BYTES} bytes. Use a lower compression level.",
            )
        if frame.content_size != _UNKNOWN_SIZE and frame.content_size > limit:
            raise body_too_large(limit)
        if frame.content_size not in (0, _UNKNOWN_SIZE):  # with 0 in the head the library reads nothing
            return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
        return _unpack_zstd_stream(body, limit)
    except zstandard.ZstdError:
        raise Refused(problems.BAD_COMPRESSION, _DAMAGED) from None


def _unpack_zstd_stream(body: bytes, limit: int) -> bytes:
    """A frame of unknown size, or of size 0. The reader bounds the size; the object finds a missing end and bytes behind it."""
    with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body) as reader:
        if len(reader.read(limit + 1)) > limit:
            raise body_too_large(limit)
    whole = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    unpacked = whole.decompress(body)
    if not whole.eof or whole.unused_data:
        raise Refused(problems.BAD_COMPRESSION, _DAMAGED)
    return unpacked


class Format(enum.Enum):
    """The format of a body by its Content-Type."""

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
    """The format of a Content-Type; None when it is not supported or not in UTF-8."""
    # The parser needs quadratic time, and reads only ASCII.
    if len(content_type) > MAX_MEDIA_TYPE or not content_type.isascii():
        return None
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_param("charset", "utf-8")
    if not isinstance(charset, str) or charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        return None
    return MEDIA_TYPES.get(content_type.partition(";")[0].strip().lower())


def check_format(message: RawRequestMessage) -> tuple[str, Format | None]:
    """The Content-Type and its format; None for a CloudEvent in binary mode. Raises Refused for any other."""
    content_type = message.headers.get(hdrs.CONTENT_TYPE, "")
    chosen = find_format(content_type)
    if chosen in (Format.CLOUDEVENT, Format.CLOUDEVENTS_BATCH):
        return content_type, chosen
    if "ce-specversion" in message.headers:
        return content_type, None
    if chosen is None:
        wrong = "is not supported, or its charset is not UTF-8" if content_type else "is missing"
        detail = (
            f"The Content-Type {wrong}. Use {', '.join(MEDIA_TYPES)}, or send an event's attributes in ce- headers."
        )
        raise Refused(problems.UNSUPPORTED_MEDIA_TYPE, detail)
    return content_type, chosen


def read_items(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Items:
    """The events in a body. Raises Refused when it cannot be used as a whole."""
    if chosen is None:
        return cloudevents.read_binary(body, message.headers.items(), content_type, limits)
    return _READERS[chosen](body, limits)


SLICE_BYTES = 1 << 16
"""A body of at most this size is read at once."""
_MAX_GUESSES = 256
_loads = orjson.loads

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+'
_SCALAR = rb"(?:" + _STRING + rb'|[^"{}\[\], \t\r\n]++)'
_SPACE = rb"[ \t\r\n]*+"


def _container(depth: int) -> bytes:
    """A pattern for an array or object of at most so many levels, whose strings are closed. It never backtracks."""
    found = rb"[{\[]" + _FLAT + rb"[}\]]"
    for _ in range(depth - 1):
        found = rb"[{\[]" + _FLAT + rb"(?:" + found + _FLAT + rb")*+[}\]]"
    return found


_ELEMENT = _SPACE + rb"(?:" + _container(MAX_DEPTH) + rb"|" + _SCALAR + rb")" + _SPACE
_EMPTY = re.compile(_SPACE + rb"\]")
_SOME = re.compile(rb"(?:" + _ELEMENT + rb",)++", re.DOTALL)

_Cut = tuple[bytes, list[Any] | None]
"""The text of an array, and its parsed elements; or one element that is too large to be parsed, and None."""
_Read = Callable[[bytes, list[Any], int, Limits], Items]
"""(text of an array, its parsed elements, index of the first one in the body, limits) to events."""


def read_slices(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Iterator[Items]:
    """As `read_items`, one slice at a time; slices without events are turns for other requests. Raises Refused at any slice, for
    the whole body."""
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
        raise Refused(problems.EVENT_TOO_LARGE, json_events.too_large(len(body.strip(WHITESPACE)), limits))
    if chosen is not None or cloudevents.is_json(content_type):
        for _ in Containers(SLICE_BYTES).add_large(body):
            yield Items([], [], [])
    yield read_items(body, content_type, chosen, message, limits)


def _read_lines(body: bytes, limits: Limits) -> Iterator[Items]:
    json_events.check_start(body, limits)
    containers, at, line, found = Containers(SLICE_BYTES), 0, 0, False
    while at <= len(body):
        end = body.rfind(b"\n", at, at + SLICE_BYTES) if len(body) - at > SLICE_BYTES else len(body)
        if end < 0:
            end = body.find(b"\n", at + SLICE_BYTES)
        piece = body[at:end] if end >= 0 else body[at:]
        if len(piece) <= SLICE_BYTES:
            containers.add(piece)
        elif len(piece.strip(WHITESPACE)) <= limits.event_bytes:  # otherwise the line is not parsed
            for _ in containers.add_large(piece):
                yield Items([], [], [], by_line=True)
        items = json_events.read_piece(piece, line, limits)
        found = found or bool(items.values or items.refused)
        yield items
        line += piece.count(b"\n") + 1
        at += len(piece) + 1
    if not found:
        raise Refused(problems.EMPTY_BODY, json_events.NO_EVENT)


def _read_array(body: bytes, read: _Read, limits: Limits) -> Iterator[Items]:
    first, containers = 0, Containers(SLICE_BYTES)
    for text, documents in _cut(body, limits, containers):
        count = 1 if documents is None else len(documents)
        json_events.check_count(first + count, limits)
        if documents is None:
            yield json_events.choose([text], [json_events.unparsed(text)], range(first, first + 1), limits)
        else:
            yield read(text, documents, first, limits)
        first += count


def _cut(body: bytes, limits: Limits, containers: Containers) -> Iterator[_Cut]:
    """Texts of arrays and their parsed elements, which together are the elements of this array; empty ones while it searches."""
    at = body.index(b"[") + 1 if body.lstrip(WHITESPACE)[:1] == b"[" else 0
    if not at:
        raise Refused(problems.BAD_JSON, "The body is not an array. Send a JSON array of CloudEvents.")
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
            some = _SOME.match(body, at, at + SLICE_BYTES)
            end, opened = (some.end() - 1, None) if some is not None else (yield from _search_end(body, at))
            text = body[at:end].strip(WHITESPACE)
            if not text:
                raise _bad_json(at)
            # An element that is too large is refused for its size.
            if len(text) <= max(limits.event_bytes, SLICE_BYTES):
                text = b"[" + text + b"]"
                documents = _parse(text, at, containers, opened)
        yield text, documents
        at = end + 1
        if body[end:at] == b"]":
            _check_end(body[at:])
            return
    text = b"[" + body[at:]
    documents = _parse(text, at, containers)
    if not documents and body[at - 1 : at] == b",":
        raise Refused(problems.BAD_JSON, "The array has a comma behind its last element. Remove the comma.")
    yield text, documents


def _check_end(rest: bytes) -> None:
    if rest.strip(WHITESPACE):
        raise Refused(problems.BAD_JSON, "Bytes follow the end of the array. Remove them.")


def _guess(body: bytes, at: int) -> bytes | None:
    """The text of an array: the elements up to the last `},` of a slice at which all brackets seem to be closed."""
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


def _search_end(body: bytes, at: int) -> Generator[_Cut, None, tuple[int, int]]:
    """The place of the comma or bracket behind an element of any size, and the element's containers. Raises Refused."""
    scan = Scan(body, at, SLICE_BYTES)
    for end in scan.find_end(MAX_DEPTH):
        if scan.containers > MAX_CONTAINERS:
            raise too_many()
        if scan.deepest > MAX_DEPTH:
            raise Refused(problems.TOO_DEEP, json_events.TOO_DEEP_DETAIL)
        yield b"[]", []  # other requests get their turn
        if end is not None and body[end : end + 1] != b"}":
            return end, scan.containers
    raise _bad_json(at)


def _bad_json(at: int) -> Refused:
    return Refused(problems.BAD_JSON, f"The JSON is not valid from byte {at} on.")


def _try_parse(text: bytes, containers: Containers, opened: int | None = None) -> list[Any] | None:
    before = containers.count
    containers.add(text, opened)
    try:
        found: list[Any] = _loads(text)
    except orjson.JSONDecodeError:
        containers.count = before
        return None
    return found


def _parse(text: bytes, at: int, containers: Containers, opened: int | None = None) -> list[Any]:
    """opened: the containers, where they are known."""
    found = _try_parse(text, containers, opened)
    if found is None:
        raise Refused(problems.BAD_JSON, f"The JSON is not valid within the {len(text)} bytes from byte {at} on.")
    return found
