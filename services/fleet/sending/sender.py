"""Sends events to ingest: in batches, several requests at once, retries with the same ids, bounded memory."""

import asyncio
import os
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson

from services.core.backoff import Backoff
from services.core.event import SENDER
from services.fleet.problem import why_no_answer
from services.fleet.sending.event_source import BadInput, SourceEvent, without_place
from services.fleet.sending.pace import Pace

CONTENT_TYPE = "application/cloudevents-batch+json"


class _Probe(msgspec.Struct):
    specversion: object = None
    id: object = None


_probe = msgspec.json.Decoder(_Probe)


def wrap(payload: bytes, stream: str) -> bytes:
    """The payload, a JSON object, as one element of a CloudEvents batch. A payload that is a CloudEvent stays as it is."""
    found = _probe.decode(payload)
    if found.specversion is not None and found.id is not None:
        return payload
    head = f'{{"specversion":"1.0","id":"{make_id()}","source":"{SENDER}","type":"{stream}","data":'
    return head.encode() + payload + b"}"


def make_id() -> str:
    """A new UUID version 7 (RFC 9562)."""
    millis = time.time_ns() // 1_000_000
    number = millis << 80 | int.from_bytes(os.urandom(10), "big")
    number = number & ~(0xF << 76) | 7 << 76
    number = number & ~(0x3 << 62) | 2 << 62
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


MAX_BATCH_BYTES = 1_000_000
TIMEOUT_S = 40.0
"""Longer than ingest needs to learn the outcome of a batch, so that its answer arrives before this time-out."""
GIVE_UP_AFTER_S = 120.0
SHOWN_EXAMPLES = 10
SKIPPED = "skipped"
_LASTING_ATTEMPTS = 3
"""After so many retries the reason is shown; at once when there was no answer."""
_BASE_WAIT_S, _MAX_WAIT_S, _MAX_RETRY_AFTER_S = 0.1, 10.0, 60.0


class SendingFailed(Exception):
    """Nothing more can be sent; the message is for a person. Accepted events stay accepted. status: the last answer; 0: none."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send. url: of ingest, e.g. http://127.0.0.1:8080. batch: events per request. rate: per second; 0: no limit.

    With a low rate a request has fewer events than `batch`: those of a quarter of a second, at least one.
    """

    url: str
    stream: str
    key: str | None = field(default=None, repr=False)
    batch: int = 100
    in_flight: int = 4
    rate: float = 0.0

    @property
    def request_events(self) -> int:
        return min(self.batch, max(1, int(self.rate / 4))) if self.rate else self.batch


@dataclass(slots=True)
class SendSummary:
    """The outcome so far. refused: by ingest, counts by reason. skipped: those that are no JSON objects, which were not sent.

    examples: (position in the input, reason, detail) of the first few; the reason of a skipped one is SKIPPED. unit: the word
    for a position.
    trouble: why a request is retried; "" once one is answered. A refusal counts only after several retries.
    """

    accepted: int = 0
    requests: int = 0
    retries: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    examples: list[tuple[int, str, str]] = field(default_factory=list)
    unit: str = "event"
    trouble: str = ""

    def refuse(self, event: SourceEvent, reason: str, detail: str) -> None:
        """Count one event that ingest will never accept."""
        self.refused[reason] += 1
        self._show(event, reason, detail)

    def skip(self, event: SourceEvent) -> None:
        """Count one event that is not sent, because of its fault."""
        self.skipped += 1
        self._show(event, SKIPPED, event.fault)

    def _show(self, event: SourceEvent, reason: str, detail: str) -> None:
        if len(self.examples) < SHOWN_EXAMPLES:
            self.unit = event.unit
            self.examples.append((event.position, reason, detail))


async def send_events(
    events: Iterator[SourceEvent], target: Target, summary: SendSummary, done: Callable[[], None] = lambda: None
) -> None:
    """Send all events. `summary` is always up to date. `done` is called after each answered request.

    `events` is read from a thread. Raises SendingFailed, and the errors of `events` when all events before the error are settled.
    Cancelling stops at once; events in flight may or may not have been stored.
    """
    queue: asyncio.Queue[list[SourceEvent] | None] = asyncio.Queue(maxsize=target.in_flight)
    connector = aiohttp.TCPConnector(limit=target.in_flight)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=5.0)
    reading = _Reading(events, target, summary)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            asyncio.TaskGroup() as group,
        ):
            sender = _Sender(session, target, summary, done)
            for _ in range(target.in_flight):
                group.create_task(sender.work(queue))
            pace = Pace(target.rate)
            async for batch in reading.batches():
                await pace.wait(len(batch))
                await queue.put(batch)
            for _ in range(target.in_flight):
                await queue.put(None)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if reading.error is not None:
        raise reading.error


