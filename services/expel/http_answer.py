"""Reading a receiver's HTTP/1.1 answer (RFC 9112): little of it, raw, and never trusted.

Strict about where an answer ends, lenient elsewhere. A connection on which that is in any doubt is not used again.
"""

import re
from typing import NamedTuple

MAX_HEAD = 16_384
MAX_ANSWER = 4096
_MAX_INTERIM = 8
"""1xx answers before the real one."""
_MAX_CHUNK_LINE = 1024

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_TRAILER = re.compile(rb"(?:[^\r\n]+\r?\n)*\r?\n")
_EOL = re.compile(rb"\r?\n")
_WANTED = frozenset({b"connection", b"content-length", b"retry-after", b"transfer-encoding"})


class BadAnswer(ValueError):
    """These bytes are no HTTP answer; the message says why and repeats none of them."""


class Answer(NamedTuple):
    """body: at most MAX_ANSWER bytes as they came, not unpacked. whole: nothing of it is missing."""

    status: int
    retry_after: str | None = None
    body: bytes = b""
    whole: bool = True


class AnswerReader:
    """One answer, fed as it arrives. Holds at most MAX_HEAD bytes and what one `feed` brought.

    answer: None before the head is complete; without its body before `feed` returned True.
    reusable: once the answer is complete, whether another request may follow on the same connection.
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.reusable = False
        self._buffer = bytearray()
        self._interim = 0
        self._is_chunked = False
        self._length: int | None = None
        """Of a body that is not chunked; None: it ends with the connection."""
        self._chunks = bytearray()

    def feed(self, data: bytes) -> bool:
        """Whether the answer is complete: all of it, or as much as is read. Raises BadAnswer."""
        self._buffer += data
        while self.answer is None:
            end = _HEAD_END.search(self._buffer)
            if (len(self._buffer) if end is None else end.start()) > MAX_HEAD:
                raise BadAnswer(f"its head has more than {MAX_HEAD} bytes")
            if end is None:
                return False
            head = bytes(self._buffer[: end.start()])
            del self._buffer[: end.end()]
            self._read_head(head)
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def feed_eof(self) -> bool:
        """The connection was closed: whether the answer is complete by that."""
        is_end = self.answer is not None and self._length is None and not self._is_chunked
        return is_end and self._end(self._buffer, whole=True)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\n")
        status_line = _STATUS.fullmatch(first.rstrip(b"\r"))
        if status_line is None:
            raise BadAnswer("it does not begin like one of HTTP/1")
        status = int(status_line[2])
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > _MAX_INTERIM:
                raise BadAnswer(f"a {status} answers no POST")
            return
        fields = _read_fields(lines)
        connection = fields.get(b"connection", b"").lower()
        self.reusable = b"close" not in connection and (status_line[1] == b"1" or b"keep-alive" in connection)
        self._find_end(status, fields)
        retry_after = fields.get(b"retry-after")
        self.answer = Answer(status, None if retry_after is None else retry_after.decode("latin-1"), whole=False)

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
                raise BadAnswer("its Content-Length is no number")
            self._length = int(length[:19])

    def _read_plain(self) -> bool:
        if self._length is not None and len(self._buffer) >= self._length <= MAX_ANSWER:
            body = self._buffer[: self._length]
            del self._buffer[: self._length]
            return self._end(body, whole=True)
        return len(self._buffer) > MAX_ANSWER and self._end(self._buffer, whole=False)

    def _read_chunks(self) -> bool:
        buffer, body = self._buffer, self._chunks
        while (line := _CHUNK.match(buffer)) is not None:
            size, start = int(line[1], 16), line.end()
            if not size:
                return self._read_trailer(start)
            piece = buffer[start : start + size]
            if len(body) + len(piece) > MAX_ANSWER:
                return self._end(body + piece, whole=False)
            end = _EOL.match(buffer, start + size)
            if end is None:
                if len(buffer) > start + size + 1:
                    raise BadAnswer("a chunk is longer than it says")
                return False
            body += piece
            del buffer[: end.end()]
        if b"\n" in buffer or len(buffer) > _MAX_CHUNK_LINE:
            raise BadAnswer("a chunk has no size")
        return False

    def _read_trailer(self, start: int) -> bool:
        end = _TRAILER.match(self._buffer, start)
        if end is None:
            if len(self._buffer) > MAX_HEAD:
                raise BadAnswer(f"its trailer has more than {MAX_HEAD} bytes")
            return False
        del self._buffer[: end.end()]
        return self._end(self._chunks, whole=True)

    def _end(self, body: bytearray, *, whole: bool) -> bool:
        assert self.answer is not None
        has_end = self._is_chunked or self._length is not None
        self.reusable &= whole and has_end and not self._buffer
        self.answer = self.answer._replace(body=bytes(body[:MAX_ANSWER]), whole=whole and len(body) <= MAX_ANSWER)
        return True


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """The headers that we look at. One of these that stands twice, differently, leaves open where the answer ends."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise BadAnswer("a line of its head is no header")
        name = name.lower()
        if name in _WANTED:
            value = value.strip()
            if fields.setdefault(name, value) != value and name in (b"content-length", b"transfer-encoding"):
                raise BadAnswer(f"it has several {name.decode()}")
    return fields
