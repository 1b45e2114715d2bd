"""Compressed bodies, unpacked by ourselves and bounded: gzip and zstd.

A body must be exactly what its encoding says: complete, with a matching checksum, nothing behind it. Several gzip members one
behind the other are one body (RFC 1952; `cat a.gz b.gz` and parallel compressors make them), at most MAX_MEMBERS; of zstd
one frame is taken, with a window of at most 8 MiB (what RFC 8878 asks every decoder to support).
"""

import zlib

import zstandard

from services.ingest import problems
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


def _too_large(limit: int) -> Refused:
    return Refused(problems.BODY_TOO_LARGE, f"At most {limit} bytes are allowed, unpacked too.")
