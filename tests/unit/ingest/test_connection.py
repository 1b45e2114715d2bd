"""HTTP framing, deadlines, bounds and drain of ingest's own server, byte by byte over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp.http
import pytest
import structlog.testing
from aiohttp.http import RawRequestMessage

from services.ingest import connection
from services.ingest.answer import Answer
from services.ingest.connection import Connection
from services.ingest.http_server import HttpServer, Timeouts
from tests.support.raw_http import Client, make_request

LIMIT = 1_000_000
LARGEST_READ = 1 << 18
"""What an event loop reads at once."""
HEAD = b"POST / HTTP/1.1\r\nHost: h\r\n"


class Echo:
    """A handler that answers with the body; while `gate` is cleared, answers wait."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[bytes] = []
        self.peers: list[Connection] = []

    async def handle(self, message: RawRequestMessage, peer: Connection) -> Answer:
        self.peers.append(peer)
        body = await peer.read_body(message, LIMIT)
        self.seen.append(body)
        if message.path == "/fault":
            raise ValueError("secret detail")
        await self.gate.wait()
        return Answer(200, body)


@asynccontextmanager
async def serving(
    echo: Echo,
    *,
    head: float = 30.0,
    body: float = 30.0,
    idle: float = 30.0,
    connections: int = 100,
    in_flight: int = 10**8,
) -> AsyncIterator[int]:
    server = HttpServer(
        echo.handle, timeouts=Timeouts(head, body, idle), max_connections=connections, max_in_flight=in_flight
    )
    async with server.listen("127.0.0.1", 0, reuse_port=False) as (_, port):
        yield port


@pytest.fixture
async def echo() -> Echo:
    return Echo()


def test_the_parser_is_the_compiled_one() -> None:
    """Everything below relies on llhttp's strictness; the pure Python fallback differs."""
    assert aiohttp.http.HttpRequestParser.__module__ == "aiohttp._http_parser"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Content-Length: 2, 2\r\n\r\n{}",
        HEAD + b"Content-Length: -2\r\n\r\n{}",
        HEAD + b"Content-Length: +2\r\n\r\n{}",
        HEAD + b"Content-Length: 0x2\r\n\r\n{}",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
        HEAD + b"Content-Length : 2\r\n\r\n{}",
        HEAD + b"Host: other\r\nContent-Length: 2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: a\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\r\n\r\n",
        b"POST / HTTP/2.0\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_unclear_framing_is_400_and_the_end(echo: Echo, request_bytes: bytes) -> None:
    """A request whose length two parsers may read differently is a smuggled request; the connection must not go on."""
    async with serving(echo) as port, Client(port) as client:
        reply = await client.request(request_bytes)
        assert (reply.status, reply.problem, reply.closed) == (400, "bad-request", True)
        assert await client.is_over()
    assert b"{}" not in echo.seen


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"deflate,chunked", b"x, chunked", b"gzip;q=1, chunked"])
async def test_a_transfer_coding_beside_chunked_is_501_and_the_end(echo: Echo, coding: bytes) -> None:
    """Broken: packed bytes are taken for the events' text, or for what another parser makes of them."""
    async with serving(echo) as port, Client(port) as client:
        chunks = b"2\r\n{}\r\n0\r\n\r\n"
        reply = await client.request(HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + chunks)
        assert (reply.status, reply.problem, reply.closed) == (501, "unsupported-transfer-coding", True)
        assert await client.is_over()
    assert echo.seen == []


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(100)) + b"\r\n",
        HEAD + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 2000) for n in range(30)) + b"\r\n",
        b"POST /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_431(echo: Echo, head: bytes) -> None:
    """Heads are held in memory before anybody is known: they must be bounded, however they are cut into packets."""
    async with serving(echo) as port:
        async with Client(port) as client:
            reply = await client.request(head)
            assert (reply.status, reply.problem, reply.closed) == (431, "head-too-large", True)
        async with Client(port) as client:
            for start in range(0, len(head), 1000):
                await client.send(head[start : start + 1000])
                await asyncio.sleep(0)
            assert (await client.reply()).status == 431


