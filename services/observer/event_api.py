"""The story of one event on the observer's API."""

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.pipe_file.pipes import PipeFile
from services.core.story.find import find_story, make_scope
from services.core.story.search import Limits
from services.core.times import now_ms
from services.observer import problems
from services.observer.http import Refused, json_answer, read_query, read_time

LIMITS = Limits(seconds=10.0, records=1_000_000, bytes=500_000_000)
"""Of one answer. The command line searches longer."""
_MAX_ID = 256
"""Bytes, as at ingest."""
_read_time = partial(read_time, example="since, until: 2h (ago), or 2026-11-21T08:00:00Z.")


class EventApi:
    """Reads the topics for each answer, one request at a time."""

    def __init__(self, broker: Broker, pipes: PipeFile) -> None:
        self._broker, self._pipes = broker, pipes
        self._searching = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/events/{id}", self.event)]

    async def event(self, request: web.Request) -> web.Response:
        """The story of every event with this id; an empty list of events when none was found."""
        query = read_query(request, {"stream": str, "pipe": str, "since": _read_time, "until": _read_time})
        event_id = request.match_info["id"]
        if len(event_id.encode(errors="replace")) > _MAX_ID:
            raise Refused(problems.BAD_PARAMETER, f"An id has at most {_MAX_ID} bytes.")
        try:
            scope = make_scope(self._pipes, event_id, now_ms(), **query)
        except KeyError:
            kind = (
                problems.PIPE_NOT_FOUND
                if query.get("pipe") not in (None, *self._pipes.pipes)
                else problems.BAD_PARAMETER
            )
            raise Refused(kind, "stream and pipe are names of the pipe file. GET /v1/pipes lists the pipes.") from None
        if self._searching.locked():
            raise Refused(problems.BUSY, "Another event is being searched. Try again in a few seconds.")
        async with self._searching:
            try:
                story = await find_story(self._broker, self._pipes, event_id, scope, LIMITS)
            except BrokerError as error:
                raise Refused(problems.BROKER_AWAY, f"The topics cannot be read: {type(error).__name__}.") from error
        body: dict[str, Any] = msgspec.to_builtins(story)
        return json_answer(body)
