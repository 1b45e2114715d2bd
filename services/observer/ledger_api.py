"""The ledger on the observer's API: the health, loss, lag and fields of pipes; missing events by name; planned actions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from services.core.audit import CANCEL, PLAN
from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError
from services.core.lag import LagHistogram
from services.core.ledger.minute import MINUTE_MS
from services.core.times import format_time, now_ms
from services.observer import problems
from services.observer.explain import explain
from services.observer.follower import Follower, StandsBy
from services.observer.health import FindHealth
from services.observer.http import CLIENT, Refused, json_answer, read_query, read_time
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row
from services.observer.planned import MAX_LENGTH_MS, Kind, NoSuchWindow, TooManyWindows, Window

MAX_MINUTES = 24 * 60
DEFAULT_MINUTES = 60
_NAMED = 30
"""The most pipes that an answer names."""


class Announcement(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    seconds: int = 600
    pipe: str | None = None
    by: str = ""


Audit = Callable[[str, str, Mapping[str, str]], Awaitable[None]]
"""By action, who, and the window; raises BrokerError kinds."""
_ASK_THE_SPEAKER = "Ask the observer whose answers have speaks: true."


class LedgerApi:
    """Answers from the follower's table; only `explain` reads streams, one request at a time."""

    def __init__(
        self, follower: Follower, reader: Reader, find_health: FindHealth, threshold: float, audit: Audit | None = None
    ) -> None:
        """audit: None: planned actions are not written to the audit."""
        self._follower, self._reader, self._find_health, self._threshold = follower, reader, find_health, threshold
        self._audit = audit
        self._explaining = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/pipes", self.pipes),
            web.get("/v1/pipes/{pipe}/health", self.health),
            web.get("/v1/pipes/{pipe}/loss", self.loss),
            web.get("/v1/pipes/{pipe}/lag", self.lag),
            web.get("/v1/pipes/{pipe}/fields", self.fields),
            web.get("/v1/pipes/{pipe}/loss/{minute}/explain", self.explain),
            web.get("/v1/planned", self.planned),
            web.post("/v1/planned", self.announce),
            web.delete("/v1/planned/{id}", self.cancel),
        ]

    async def pipes(self, request: web.Request) -> web.Response:
        read_query(request, {})
        names = self._follower.table.flow.pipes
        return json_answer({"pipes": [{"pipe": name, **self._health(name)} for name in names], **self._how_complete()})

    async def health(self, request: web.Request) -> web.Response:
        read_query(request, {})
        pipe = self._pipe(request)
        return json_answer({"pipe": pipe, **self._health(pipe), **self._how_complete()})

    def _health(self, pipe: str) -> dict[str, object]:
        found = self._find_health(pipe, now_ms())
        return {"health": found.state, "reasons": list(found.reasons), "planned": found.planned}

    async def loss(self, request: web.Request) -> web.Response:
        first, last = _read_span(request)
        pipe, table, now = self._pipe(request), self._follower.table, now_ms()
        rows = [table.row(pipe, minute, now) for minute in table.minutes(pipe) if first <= minute <= last]
        minutes = [{**row_json(row), "planned": self._planned_in(pipe, row.minute)} for row in rows]
        judged = {"threshold": self._threshold, "final_after_ms": table.ages.final}
        return json_answer({"pipe": pipe, **judged, "minutes": minutes, **self._how_complete()})

    def _planned_in(self, pipe: str, minute: int) -> dict[str, object] | None:
        """The planned action that excuses a loss in this minute."""
        found = self._follower.planned.covers(pipe, minute * MINUTE_MS, (minute + 1) * MINUTE_MS, loss=True)
        return None if found is None else _window_json(found)

    async def lag(self, request: web.Request) -> web.Response:
        """P50, P95 and P99 in ms per step, kind and minute of measurement, of the last hour at most."""
        first, last = _read_span(request)
        pipe = self._pipe(request)
        steps = set(self._follower.table.flow.steps(pipe))
        minutes = [minute for minute in self._follower.lags.minutes() if first <= minute <= last]
        found = [
            lag_json(minute, step, kind, histogram)
            for minute in minutes
            for (step, kind), histogram in self._follower.lags.kinds(minute).items()
            if step in steps
        ]
        return json_answer({"pipe": pipe, "lags": found, **self._how_complete()})

    async def fields(self, request: web.Request) -> web.Response:
        """Statistics of sampled payloads of the last hour, per step and field; and the fields that have drifted."""
        read_query(request, {})
        pipe, fields = self._pipe(request), self._follower.fields
        found, drifts = [], []
        for step in self._follower.table.flow.steps(pipe):
            where = {"node": step.node, "destination": step.destination}
            for name, figures in fields.figures(step).items():
                found.append({**where, "field": name, **msgspec.to_builtins(figures)})
            drifts += [{**where, "field": one.field, "what": one.what, "text": one.text} for one in fields.drifts(step)]
        return json_answer({"pipe": pipe, "fields": found, "drifts": drifts, **self._how_complete()})

    async def explain(self, request: web.Request) -> web.Response:
        read_query(request, {})
        pipe, minute = self._pipe(request), read_minute(request.match_info["minute"])
        if self._explaining.locked():
            raise Refused(problems.BUSY, "Another minute is being explained. Try again in a few seconds.")
        async with self._explaining:
            try:
                found = await explain(self._follower.table, self._reader, pipe, minute)
            except BrokerError as error:
                raise Refused(problems.BROKER_AWAY, f"The streams cannot be read: {type(error).__name__}.") from error
        return json_answer({**msgspec.to_builtins(found), "minute": format_minute(minute), **self._how_complete()})

    async def planned(self, request: web.Request) -> web.Response:
        read_query(request, {})
        return json_answer({"planned": list(map(_window_json, self._follower.planned.all()))})

    async def announce(self, request: web.Request) -> web.Response:
        """Announce a planned action that begins now."""
        read_query(request, {})
        if request.content_type != "application/json":  # a page of another origin cannot send it without a preflight
            raise Refused(problems.NOT_JSON, "Send Content-Type: application/json.")
        window = self._read_window(await request.read(), request.get(CLIENT, ""))
        try:
            await self._follower.announce(window)
            await self._write_audit(PLAN, window, window.by, window.asked_with)
        except StandsBy as error:
            raise Refused(problems.STANDS_BY, _ASK_THE_SPEAKER) from error
        except TooManyWindows as error:
            raise Refused(problems.TOO_MANY_WINDOWS, f"{error}.") from error
        except BrokerError as error:
            raise Refused(
                problems.BROKER_AWAY, "The action was not stored. Try again: it may be announced twice."
            ) from error
        return json_answer(_window_json(window), status=201)

    async def cancel(self, request: web.Request) -> web.Response:
        """End a planned action now. One that is over stays as it is."""
        query, asked_with = read_query(request, {"by": str}), request.get(CLIENT, "")
        by = query.get("by", "")
        try:
            window = await self._follower.cancel(request.match_info["id"], by, asked_with)
            if window.cancelled_by == by:
                await self._write_audit(CANCEL, window, by, asked_with)
        except StandsBy as error:
            raise Refused(problems.STANDS_BY, _ASK_THE_SPEAKER) from error
        except NoSuchWindow as error:
            raise Refused(problems.PLANNED_NOT_FOUND, "GET /v1/planned lists the actions of the last day.") from error
        except BrokerError as error:
            raise Refused(problems.BROKER_AWAY, "The end was not stored. Try again.") from error
        return json_answer(_window_json(window))

    async def _write_audit(self, action: str, window: Window, by: str, asked_with: str) -> None:
        """Of people's actions: the autoscaler announces each of its own, and they excuse no loss. Raises BrokerError kinds."""
        if self._audit is not None and window.excuses_loss:
            shown = {name: str(value) for name, value in _window_json(window).items() if value is not None}
            await self._audit(action, f"{by or 'somebody'} (token {asked_with})", shown)

    def _read_window(self, body: bytes, asked_with: str) -> Window:
        try:
            wanted = _ANNOUNCEMENT.decode(body)
        except msgspec.MsgspecError as error:
            example = 'Send {"kind": "deploy" | "scaling" | "pause", "seconds": 600, "pipe": null, "by": "ci"}.'
            raise Refused(problems.BAD_BODY, example) from error
        if wanted.pipe is not None:
            self._check_pipe(wanted.pipe)
        if not 1 <= wanted.seconds <= MAX_LENGTH_MS // 1000:
            raise Refused(problems.BAD_BODY, f"seconds is a number from 1 to {MAX_LENGTH_MS // 1000}.")
        now = now_ms()
        return Window(wanted.kind, wanted.pipe, now, now + wanted.seconds * 1000, wanted.by[:100], asked_with)

    def _pipe(self, request: web.Request) -> str:
        return self._check_pipe(request.match_info["pipe"])

    def _check_pipe(self, pipe: str) -> str:
        if pipe not in self._follower.table.flow.pipes:
            known = sorted(self._follower.table.flow.pipes)
            more = f" and {len(known) - _NAMED} more: GET /v1/pipes" if len(known) > _NAMED else ""
            raise Refused(problems.PIPE_NOT_FOUND, f"The pipe file has these pipes: {', '.join(known[:_NAMED])}{more}.")
        return pipe

    def _how_complete(self) -> dict[str, object]:
        return {
            "catching_up": self._follower.catching_up,
            "problem": self._follower.problem,
            "speaks": self._follower.speaks,
        }


