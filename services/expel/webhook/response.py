"""A receiver's HTTP/1.1 response (RFC 9112): how its bytes are read, and which events it refuses.

The parser is strict about where a response ends and lenient elsewhere. A connection on which the end is in doubt is not reused.

A receiver that took only some events answers 200 or 207 with JSON `{"failed": [item, …]}`, at most MAX_RESPONSE bytes, not
compressed. An item names an event by `"id"` (its CloudEvents id) or by `"index"` (its 0-based place in the body). It may add
`"status"` (as if that event had been answered alone), `"retry"` (true or false, instead of deciding by the status) and
`"reason"` (text for the dead letter). Events that are not named are delivered. docs/delivery.md documents this for receivers.
"""

import re
from typing import NamedTuple

import msgspec

from services.expel.delivery import Delivery
from services.expel.retry_policy import Failure, Outcome, is_recoverable

MAX_HEAD = 16_384
MAX_RESPONSE = 4096
_MAX_INTERIM = 8
"""1xx responses before the final one."""
_MAX_CHUNK_LINE = 1024

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_TRAILER = re.compile(rb"(?:[^\r\n]+\r?\n)*\r?\n")
_EOL = re.compile(rb"\r?\n")
_WANTED = frozenset({b"connection", b"content-length", b"retry-after", b"transfer-encoding"})


class BadResponse(ValueError):
    """These bytes are not an HTTP response. The message gives the reason and repeats none of the bytes."""


class Response(NamedTuple):
    """body: at most MAX_RESPONSE bytes as received, not decompressed. whole: the body is complete."""

    status: int
    retry_after: str | None = None
    body: bytes = b""
    whole: bool = True


class ResponseReader:
    """Parses one response as it arrives. Holds at most MAX_HEAD bytes and the bytes of one `feed`.

    response: None before the head is complete, without its body before `feed` returned True.
    reusable: once the response is complete, whether another request may follow on the same connection.
    """

    def __init__(self) -> None:
        self.response: Response | None = None
        self.reusable = False
        self._buffer = bytearray()
        self._interim = 0
        self._is_chunked = False
        self._length: int | None = None
        """Of a body that is not chunked. None: the body ends with the connection."""
        self._chunks = bytearray()

    def feed(self, data: bytes) -> bool:
        """Whether the response is complete, or as much of it as is ever read. Raises BadResponse."""
        self._buffer += data
        while self.response is None:
            end = _HEAD_END.search(self._buffer)
            if (len(self._buffer) if end is None else end.start()) > MAX_HEAD:
                raise BadResponse(f"its head has more than {MAX_HEAD} bytes")
            if end is None:
                return False
            head = bytes(self._buffer[: end.start()])
            del self._buffer[: end.end()]
            self._read_head(head)
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def feed_eof(self) -> bool:
        """The connection was closed. Whether that completes the response."""
        is_end = self.response is not None and self._length is None and not self._is_chunked
        return is_end and self._end(self._buffer, whole=True)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\n")
        status_line = _STATUS.fullmatch(first.rstrip(b"\r"))
        if status_line is None:
            raise BadResponse("it has no status line of HTTP/1")
        status = int(status_line[2])
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > _MAX_INTERIM:
                raise BadResponse(f"a {status} answers no POST")
            return
        fields = _read_fields(lines)
        connection = fields.get(b"connection", b"").lower()
        self.reusable = b"close" not in connection and (status_line[1] == b"1" or b"keep-alive" in connection)
        self._find_end(status, fields)
        retry_after = fields.get(b"retry-after")
        self.response = Response(status, None if retry_after is None else retry_after.decode("latin-1"), whole=False)

    def _find_end(self, status: int, fields: dict[bytes, bytes]) -> None:
        """RFC 9112, 6.3."""
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if status in (204, 304):
            self._length = 0
        elif coding is not None:
            self._is_chunked = coding.lower() == b"chunked"
            self.reusable &= length is None
        elif length is not None:
            if not length.isdigit():
                raise BadResponse("its Content-Length is not a number")
            self._length = int(length[:19])

    def _read_plain(self) -> bool:
        if self._length is not None and len(self._buffer) >= self._length <= MAX_RESPONSE:
            body = self._buffer[: self._length]
            del self._buffer[: self._length]
            return self._end(body, whole=True)
        return len(self._buffer) > MAX_RESPONSE and self._end(self._buffer, whole=False)

    def _read_chunks(self) -> bool:
        buffer, body = self._buffer, self._chunks
        while (line := _CHUNK.match(buffer)) is not None:
            size, start = int(line[1], 16), line.end()
            if not size:
                return self._read_trailer(start)
            piece = buffer[start : start + size]
            if len(body) + len(piece) > MAX_RESPONSE:
                return self._end(body + piece, whole=False)
            end = _EOL.match(buffer, start + size)
            if end is None:
                if len(buffer) > start + size + 1:
                    raise BadResponse("a chunk is longer than it says")
                return False
            body += piece
            del buffer[: end.end()]
        if b"\n" in buffer or len(buffer) > _MAX_CHUNK_LINE:
            raise BadResponse("a chunk has no size")
        return False

    def _read_trailer(self, start: int) -> bool:
        end = _TRAILER.match(self._buffer, start)
        if end is None:
            if len(self._buffer) > MAX_HEAD:
                raise BadResponse(f"its trailer has more than {MAX_HEAD} bytes")
            return False
        del self._buffer[: end.end()]
        return self._end(self._chunks, whole=True)

    def _end(self, body: bytearray, *, whole: bool) -> bool:
        assert self.response is not None
        has_end = self._is_chunked or self._length is not None
        self.reusable &= whole and has_end and not self._buffer
        self.response = self.response._replace(
            body=bytes(body[:MAX_RESPONSE]), whole=whole and len(body) <= MAX_RESPONSE
        )
        return True


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """The headers that are used. Two different values of a length header leave the end of the response in doubt: BadResponse."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise BadResponse("a line of its head is not a header")
        name = name.lower()
        if name in _WANTED:
            value = value.strip()
            if fields.setdefault(name, value) != value and name in (b"content-length", b"transfer-encoding"):
                raise BadResponse(f"it has several {name.decode()}")
    return fields


_MAX_EXCERPT = 200
_MAX_REASON = 500

BAD_RESPONSE = "bad_answer"
ITEM_FAILED = "item_failed"


class FailedItem(msgspec.Struct):
    """One event that the receiver refused."""

    id: str | None = None
    index: int | None = None
    status: int | None = None
    retry: bool | None = None
    reason: str | None = None


class PartialResponse(msgspec.Struct):
    """The response's body; other members are ignored."""

    failed: list[FailedItem]


