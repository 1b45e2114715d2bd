"""The client of one destination: what it sends, and which connections it uses again."""

import asyncio

import pytest

from services.core.http import client as http_client
from services.core.http.client import HttpClient
from services.core.http.net_guard import NetPolicy, parse_networks
from services.core.http.resolver import Resolver
from tests.unit.expel import receiver as bad
from tests.unit.expel.receiver import open_receiver, open_socket_server, wait_until

LOCAL = NetPolicy(allow=parse_networks("127.0.0.0/8"))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def open_client(url: str, headers: dict[str, str] | None = None, timeout: float = 20.0) -> HttpClient:
    return HttpClient(url, policy=LOCAL, resolver=Resolver(), timeout=timeout, headers=headers or {})


async def test_the_head_of_a_request() -> None:
    """Broken: a path or query arrives changed, a header twice, or the receiver's virtual host is not found."""
    heads: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)

    async with open_socket_server(note) as url:
        with open_client(f"{url}/a%20b/c|d?e=%2F&f", {"user-agent": "mine", "X-A": "b"}) as client:
            assert (await client.post(b"webhook-id: 1\r\n", b"{}")).status == 200
    host = url.split("/")[2].encode()
    assert heads[0].split(b"\r\n") == [
        b"POST /hook/a%20b/c|d?e=%2F&f HTTP/1.1",
        b"Host: " + host,
        b"Accept-Encoding: identity",
        b"Accept: */*",
        b"user-agent: mine",
        b"X-A: b",
        b"webhook-id: 1",
        b"Content-Length: 2",
        b"",
        b"",
    ]


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a request meets the receiver's close of a connection that was idle, or a quiet lane holds its connections."""
    monkeypatch.setattr(http_client, "_KEEP_ALIVE", 0.05)
    async with open_receiver() as receiver:
        with open_client(receiver.url) as client:
            headers = b"Content-Type: text/plain\r\n"
            await asyncio.gather(client.post(headers, b"1"), client.post(headers, b"2"))
            await wait_until(lambda: not client._idle)
            await client.post(headers, b"3")
        assert len(receiver.connections) == 3


@pytest.mark.parametrize("after", [b"", OK])
async def test_a_connection_in_doubt_is_not_used_again(after: bytes) -> None:
    """Broken: a closed connection fails the next request, or bytes that came early are taken for its answer."""
    opened = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(0.01)
        writer.write(after)
        if not after:
            writer.close()
        await reader.read()

    async with open_socket_server(answer_once) as url:
        with open_client(url) as client:
            await client.post(b"", b"")
            await wait_until(lambda: not client._idle or not client._idle[0].is_open)
            assert (await client.post(b"", b"")).status == 200
    assert opened == 2


async def test_a_cancelled_request_takes_its_connection_with_it() -> None:
    """Broken: the answer to a request that nobody waits for any more is taken for the next one's."""
    async with open_socket_server(bad.hang) as url:
        with open_client(url) as client:
            task = asyncio.create_task(client.post(b"", b"{}"))
            await wait_until(lambda: bool(client._busy))
            (connection,) = client._busy
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not connection.is_open
            assert not client._busy
            assert not client._idle


@pytest.mark.parametrize("answers", [True, False])
async def test_a_process_that_was_frozen_reads_the_answer_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Broken: a virtual machine that was paused for longer than a request's time-out delivers everything under way again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answers:
            writer.write(OK)
        await reader.read()

    monkeypatch.setattr(http_client, "_READ_FIRST_S", 20.0 if answers else 0.01)
    async with open_socket_server(answer) as url:
        with open_client(url) as client:
            connection = await client._connect()
            passed = asyncio.get_running_loop().time() - 10.0  # its timer is that late
            exchange = asyncio.create_task(connection.exchange([b"POST /hook HTTP/1.1\r\n\r\n"], passed))
            if answers:
                assert (await exchange).status == 200
            else:
                with pytest.raises(TimeoutError):
                    await exchange


async def test_a_status_is_enough_for_a_failure() -> None:
    """Broken: a receiver that says 410 and never ends its answer is called on and on."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 410 Gone\r\nContent-Length: 9\r\n\r\nbye")
        await reader.read()

    async with open_socket_server(half) as url:
        with open_client(url, timeout=0.3) as client:
            assert (await client.post(b"", b""))[::3] == (410, False)
