"""Framing and heads, byte by byte over a raw socket (RFC 9112): what two parsers may read differently is refused and ends it."""

import pytest

from tests.unit.ingest.raw_case import PATH, Case, post, try_case

BODY = b'{"a":1}'
NEXT = b'{"b":2}'
SMUGGLED = post(b'{"smuggled":1}')
LINE = b"POST %b HTTP/1.1\r\n" % PATH.encode()
HOST = b"Host: localhost\r\nContent-Type: application/json\r\n"
START = LINE + HOST
LENGTH = b"Content-Length: 7\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"7\r\n" + BODY + b"\r\n0\r\n\r\n"

Answers = tuple[tuple[int, str | None], ...]
OK: Answers = ((200, None),)
TWO: Answers = ((200, None), (200, None))
BAD: Answers = ((400, "bad-request"),)
LARGE: Answers = ((431, "head-too-large"),)


def good(name: str, wire: bytes, answers: Answers = OK, *stored: bytes) -> Case:
    """Taken, and the connection goes on."""
    return Case(name, wire, answers, open=True, stored=stored or (BODY,))


def over(name: str, wire: bytes, answers: Answers = BAD, *stored: bytes) -> Case:
    """Refused, and the connection ends; what is smuggled behind is not read."""
    return Case(name, wire + SMUGGLED, answers, open=False, stored=stored)


def follows(name: str, wire: bytes, status: int, problem: str) -> Case:
    """Refused for what it asks, not for how: the request behind it is answered."""
    answers = ((status, problem), (200, None))
    return Case(name, wire + post(NEXT), answers, open=True, stored=(NEXT,))


def header(name: str, line: bytes, answers: Answers = BAD) -> Case:
    """One line too much in a request that is right otherwise."""
    return over(name, START + line + b"\r\n" + LENGTH + BODY, answers)


def length(name: str, value: bytes) -> Case:
    return over(name, START + b"Content-Length: " + value + b"\r\n\r\n" + BODY)


def coding(name: str, value: bytes, answers: Answers = BAD) -> Case:
    return over(name, START + b"Transfer-Encoding: " + value + b"\r\n\r\n" + CHUNKS, answers)


def chunks(name: str, body: bytes) -> Case:
    return over(name, START + CHUNKED + body)


def line(name: str, first: bytes, answers: Answers = BAD) -> Case:
    return over(name, first + b"\r\n" + HOST + LENGTH + BODY, answers)


