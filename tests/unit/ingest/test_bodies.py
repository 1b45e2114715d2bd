"""Which body gets which answer, and what of it is stored: FAULTS.md "Bad inputs: Ingest", line by line."""

import gzip
import zlib

import orjson
import pytest
import zstandard

from tests.unit.ingest.service import LIMITS, Service

NDJSON = "application/x-ndjson"


def nested(depth: int) -> bytes:
    """An object nested so deep, the outermost one counted."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


async def test_an_array_is_stored_byte_for_byte(service: Service) -> None:
    """Payloads must come out as they went in: number formats, key order, spaces, escapes, integers beyond 64 bits."""
    texts = [
        b'{"b":1.50,"a":1e2}',
        b'{ "big" : 123456789012345678901234567890, "neg":-0 }',
        b'{"s":"\\u00e9\\ud83d\\ude00 \xc3\xa9"}',
        b'{"a":1,"a":2}',
        b"{}",
    ]
    reply = await service.post(b" [" + b" ,\n".join(texts) + b"]\n")
    assert (reply.status, reply.json()) == (200, {"accepted": 5})
    assert service.values() == texts


async def test_one_object_is_one_event(service: Service) -> None:
    """The smallest client: one event, no array."""
    reply = await service.post(b'  {"a": 1}\n')
    assert (reply.status, reply.json()) == (200, {"accepted": 1})
    assert service.values() == [b'{"a": 1}']


async def test_an_empty_array_is_accepted(service: Service) -> None:
    """A client that flushes an empty buffer did nothing wrong (and a CloudEvents batch may be empty)."""
    reply = await service.post(b"[]")
    assert (reply.status, reply.json()) == (200, {"accepted": 0})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "empty-body"),
        (b" \n", "empty-body"),
        (nested(129), "too-deep"),
        (b"[" + nested(129) + b"]", "too-deep"),
        (b"[" * 1500 + b"]" * 1500, "bad-json"),
        (b'{"a":NaN}', "bad-json"),
        (b'{"a":Infinity}', "bad-json"),
        (b'{"a":-Infinity}', "bad-json"),
        (b'{"a":1e400}', "bad-json"),
        (b'[{"a":1},{"a":-1E+400}]', "bad-json"),
        (b'{"a":' + b"9" * 400 + b"}", "bad-json"),
        (b'{"a":"\xff"}', "bad-json"),
        (b'{"a":"\xed\xa0\x80"}', "bad-json"),
        (b'{"a":"\\ud800"}', "bad-json"),
        (b'{"\\udc00":1}', "bad-json"),
        (b"\xef\xbb\xbf{}", "bad-json"),
        (b'{"a":"\x00"}', "bad-json"),
        (b'{"a":1}{"b":2}', "bad-json"),
        (b'[{"a":1},]', "bad-json"),
        (b"{'a':1}", "bad-json"),
        (b'{"a":01}', "bad-json"),
        (b'"text"', "bad-json"),
        (b"1", "bad-json"),
        (b"null", "bad-json"),
    ],
)
async def test_a_body_that_is_not_good_json_is_400(service: Service, body: bytes, problem: str) -> None:
    """What we accept, every consumer must be able to read; nothing of a bad body is stored."""
    reply = await service.post(body)
    assert (reply.status, reply.problem) == (400, problem)
    assert service.values() == []


async def test_an_array_of_arrays_that_is_too_deep_is_400(service: Service) -> None:
    """Depth is found wherever it hides: behind many scalars, which have no brackets of their own."""
    body = b"[" + b"1," * 90 + b"[" * 130 + b"]" * 130 + b"]"
    reply = await service.post(body)
    assert (reply.status, reply.problem) == (400, "too-deep")


@pytest.mark.parametrize("body", [nested(128), b"[" + nested(128) + b"," + nested(100) + b"]"])
async def test_128_levels_are_accepted(service: Service, body: bytes) -> None:
    """The limit is a limit, not a rough guess."""
    assert (await service.post(body)).status == 200


async def test_brackets_in_texts_are_no_depth(service: Service) -> None:
    """The quick count of brackets must not refuse what the exact look allows."""
    assert (await service.post(orjson.dumps({"a": "[" * 500}))).status == 200
    assert (await service.post(orjson.dumps([{"a": "{" * 500}] * 3))).status == 200


async def test_an_answer_never_repeats_the_input(service: Service) -> None:
    """Error texts end up in logs and pages; what a client sends must not."""
    for body in (b'{"a":"hunter2\x01"}', b'[{"hunter2":1},"hunter2"]', b"hunter2", b'{"id":"hunter2\\u0000"}'):
        reply = await service.post(body, "orders")
        assert b"hunter2" not in reply.body


async def test_elements_that_are_no_objects_are_refused_one_by_one(service: Service) -> None:
    """One bad element must not cost the good ones; its index must be exact."""
    reply = await service.post(b'[{"a":1},2,"x",null,[{}],{"b":2}]')
    assert reply.status == 207
    document = reply.json()
    assert document["accepted"] == 2
    assert [(item["index"], item["reason"], item["retry"]) for item in document["refused"]] == [
        (index, "not-an-object", False) for index in (1, 2, 3, 4)
    ]
    assert service.values() == [b'{"a":1}', b'{"b":2}']


async def test_nothing_accepted_is_422(service: Service) -> None:
    """A client that looks at the status alone must see that nothing was stored."""
    reply = await service.post(b"[1,2]")
    assert (reply.status, reply.problem) == (422, "nothing-accepted")
    assert [item["index"] for item in reply.json()["refused"]] == [0, 1]


async def test_too_many_events_are_413(service: Service) -> None:
    """A body of tiny events costs far more than its bytes."""
    allowed, more = b",".join([b"{}"] * LIMITS.events), b",".join([b"{}"] * (LIMITS.events + 1))
    assert (await service.post(b"[" + allowed + b"]")).status == 200
    for body, media in ((b"[" + more + b"]", "application/json"), (more.replace(b",", b"\n"), NDJSON)):
        reply = await service.post(body, media=media)
        assert (reply.status, reply.problem) == (413, "too-many-events")
    assert len(service.values()) == LIMITS.events


async def test_an_event_over_the_limit_is_413_or_its_item_refused(service: Service) -> None:
    """One client's giant must not be stored, nor cost its neighbours."""
    giant = orjson.dumps({"a": "x" * LIMITS.event_bytes})
    reply = await service.post(giant)
    assert (reply.status, reply.problem) == (413, "event-too-large")
    reply = await service.post(b"[{}," + giant + b"]")
    assert reply.status == 207
    assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(1, "event-too-large")]
    assert service.values() == [b"{}"]


