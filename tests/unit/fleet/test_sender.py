"""The sending client against an ingest that refuses, stalls and breaks on purpose: nothing lost, same ids, bounded."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from services.fleet.sending import sender
from services.fleet.sending.event_source import BadInput, SourceEvent
from services.fleet.sending.pace import Pace
from services.fleet.sending.sender import SendingFailed, SendSummary, Target, make_id, send_events, wrap

Event = dict[str, Any]
Script = Callable[[list[Event]], Awaitable[web.Response | None]]


@dataclass
class FakeIngest:
    """Answers as `script` says, else takes everything. stored: data by event id, in order of arrival."""

    script: Script
    stored: dict[str, Event] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    most_in_flight: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def take(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.headers = dict(request.headers)
            events: list[Event] = json.loads(await request.read())
            self.seen.update(event["id"] for event in events)
            answer = await self.script(events)
            if answer is None:
                self.stored |= {event["id"]: event["data"] for event in events}
                answer = web.json_response({"accepted": len(events)})
            return answer
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/streams/orders/events", self.take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            await runner.cleanup()


def numbered(count: int, size: int = 0) -> Iterator[SourceEvent]:
    for number in range(1, count + 1):
        yield SourceEvent(number, json.dumps({"n": number, "pad": "x" * size}).encode(), "")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_BASE_WAIT_S", 0.01)


async def send(script: Script, events: Iterator[SourceEvent], **target: Any) -> tuple[FakeIngest, SendSummary]:
    ingest, summary = FakeIngest(script), SendSummary()
    async with ingest.serve() as url:
        await send_events(events, Target(url, "orders", **target), summary)
    return ingest, summary


async def take_all(_events: list[Event]) -> web.Response | None:
    return None


async def test_everything_arrives_once_in_batches() -> None:
    """Broken: events are lost, doubled or altered on the way from file to ingest."""
    ingest, summary = await send(take_all, numbered(1005), key="psk_x", in_flight=3)
    assert sorted(data["n"] for data in ingest.stored.values()) == list(range(1, 1006))
    assert set(ingest.seen.values()) == {1}
    assert (summary.accepted, summary.requests, summary.retries) == (1005, 11, 0)
    assert ingest.most_in_flight <= 3
    assert ingest.headers["Authorization"] == "Bearer psk_x"


async def test_retries_keep_ids_and_honour_retry_after() -> None:
    """Broken: what ingest stored without being able to say so is stored again under new ids; or ingest is hammered."""
    asked: dict[str, int] = {}
    began = asyncio.get_running_loop().time()

    async def script(events: list[Event]) -> web.Response | None:
        turn = asked[events[0]["id"]] = asked.get(events[0]["id"], 0) + 1
        if turn == 1:
            return web.Response(status=503, headers={"Retry-After": "1"})
        return web.Response(status=429) if turn == 2 else None

    ingest, summary = await send(script, numbered(10))
    assert set(ingest.seen.values()) == {3}
    assert len(ingest.stored) == summary.accepted == 10
    assert summary.retries == 2
    assert asyncio.get_running_loop().time() - began >= 1.0


async def test_no_answer_is_repeated() -> None:
    """Broken: a cut connection loses a batch, or doubles it under new ids."""
    broken: list[int] = []

    async def script(events: list[Event]) -> web.Response | None:
        if len(broken) < 3:
            broken.append(len(events))
            raise ConnectionResetError("as a crash would")
        return None

    ingest, summary = await send(script, numbered(50))
    assert len(ingest.stored) == summary.accepted == 50
    assert set(ingest.seen.values()) == {4}


async def test_refused_items_are_named_and_others_accepted() -> None:
    """Broken: a 207 counts as success for all, or for none."""

    async def script(events: list[Event]) -> web.Response | None:
        refused = [
            {"index": index, "reason": "bad-time", "detail": "not a time", "retry": event["data"]["n"] == 3}
            for index, event in enumerate(events)
            if event["data"]["n"] in (2, 3) and (event["data"]["n"] == 2 or len(events) > 1)
        ]
        if not refused:
            return None
        return web.json_response({"accepted": len(events) - len(refused), "refused": refused}, status=207)

    _, summary = await send(script, numbered(10))
    assert summary.accepted == 9
    assert dict(summary.refused) == {"bad-time": 1}
    assert summary.examples == [(2, "bad-time", "not a time")]


async def test_one_poisonous_event_does_not_spoil_its_batch() -> None:
    """Broken: an event that makes ingest refuse the whole request takes 99 good ones with it."""

    async def script(events: list[Event]) -> web.Response | None:
        poisoned = any(event["data"]["n"] == 42 for event in events)
        problem = {
            "type": "urn:penstock:problem:bad-json",
            "detail": "Not valid at line 1, column 201: number out of range",
        }
        return web.json_response(problem, status=400) if poisoned else None

    _, summary = await send(script, numbered(100))
    assert summary.accepted == 99
    assert summary.examples == [(42, "bad-json", "Not valid: number out of range")], "not the place in the request"


@pytest.mark.parametrize("status", [301, 401, 403, 404, 415])
async def test_what_no_repetition_repairs_ends_at_once(status: int) -> None:
    """Broken: a wrong key is tried for minutes, a redirect carries the key elsewhere."""

    async def script(_events: list[Event]) -> web.Response | None:
        return web.json_response({"title": "No", "detail": "because"}, status=status, headers={"Location": "/x"})

    with pytest.raises(SendingFailed, match=rf"status {status}: No\. because"):
        await send(script, numbered(1000))


async def test_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a script hangs for ever when ingest is away."""
    monkeypatch.setattr(sender, "GIVE_UP_AFTER_S", 0.2)
    with pytest.raises(SendingFailed, match=r"ingest accepted nothing for .*: nobody listens on 127\.0\.0\.1:9"):
        await send_events(numbered(10), Target("http://127.0.0.1:9", "orders"), SendSummary())


