"""Groups of the fleet while it runs: they grow, shrink by one with a full drain, and only for who holds the folder's token."""

import asyncio
import os
import signal
import stat
from typing import Any

import aiohttp
import pytest

from services.core.group_control import SizeRefused
from services.fleet.folder import TOKEN_FILE
from services.fleet.up.supervisor import Fleet
from tests.unit.fleet.test_supervisor import Bench, bench, is_alive, until, until_state

__all__ = ["bench"]


def names(fleet: Fleet) -> list[str]:
    return [process.spec.name for process in fleet.processes]


async def test_grows_and_shrinks_by_one_with_a_drain(bench: Bench) -> None:
    """Broken: a group under load cannot grow, or a process that leaves is killed in the middle of its work."""
    async with bench.run("expel", "ingest") as fleet:
        await fleet.resize("expel", 1, 3)
        await fleet.wait_ready()
        assert names(fleet) == ["expel-1", "ingest-1", "expel-2", "expel-3"]
        await until_state(bench, lambda state: sum(one.pid is not None for one in state.processes) == 4)
        youngest = fleet.processes[-1].pid
        await fleet.resize("expel", 3, 2)
        assert fleet.why_not_ready() is None
        with pytest.raises(SizeRefused, match="draining already"):
            await fleet.resize("expel", 2, 1)
        await until(lambda: names(fleet) == ["expel-1", "ingest-1", "expel-2"], "the youngest gone")
        assert youngest is not None
        assert not is_alive(youngest)
        await until_state(bench, lambda state: len(state.processes) == 3)
    assert [line for line in bench.notes() if line.endswith("drained")] == [
        "expel drained",
        "ingest drained",
        "expel drained",
        "expel drained",
    ]


async def test_a_process_that_crashes_while_it_leaves_does_not_come_back(bench: Bench) -> None:
    """Broken: a group that was made smaller grows again by itself."""
    async with bench.run("expel", mode="stuck") as fleet:
        await fleet.resize("expel", 1, 2)
        await fleet.wait_ready()
        leaving = fleet.processes[-1]
        assert leaving.pid is not None
        await fleet.resize("expel", 2, 1)
        os.kill(leaving.pid, signal.SIGKILL)
        await until(lambda: names(fleet) == ["expel-1"], "it is gone")
        assert leaving.restarts == 0
        bench.stop.insisted.set()  # the other one is stuck, too


async def test_a_fleet_that_stops_lets_the_leaving_drain(bench: Bench) -> None:
    """Broken: Ctrl-C during a shrink sends the one that drains a second SIGTERM, which means "at once"."""
    async with bench.run("expel") as fleet:
        await fleet.resize("expel", 1, 2)
        await fleet.wait_ready()
        await fleet.resize("expel", 2, 1)
    assert fleet.drained
    assert bench.notes()[-2:] == ["expel drained"] * 2


REFUSED = [
    ("observer", 1, 2, False),
    ("expel", 1, 0, False),
    ("expel", 1, 65, False),
    ("expel", 3, 1, False),
    ("expel", 2, 3, True),
    ("ingest", 0, 1, False),
]


async def test_refused_sizes(bench: Bench) -> None:
    """Broken: a wrong order empties a group, or one that was decided on old figures is carried out."""
    async with bench.run("expel", "observer") as fleet:
        for service, seen, size, again in REFUSED:
            with pytest.raises(SizeRefused) as caught:
                await fleet.resize(service, seen, size)
            assert caught.value.again == again, (service, seen, size)
            assert names(fleet) == ["expel-1", "observer-1"], (service, seen, size)


async def status_of(address: str, authorization: bytes) -> bytes:
    """Of a request with bytes that no client sends."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET /v1/groups/expel HTTP/1.1\r\nHost: h\r\nAuthorization: " + authorization + b"\r\n\r\n")
        return (await reader.readline()).split()[1]
    finally:
        writer.close()
        await writer.wait_closed()


async def test_control_asks_for_the_token(bench: Bench) -> None:
    """Broken: any page in a browser on this machine resizes the fleet, or a right order does nothing."""
    async with bench.run("expel") as fleet, aiohttp.ClientSession() as session:
        file = bench.data / TOKEN_FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        token = await asyncio.to_thread(file.read_text)
        url = f"http://{fleet.management}/v1/groups/expel"

        async def put(body: bytes, token: str = token, url: str = url) -> tuple[int, Any]:
            async with session.put(url, data=body, headers={"Authorization": f"Bearer {token}"}) as answer:
                return answer.status, await answer.text()

        order = b'{"seen": 1, "size": 2}'
        assert (await put(order, token="wrong"))[0] == 401
        assert await status_of(fleet.management, b"Bearer \xff\xfe") == b"401"
        assert (await put(order, url=url.replace("expel", "transform")))[0] == 404
        assert (await put(b'{"seen": 1}'))[0] == 422
        assert (await put(b'{"seen": 1, "size": 0}'))[0] == 422
        assert (await put(b'{"seen": 2, "size": 3}'))[0] == 409
        assert (await put(b" " * 9000))[0] == 413
        assert names(fleet) == ["expel-1"]
        status, body = await put(order)
        assert status == 202
        assert '"size":2' in body
        assert names(fleet) == ["expel-1", "expel-2"]
