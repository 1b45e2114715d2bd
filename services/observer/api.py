"""The observer's HTTP API: reads only, and shows no payload. Who may ask it: `answers.Door`. docs/observing.md is its page."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from services.core.address import is_loopback, parse_address
from services.core.bearer import Tokens
from services.core.listening import serve_app
from services.core.pipes import dead_letter_topic
from services.core.times import format_time, parse_time
from services.observer import problems
from services.observer.answers import Door, Refused, answer, json_answer, read_query
from services.observer.failures import FailureBook, Failures
from services.observer.letter_reader import LetterReader

OPENAPI = Path(__file__).with_name("openapi.json")
LIMIT, MOST = 20, 100

State = Callable[[str], str | None]
"""Of `<pipe>/<destination>`: whether it is paused, or how its breaker is. None while it is not known."""


class Api:
    """Answers from what was read so far; nothing here waits for a broker."""

    def __init__(
        self, book: FailureBook, reader: LetterReader, state: State, openapi: bytes, breaker: State = lambda _lane: None
    ) -> None:
        self._book, self._reader, self._openapi = book, reader, openapi
        self._state, self._breaker = state, breaker

    def routes(self) -> list[web.RouteDef]:
        """What there is."""
        return [
            web.get("/v1/destinations", self.destinations),
            web.get("/v1/destinations/{pipe}/{name}/failures", self.failures),
            web.get("/openapi.json", self.openapi),
        ]

    async def destinations(self, request: web.Request) -> web.Response:
        """All of them."""
        read_query(request, {})
        found = [self._summary(pipe, name, failures) for (pipe, name), failures in self._book.all().items()]
        return json_answer({"destinations": found, **self._how_complete()})

    async def failures(self, request: web.Request) -> web.Response:
        """The causes of one destination's failures."""
        query = read_query(request, {"since": _since, "limit": _limit})
        pipe, name = request.match_info["pipe"], request.match_info["name"]
        failures = self._book.all().get((pipe, name))
        if failures is None:
            raise Refused(problems.DESTINATION_NOT_FOUND, "GET /v1/destinations lists those that there are.")
        causes = failures.since(query.get("since", -(2**63)))
        shown = [cause.as_json() for cause in causes[: query.get("limit", LIMIT)]]
        more = len(causes) - len(shown)
        return json_answer(
            {**self._summary(pipe, name, failures), "causes": shown, "more": more, **self._how_complete(pipe)}
        )

    async def openapi(self, _request: web.Request) -> web.Response:
        """The description of this API."""
        return web.Response(body=self._openapi, content_type="application/json")

    def _summary(self, pipe: str, name: str, failures: Failures) -> dict[str, object]:
        last = None if failures.last is None else format_time(failures.last)
        standing = {"state": self._state(f"{pipe}/{name}"), "breaker": self._breaker(f"{pipe}/{name}")}
        return {"pipe": pipe, "destination": name, **standing, "letters": failures.letters, "last_failure": last}

    def _how_complete(self, pipe: str | None = None) -> dict[str, object]:
        unread = self._reader.problems
        if pipe is not None:
            unread = {topic: problem for topic, problem in unread.items() if topic == dead_letter_topic(pipe)}
        return {"catching_up": self._reader.catching_up, "unread": unread}


def _since(text: str) -> int:
    try:
        return parse_time(text, time.time())
    except (ValueError, OverflowError):
        raise Refused(problems.BAD_PARAMETER, "since: 2h (ago), or 2026-11-21T08:00:00Z.") from None


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise Refused(problems.BAD_PARAMETER, f"limit: a number from 1 to {MOST}.")
    return int(text)


@asynccontextmanager
async def serve_api(
    address: str,
    routes: Sequence[web.RouteDef],
    more: Callable[[web.Application], None] = lambda app: None,
    *,
    tokens: Tokens | None = None,
    names: frozenset[str] = frozenset(),
) -> AsyncIterator[str]:
    """Listen until the context is left; yields the bound "host:port". more: adds what is no API. tokens, names: see `Door`.

    Raises OSError when the port is taken.
    """
    door = Door(tokens, names, loopback=is_loopback(parse_address(address)[0]))
    app = web.Application(client_max_size=1024, middlewares=[answer, *door.checks()])
    app.add_routes(routes)
    more(app)
    async with serve_app(app, address) as bound:
        yield bound