class _Reading:
    """Reads the input. error: why it ended early. Its last batch has the events before that."""

    def __init__(self, events: Iterator[SourceEvent], target: Target, summary: SendSummary) -> None:
        self._events, self._target, self._summary = events, target, summary
        self.error: BadInput | OSError | None = None

    async def batches(self) -> AsyncIterator[list[SourceEvent]]:
        """Batches of up to `Target.request_events` events and about MAX_BATCH_BYTES. What is no JSON object is skipped."""
        more = True
        while more:
            batch, more = await asyncio.to_thread(self._next)
            for event in batch:
                if event.fault:
                    self._summary.skip(event)
            stream = self._target.stream
            good = [event._replace(payload=wrap(event.payload, stream)) for event in batch if not event.fault]
            if good:
                yield good

    def _next(self) -> tuple[list[SourceEvent], bool]:
        """(the next batch, whether there may be more). Blocking."""
        batch: list[SourceEvent] = []
        size, most = 0, self._target.request_events
        try:
            for event in self._events:
                batch.append(event)
                size += len(event.payload)
                if len(batch) >= most or size >= MAX_BATCH_BYTES:
                    return batch, True
        except (BadInput, OSError) as error:
            self.error = error
        return batch, False


PROBE_S = 5.0


async def probe(url: str) -> str:
    """Why nothing can be connected to at the URL, for a person; "" when something listens there. Takes up to PROBE_S."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            )
    except TimeoutError:
        return f"no connection within {PROBE_S:.0f} s"
    except socket.gaierror:
        return f"there is no host {parts.hostname}"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return error.strerror or type(error).__name__
    writer.close()
    return ""


class _Sender:
    """Sends batches. Retries each of them until every event is accepted or finally refused."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, summary: SendSummary, done: Callable[[], None]
    ) -> None:
        self._session, self._summary, self._done = session, summary, done
        self._url = f"{target.url.rstrip('/')}/v1/streams/{target.stream}/events"
        self._headers = {"Content-Type": CONTENT_TYPE}
        if target.key is not None:
            self._headers["Authorization"] = f"Bearer {target.key}"

    async def work(self, queue: asyncio.Queue[list[SourceEvent] | None]) -> None:
        while (batch := await queue.get()) is not None:
            waiting = deque([batch])
            while waiting:
                waiting.extend(await self._send(waiting.popleft()))

    async def _send(self, batch: list[SourceEvent]) -> list[list[SourceEvent]]:
        """Send one batch until its outcome is final. Returns smaller batches when the whole was refused because of a part."""
        deadline = time.monotonic() + GIVE_UP_AFTER_S
        backoff = Backoff(_BASE_WAIT_S, _MAX_WAIT_S)
        while True:
            status, answer, asked = await self._post(batch)
            if status in (200, 207, 422):
                batch = self._settle(batch, answer, status)
            elif status in (400, 413) and len(batch) > 1:
                middle = len(batch) // 2
                return [batch[:middle], batch[middle:]]
            elif status in (400, 413):
                detail = without_place(str(answer.get("detail", "")))
                self._summary.refuse(batch[0], _reason(answer, status), detail)
                batch = []
            elif status not in (408, 429) and 300 <= status < 500:
                raise SendingFailed(_explain(status, answer), status)
            lasts = not status or backoff.failures >= _LASTING_ATTEMPTS
            self._summary.trouble = _explain(status, answer) if batch and lasts else ""
            self._done()
            if not batch:
                return []
            backoff.fail()
            wait = max(asked, backoff.delay())
            if time.monotonic() + wait > deadline:
                waited = f"ingest accepted nothing for {GIVE_UP_AFTER_S:.0f} s"
                raise SendingFailed(f"{waited}: {_explain(status, answer)}", status)
            self._summary.retries += 1
            await asyncio.sleep(wait)

    async def _post(self, batch: Sequence[SourceEvent]) -> tuple[int, dict[str, Any], float]:
        """(status, the JSON of the answer, its Retry-After in seconds). Status 0: no answer, the outcome is unknown."""
        self._summary.requests += 1
        body = b"[" + b",".join([event.payload for event in batch]) + b"]"
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, {"detail": why_no_answer(error)}, 0.0
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = {}
        asked = response.headers.get("Retry-After", "")
        wait = min(float(asked), _MAX_RETRY_AFTER_S) if asked.isdigit() else 0.0
        return response.status, answer if isinstance(answer, dict) else {}, wait

    def _settle(self, batch: list[SourceEvent], answer: dict[str, Any], status: int) -> list[SourceEvent]:
        """Count the settled events. Returns those that may be accepted later."""
        refused = answer.get("refused", []) if status != 200 else []
        again: list[SourceEvent] = []
        for item in refused:
            event = batch[item["index"]]
            if item.get("retry"):
                again.append(event)
            else:
                self._summary.refuse(event, _reason(item, status), str(item.get("detail", "")))
        self._summary.accepted += len(batch) - len(refused)
        return again


def _reason(answer: dict[str, Any], status: int) -> str:
    named = answer.get("reason") or str(answer.get("type", "")).rpartition(":")[2]
    return str(named or f"status {status}")


def _explain(status: int, answer: dict[str, Any]) -> str:
    what = ". ".join(str(answer[key]).removesuffix(".") for key in ("title", "detail") if answer.get(key))
    return f"status {status}: {what}".removesuffix(": ") if status else what