async def test_a_body_over_the_limit_is_413(service: Service) -> None:
    """Before anything of it is parsed."""
    reply = await service.post(b"[" + b" " * LIMITS.body_bytes + b"]")
    assert (reply.status, reply.problem) == (413, "body-too-large")


async def test_one_bad_line_is_that_line_alone(service: Service) -> None:
    """NDJSON exists so that lines stand alone: each kind of bad line costs itself and is named by its number."""
    lines = [
        b'{"a":1}',
        b"{oops",
        b"",
        b'{"a":1e400}',
        b'{"a":"\xff"}',
        b'{"a":1},{"b":2}',
        nested(129),
        orjson.dumps({"a": "x" * LIMITS.event_bytes}),
        b"7",
        b'{"z":9}\r',
    ]
    reply = await service.post(b"\n".join(lines) + b"\n", media=NDJSON)
    assert reply.status == 207
    assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [
        (1, "bad-json"),
        (3, "bad-json"),
        (4, "bad-json"),
        (5, "bad-json"),
        (6, "too-deep"),
        (7, "event-too-large"),
        (8, "not-an-object"),
    ]
    assert service.values() == [b'{"a":1}', b'{"z":9}']


async def test_lines_never_join(service: Service) -> None:
    """Two broken lines that make one valid text together must both be refused, whatever a third line does to the count."""
    reply = await service.post(b'{"a":1\n"b":2}\n{"c":3},{"d":4}', media=NDJSON)
    assert reply.status == 422
    assert service.values() == []


@pytest.mark.parametrize("body", [b"", b"\n\r\n \n", b'\xef\xbb\xbf{"a":1}'])
async def test_ndjson_without_a_line_or_with_a_mark_is_400(service: Service, body: bytes) -> None:
    """The same rules for the text as a whole as in JSON."""
    assert (await service.post(body, media=NDJSON)).status == 400


@pytest.mark.parametrize("media", ["application/x-ndjson", "application/jsonl", "application/jsonl; charset=UTF-8"])
async def test_ndjson_has_two_names(service: Service, media: str) -> None:
    """Neither is registered; both are used."""
    reply = await service.post(b'{"a":1}\n{"b":2}', media=media)
    assert (reply.status, reply.json()) == (200, {"accepted": 2})


