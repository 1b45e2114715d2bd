"""Reading answers: broken, a receiver's bytes fill our memory, hold a slot, or are taken for the answer to another request."""

import random

import pytest

from services.core.http.client import MAX_HEAD, MAX_RESPONSE, BadResponse, Response, ResponseReader

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

WHOLE = [
    (b"HTTP/1.1 204 No Content\r\n\r\n", Response(204), True),
    (b"HTTP/1.1 204\r\nContent-Length: 7\r\n\r\n", Response(204), True),
    (b"HTTP/1.1 304 X\r\nTransfer-Encoding: chunked\r\n\r\n", Response(304), True),
    (OK + b"Content-Length: 2\r\n\r\nok", Response(200, None, b"ok"), True),
    (OK + b"content-length:2\r\nCONTENT-LENGTH: 2 \r\n\r\nok", Response(200, None, b"ok"), True),
    (b"HTTP/1.1 503 X\nRetry-After: 7\nContent-Length: 0\n\n", Response(503, "7"), True),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx", Response(200, None, b"x"), True),
    (OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx", Response(200, None, b"x"), False),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", Response(200, None, b"x"), False),
    (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx", Response(200, None, b"x"), True),
    (CHUNKED + b"2;a=b\r\nok\r\n1\r\n!\r\n0\r\n\r\n", Response(200, None, b"ok!"), True),
    (CHUNKED + b"2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n", Response(200, None, b"ok"), True),
    (
        OK + b"Content-Length: 9\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        Response(200, None, b"x"),
        False,
    ),
]


@pytest.mark.parametrize(("data", "answer", "reusable"), WHOLE)
def test_whole_answers(data: bytes, answer: Response, reusable: bool) -> None:
    """Broken: an ordinary receiver's answer is misread, or waited for until the time-out."""
    reader = ResponseReader()
    assert reader.feed(data)
    assert (reader.response, reader.reusable) == (answer, reusable)


def test_pieces_make_no_difference() -> None:
    """Broken: how the network cuts an answer decides what it says."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for data, answer, reusable in WHOLE:
        for _ in range(20):
            cuts = sorted(chance.sample(range(1, len(data)), 4))
            reader = ResponseReader()
            pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            done = [reader.feed(piece) for piece in pieces]
            assert done[-1]
            assert (reader.response, reader.reusable) == (answer, reusable)


@pytest.mark.parametrize("data", [data for data, _, reusable in WHOLE if reusable])
def test_bytes_behind_an_answer_end_the_connection(data: bytes) -> None:
    """Broken: a receiver answers requests that were not made yet, and their events count as delivered."""
    reader = ResponseReader()
    assert reader.feed(data + b"HTTP/1.1 204 X\r\n\r\n")
    assert not reader.reusable


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 100000\r\n\r\n" + b"y" * 5000,
        OK + b"\r\n" + b"y" * 5000,
        CHUNKED + b"10000\r\n" + b"y" * 5000,
        CHUNKED + b"800\r\n" + b"y" * 0x800 + b"\r\n" + b"900\r\n" + b"y" * 0x900,
        OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + b"y" * 5000,
    ],
)
def test_long_answers_are_cut(data: bytes) -> None:
    """Broken: more than 4 KiB of an answer is read, or its connection is used again."""
    reader = ResponseReader()
    assert reader.feed(data)
    assert reader.response == Response(200, None, b"y" * MAX_RESPONSE, whole=False)
    assert not reader.reusable


def test_an_answer_of_just_the_limit_is_whole() -> None:
    """Broken: the documented 4,096 bytes are one less."""
    for head, tail in ((OK + b"Content-Length: 4096\r\n\r\n", b""), (CHUNKED + b"1000\r\n", b"\r\n0\r\n\r\n")):
        reader = ResponseReader()
        assert reader.feed(head + b"y" * MAX_RESPONSE + tail)
        assert reader.response == Response(200, None, b"y" * MAX_RESPONSE)
        assert reader.reusable


def test_an_answer_may_end_with_the_connection() -> None:
    """Broken: old receivers, which send no length, never succeed; or half an answer counts as a whole one."""
    reader = ResponseReader()
    assert not reader.feed(OK + b"\r\nok")
    assert reader.feed_eof()
    assert reader.response == Response(200, None, b"ok")
    assert not reader.reusable
    for half in (b"HTTP/1.1 200", OK + b"Content-Length: 3\r\n\r\nok", CHUNKED + b"2\r\nok\r\n", b""):
        reader = ResponseReader()
        assert not reader.feed(half)
        assert not reader.feed_eof()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 2000 X\r\n\r\n",
        b"HTTP/1.1 099 X\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1, 1\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length : 1\r\n\r\n",
        OK + b"no header\r\n\r\n",
        OK + b"X: y\r\n folded\r\n\r\n",
        OK + b"X: " + b"y" * MAX_HEAD,
        CHUNKED + b"-1\r\n",
        CHUNKED + b"x\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"1;" + b"y" * 2000,
        CHUNKED + b"1\r\nxyz\r\n",
        CHUNKED + b"0\r\n" + b"X: y\r\n" * 5000,
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    """Broken: garbage counts as success, is waited for, or grows our memory."""
    with pytest.raises(BadResponse):
        ResponseReader().feed(data)


def test_random_bytes_never_do_anything_else() -> None:
    """Broken: some bytes of a receiver raise what nobody expects, and end the lane."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for data, *_ in WHOLE * 200:
        damaged = bytearray(data)
        for _ in range(3):
            damaged[chance.randrange(len(damaged))] = chance.choice(b"\r\n: 019afHx\x00\xff")
        reader = ResponseReader()
        try:
            if not reader.feed(bytes(damaged)):
                reader.feed_eof()
        except BadResponse:
            continue