def row_json(row: Row) -> dict[str, object]:
    fields: dict[str, Any] = msgspec.to_builtins(row)
    del fields["pipe"]
    for step in fields["steps"]:
        step["final"] = step["why_open"] is None
    return {
        **fields,
        "minute": format_minute(row.minute),
        "final": row.why_open is None,
        "loss": row.loss,
        "final_loss": row.final_loss,
    }


def lag_json(minute: int, step: Step, kind: str, histogram: LagHistogram) -> dict[str, object]:
    p50, p95, p99 = (round(value, 1) for value in histogram.quantiles((0.5, 0.95, 0.99)))
    where = {"minute": format_minute(minute), "node": step.node, "destination": step.destination, "kind": kind}
    return {**where, "count": histogram.count, "p50": p50, "p95": p95, "p99": p99}


def format_minute(minute: int) -> str:
    """RFC 3339 to the minute."""
    return format_time(minute * MINUTE_MS)[:16] + "Z"


def read_minute(text: str) -> int:
    """From `format_minute`, `2h` (ago), or any RFC 3339 time in it. Raises Refused."""
    return read_time(text, "A minute is written as 5m (ago) or 2026-11-21T08:05Z.") // MINUTE_MS


def _read_span(request: web.Request) -> tuple[int, int]:
    query = read_query(request, {"from": read_minute, "to": read_minute})
    last = query.get("to", now_ms() // MINUTE_MS)
    first = query.get("from", last - DEFAULT_MINUTES + 1)
    if not 0 <= last - first < MAX_MINUTES:
        raise Refused(
            problems.BAD_PARAMETER, f"from is not after to. From one to the other are at most {MAX_MINUTES} minutes."
        )
    return first, last


def _window_json(window: Window) -> dict[str, object]:
    times = {"from": format_time(window.from_ms), "until": format_time(window.until_ms)}
    who = {"by": window.by, "token": window.asked_with or None}
    cancelled = {"cancelled_by": window.cancelled_by, "cancelled_token": window.cancelled_with or None}
    return {"id": window.id, "kind": window.kind, "pipe": window.pipe, **who, **times, **cancelled}


_ANNOUNCEMENT = msgspec.json.Decoder(Announcement)
