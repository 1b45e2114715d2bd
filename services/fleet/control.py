"""How a group of the fleet is seen and resized while it runs: two routes on the supervisor's management port.

The caller proves with the token in the data folder that it may; a page in somebody's browser cannot read that.
"""

import hmac
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from services.fleet.process import ServiceProcess
from services.fleet.size import RESIZABLE, SizeRefused

MAX_BODY = 1024


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PUT: the size that the caller saw, and the one that it wants."""

    seen: int
    size: int


_ORDER = msgspec.json.Decoder(Order)


class Control:
    """Answers from the running fleet. of: the processes of a service; resize: as `Fleet.resize`."""

    def __init__(
        self, of: Callable[[str], Sequence[ServiceProcess]], resize: Callable[[str, int, int], None], token: str
    ) -> None:
        self._of, self._resize, self._expected = of, resize, f"Bearer {token}".encode()

    def routes(self) -> list[web.RouteDef]:
        """What there is."""
        return [web.get("/v1/groups/{service}", self.show), web.put("/v1/groups/{service}", self.order)]

    async def show(self, request: web.Request) -> web.Response:
        """The size that was ordered, and every process with its management address (null while it does not run)."""
        self._check(request)
        return self._shown(request.match_info["service"], 200)

    async def order(self, request: web.Request) -> web.Response:
        """Order another size. 202: it is on its way; 409: not now, look again; 422: never."""
        self._check(request)
        service = request.match_info["service"]
        if request.content_length is None or request.content_length > MAX_BODY:
            return _say(413, "a short body with its length")
        try:
            order = _ORDER.decode(await request.read())
            self._resize(service, order.seen, order.size)
        except msgspec.MsgspecError:
            return _say(422, 'wanted: {"seen": 1, "size": 2}')
        except SizeRefused as error:
            return _say(409 if error.again else 422, str(error))
        return self._shown(service, 202)

    def _check(self, request: web.Request) -> None:
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # as it came
        if not hmac.compare_digest(said, self._expected):
            raise web.HTTPUnauthorized(text="the token of the data folder is needed")
        if request.match_info["service"] not in RESIZABLE:
            raise web.HTTPNotFound(text=f"resizable: {', '.join(RESIZABLE)}")

    def _shown(self, service: str, status: int) -> web.Response:
        group = self._of(service)
        instances = [
            {"name": one.spec.name, "address": one.management if one.pid else None, "leaving": one.leaving}
            for one in group
        ]
        size = sum(not one.leaving for one in group)
        return web.json_response({"service": service, "size": size, "instances": instances}, status=status)


def _say(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)
