"""The observer's API: the health of pipes, which limits scaling; the autoscaler's announcements and reports."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec

from services.core.group_report import GroupReport
from services.core.security.bearer import read_tokens
from services.core.times import parse_time
from services.core.yaml_source import BadConfiguration

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
OURS = "autoscaler/groups/"
"""The start of our announcements. The group's name, a space, `out`, `in` or `replace`, and the sizes or the name follow."""

Lane = tuple[str, str]
"""(pipe, destination)"""


class ObserverUnavailable(Exception):
    """It does not answer, or not as expected."""


class Destination(msgspec.Struct, frozen=True):
    """From GET /v1/destinations."""

    pipe: str
    destination: str
    state: str | None
    breaker: str | None


class PlannedChange(msgspec.Struct, frozen=True):
    """From GET /v1/planned."""

    kind: str
    by: str
    begins: str = msgspec.field(name="from")
    until: str

    @property
    def began(self) -> float:
        """Seconds since 1970."""
        return _seconds(self.begins)


class Pipe(msgspec.Struct, frozen=True):
    """From GET /v1/pipes."""

    pipe: str
    health: str
    reasons: tuple[str, ...]


class _Pipes(msgspec.Struct):
    pipes: list[Pipe]


class _Destinations(msgspec.Struct):
    destinations: list[Destination]


class _Planned(msgspec.Struct):
    planned: list[PlannedChange]


@dataclass(frozen=True, slots=True)
class Observed:
    """failing: lanes whose receiver makes events wait. planned: all announcements of the last day. unstable: pipes
    that lose events, or whose nodes are silent."""

    failing: frozenset[Lane]
    planned: tuple[PlannedChange, ...]
    unstable: tuple[Pipe, ...]

    def under_way(self, now: float) -> str | None:
        """An unstable pipe, a deploy, or a scaling that is not one of our groups', at `now` (s since 1970)."""
        for pipe in self.unstable:
            return f"pipe {pipe.pipe} is unstable: {'; '.join(pipe.reasons)}"
        for one in self.planned:
            if one.began <= now < _seconds(one.until) and _blocks_scaling(one):
                return f"a {one.kind} by {one.by or 'somebody'} is announced"
        return None

    def last_change(self, group: str) -> PlannedChange | None:
        """The last announcement of any autoscaler for the group. By order, so independent of clocks."""
        return next((one for one in reversed(self.planned) if one.by.startswith(f"{OURS}{group} ")), None)


def action_of(window: PlannedChange) -> Literal["out", "in"]:
    """A replacement counts as `out`: an instance starts."""
    return "in" if window.by.partition(" ")[2].startswith("in ") else "out"


def _blocks_scaling(window: PlannedChange) -> bool:
    return window.kind == "deploy" or (window.kind == "scaling" and not window.by.startswith(OURS))


def _seconds(text: str) -> float:
    return parse_time(text, time.time()) / 1000


class ObserverClient:
    """One observer's API. Each call is one attempt of at most 5 s; raises ObserverUnavailable.

    token_file: read for each request, because tokens rotate; its first token is sent.
    """

    def __init__(self, address: str, session: aiohttp.ClientSession, token_file: Path | None = None) -> None:
        self._address, self._session, self._token_file = address, session, token_file

    async def read(self) -> Observed:
        destinations = await self._ask("GET", "/v1/destinations", _Destinations)
        planned = await self._ask("GET", "/v1/planned", _Planned)
        pipes = await self._ask("GET", "/v1/pipes", _Pipes)
        unstable = tuple(pipe for pipe in pipes.pipes if pipe.health == "unstable")
        failing = frozenset(
            (one.pipe, one.destination)
            for one in destinations.destinations
            if one.state == "paused" or one.breaker not in (None, "closed")
        )
        return Observed(failing, tuple(planned.planned), unstable)

    async def announce(self, group: str, action: str, words: str, seconds: float) -> PlannedChange:
        """Announce a change of scale: its disturbance raises no alarm, and other autoscalers know of it. Returns the
        announcement as `read` will show it."""
        by = f"{OURS}{group} {action} {words}"[:100]
        body = {"kind": "scaling", "seconds": max(1, round(seconds)), "by": by}
        window: PlannedChange = await self._ask("POST", "/v1/planned", PlannedChange, body)
        return window

    async def report(self, report: GroupReport) -> None:
        """Show the last decision about a group on the observer's page."""
        body = msgspec.to_builtins(report.cut())
        await self._ask("PUT", f"/v1/scaling/{quote(report.group, safe='')}", dict[str, Any], body)

    async def announce_shards(self, what: str, seconds: float) -> None:
        """Announce splits or merges: no group shrinks meanwhile."""
        body = {"kind": "scaling", "seconds": max(1, round(seconds)), "by": f"autoscaler: {what}"[:100]}
        await self._ask("POST", "/v1/planned", dict[str, Any], body)

    async def _ask(self, method: str, path: str, kind: type[Any], body: dict[str, Any] | None = None) -> Any:
        url, head = f"http://{self._address}{path}", await self._head()
        data = None if body is None else msgspec.json.encode(body)
        if data is not None:
            head["Content-Type"] = "application/json"
        try:
            async with self._session.request(method, url, data=data, headers=head, allow_redirects=False) as answer:
                text = await answer.read()
            if answer.status not in (200, 201):
                raise ObserverUnavailable(
                    f"the observer at {self._address} answers {method} {path} with {answer.status}"
                )
            return msgspec.json.decode(text, type=kind)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise ObserverUnavailable(f"the observer at {self._address} does not answer: {error!r}") from error

    async def _head(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            tokens = await asyncio.to_thread(read_tokens, self._token_file)
        except BadConfiguration as error:
            raise ObserverUnavailable(f"no token for the observer: {error}") from error
        return {"Authorization": f"Bearer {tokens[0]}"}


@asynccontextmanager
async def open_observer(address: str, token_file: Path | None = None) -> AsyncIterator[ObserverClient]:
    async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=False) as session:
        yield ObserverClient(address, session, token_file)