async def test_a_slow_head_is_408(echo: Echo) -> None:
    """A client that never finishes its head would hold a connection for ever."""
    async with serving(echo, head=0.2) as port, Client(port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: h\r\nX: ")
        reply = await client.reply()
        assert (reply.status, reply.problem, reply.closed) == (408, "too-slow", True)
        assert await client.is_over()


async def test_a_slow_body_is_408(echo: Echo) -> None:
    """The same for a body that drips: the deadline is for all of it, not for the next byte."""
    async with serving(echo, body=0.5) as port, Client(port) as client:
        await client.send(HEAD + b"Content-Length: 100\r\n\r\n")
        drip = asyncio.create_task(_drip(client))
        reply = await client.reply()
        drip.cancel()
        assert (reply.status, reply.problem, reply.closed) == (408, "too-slow", True)
    assert echo.seen == []


async def _drip(client: Client) -> None:
    for _ in range(99):
        await client.send(b"x")
        await asyncio.sleep(0.05)


async def test_a_silent_connection_is_closed(echo: Echo) -> None:
    """A client that connects and says nothing, or stops saying anything, must not hold a connection."""
    async with serving(echo, head=0.1, idle=0.1) as port:
        async with Client(port) as client:
            assert await client.is_over()
        async with Client(port) as client:
            assert (await client.request(make_request("/", b"x"))).status == 200
            assert await client.is_over()


async def test_requests_of_a_connection_are_answered_in_order(echo: Echo) -> None:
    """Pipelined answers in another order would tell a client that the wrong events were stored."""
    async with serving(echo) as port, Client(port) as client:
        await client.send(b"".join(make_request("/", b"%d" % n) for n in range(50)))
        assert [(await client.reply()).body for _ in range(50)] == [b"%d" % n for n in range(50)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_request_may_come_in_pieces(echo: Echo, size: int) -> None:
    """TCP cuts where it likes."""
    data = make_request("/", b"a" * 2000) + make_request("/", b"b")
    async with serving(echo) as port, Client(port) as client:
        for start in range(0, len(data), size):
            await client.send(data[start : start + size])
        assert (await client.reply()).body == b"a" * 2000
        assert (await client.reply()).body == b"b"


async def test_a_chunked_body_is_one_body(echo: Echo) -> None:
    """Many HTTP clients stream without knowing the length."""
    async with serving(echo) as port, Client(port) as client:
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        reply = await client.request(
            head + b"".join(b"1\r\n%b\r\n" % bytes([65 + n % 26]) for n in range(5000)) + b"0\r\n\r\n"
        )
        assert reply.body == bytes(65 + n % 26 for n in range(5000))
        assert not reply.closed


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 2000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1e8480\r\n"]
)
async def test_a_body_over_the_limit_is_413_and_the_answer_arrives(echo: Echo, framing: bytes) -> None:
    """The client is still sending when we refuse: closing at once would make its kernel drop our answer."""
    async with serving(echo) as port, Client(port) as client:
        await client.send(HEAD + framing)
        pour = asyncio.create_task(_pour(client))
        reply = await client.reply()
        pour.cancel()
        assert (reply.status, reply.problem, reply.closed) == (413, "body-too-large", True)
    assert echo.seen == []


async def _pour(client: Client) -> None:
    try:
        for _ in range(20):
            await client.send(b"x" * 100_000)
    except OSError:
        return


async def test_expect_100_continue_is_answered_before_the_body(echo: Echo) -> None:
    """curl waits a second for it before each large body."""
    async with serving(echo) as port, Client(port) as client:
        await client.send(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.reply()).status == 100
        assert (await client.request(b"ok")).body == b"ok"
        await client.send(HEAD + b"Content-Length: 2000000\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.reply()).status == 413


async def test_chunk_extensions_and_trailers_change_nothing(echo: Echo) -> None:
    """Both are allowed, both are used to hide requests: what follows must be read as the next request and nothing else."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nX: y\r\n\r\n"
    async with serving(echo) as port, Client(port) as client:
        await client.send(chunked + make_request("/", b"next"))
        assert (await client.reply()).body == b"ok"
        assert (await client.reply()).body == b"next"
        reply = await client.request(chunked.replace(b"X: y", b"Content-Length: 50"))
        assert (reply.status, reply.closed) == (400, True)


async def test_a_client_that_does_not_read_is_cut_off(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could otherwise pile up answers in our memory: we stop reading from it, wait a while, and end it."""
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)
    async with serving(echo) as port:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, ("127.0.0.1", port))
            with pytest.raises(OSError):
                await asyncio.wait_for(_pipeline(loop, client), 30)
    assert len(echo.seen) < 100


@asynccontextmanager
async def deaf_client(port: int) -> AsyncIterator[socket.socket]:
    """A connection that takes next to no answers."""
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        yield client


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.005)


async def test_nothing_is_read_behind_an_answer_that_is_not_taken(echo: Echo) -> None:
    """Broken: a connection whose client reads nothing holds megabytes: everything it pipelines, parsed and waiting."""
    async with serving(echo) as port, deaf_client(port) as client:
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(_pipeline(loop, client))
        await _until(lambda: bool(echo.peers) and echo.peers[0].phase is connection.Phase.ANSWERING)
        (peer,) = set(echo.peers)
        seen, held = len(echo.seen), peer.held
        assert peer.transport is not None
        assert not peer.transport.is_reading()
        kernel = peer.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert kernel <= 2 * connection.SEND_BUFFER_BYTES, (
            "by itself it keeps 4 MB of each, and all others wait for memory"
        )
        unsent = peer.transport.get_write_buffer_size()
        assert unsent <= held <= unsent + 2 * LARGEST_READ
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(echo.seen), peer.held) == (seen, held)
        sending.cancel()


