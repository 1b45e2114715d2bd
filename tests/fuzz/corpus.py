"""What the fuzzer starts from: a good body of every format, and the bad inputs that are known, each as one request."""

import gzip
from typing import NamedTuple

import orjson
import zstandard

JSON = "application/json"
LINES = "application/x-ndjson"
EVENT = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
MEDIA = (JSON, LINES, "application/jsonl", EVENT, BATCH, "application/json; charset=UTF-8")
ODD_MEDIA = (
    "",
    "text/plain",
    "application/json; charset=latin-1",
    "application/json;;",
    "a/b; charset*=%",
    "json",
    "é/é",
)

MAX_EVENT = 20_000
MAX_BODY = 200_000
"""Bytes. The limits that ingest runs with: small, so that what goes over them stays small."""


class Seed(NamedTuple):
    """A body as it stands before any compression. headers: those of a CloudEvent in binary mode."""

    body: bytes
    media: str
    headers: tuple[tuple[str, str], ...] = ()


def _event(number: int, **more: object) -> dict[str, object]:
    one = {"specversion": "1.0", "id": f"e-{number}", "source": "/fuzz", "type": "fuzz", "time": "2026-01-02T03:04:05Z"}
    return {**one, "partitionkey": f"k-{number % 5}", "data": {"n": number, "text": "é\U0001f600"}, **more}


_ORDERS = [{"id": f"o-{n}", "customer": f"c-{n % 7}", "at": 1_767_000_000_000 + n, "amount": n / 7} for n in range(20)]
_MIXED = [
    {"id": 7},
    {"id": 2**63, "at": 1.5},
    {"id": None},
    {"customer": 12},
    {"at": "1999-12-31T23:59:60Z"},
    {},
    7,
    [],
]
_BINARY = (("ce-specversion", "1.0"), ("ce-id", "b-1"), ("ce-source", "/%C3%A9"), ("ce-type", "t"))

GOOD = (
    Seed(b'{"id": "one", "customer": "c", "at": 1767000000, "x": [1, -0.0, 1e2, true, null, "\\u00e9"]}', JSON),
    Seed(orjson.dumps(_ORDERS), JSON),
    Seed(b'[{"a":{"b":[{"c":[{}]}]}},\n {"big":123456789012345678901234567890,"id":"dup","id":"last"}]', JSON),
    Seed(orjson.dumps([{"fill": "x" * 500, "n": n} for n in range(100)]), JSON),
    Seed(b"[]", JSON),
    Seed(b"\n".join(map(orjson.dumps, _ORDERS)) + b"\n", LINES),
    Seed(b'{"id":"a"}\r\n\r\n {"id":"b"} \n', "application/jsonl"),
    Seed(orjson.dumps(_event(1)), EVENT),
    Seed(orjson.dumps(_event(2, data="text", datacontenttype="text/plain")), EVENT),
    Seed(orjson.dumps([_event(n) for n in range(10)]), BATCH),
    Seed(orjson.dumps([_event(1, data=None, data_base64="AAEC/w=="), _event(2, subject="s", extension=5)]), BATCH),
    Seed(b'{"id":"in data"}', JSON, _BINARY),
    Seed(b"\x00\x01 any bytes \xff", "application/octet-stream", _BINARY),
)
"""Taken whole: 2xx."""

BAD = (
    Seed(orjson.dumps(_MIXED), JSON),
    Seed(b"\n".join(map(orjson.dumps, _MIXED)), LINES),
    Seed(b"", JSON),
    Seed(b" \n", LINES),
    Seed(b'{"id":"a"}\n{oops\n{"id":1e400}\n{"id":"b"}', LINES),
    Seed(b'{"a":' * 129 + b"1" + b"}" * 129, JSON),
    Seed(b"[" * 5000 + b"]" * 5000, JSON),
    Seed(b'[{"a":NaN},{"a":Infinity}]', JSON),
    Seed(b'{"a":1e400}', JSON),
    Seed(b'{"a":"\xff\xfe"}', JSON),
    Seed(b'{"id":"\\ud800"}', JSON),
    Seed(b'{"id":"a\\u0000b"}', JSON),
    Seed(b"\xef\xbb\xbf{}", JSON),
    Seed(b'[{"at":"9999-12-31T23:59:59Z"},{"at":-1},{"at":1e300},{"at":"0000-00-00T00:00:00Z"}]', JSON),
    Seed(b'{"fill":"' + b"x" * MAX_EVENT + b'"}', JSON),
    Seed(b"[" + b",".join([b"{}"] * 11_000) + b"]", JSON),
    Seed(b"[" + b" " * MAX_BODY + b"]", JSON),
    Seed(orjson.dumps(_event(1, specversion="2.0")), EVENT),
    Seed(orjson.dumps([_event(1, data_base64="!"), _event(2, Bad=1), _event(3, id=""), 7]), BATCH),
    Seed(b"x", JSON, (*_BINARY, ("ce-id", "twice"))),
    Seed(b"x", "text/plain", (("ce-specversion", "1.0"), ("ce-id", "%00"), ("ce-source", "%ff"), ("ce-type", ""))),
)
"""Refused, whole or in part."""

SEEDS = GOOD + BAD

TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\n", b"\r\n", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"\\ud800", b"\\u0000", b"\\", b"null", b"true", b"NaN", b"-Infinity", b"1e400", b"-1e-400", b"-0", b"01", b"1."),
    *(
        b"18446744073709551616",
        b"9" * 400,
        b"0." + b"0" * 400 + b"1",
        b'"id":',
        b'"at":',
        b'"data":',
        b'"data_base64":',
    ),
    *(
        b"[" * 200,
        b'{"a":' * 200,
        b"x" * 3000,
        b'""',
        b"{}",
        b"\x1f\x8b\x08",
        b"\x28\xb5\x2f\xfd",
        "\u202e\u0085".encode(),
    ),
)
"""Pieces that mean something to one of the parsers."""

VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2**31,
        2**63,
        -(2**63),
        2**64 - 1,
        1e308,
        5e-324,
        1.5,
        "",
        " ",
        "a" * 257,
        "k" * 1025,
        "\x7f",
        "\0",
    ),
    *(
        "2026-01-02T03:04:05Z",
        "2026-01-02",
        "9999-12-31T23:59:59.999999999+14:00",
        "\u0660",
        "\U0001f600" * 80,
        [],
        {},
        [[]],
    ),
    *(1_767_000_000, 1_767_000_000_000, 10**11, 10**15, {"id": "inner"}, ["a"], "%00", "\u2028", "text/plain", "1.0"),
)
"""Values that fit JSON and nothing else."""


def bombs() -> tuple[tuple[bytes, str], ...]:
    """(bytes on the wire, Content-Encoding) of bodies that are far larger than they look, or ask for far more memory."""
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=window).compressobj()
    return (
        (gzip.compress(b" " * 20_000_000), "gzip"),
        (gzip.compress(b"") * 2000, "gzip"),
        (zstandard.compress(b" " * 20_000_000), "zstd"),
        (wide.compress(b"[]") + wide.flush(), "zstd"),
    )
