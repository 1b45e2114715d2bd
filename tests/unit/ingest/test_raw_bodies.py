"""Bodies and what they mean, byte by byte over a raw socket: what is stored, what is refused, and that the connection goes on."""

import gzip
import zlib

import pytest
import zstandard

from services.ingest.json_events import Limits
from tests.unit.ingest.raw_case import Case, post, try_case

OK = ((200, None),)
GOOD = b'{"a":1}'
PACKED = gzip.compress(GOOD)
LARGE = Limits(events=10_000, event_bytes=1_000_000, body_bytes=5_000_000)
LISTS = b'{"a":[' + b"[]," * 332_000 + b"0]}"
LINES, BINARY = "application/x-ndjson", "application/octet-stream"
CE = ("ce-specversion: 1.0", "ce-id: e", "ce-source: /s", "ce-type: t")
WINDOW = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=24))


def refused(status: int, problem: str) -> tuple[tuple[int, str | None], ...]:
    return ((status, problem),)


def nested(levels: int) -> bytes:
    """An object of so many levels."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def wide_window() -> bytes:
    """A zstd frame whose head asks for 16 MiB of memory."""
    packer = WINDOW.compressobj()
    return packer.compress(GOOD) + packer.flush()


def plain(name: str, body: bytes, answers: tuple[tuple[int, str | None], ...], *stored: bytes) -> Case:
    """A JSON body to a stream that reads no fields."""
    return Case(name, post(body), answers, open=True, stored=stored)


def packed(name: str, body: bytes, encoding: str, answers: tuple[tuple[int, str | None], ...], *stored: bytes) -> Case:
    """A body under a Content-Encoding."""
    return Case(name, post(body, f"Content-Encoding: {encoding}"), answers, open=True, stored=stored)


def fields(name: str, body: bytes, answers: tuple[tuple[int, str | None], ...], *stored: bytes) -> Case:
    """A JSON body to a stream that reads id, key and time."""
    return Case(name, post(body, stream="orders"), answers, open=True, stored=stored, stream="orders")


def media(
    name: str, body: bytes, kind: str | None, answers: tuple[tuple[int, str | None], ...], *stored: bytes
) -> Case:
    """A body of another media type."""
    return Case(name, post(body, media=kind), answers, open=True, stored=stored)


BAD_JSON, EMPTY = refused(400, "bad-json"), refused(400, "empty-body")
NOTHING, DAMAGED = refused(422, "nothing-accepted"), refused(400, "bad-compression")
SOME = ((207, None),)

CASES = [
    plain("one object", GOOD, OK, GOOD),
    plain("an array", b'[{"a":1}, {"b":2}]', OK, GOOD, b'{"b":2}'),
    plain("an empty array", b"[]", OK),
    plain("white space around", b" \r\n\t{} \n", OK, b"{}"),
    plain("an empty body", b"", EMPTY),
    plain("white space only", b" \r\n ", EMPTY),
    plain("null", b"null", BAD_JSON),
    plain("a text", b'"a"', BAD_JSON),
    plain("a number", b"7", BAD_JSON),
    plain("an array with a number", b'[1,{"a":1}]', SOME, GOOD),
    plain("an array of nothing else", b"[1]", NOTHING),
    plain("something behind the end", b"{}x", BAD_JSON),
    plain("two objects without an array", b"{}{}", BAD_JSON),
    plain("a comma before the end", b"[{},]", BAD_JSON),
    plain("cut off", b'[{"a":', BAD_JSON),
    plain("NaN", b'{"a":NaN}', BAD_JSON),
    plain("Infinity", b'{"a":-Infinity}', BAD_JSON),
    plain("a number beyond a double", b'{"a":1e400}', BAD_JSON),
    plain("an integer beyond 64 bits is kept", b'{"a":36893488147419103233}', OK, b'{"a":36893488147419103233}'),
    plain("duplicate keys are kept", b'{"a":1,"a":2}', OK, b'{"a":1,"a":2}'),
    plain("a byte order mark", b"\xef\xbb\xbf{}", BAD_JSON),
    plain("not UTF-8", b'{"a":"\xff"}', BAD_JSON),
    plain("a lone surrogate", b'{"a":"\\ud800"}', BAD_JSON),
    plain("a raw control character", b'{"a":"\x01"}', BAD_JSON),
    plain("a comment", b"{} // no", BAD_JSON),
    plain("128 levels", nested(128), OK, nested(128)),
    plain("129 levels", nested(129), refused(400, "too-deep")),
    plain("20,000 levels", b"[" * 20_000 + b"]" * 20_000, BAD_JSON),
    plain("an event over the limit", b'{"a":"%b"}' % (b"x" * 2000), refused(413, "event-too-large")),
    plain("one of two over the limit", b'[{"a":"%b"},{"a":1}]' % (b"x" * 2000), SOME, GOOD),
    plain("too many events", b"[" + b"{}," * 100 + b"{}]", refused(413, "too-many-events")),
    Case("a body over the limit", post(b" " * 50_001), refused(413, "body-too-large"), open=True),
    media("lines", b'{"a":1}\n\n{"b":2}\n', LINES, OK, GOOD, b'{"b":2}'),
    media("one bad line", b'{"a":1}\n{"b":\n', LINES, SOME, GOOD),
    media("empty lines only", b"\n\n", LINES, EMPTY),
    media("too many lines", b"\n" * 101, LINES, refused(413, "too-many-events")),
    media("another media type", GOOD, "text/plain", refused(415, "unsupported-media-type")),
    media("no media type", GOOD, None, refused(415, "unsupported-media-type")),
    media("another character set", GOOD, "application/json; charset=latin-1", refused(415, "unsupported-media-type")),
    packed("gzip", PACKED, "gzip", OK, GOOD),
    packed("gzip, two members", gzip.compress(b'{"a"') + gzip.compress(b":1}"), "gzip", OK, GOOD),
    packed("gzip, cut off", PACKED[:12], "gzip", DAMAGED),
    packed("gzip, no trailer", PACKED[:-8], "gzip", DAMAGED),
    packed("gzip, half a trailer", PACKED[:-4], "gzip", DAMAGED),
    packed("gzip, wrong checksum", PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "gzip", DAMAGED),
    packed("gzip, something behind", PACKED + b"x", "gzip", DAMAGED),
    packed("gzip, a bomb", gzip.compress(b" " * 5_000_000), "gzip", refused(413, "body-too-large")),
    packed("gzip that is zlib", zlib.compress(GOOD), "gzip", DAMAGED),
    packed("gzip that is not packed", GOOD, "gzip", DAMAGED),
    packed("zstd", zstandard.compress(GOOD), "zstd", OK, GOOD),
    packed("zstd, cut off", zstandard.compress(GOOD)[:-2], "zstd", DAMAGED),
    packed("zstd, a huge window", wide_window(), "zstd", refused(413, "body-too-large")),
    packed("zstd, two frames", zstandard.compress(GOOD) * 2, "zstd", DAMAGED),
    packed("an unknown encoding", GOOD, "br", refused(415, "unsupported-encoding")),
    packed("gzip twice", gzip.compress(PACKED), "gzip, gzip", refused(415, "unsupported-encoding")),
    Case(
        "two encodings, a header each",
        post(PACKED, "Content-Encoding: gzip", "Content-Encoding: gzip"),
        refused(415, "unsupported-encoding"),
        open=True,
    ),
    Case(
        "gzip of events of empty lists",
        post(gzip.compress(b"[" + b",".join([LISTS] * 4) + b"]"), "Content-Encoding: gzip"),
        refused(413, "too-many-containers"),
        open=True,
        limits=LARGE,
    ),
    fields("a NUL in an id", b'{"id":"a\\u0000"}', refused(400, "bad-id-characters")),
    fields("an id of 257 bytes", b'{"id":"%b"}' % (b"x" * 257), NOTHING),
    fields("an id that is a fraction", b'[{"id":1.5},{"id":"b"}]', SOME, b'{"id":"b"}'),
    fields("a key that is an object", b'{"customer":{"id":{}}}', NOTHING),
    fields("a time in the year 9999", b'{"at":"9999-12-31T23:59:59Z"}', NOTHING),
    fields("a time before 1970", b'{"at":-1}', NOTHING),
    fields("a time without an offset", b'{"at":"2026-01-02T03:04:05"}', NOTHING),
    Case("a CloudEvent in headers", post(b"\x00\xff", *CE, media=BINARY), OK, open=True, stored=(b"\x00\xff",)),
    Case("a CloudEvent without an id", post(b"x", CE[0], *CE[2:], media=BINARY), NOTHING, open=True),
    media("a batch of CloudEvents that is none", b"{}", "application/cloudevents-batch+json", BAD_JSON),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
async def test_body(case: Case) -> None:
    """Broken: ingest stores what the client did not send, refuses what it may send, or loses step on the connection."""
    await try_case(case)


def test_the_table_is_whole() -> None:
    """Broken: a case stands twice, or most of them are gone."""
    assert len({case.name for case in CASES}) == len(CASES) >= 44
