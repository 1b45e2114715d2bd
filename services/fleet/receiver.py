"""A webhook receiver for tests and demos: verifies signatures and tokens, counts distinct events, fails or delays on request."""

import asyncio
import hmac
import random
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from aiohttp import hdrs, web

from services.core.security.signing import ID_HEADER, BadSignature, SigningKey, verify

MAX_BODY = 20_000_000
REMEMBERED_IDS = 1_000_000
REFUSAL = 503
_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Received:
    """One request. new: events whose id no request of the same pipe had before. texts: the bytes of these in the body, as they
    were received.

    signed: None without a secret; False: the signature was bad.
    authorized: the same for the bearer token. After a bad token the signature is not verified.
    """

    webhook_id: str
    events: Sequence[dict[str, Any]]
    new: Sequence[dict[str, Any]]
    signed: bool | None
    at: float
    authorized: bool | None = None
    texts: Sequence[bytes] = ()


@dataclass(slots=True)
class Receiver:
    """Handles requests and counts them. fail: the share of requests (0..1) answered with the status `refusal`. slow:
    seconds before each answer.

    token: the bearer token that each request must have; "": none. An event is identified by its CloudEvents id, else its own
    `id`, else the webhook-id and its index in the body. The last million ids are kept.
    """

    keys: Sequence[SigningKey] = ()
    fail: float = 0.0
    slow: float = 0.0
    on_request: Callable[[Received], None] = lambda _received: None
    token: str = field(default="", repr=False)
    refusal: int = REFUSAL
    requests: int = 0
    failed: int = 0
    unauthorized: int = 0
    unsigned: int = 0
    delivered: int = 0
    duplicates: int = 0
    without_id: int = 0
    """Of the delivered ones: only a repeated request shows that one of these came twice."""
    _seen: OrderedDict[str, None] = field(default_factory=OrderedDict)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one delivery."""
        body = await request.read()
        self.requests += 1
        if self.slow:
            await asyncio.sleep(self.slow)
        webhook_id = request.headers.get(ID_HEADER, "")
        authorized = True if self.token else None
        if fault := self._token_fault(request):
            self.unauthorized += 1
            self.on_request(Received(webhook_id, (), (), None, time.time(), False))
            return web.json_response({"error": fault}, status=401)
        if self.keys:
            try:
                verify(self.keys, request.headers, body, now=time.time())
            except BadSignature as error:
                self.unsigned += 1
                self.on_request(Received(webhook_id, (), (), False, time.time(), authorized))
                return web.json_response({"error": str(error)}, status=401)
        if random.random() < self.fail:  # noqa: S311
            self.failed += 1
            return web.json_response({"error": "playing a bad receiver"}, status=self.refusal)
        try:
            texts = split_body(request.content_type, body)
            events = [_parse_event(text) for text in texts]
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        new = [index for index, event in enumerate(events) if self._is_new(_identity(event, webhook_id, index))]
        self.delivered += len(new)
        self.duplicates += len(events) - len(new)
        self.without_id += sum("id" not in events[index] for index in new)
        received = Received(
            webhook_id,
            events,
            [events[index] for index in new],
            True if self.keys else None,
            time.time(),
            authorized,
            [texts[index] for index in new],
        )
        self.on_request(received)
        return web.Response(status=204)

    def _token_fault(self, request: web.Request) -> str:
        """Why the request is not authorized, for a person; "" when it is. Compares in constant time."""
        given = request.headers.get(hdrs.AUTHORIZATION)
        if not self.token:
            return ""
        if given is None:
            return "the request has no Authorization header; wanted: Authorization: Bearer and the token"
        scheme, _, credential = given.partition(" ")
        good = hmac.compare_digest(credential.strip().encode(errors="surrogateescape"), self.token.encode())
        return "" if good and scheme.lower() == "bearer" else "the Authorization header has another token or scheme"

    def _is_new(self, identity: str) -> bool:
        if identity in self._seen:
            return False
        self._seen[identity] = None
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return True


def split_body(content_type: str, body: bytes) -> list[bytes]:
    """The events of a delivery, in any of the formats that expel writes, each with its bytes. Raises ValueError."""
    if content_type == "application/x-ndjson":
        return [line for line in body.split(b"\n") if line.strip()]
    try:
        return [bytes(event) for event in _EVENTS.decode(body)] if body.lstrip()[:1] == b"[" else [body.strip()]
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _parse_event(text: bytes) -> dict[str, Any]:
    event = orjson.loads(text)
    if not isinstance(event, dict):
        raise ValueError("an event is not a JSON object")  # noqa: TRY004
    return event


def _identity(event: dict[str, Any], webhook_id: str, index: int) -> str:
    """An event has the same id in every pipe, and each pipe may deliver something else for it."""
    pipe = re.match("[^/:]*[/:]", webhook_id)  # expel's are PIPE/HASH and PIPE:ID
    return f"{'' if pipe is None else pipe[0][:-1]}:{event['id']}" if "id" in event else f"{webhook_id}/{index}"


@asynccontextmanager
async def serve_receiver(receiver: Receiver, host: str, port: int) -> AsyncIterator[int]:
    """Listen until the context is left, on every path. Yields the port. Raises OSError when the port is in use."""
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound: int = runner.addresses[0][1]
        yield bound
    finally:
        await runner.cleanup()
