"""Shows and resizes groups of instances over HTTP, and replaces an instance: routes on a management port.

The supervisor of `penstock up` serves them for its processes, the transform service for its executors. A caller sends a token; a
web page in a browser cannot read the file that it is in.
"""

from collections.abc import Collection
from typing import Protocol

import msgspec
from aiohttp import web

from services.core.security.bearer import Tokens

MAX_BODY = 8192


class SizeRefused(ValueError):
    """The size is refused; the message is for a person. again: whether the same request may succeed later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Figures(msgspec.Struct, frozen=True):
    """Of an instance without a management port. age: seconds since it began. cpu: seconds of CPU that it has used since then."""

    age: float
    cpu: float


class Instance(msgspec.Struct, frozen=True):
    """address: of its management port; None while it has none. leaving: it was ordered to leave.

    figures: None when its management port has them.
    """

    name: str
    address: str | None
    leaving: bool
    figures: Figures | None = None


class GroupState(msgspec.Struct, frozen=True):
    """size: the ordered number of instances, without those that leave."""

    size: int
    instances: tuple[Instance, ...]


class Groups(Protocol):
    """Groups of instances. No method waits for a result: `describe` shows the progress."""

    @property
    def names(self) -> Collection[str]:
        """Of the groups that can be resized."""

    async def describe(self, group: str) -> GroupState:
        """The group now. Raises SizeRefused when that is not known now."""

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str]) -> None:
        """Order another size than the `seen` one. failed: instances of which one leaves first. Raises SizeRefused."""

    async def replace(self, group: str, name: str) -> None:
        """End an instance; another one is started in its place. Raises SizeRefused."""


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PUT, as in `Groups.resize`."""

    seen: int
    size: int
    failed: tuple[str, ...] = ()


_ORDER = msgspec.json.Decoder(Order)


class GroupControl:
    """The routes. whose: names the tokens for a person whose request lacks one."""

    def __init__(self, groups: Groups, tokens: Tokens, *, whose: str) -> None:
        self._groups, self._tokens, self._whose = groups, tokens, whose

    def routes(self) -> list[web.RouteDef]:
        """For the management port."""
        one = "/v1/groups/{group}"
        return [web.get(one, self._show), web.put(one, self._order), web.delete(one + "/{name}", self._replace)]

    async def _show(self, request: web.Request) -> web.Response:
        """The ordered size, and each instance."""
        self._check(request)
        return await self._shown(request.match_info["group"], 200)

    async def _order(self, request: web.Request) -> web.Response:
        """Order another size. 202: accepted; 409: not now, read the size again; 422: never."""
        self._check(request)
        group = request.match_info["group"]
        if request.content_length is None or request.content_length > MAX_BODY:
            return _problem(413, f"the body needs a Content-Length of at most {MAX_BODY}")
        try:
            order = _ORDER.decode(await request.read())
            await self._groups.resize(group, order.seen, order.size, order.failed)
        except msgspec.MsgspecError:
            return _problem(422, 'send {"seen": 1, "size": 2}')
        except SizeRefused as error:
            return _problem(409 if error.again else 422, str(error))
        return await self._shown(group, 202)

    async def _replace(self, request: web.Request) -> web.Response:
        """End an instance, in whose place another one is started. 202: accepted; 409: not now."""
        self._check(request)
        group = request.match_info["group"]
        try:
            await self._groups.replace(group, request.match_info["name"])
        except SizeRefused as error:
            return _problem(409 if error.again else 422, str(error))
        return await self._shown(group, 202)

    def _check(self, request: web.Request) -> None:
        if not self._tokens.allows(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(text=f"a token of {self._whose} is needed")
        if request.match_info["group"] not in self._groups.names:
            raise web.HTTPNotFound(text=f"the groups here are {', '.join(self._groups.names)}")

    async def _shown(self, group: str, status: int) -> web.Response:
        """The group; 503 when it is not known now, also after a change that was made."""
        try:
            body = msgspec.json.encode(await self._groups.describe(group))
        except SizeRefused as error:
            return _problem(503, str(error))
        return web.Response(status=status, body=body, content_type="application/json")


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)