async def test_reads_no_further_than_it_sends() -> None:
    """Broken: a large file is read into memory while ingest is slow."""
    released = asyncio.Event()
    taken: list[int] = []

    def source() -> Iterator[SourceEvent]:
        for event in numbered(100_000, size=100):
            taken.append(event.position)
            yield event

    async def script(_events: list[Event]) -> web.Response | None:
        await released.wait()
        return None

    ingest, summary = FakeIngest(script), SendSummary()
    async with ingest.serve() as url:
        sending = asyncio.ensure_future(send_events(source(), Target(url, "orders", in_flight=2), summary))
        async with asyncio.timeout(600):
            while ingest.in_flight < 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(taken) <= 100 * (2 + 2 + 2)
        sending.cancel()
        await asyncio.wait({sending})
        released.set()


async def test_rate_is_kept() -> None:
    """Broken: --rate does not protect what is behind it."""
    began = asyncio.get_running_loop().time()
    _, summary = await send(take_all, numbered(30), batch=10, rate=40.0)
    assert summary.accepted == 30
    assert asyncio.get_running_loop().time() - began >= 0.5


@pytest.mark.parametrize(("rate", "most"), [(0.5, 1), (25.0, 6), (1000.0, 100), (0.0, 100)])
def test_a_low_rate_has_small_requests(rate: float, most: int) -> None:
    """Broken: --rate 25 sends 100 events at once, and nothing in the next four seconds."""
    assert Target("", "orders", rate=rate).request_events == most


async def test_pace_is_even_from_the_first_event_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the first events, or those after a pause, come as a burst above the rate."""
    clock = [100.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("services.fleet.sending.pace.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("services.fleet.sending.pace.asyncio.sleep", sleep)
    even, sent = Pace(10.0), []
    for count, pause in ((5, 0.0), (5, 0.0), (1, 0.0), (5, 60.0)):
        clock[0] += pause
        await even.wait(count)
        sent.append(round(clock[0] - 100.0, 3))
    assert sent == [0.4, 0.9, 1.0, 61.4]


async def test_bad_lines_are_counted_not_sent() -> None:
    """Broken: one bad line makes ingest refuse the others, or is not in the summary."""
    events = [*numbered(2), SourceEvent(3, b"{", "not valid JSON"), SourceEvent(4, b'{"n":4}', "")]
    ingest, summary = await send(take_all, iter(events))
    assert len(ingest.stored) == summary.accepted == 3
    assert (summary.skipped, dict(summary.refused)) == (1, {}), "ingest knows nothing of it"
    assert summary.examples == [(3, "skipped", "not valid JSON")]


@pytest.mark.parametrize("in_flight", [1, 4])
async def test_the_events_before_damage_are_sent_and_counted(in_flight: int) -> None:
    """Broken: ingest stores some of the events, the summary says `accepted 0`, and the message that all of them were sent."""

    async def slow(_events: list[Event]) -> web.Response | None:
        await asyncio.sleep(0.01)
        return None

    def damaged() -> Iterator[SourceEvent]:
        yield from numbered(499)
        raise BadInput("event 500, line 1: not valid JSON")

    ingest, summary = FakeIngest(slow), SendSummary()
    async with ingest.serve() as url:
        with pytest.raises(BadInput, match="event 500"):
            await send_events(damaged(), Target(url, "orders", in_flight=in_flight), summary)
    assert (len(ingest.stored), summary.accepted, summary.requests) == (499, 499, 5)


def test_wrapping() -> None:
    """Broken: a CloudEvent is wrapped in another, or a payload is changed by its envelope."""
    plain, number = b'{"a":1.10,"b":12345678901234567890}', b'{"specversion":"1.0","x":1}'
    cloud = b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":{}}'
    assert wrap(plain, "orders").endswith(b'"data":' + plain + b"}")
    assert wrap(number, "orders").endswith(b'"data":' + number + b"}")
    assert wrap(cloud, "orders") == cloud
    ids = [make_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(one) == 36 and one[14] == "7" and one[19] in "89ab" for one in ids)
