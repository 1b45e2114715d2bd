"""The observer's API over HTTP: queries, answers in JSON, problems (RFC 9457), and who may ask."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from services.core import metrics
from services.core.group_report import MAX_REPORT_BYTES
from services.core.http.address import (
    LOOPBACK_NAMES,
    is_loopback,
    is_loopback_authority,
    is_named_authority,
    parse_address,
)
from services.core.http.listening import serve_app
from services.core.http.problem_type import CONTENT_TYPE, ProblemType, problem_json
from services.core.security.bearer import Tokens
from services.core.times import parse_time
from services.observer import problems

log = structlog.get_logger()

_MAX_PARAMETER = 63
_ASK = ('Basic realm="penstock"', 'Bearer realm="penstock"')
"""Each in its own line: browsers find only the first of a list."""
CLIENT = web.RequestKey("client", str)
"""In a request that needs a token: the name of the client's."""
_READING = ("GET", "HEAD")


class Refused(Exception):
    """The answer to the request is this problem."""

    def __init__(self, kind: ProblemType, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


def read_query(request: web.Request, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Only known parameters, each at most once. Raises Refused."""
    found: dict[str, Any] = {}
    for name, text in request.query.items():
        if name not in known or name in found or len(text) > _MAX_PARAMETER:
            allowed = f"This path takes these parameters, each at most once: {', '.join(known) or 'none'}."
            raise Refused(problems.BAD_PARAMETER, allowed)
        found[name] = known[name](text)
    return found


def read_time(text: str, example: str) -> int:
    """Milliseconds, from a text as of `parse_time`. example: of such texts. Raises Refused."""
    try:
        return parse_time(text, time.time())
    except (ValueError, OverflowError):
        raise Refused(problems.BAD_PARAMETER, example) from None


def json_answer(body: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _problem(kind: ProblemType, detail: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=kind.status, body=problem_json(kind, detail), content_type=CONTENT_TYPE, headers=headers)


@web.middleware
async def answer(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Counts each answer, and turns every error into a problem."""
    try:
        response = await handler(request)
    except Refused as error:
        response = _problem(error.kind, error.detail)
        for challenge in _ASK if error.kind is problems.UNAUTHORIZED else ():
            response.headers.add("WWW-Authenticate", challenge)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _problem(problems.METHOD_NOT_ALLOWED, f"Allowed: {allowed}.", {"Allow": allowed})
    except web.HTTPNotFound:
        response = _problem(problems.NOT_FOUND, "GET /openapi.json lists the resources.")
    except web.HTTPException as error:
        response = _problem(problems.BAD_REQUEST._replace(status=error.status), error.reason)
    except Exception:  # the boundary: a fault of ours is logged once, counted, and answered as a problem
        log.exception("request_failed", path=request.path)
        response = _problem(problems.INTERNAL, "The reason is in the observer's log.")
    metrics.OBSERVER_REQUESTS.labels(str(response.status)).inc()
    return response


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AccessControl:
    """On loopback everybody on this machine may read, and clients with a token may announce. Elsewhere every request needs a
    token. A request to a name that is not the observer's is refused in both cases (DNS rebinding).

    names: under which clients beyond loopback reach it, beside its addresses. tokens: None: no client has one.
    """

    def __init__(
        self, tokens: Tokens | None = None, names: frozenset[str] = frozenset(), *, loopback: bool = True
    ) -> None:
        self._tokens, self._names, self._loopback = tokens, names, loopback

    def checks(self) -> list[Middleware]:
        """The middlewares, in the order in which a request passes them."""
        return [self._check_name, self._check_token]

    @web.middleware
    async def _check_name(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.url.raw_authority
        if self._loopback and not is_loopback_authority(asked):
            raise Refused(problems.BAD_HOST, LOOPBACK_NAMES)
        if not self._loopback and not is_named_authority(asked, self._names):
            raise Refused(
                problems.BAD_HOST, "The observer answers to its addresses and to the names in its setting `names`."
            )
        return await handler(request)

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        has_no_effect = request.match_info.http_exception is not None
        reads = request.method in _READING or has_no_effect
        if self._loopback and reads:
            return await handler(request)
        if self._tokens is None:
            raise Refused(problems.UNAUTHORIZED, "The observer has no tokens. Try: start it with --token-file")
        client = self._tokens.find(request.headers.get("Authorization", ""))
        if client is None:
            raise Refused(
                problems.UNAUTHORIZED, "Send Authorization: Bearer, with a token of the observer's --token-file."
            )
        request[CLIENT] = client
        return await handler(request)


@asynccontextmanager
async def serve_api(
    address: str,
    routes: Sequence[web.RouteDef],
    more: Callable[[web.Application], None] = lambda app: None,
    *,
    tokens: Tokens | None = None,
    names: frozenset[str] = frozenset(),
) -> AsyncIterator[str]:
    """Listen until the context is left; yields the bound "host:port". more: adds further routes. tokens, names: as in
    `AccessControl`.

    Raises OSError when the port is taken.
    """
    access = AccessControl(tokens, names, loopback=is_loopback(parse_address(address)[0]))
    app = web.Application(client_max_size=MAX_REPORT_BYTES, middlewares=[answer, *access.checks()])
    app.add_routes(routes)
    more(app)
    async with serve_app(app, address) as bound:
        yield bound
