"""Reads the body of a request, bounded in size and time, and unpacks gzip and zstd.

The connection counts the body against the bytes that this process may hold.

A packed body must be exactly what its encoding says: complete, with a matching checksum and nothing after its end. Several
gzip members in sequence are one body (RFC 1952; `cat a.gz b.gz` and parallel compressors make them), at most MAX_MEMBERS. A
zstd body is one frame, with a window of at most 8 MiB (RFC 8878 asks every decoder to support that size).
"""

import zlib

import zstandard
from aiohttp.http import RawRequestMessage

from services.ingest import problems
from services.ingest.answer import CONTINUE
from services.ingest.connection import FOREVER, Connection, Phase
from services.ingest.problems import Refused

MAX_WINDOW_BYTES = 8 << 20
MAX_MEMBERS = 1000
ENCODINGS = frozenset(("gzip", "x-gzip", "zstd"))
_GZIP = 16 + zlib.MAX_WBITS
_UNKNOWN_SIZE = zstandard.CONTENTSIZE_UNKNOWN


def choose_encoding(values: list[str]) -> str | None:
    """The encoding that a request's Content-Encoding headers name; None for none. Raises Refused for unknown and doubled ones."""
    if not values or values == ["identity"]:
        return None
    encoding = values[0].strip().lower()
    if len(values) > 1 or encoding not in ENCODINGS:
        raise Refused(problems.UNSUPPORTED_ENCODING, "One of gzip and zstd, once, or none is supported.")
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
            raise _damaged() from None
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if not member.eof:
            raise _damaged()
        body = member.unused_data
        if not body:
            return b"".join(parts)
    raise Refused(problems.BAD_COMPRESSION, f"At most {MAX_MEMBERS} gzip members are allowed.")


def _unpack_zstd(body: bytes, limit: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.window_size > MAX_WINDOW_BYTES:
            raise Refused(problems.BODY_TOO_LARGE, f"A zstd window has at most {MAX_WINDOW_BYTES} bytes.")
        if frame.content_size != _UNKNOWN_SIZE and frame.content_size > limit:
            raise _too_large(limit)
        if frame.content_size not in (0, _UNKNOWN_SIZE):  # the library does not read on when a head says 0
            return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
        return _unpack_zstd_stream(body, limit)
    except zstandard.ZstdError:
        raise _damaged() from None


def _unpack_zstd_stream(body: bytes, limit: int) -> bytes:
    """A frame of unknown size, or of 0: the reader is bounded, the object notices a missing end and left-overs."""
    with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body) as reader:
        if len(reader.read(limit + 1)) > limit:
            raise _too_large(limit)
    whole = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    unpacked = whole.decompress(body)
    if not whole.eof or whole.unused_data:
        raise _damaged()
    return unpacked


def _damaged() -> Refused:
    return Refused(problems.BAD_COMPRESSION, "It is cut off, altered, or something follows its end.")


def _too_large(limit: int, note: str = ", unpacked too") -> Refused:
    return Refused(problems.BODY_TOO_LARGE, f"At most {limit} bytes are allowed{note}.")


async def read_body(connection: Connection, message: RawRequestMessage, limit: int) -> bytes:
    """The body of the request under way, at most `limit` bytes.

    Raises Refused: too large, too slow, incomplete, or too much under way in this process. Raises ClientGone.
    """
    payload = connection.payload
    if payload.is_eof():
        body: bytes = payload.read_nowait()
        if len(body) > limit:
            raise _too_large(limit, "")
        connection.server.check_room()
        return body
    if int(message.headers.get("Content-Length", "0")) > limit:
        raise _too_large(limit, "")
    connection.server.check_room()
    _expect(connection, message)
    connection.wait(Phase.BODY, connection.server.timeouts.body)
    try:
        return await _read_chunks(connection, limit)
    finally:
        connection.phase, connection.deadline = Phase.HANDLING, FOREVER


async def _read_chunks(connection: Connection, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await connection.payload.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, "")
        connection.server.check_room()
    return b"".join(chunks)


def _expect(connection: Connection, message: RawRequestMessage) -> None:
    """Tell a client that waits for permission to send its body."""
    expectation = message.headers.get("Expect")
    if expectation is None:
        return
    if expectation.lower() != "100-continue":
        raise Refused(problems.EXPECTATION_FAILED, "Only 100-continue is supported.")
    if connection.transport is not None:
        connection.transport.write(CONTINUE)
