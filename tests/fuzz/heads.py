"""Requests whose line, headers or framing are wrong, odd or rare. Case N of a seed is always the same bytes."""

import random
from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.bodies import make_chunks
from tests.fuzz.mutation import mutate

STREAM = "plain"
_PATH = b"/v1/streams/plain/events"
_METHODS = (
    b"GET",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"CONNECT",
    b"TRACE",
    b"PATCH",
    b"post",
    b"PRI",
    b"",
    b"P\x00ST",
)
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/11", b"http/1.1", b"ICE/1.0", b"")
_TARGETS = (
    *(
        b"/",
        b"/openapi.json",
        b"*",
        b"//",
        b"",
        b"/../..",
        b"/v1/streams//events",
        b"/v1/streams/%70lain/events",
        b"/%",
        b"/%ff",
    ),
    *(
        _PATH + b"?key=psk_a_b",
        _PATH + b"?" + b"a=b&" * 500,
        _PATH + b"#f",
        b"http://h" + _PATH,
        b"http://[::1",
        b"a:b",
        b"h:1",
    ),
    *(
        b"/" + b"x" * 9000,
        b"/v1/streams/nobody/events",
        b"/v1/streams/plain%2fevents",
        b"/\xff\xfe",
        b"/v1/" + b"%00" * 50,
    ),
)
_HEADERS = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: 99999999999999999999"),
    *(
        b"Content-Length: 5, 5",
        b"Content-Length:",
        b"Content-Length: 0x5",
        b"Content-Length: +5",
        b"Content-Length: 900000",
    ),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, chunked"),
    *(
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding:",
        b"Transfer-Encoding : chunked",
    ),
    *(
        b"Host: other",
        b"Host:",
        b"Host: a b",
        b"Host: a, b",
        b"Expect: 100-continue",
        b"Expect: 200-ok",
        b"Upgrade: websocket",
    ),
    *(b"Connection: close", b"Connection: upgrade", b"Connection: keep-alive, close", b"Connection: \x80"),
    *(b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__", b"Prefer: return=representation"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Encoding:", b"Content-Encoding: gzip, zstd"),
    *(
        b"Content-Type: text/plain",
        b"Content-Type:",
        b"Content-Type: \xff",
        b"traceparent: \xff",
        b"Authorization: Bearer psk_a_b",
    ),
    *(
        b"X: " + b"x" * 9000,
        b"X" * 9000 + b": x",
        b"X: \x00",
        b"X\x00: x",
        b" folded",
        b"\tfolded: x",
        b": nameless",
        b"nameless",
    ),
    *(b"\r\n".join([b"X: " + b"y" * 3000] * 12), b"\r\n".join([b"X: y"] * 100), b"X: a\nY: b", b"X: a\rY: b", b"X : y"),
    *(b"Trailer: X", b"TE: trailers", b"Content-Range: bytes 0-1/2", b"X-HTTP-Method-Override: GET", b"Date: \xc3\xa9"),
)


class Head(NamedTuple):
    """One connection's worth of bytes. payload: the event in it. patient: whether the client ends its side only after the first
    answer."""

    number: int
    wire: bytes
    payload: bytes
    patient: bool


class _Parts:
    """A request in pieces that recipes change."""

    def __init__(self, number: int) -> None:
        self.payload = b'{"n":"%09d","fill":"0123456789"}' % number
        self.line = [b"POST", _PATH, b"HTTP/1.1"]
        self.headers = [b"Host: localhost", b"Content-Type: application/json"]
        self.framing = b"Content-Length: %d" % len(self.payload)
        self.body = self.payload

    def render(self) -> bytes:
        head = [b" ".join(self.line), *self.headers, *([self.framing] if self.framing else [])]
        return b"\r\n".join([*head, b"", b""]) + self.body


def payload_number(payload: bytes) -> int:
    """The number of the case whose event this is."""
    return int(payload[6:15])


def make_head(seed: int, number: int) -> Head:
    """Case `number` (from 1, below 10^9)."""
    chance = random.Random(f"{seed} head {number}")
    parts = _Parts(number)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        chance.choice(_RECIPES)(parts, chance)
    wire = parts.render()
    if chance.random() < 0.3:
        head, blank, body = wire.partition(b"\r\n\r\n")
        wire = mutate(head, chance) + blank + body
    if chance.random() < 0.15:
        wire *= chance.choice((2, 3, 20))
    return Head(number, wire, parts.payload, chance.random() < 0.05)


def _method(parts: _Parts, chance: random.Random) -> None:
    parts.line[0] = chance.choice(_METHODS)


def _target(parts: _Parts, chance: random.Random) -> None:
    parts.line[1] = chance.choice(_TARGETS)


def _version(parts: _Parts, chance: random.Random) -> None:
    parts.line[2] = chance.choice(_VERSIONS)


def _header(parts: _Parts, chance: random.Random) -> None:
    parts.headers.insert(chance.randrange(len(parts.headers) + 1), chance.choice(_HEADERS))


def _lose_header(parts: _Parts, chance: random.Random) -> None:
    if parts.headers:
        parts.headers.pop(chance.randrange(len(parts.headers)))


def _length(parts: _Parts, chance: random.Random) -> None:
    wrong = len(parts.payload) + chance.choice((-20, -1, 1, 5, 500))
    parts.framing = chance.choice((b"Content-Length: %d" % wrong, parts.framing + b"\r\n" + parts.framing, b""))


def _chunks(parts: _Parts, chance: random.Random) -> None:
    parts.framing = b"Transfer-Encoding: chunked"
    parts.body = make_chunks(parts.payload, (chance.choice((1, 10, 100)),))
    if chance.random() < 0.6:
        old, new = chance.choice(_CHUNK_FAULTS)
        parts.body = parts.body.replace(old, new, chance.choice((1, -1)))


_CHUNK_FAULTS = (
    *((b"0\r\n\r\n", b""), (b"0\r\n\r\n", b"0\r\n"), (b"0\r\n\r\n", b"0\r\nX: trailer\r\n\r\n"), (b"\r\n", b"\n")),
    *(
        (b"\r\n", b";extension=1\r\n"),
        (b"\r\n", b";" + b"e" * 9000 + b"\r\n"),
        (b"a\r\n", b"b\r\n"),
        (b"a\r\n", b"-1\r\n"),
    ),
    *(
        (b"a\r\n", b"ffffffffffffffffff\r\n"),
        (b"a\r\n", b"fffff\r\n"),
        (b"a\r\n", b" a\r\n"),
        (b"0\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 90),
    ),
)
_RECIPES: tuple[Callable[[_Parts, random.Random], None], ...] = (
    *(_method, _target, _version, _header, _header, _header, _lose_header, _length, _chunks, _chunks),
)