@pytest.mark.parametrize("media", [None, "text/plain", "application/xml", "application/json; charset=latin-1", "json"])
async def test_another_content_type_is_415(service: Service, media: str | None) -> None:
    """Guessing what a body is leads to storing what it is not."""
    reply = await service.post(b"{}", media=media)
    assert (reply.status, reply.problem) == (415, "unsupported-media-type")


@pytest.mark.parametrize("media", [b"appl\xb7\xd0\x88\xd7ion/json", b"\xff", b'application/json; a="' + b";" * 8000])
async def test_a_content_type_that_nobody_parses_is_415(service: Service, media: bytes) -> None:
    """Broken: bytes that are no text are our fault (500), or a long list of parameters costs 60 ms of everybody's time."""
    head = (
        b"POST /v1/streams/plain/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: %b\r\n\r\n{}"
    )
    reply = await service.send(head % media)
    assert (reply.status, reply.problem) == (415, "unsupported-media-type")


def zstd(data: bytes, *, sized: bool = True) -> bytes:
    """One frame, with or without its content's size in its head."""
    if sized:
        return zstandard.ZstdCompressor().compress(data)
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


BODY = b"[" + b",".join(b'{"n":%d}' % n for n in range(100)) + b"]"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZip", gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY[:100]) + gzip.compress(BODY[100:])),
        ("zstd", zstd(BODY)),
        ("zstd", zstd(BODY, sized=False)),
        ("identity", BODY),
    ],
)
async def test_compressed_bodies(service: Service, encoding: str, body: bytes) -> None:
    """What the compressors out there make, several gzip members included."""
    reply = await service.post(body, content_encoding=encoding)
    assert (reply.status, reply.json()) == (200, {"accepted": 100})


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(BODY)[: len(gzip.compress(BODY)) // 2]),
        ("gzip", gzip.compress(BODY)[:-8]),
        ("gzip", gzip.compress(BODY)[:-1]),
        ("gzip", gzip.compress(BODY)[:-8] + b"\x00" * 8),
        ("gzip", gzip.compress(BODY) + b"x"),
        ("gzip", gzip.compress(BODY) + b"\x00"),
        ("gzip", zlib.compress(BODY)),
        ("gzip", BODY),
        ("gzip", b""),
        ("gzip", gzip.compress(b"") * 2000),
        ("zstd", zstd(BODY)[:-3]),
        ("zstd", zstd(BODY, sized=False)[:-3]),
        ("zstd", zstd(BODY) + b"x"),
        ("zstd", zstd(BODY, sized=False) + b"x"),
        ("zstd", zstd(BODY) + zstd(BODY)),
        ("zstd", zstd(b"") + b"x"),
        ("zstd", zstd(BODY[:100]).replace(bytes((0x20, 100)), bytes((0x20, 0)), 1)),
        ("zstd", BODY),
        ("zstd", b""),
    ],
)
async def test_damaged_compression_is_400(service: Service, encoding: str, body: bytes) -> None:
    """Half a body that unpacks to valid JSON would be half of the events, acknowledged as all."""
    reply = await service.post(body, content_encoding=encoding)
    assert (reply.status, reply.problem) == (400, "bad-compression")
    assert service.values() == []


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(b" " * 40_000_000)),
        ("zstd", zstd(b" " * 40_000_000)),
        ("zstd", zstd(b" " * 40_000_000, sized=False)),
    ],
)
async def test_a_bomb_is_413(service: Service, encoding: str, body: bytes) -> None:
    """A few KB must not become 40 MB here; the bound counts what comes out."""
    assert len(body) < LIMITS.body_bytes
    reply = await service.post(body, content_encoding=encoding)
    assert (reply.status, reply.problem) == (413, "body-too-large")


async def test_a_huge_zstd_window_is_413(service: Service) -> None:
    """A frame may ask its decoder for gigabytes of memory before the first byte."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    reply = await service.post(stream.compress(BODY) + stream.flush(), content_encoding="zstd")
    assert (reply.status, reply.problem) == (413, "body-too-large")


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "gzip, zstd", "gzip, identity", ""])
async def test_an_unknown_or_doubled_encoding_is_415(service: Service, encoding: str) -> None:
    """Each layer multiplies what a bomb can do."""
    reply = await service.post(gzip.compress(BODY), content_encoding=encoding)
    assert (reply.status, reply.problem) == (415, "unsupported-encoding")


async def test_two_encoding_headers_are_415(service: Service) -> None:
    """The same, in two lines."""
    head = b"POST /v1/streams/plain/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = gzip.compress(BODY)
    head += b"Content-Encoding: gzip\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    reply = await service.send(head + body)
    assert (reply.status, reply.problem) == (415, "unsupported-encoding")
