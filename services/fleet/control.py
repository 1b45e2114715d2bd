"""Shows and resizes the groups of a running fleet, and replaces a process: routes on the supervisor's management port.

The caller sends the token from the data folder. A web page in a browser cannot read that file.
"""

import hmac
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from aiohttp import web

from services.fleet.process import ServiceProcess

RESIZABLE: Mapping[str, int] = {"ingest": 64, "expel": 64, "retrier": 10}
"""The maximum number of processes by service. Every other service has exactly one."""


class SizeRefused(ValueError):
    """The size is refused; the message is for a person. again: whether the same request may succeed later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


def refuse_size(service: str, staying: int, leaving: int, seen: int, size: int, open_: bool) -> None:
    """Raise SizeRefused unless a caller that knows the size `seen` may order `size`. One process leaves at a time."""
    if service not in RESIZABLE:
        raise SizeRefused(f"{service} always has the same processes", again=False)
    if not 1 <= size <= RESIZABLE[service]:
        raise SizeRefused(f"{service}: from 1 to {RESIZABLE[service]} processes", again=False)
    if size < seen - 1:
        raise SizeRefused(f"{service}: one process fewer at a time", again=False)
    if not open_:
        raise SizeRefused("the fleet is starting or stopping", again=True)
    if not staying:
        raise SizeRefused(f"this fleet runs no {service}", again=False)
    if seen != staying:
        raise SizeRefused(f"{service} has {staying} processes, not {seen}", again=True)
    if size < seen and leaving:
        raise SizeRefused(f"a process of {service} is draining already", again=True)


MAX_BODY = 8192


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PUT. seen: the size that the caller knows. size: the size that it wants. failed: processes that do not work:
    one of them leaves first."""

    seen: int
    size: int
    failed: tuple[str, ...] = ()


Resize = Callable[[str, int, int, Collection[str]], None]
Replace = Callable[[str, str], None]


_ORDER = msgspec.json.Decoder(Order)


class Control:
    """The routes. of: returns the processes of a service. resize, replace: as `Fleet.resize` and `Fleet.replace`."""

    def __init__(
        self, of: Callable[[str], Sequence[ServiceProcess]], resize: Resize, replace: Replace, token: str
    ) -> None:
        self._of, self._resize, self._replace, self._expected = of, resize, replace, f"Bearer {token}".encode()

    def routes(self) -> list[web.RouteDef]:
        """For the management port."""
        one = "/v1/groups/{service}"
        return [web.get(one, self.show), web.put(one, self.order), web.delete(one + "/{name}", self.replace)]

    async def show(self, request: web.Request) -> web.Response:
        """The ordered size, and each process with its management address (null while it does not run)."""
        self._check(request)
        return self._shown(request.match_info["service"], 200)

    async def order(self, request: web.Request) -> web.Response:
        """Order another size. 202: accepted; 409: not now, read the size again; 422: never."""
        self._check(request)
        service = request.match_info["service"]
        if request.content_length is None or request.content_length > MAX_BODY:
            return _problem(413, "a short body with its length")
        try:
            order = _ORDER.decode(await request.read())
            self._resize(service, order.seen, order.size, order.failed)
        except msgspec.MsgspecError:
            return _problem(422, 'wanted: {"seen": 1, "size": 2}')
        except SizeRefused as error:
            return _problem(409 if error.again else 422, str(error))
        return self._shown(service, 202)

    async def replace(self, request: web.Request) -> web.Response:
        """End a process, which is then started again. 202: accepted; 409: not now."""
        self._check(request)
        service = request.match_info["service"]
        try:
            self._replace(service, request.match_info["name"])
        except SizeRefused as error:
            return _problem(409 if error.again else 422, str(error))
        return self._shown(service, 202)

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # the received bytes
        if not hmac.compare_digest(given, self._expected):
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


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)