CASES = [
    # Length and coding
    over("length and chunked", START + b"Content-Length: 7\r\n" + CHUNKED + CHUNKS),
    over("chunked and length", START + b"Transfer-Encoding: chunked\r\n" + LENGTH + CHUNKS),
    header("two lengths alike", b"Content-Length: 7"),
    header("two lengths that differ", b"Content-Length: 8"),
    length("a list of lengths", b"7, 7"),
    length("a negative length", b"-7"),
    length("a length with a plus", b"+7"),
    length("a hexadecimal length", b"0x7"),
    length("a length with an exponent", b"7e0"),
    length("a length with a blank inside", b"0 7"),
    length("a length beyond 64 bits", b"18446744073709551623"),
    length("an empty length", b""),
    follows("neither length nor coding", START + b"\r\n", 400, "empty-body"),
    coding("gzip, chunked", b"gzip, chunked", ((501, "unsupported-transfer-coding"),)),
    coding("chunked, gzip", b"chunked, gzip"),
    coding("chunked twice", b"chunked, chunked"),
    coding("identity", b"identity"),
    coding("a coding that only ends like chunked", b"xchunked"),
    coding("a coding behind a vertical tab", b"\x0bchunked"),
    coding("an empty coding", b""),
    header("two codings, a header each", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
    good("chunked in capitals", START + b"Transfer-Encoding: CHUNKED\r\n\r\n" + CHUNKS),
    # Chunks
    good("chunked", START + CHUNKED + CHUNKS),
    good("a chunk a byte", START + CHUNKED + b"".join(b"1\r\n%c\r\n" % one for one in BODY) + b"0\r\n\r\n"),
    good("a chunk extension", START + CHUNKED + CHUNKS.replace(b"7\r\n", b"7;a=b\r\n")),
    good("a trailer", START + CHUNKED + CHUNKS[:-2] + b"X: y\r\n\r\n"),
    good("leading zeros of a chunk size", START + CHUNKED + b"000" + CHUNKS),
    chunks("a trailer that is a length", CHUNKS[:-2] + b"Content-Length: 50\r\n\r\n"),
    chunks("no chunk size", b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk size that is no number", b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a negative chunk size", b"-7\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk size with 0x", b"0x7\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk size beyond 64 bits", b"10000000000000007\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk longer than its size", b"6\r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk that ends in a bare line feed", b"7\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a blank behind a chunk size", b"7 \r\n" + BODY + b"\r\n0\r\n\r\n"),
    chunks("a chunk extension with a bare line feed", b"7;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    Case(
        "a last chunk that never ends",
        START + CHUNKED + CHUNKS[:-2],
        ((400, "incomplete-body"),),
        open=False,
        ends=True,
    ),
    # Headers
    header("an old folded line", b"X: a\r\n b"),
    header("a folded first header", b" X: a"),
    header("a blank before a colon", b"X : a"),
    header("a header without a name", b": a"),
    header("a header without a colon", b"X"),
    header("a NUL in a value", b"X: a\x00b"),
    header("a NUL in a name", b"X\x00: a"),
    header("a bare line feed", b"X: a\nY: b"),
    header("a bare carriage return", b"X: a\rY: b"),
    header("a length with a blank before its colon", b"Content-Length : 7"),
    header("two content types", b"Content-Type: text/plain"),
    over("no Host", LINE + LENGTH + BODY),
    header("two Hosts", b"Host: localhost"),
    follows("another Host", START.replace(b"localhost", b"evil.example") + LENGTH + BODY, 421, "bad-host"),
    follows("an empty Host", START.replace(b"localhost", b"") + LENGTH + BODY, 421, "bad-host"),
    good("bytes beyond ASCII in a value", START + b"X: \xff\xfe\r\n" + LENGTH + BODY),
    header("a line of 9,000 bytes", b"X: " + b"x" * 9_000, LARGE),
    header("a name of 9,000 bytes", b"X" * 9_000 + b": x", LARGE),
    header("100 headers", b"\r\n".join(b"X-%d: x" % n for n in range(100)), LARGE),
    header("36 KB of headers", b"\r\n".join(b"X-%d: %b" % (n, b"x" * 3_000) for n in range(12)), LARGE),
    # Request lines
    line("a target of 9,000 bytes", b"POST /" + b"x" * 9_000 + b" HTTP/1.1", LARGE),
    line("a target with a blank", b"POST /a b HTTP/1.1"),
    line("no target", b"POST  HTTP/1.1"),
    line("no version", b"POST " + PATH.encode()),
    line("HTTP/1.2", b"POST %b HTTP/1.2" % PATH.encode()),
    line("HTTP/2.0", b"POST %b HTTP/2.0" % PATH.encode()),
    line("http/1.1 in small letters", b"POST %b http/1.1" % PATH.encode()),
    line("a method in small letters", b"post %b HTTP/1.1" % PATH.encode()),
    line("a tab for a blank", b"POST\t%b HTTP/1.1" % PATH.encode()),
    over("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    over("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    over("garbage", b"\x00\x01\x02\r\n\r\n"),
    good("empty lines before", b"\r\n\r\n" + START + LENGTH + BODY),
    good("an absolute target", START.replace(b"POST /", b"POST http://localhost/") + LENGTH + BODY),
    follows(
        "an absolute target of another name",
        START.replace(b"POST /", b"POST http://evil.example/") + LENGTH + BODY,
        421,
        "bad-host",
    ),
    line("a target in authority form", b"CONNECT localhost:80 HTTP/1.1", ((405, "method-not-allowed"),)),
    follows("an asterisk", b"OPTIONS * HTTP/1.1\r\n" + HOST + LENGTH + BODY, 404, "not-found"),
    follows("a path with two dots", START.replace(b"/v1", b"/v1/../v1") + LENGTH + BODY, 404, "not-found"),
    follows("another method", START.replace(b"POST", b"DELETE") + LENGTH + BODY, 405, "method-not-allowed"),
    # What comes when
    good("pipelined", START + LENGTH + BODY + post(NEXT), TWO, BODY, NEXT),
    good("pipelined, chunked first", START + CHUNKED + CHUNKS + post(NEXT), TWO, BODY, NEXT),
    good(
        "pipelined, a refused one between",
        post(BODY) + post(b"{") + post(NEXT),
        ((200, None), (400, "bad-json"), (200, None)),
        BODY,
        NEXT,
    ),
    over("garbage behind a request", post(BODY) + b"\x00\r\n\r\n", ((200, None), (400, "bad-request")), BODY),
    over("the end was announced", START + b"Connection: close\r\n" + LENGTH + BODY, OK, BODY),
    over("HTTP/1.0", START.replace(b"1.1", b"1.0") + LENGTH + BODY, OK, BODY),
    over("HTTP/1.0, chunked", START.replace(b"1.1", b"1.0") + CHUNKED + CHUNKS),
    over("HTTP/1.0 without Host", LINE.replace(b"1.1", b"1.0") + LENGTH + BODY),
    over("an upgrade", START + b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + LENGTH + BODY, OK, BODY),
    over("an upgrade to HTTP/2", START + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + BODY, OK, BODY),
    good("expects 100", START + b"Expect: 100-continue\r\n" + LENGTH + BODY),
    Case("expects something else", START + b"Expect: 200-ok\r\n" + LENGTH, ((417, "expectation-failed"),), open=False),
    Case("half a body, then the end", START + LENGTH + b'{"a"', ((400, "incomplete-body"),), open=False, ends=True),
    Case("half a head, then the end", START, (), open=False, ends=True),
    Case("a request, then the end", START + LENGTH + BODY, OK, open=False, stored=(BODY,), ends=True),
    Case("three requests, then the end", post(BODY) * 3, OK * 3, open=False, stored=(BODY,) * 3, ends=True),
    Case("nothing, then the end", b"", (), open=False, ends=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
async def test_head(case: Case) -> None:
    """Broken: somebody in front of us and we see other requests in the same bytes, or a connection loses step."""
    await try_case(case)


def test_the_table_is_whole() -> None:
    """Broken: a case stands twice, or most of them are gone."""
    assert len({case.name for case in CASES}) == len(CASES) >= 65