async def test_what_is_pipelined_counts_from_its_arrival(echo: Echo) -> None:
    """Broken: bodies that wait behind a request count nowhere, and a thousand connections of them fill the memory."""
    async with serving(echo, in_flight=3000) as port, Client(port) as first, Client(port) as second:
        echo.gate.clear()
        await first.send(make_request("/", b"x" * 1000))
        await _until(lambda: bool(echo.seen))
        await first.send(make_request("/", b"y" * 1000))
        await _until(lambda: echo.peers[0].held > 2000)
        reply = await second.request(make_request("/", b"z" * 1000))
        assert (reply.status, reply.problem) == (503, "overloaded")
        echo.gate.set()
        assert [(await first.reply()).body for _ in range(2)] == [b"x" * 1000, b"y" * 1000]
        assert (await first.request(make_request("/", b"z" * 1000))).status == 200
        assert echo.peers[0].held == 0


async def test_those_who_do_not_read_go_first_when_memory_is_short(echo: Echo) -> None:
    """Broken: a few clients that take no answers hold all that this process may hold, and everybody else gets 503."""
    async with serving(echo, in_flight=1_500_000) as port, deaf_client(port) as client, Client(port) as other:
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(_pipeline(loop, client))
        await _until(lambda: bool(echo.peers) and echo.peers[0].phase is connection.Phase.ANSWERING)
        echo.peers[0].hold_unpacked(1_400_000 - echo.peers[0].held)
        assert (await other.request(make_request("/", b"x" * 200_000))).body == b"x" * 200_000
        with pytest.raises(OSError):
            await asyncio.wait_for(sending, 600)


async def test_a_pipeline_longer_than_the_memory_that_it_may_use_is_refused_and_ended(echo: Echo) -> None:
    """Broken: what was read ahead is dropped without a word, or the client takes an answer for another request's."""
    async with serving(echo, in_flight=3000) as port, Client(port) as client:
        echo.gate.clear()
        await client.send(make_request("/", b"x" * 1000))
        await _until(lambda: bool(echo.seen))
        await client.send(make_request("/", b"y" * 5000))
        await _until(lambda: echo.peers[0].held < 2000 and not echo.peers[0]._ahead)
        echo.gate.set()
        assert (await client.reply()).body == b"x" * 1000
        reply = await client.reply()
        assert (reply.status, reply.problem, reply.closed) == (503, "overloaded", True)
        assert await client.is_over()
    assert echo.seen == [b"x" * 1000]


async def test_large_bodies_may_be_pipelined(echo: Echo) -> None:
    """Broken: reading is not taken up again behind an answer that waited, and the next body never arrives."""
    async with serving(echo) as port, Client(port) as client:
        bodies = [bytes([65 + n]) * 300_001 for n in range(20)]
        sending = asyncio.create_task(client.send(b"".join(make_request("/", body) for body in bodies)))
        assert [(await client.reply()).body for _ in bodies] == bodies
        await sending
        assert echo.peers[0].held == 0


async def test_a_pipeline_may_end_with_the_clients_side(echo: Echo) -> None:
    """Broken: requests that came in one packet with the end of the client's side are not answered."""
    async with serving(echo) as port, Client(port) as client:
        await client.send(b"".join(make_request("/", b"%d" % n) for n in range(3)))
        client.end()
        assert [(await client.reply()).body for _ in range(3)] == [b"0", b"1", b"2"]
        assert await client.is_over()