_decode = msgspec.json.Decoder(PartialResponse).decode


def read_outcome(status: int, body: bytes, whole: bool, delivery: Delivery) -> Outcome:
    """The outcome of a 2xx with this body.

    When the body may name failed events but cannot be parsed, no event counts as delivered: better twice than never.
    """
    if status != 207 and b'"failed"' not in body:
        return None
    if not whole:
        return _bad(f"a response that names failed events has at most {MAX_RESPONSE} bytes")
    try:
        items = _decode(body).failed
    except (msgspec.DecodeError, RecursionError):
        return _bad('a 207 needs JSON like {"failed": [{"id": "…"}]}') if status == 207 else _read_odd_body(body)
    return _by_index(items, delivery)


def _read_odd_body(body: bytes) -> Outcome:
    """A 200 whose body has "failed" in another form: `{"failed": 0}` refuses nothing, a list that cannot be parsed does."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None  # not JSON: a page or a text that contains the word
    named = value.get("failed") if isinstance(value, dict) else None
    return _bad("the list of failed events is not valid") if isinstance(named, list) else None


def _by_index(items: list[FailedItem], delivery: Delivery) -> Outcome:
    places: dict[bytes, list[int]] = {}
    for index, event_id in enumerate(delivery.ids):
        places.setdefault(event_id, []).append(index)
    failures: dict[int, Failure] = {}
    for item in items:
        if item.index is not None:
            found = [item.index] if 0 <= item.index < len(delivery) else []
        else:
            found = places.get((item.id or "").encode(errors="replace"), [])
        if not found:
            return _bad("the response names an event that was not in the request")
        failures.update(dict.fromkeys(found, _fail_item(item)))
    return failures or None


def _fail_item(item: FailedItem) -> Failure:
    recoverable = item.retry if item.retry is not None else item.status is None or is_recoverable(item.status)
    reason = ITEM_FAILED if item.status is None or not 100 <= item.status <= 599 else f"http_{item.status}"
    detail = "the receiver refused this event" + (f": {_printable(item.reason[:_MAX_REASON])}" if item.reason else "")
    return Failure(reason, detail, recoverable)


def _bad(detail: str) -> Failure:
    return Failure(BAD_RESPONSE, detail, recoverable=True)


def excerpt(body: bytes) -> str:
    """The beginning of a response, printable, on one line."""
    return _printable(body[:_MAX_EXCERPT].decode(errors="replace"))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()
