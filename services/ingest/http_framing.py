"""aiohttp's HTTP/1.1 parser, the checks that it does not make, and the answers to its errors.

The compiled parser (llhttp, strict) refuses by itself: Content-Length with Transfer-Encoding, twice, negative or not a
number; two Hosts, and none in HTTP/1.1; bare CR or LF, spaces before colons, obsolete folding, bad chunk sizes.
"""

import asyncio

from aiohttp import hdrs
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpVersion10, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import StreamReader

from services.ingest import problems
from services.ingest.problems import Refused

MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
MAX_HEAD_BYTES = 32_768
READ_BUFFER_BYTES = 1 << 18

Incoming = tuple[RawRequestMessage, StreamReader]
"""A request's head and where its body arrives."""


class HeadTooLarge(HttpProcessingError):
    """All lines of a head together are too long."""


class HttpProtocol(BaseProtocol):
    """aiohttp's protocol object with its request parser and its flow control, under public names.

    This class holds every use of aiohttp's private parts. `unit/ingest/test_http_framing.py` fails on an upgrade until somebody
    has read them again. `transport` is None after the connection was lost.
    """

    __slots__ = ("loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.loop = loop  # no property: it would cost each request two calls

    def open_parser(self) -> None:
        """Open a parser that stops after each request. It does not decompress: aiohttp accepts half a gzip body."""
        self._parser = HttpRequestParser(
            self,
            self._loop,
            READ_BUFFER_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_LINE_BYTES,
            auto_decompress=False,
            max_msg_queue_size=1,
        )

    def close_parser(self) -> None:
        """Parse nothing more."""
        self._parser = None

    def feed_parser(self, data: bytes) -> Incoming | None:
        """The next request, if its head is complete. Raises HttpProcessingError."""
        requests, _, _ = self._parser.feed_data(data) if self._parser is not None else ((), False, b"")
        return requests[0] if requests else None

    def resume_reading(self, resume_parser: bool = True) -> None:
        """The parser calls this at the end of every body. Reading is rarely paused then."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def hold_reading(self) -> None:
        """Read no more from the socket until `release_reading`. Idempotent."""
        if not self._buffer_paused:
            self._pause_reading_for_buffer()

    def release_reading(self) -> None:
        """Undo `hold_reading`; the parser's own pause stays."""
        if self._buffer_paused:
            self._resume_reading_for_buffer()

    def read_on(self) -> None:
        """Read from the socket again, whoever paused it."""
        self._resume_transport_reading()

    async def drain_writes(self) -> None:
        """Return when the client has received most of the written bytes. Raises ConnectionError when it is gone."""
        await self._drain_helper()


def check_head_size(message: RawRequestMessage) -> None:
    """Raises HeadTooLarge. Called only when so much came at once that a head may be too large."""
    size = len(message.path) + sum(len(name) + len(value) + 4 for name, value in message.raw_headers)
    if size > MAX_HEAD_BYTES:
        raise HeadTooLarge


def switches(message: RawRequestMessage) -> bool:
    """Whether the client asks for another protocol after this request. Ingest has none; the parser drops the bytes behind."""
    return bool(message.upgrade) or message.method == "CONNECT"


def check_head(message: RawRequestMessage) -> None:
    """Raises Refused unless this is HTTP/1.1, or HTTP/1.0 with a Host; and for every transfer coding but chunked."""
    if hdrs.TRANSFER_ENCODING in message.headers:
        _check_coding(message)
    if message.version is HttpVersion11:
        return
    if message.version != HttpVersion10 or hdrs.HOST not in message.headers:
        raise Refused(problems.BAD_REQUEST, "The request is not HTTP/1.1.")


def _check_coding(message: RawRequestMessage) -> None:
    """The parser checks only the last coding. A body with another coding would be stored as it is.

    It accepts an empty header, behind which a proxy may read a body where ingest reads the next request.
    """
    if not message.chunked:
        raise Refused(problems.BAD_REQUEST, "The header Transfer-Encoding names no coding.", ends=True)
    if message.version is not HttpVersion11:
        raise Refused(problems.BAD_REQUEST, "The request has a Transfer-Encoding, and is not HTTP/1.1.", ends=True)
    if message.headers[hdrs.TRANSFER_ENCODING].strip(" \t,").lower() != "chunked":
        raise Refused(
            problems.UNSUPPORTED_CODING,
            "The Transfer-Encoding is not chunked. Compress with Content-Encoding: gzip.",
            ends=True,
        )


def explain(error: HttpProcessingError) -> Refused:
    """The answer to bytes that are not HTTP."""
    if isinstance(error, LineTooLong | HeadTooLarge) or error.message == "Too many headers received":
        return Refused(
            problems.HEAD_TOO_LARGE,
            f"The head of the request has more than {MAX_HEADERS} headers, {MAX_LINE_BYTES} bytes in a header, or "
            f"{MAX_HEAD_BYTES} bytes in all. Send fewer or shorter headers.",
        )
    return Refused(problems.BAD_REQUEST, "The bytes are not a valid HTTP/1.1 request.")