async def _pipeline(loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
    while True:
        await loop.sock_sendall(client, make_request("/", b"x" * 500_000))


async def test_an_unknown_expectation_is_417(echo: Echo) -> None:
    """RFC 9110: what we do not understand we must not ignore."""
    async with serving(echo) as port, Client(port) as client:
        reply = await client.request(HEAD + b"Content-Length: 2\r\nExpect: 200-ok\r\n\r\n")
        assert (reply.status, reply.problem) == (417, "expectation-failed")


async def test_a_client_that_leaves_mid_body_stores_nothing(echo: Echo) -> None:
    """Half a batch is no batch: with and without a proper end of the connection."""
    async with serving(echo) as port:
        async with Client(port) as client:
            await client.send(HEAD + b"Content-Length: 100\r\n\r\nhalf")
            client.end()
            assert (await client.reply()).problem == "incomplete-body"
        async with Client(port) as client:
            await client.send(HEAD + b"Content-Length: 100\r\n\r\nhalf")
        async with Client(port) as client:
            assert (await client.request(make_request("/", b"fresh"))).status == 200
    assert echo.seen == [b"fresh"]


async def test_a_client_may_end_its_side_and_wait(echo: Echo) -> None:
    """`nc -N` and old clients half-close after the request."""
    async with serving(echo) as port, Client(port) as client:
        await client.send(make_request("/", b"whole"))
        client.end()
        assert (await client.reply()).body == b"whole"
        assert await client.is_over()


async def test_http_10_gets_its_answer_and_the_end(echo: Echo) -> None:
    """Such clients read until the connection ends."""
    async with serving(echo) as port, Client(port) as client:
        reply = await client.request(b"POST / HTTP/1.0\r\nHost: h\r\nContent-Length: 2\r\n\r\nok")
        assert (reply.status, reply.body, reply.closed) == (200, b"ok", True)
        assert await client.is_over()


async def test_an_upgrade_is_declined(echo: Echo) -> None:
    """Bytes behind a declined upgrade must not be read as a request."""
    async with serving(echo) as port, Client(port) as client:
        head = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n"
        reply = await client.request(head + b"ok" + make_request("/", b"behind"))
        assert (reply.status, reply.closed) == (200, True)
        assert await client.is_over()
    assert echo.seen == [b"ok"]


async def test_complete_requests_before_garbage_are_answered_then_400(echo: Echo) -> None:
    """What was stored must be acknowledged even when the client goes mad afterwards."""
    async with serving(echo) as port, Client(port) as client:
        echo.gate.clear()
        await client.send(make_request("/", b"good"))
        while not echo.seen:
            await asyncio.sleep(0.01)
        await client.send(b"\x00garbage\r\n\r\n")
        await asyncio.sleep(0.05)
        echo.gate.set()
        assert (await client.reply()).body == b"good"
        assert (await client.reply()).status == 400
        assert await client.is_over()


async def test_a_fault_of_ours_is_500_without_detail(echo: Echo) -> None:
    """A stack or a message in an answer tells attackers about us; the log must have it."""
    with structlog.testing.capture_logs() as logs:
        async with serving(echo) as port, Client(port) as client:
            reply = await client.request(make_request("/fault", b"x"))
            assert (reply.status, reply.problem, reply.closed) == (500, "internal", True)
            assert b"secret detail" not in reply.body
    assert [str(entry["exc_info"]) for entry in logs] == ["secret detail"]


async def test_connections_are_bounded(echo: Echo) -> None:
    """Ten times the rated load must not take all file descriptors; a place becomes free again."""
    async with serving(echo, connections=2) as port:
        async with Client(port) as first, Client(port) as second:
            assert (await first.request(make_request("/", b"1"))).status == 200
            assert (await second.request(make_request("/", b"2"))).status == 200
            async with Client(port) as third:
                reply = await third.reply()
                assert (reply.status, reply.problem, reply.closed) == (503, "overloaded", True)
                assert int(reply.headers["retry-after"]) >= 1
        async with asyncio.timeout(600):
            while True:
                async with Client(port) as client:
                    if (await client.request(make_request("/", b"3"))).status == 200:
                        break


async def test_bytes_in_flight_are_bounded_and_released(echo: Echo) -> None:
    """Requests that wait for a slow broker must not fill the memory."""
    async with serving(echo, in_flight=2000) as port, Client(port) as first, Client(port) as second:
        echo.gate.clear()
        await first.send(make_request("/", b"x" * 1000))
        while not echo.seen:
            await asyncio.sleep(0.01)
        reply = await second.request(make_request("/", b"y" * 1000))
        assert (reply.status, reply.problem) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        echo.gate.set()
        assert (await first.reply()).status == 200
        assert (await second.request(make_request("/", b"y" * 1000))).status == 200


async def test_drain_answers_what_is_under_way(echo: Echo) -> None:
    """A rolling restart must not lose an answer: the events are stored, the client must learn it. Idle connections just end."""
    async with asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            async with serving(echo) as port:
                started.set_result(port)
                await stop.wait()

        running = group.create_task(run())
        port = await started
        async with Client(port) as busy, Client(port) as idle:
            assert (await idle.request(make_request("/", b"warm"))).status == 200
            echo.gate.clear()
            await busy.send(make_request("/", b"slow"))
            while b"slow" not in echo.seen:
                await asyncio.sleep(0.01)
            stop.set()
            assert await idle.is_over()
            assert not running.done()
            with pytest.raises(OSError):
                async with Client(port):
                    pass
            echo.gate.set()
            reply = await busy.reply()
            assert (reply.status, reply.body, reply.closed) == (200, b"slow", True)
