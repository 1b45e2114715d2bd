"""The routes of groups, when their owner cannot say now what there is."""

from collections.abc import Collection

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.core.group_control import GroupControl, GroupState, SizeRefused
from services.core.security.bearer import Tokens

TOKEN = "0123456789abcdef0123456789abcdef"


class Busy:
    """Takes every order, and does not answer afterwards, as Spark while its Java frees memory."""

    names = ("executors",)

    def __init__(self) -> None:
        self.orders: list[str] = []

    async def describe(self, group: str) -> GroupState:
        raise SizeRefused("Spark does not answer: TimeoutError", again=True)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str]) -> None:
        self.orders.append(f"{size}")

    async def replace(self, group: str, name: str) -> None:
        self.orders.append(name)


async def test_a_busy_owner_answers_503() -> None:
    """Broken: the autoscaler gets a 500 with a stack, and takes an owner that is busy for one that is at fault."""
    groups = Busy()
    app = web.Application()
    app.add_routes(GroupControl(groups, Tokens([TOKEN]), whose="the test").routes())
    head = {"Authorization": f"Bearer {TOKEN}"}
    async with TestServer(app) as server, aiohttp.ClientSession(headers=head) as session:
        url = server.make_url("/v1/groups/executors")
        for request in (
            session.get(url),
            session.put(url, json={"seen": 1, "size": 2}),
            session.delete(f"{url}/7"),
        ):
            async with request as answer:
                assert answer.status == 503
                assert "Spark does not answer" in (await answer.json())["detail"]
    assert groups.orders == ["2", "7"]
