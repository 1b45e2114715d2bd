"""Sends events to a webhook: one attempt is one signed POST (Standard Webhooks). The response says which events were refused.

A receiver that refuses some of the events answers 200 or 207 with JSON `{"failed": [item, …]}`, at most MAX_RESPONSE bytes, not
compressed. An item names an event by `"id"` (its CloudEvents id) or by `"index"` (its 0-based place in the body). It may add
`"status"` (as if that event had been answered alone), `"retry"` (true or false, instead of deciding by the status) and
`"reason"` (text for the dead letter). Events that are not named are delivered. docs/delivery.md documents this for receivers.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from services.core.broker.record import Batch, Record
from services.core.event import TRACEPARENT, read_traceparent
from services.core.http.client import MAX_RESPONSE, BadResponse, HttpClient, Response
from services.core.http.failure import BAD_RESPONSE, Failure, classify, excerpt, parse_retry_after, printable
from services.core.security.authorization import (
    NO_CREDENTIAL,
    Authorization,
    Credential,
    NoAuthorization,
    NoCredential,
)
from services.core.security.signing import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, SigningKeys, sign
from services.expel.delivery import Delivery, Rendered
from services.expel.retry_policy import Outcome, fail_by_status, is_recoverable
from services.expel.webhook.body import BodyFormat, Renderer, render

_FRAME_BYTES = 2
"""Bytes of a body without its parts and one byte per part."""
_MAX_REASON = 500
_UNAUTHORIZED = 401
ITEM_FAILED = "item_failed"
_ID_CHARS = bytes(code for code in range(0x21, 0x7F) if code != ord("."))
_MAX_ID = 200


class WebhookSender:
    """`client` belongs to this destination. `max_bytes` bounds a body."""

    def __init__(
        self,
        client: HttpClient,
        pipe: str,
        body: BodyFormat,
        keys: SigningKeys,
        max_bytes: int,
        authorization: Authorization | None = None,
    ) -> None:
        self._client, self._authorization = client, authorization or NoAuthorization()
        self._pipe, self._body, self._keys = pipe, body, keys
        self._max_part = max_bytes - _FRAME_BYTES - 1
        self._renderers: dict[str, Renderer] = {}

    def render(self, batch: Batch) -> Rendered:
        renderer = self._renderers.get(batch.topic)
        if renderer is None:
            renderer = self._renderers[batch.topic] = self._body.renderer_for(batch.topic)
        return render(batch, renderer, self._max_part)

    async def send(self, delivery: Delivery) -> Outcome:
        """The message id is the same for the same events, over retries and restarts."""
        body = self._body.join(delivery.parts)
        delivery.message_id = delivery.message_id or make_message_id(self._pipe, delivery.ids)
        try:
            credential = await self._authorization.get()
            response = await self._post(delivery, body, credential)
            if response.status == _UNAUTHORIZED and (other := await self._authorization.renew(credential)) is not None:
                credential, response = other, await self._post(delivery, body, other)
        except NoCredential as error:
            return error.failure
        except (OSError, BadResponse) as error:
            return classify(error)
        status, wish, text, whole = response
        if text:
            text = credential.mask(text, whole=whole)
        if 200 <= status < 300:
            return read_outcome(status, text, whole, delivery, credential) if text or status == 207 else None
        failure = fail_by_status(status, excerpt(text), parse_retry_after(wish, now=time.time()))
        if status == _UNAUTHORIZED and credential.line:  # the credential is refused, not the events
            return replace(failure, recoverable=True)
        return failure

    async def _post(self, delivery: Delivery, body: bytes, credential: Credential) -> Response:
        return await self._client.post(self._headers(delivery, body) + credential.line, body)

    def _headers(self, delivery: Delivery, body: bytes) -> bytes:
        now, message_id = int(time.time()), delivery.message_id
        lines = f"{ID_HEADER}: {message_id}\r\n{TIMESTAMP_HEADER}: {now}\r\n"
        if keys := self._keys.current:
            lines += f"{SIGNATURE_HEADER}: {sign(keys, message_id, now, body)}\r\n"
        if (trace := _common_trace(delivery.records)) is not None:
            lines += f"{TRACEPARENT}: {trace}\r\n"
        return lines.encode()


def _common_trace(records: Sequence[Record]) -> str | None:
    """The trace context of the request, if all of its events have the same one."""
    trace = read_traceparent(records[0])
    if trace is None or any(record.header(TRACEPARENT) != trace.encode() for record in records):
        return None
    return trace


def make_message_id(pipe: str, ids: Sequence[bytes]) -> str:
    """`<pipe>:<event id>` for one event. `<pipe>/<hash of the ids in order>` for several, or for an id that no header may have.

    The pipe is a part of the id because one event may go through several pipes to one receiver, as different messages. The
    separators differ, so an event whose id looks like a hash does not get the id of a batch. The hash covers the lengths, so
    one odd id does not get the hash of several.
    """
    if len(ids) == 1 and len(ids[0]) <= _MAX_ID and not ids[0].translate(None, _ID_CHARS):
        return f"{pipe}:{ids[0].decode()}"
    digest = hashlib.blake2b(b"".join(b"%d:%b" % (len(one), one) for one in ids), digest_size=16).hexdigest()
    return f"{pipe}/{digest}"


class FailedItem(msgspec.Struct):
    """One event that the receiver refused."""

    id: str | None = None
    index: int | None = None
    status: int | None = None
    retry: bool | None = None
    reason: str | None = None


class PartialResponse(msgspec.Struct):
    """The response's body; other members are ignored."""

    failed: list[FailedItem]


_decode = msgspec.json.Decoder(PartialResponse).decode


def read_outcome(
    status: int, body: bytes, whole: bool, delivery: Delivery, credential: Credential = NO_CREDENTIAL
) -> Outcome:
    """The outcome of a 2xx with this body. credential: of the request; the receiver's reasons may quote it.

    When the body may name failed events but cannot be parsed, no event counts as delivered: better twice than never.
    """
    if status != 207 and b'"failed"' not in body:
        return None
    if not whole:
        return _bad(f"the response names failed events and has more than {MAX_RESPONSE} bytes")
    try:
        items = _decode(body).failed
    except (msgspec.DecodeError, RecursionError):
        return _bad('a 207 needs JSON like {"failed": [{"id": "…"}]}') if status == 207 else _read_odd_body(body)
    return _by_index(items, delivery, credential)


def _read_odd_body(body: bytes) -> Outcome:
    """A 200 whose body has "failed" in another form: `{"failed": 0}` refuses nothing, a list that cannot be parsed does."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None  # not JSON: a page or a text with this word
    named = value.get("failed") if isinstance(value, dict) else None
    return _bad("the list of failed events is not valid") if isinstance(named, list) else None


def _by_index(items: list[FailedItem], delivery: Delivery, credential: Credential) -> Outcome:
    places: dict[bytes, list[int]] = {}
    for index, event_id in enumerate(delivery.ids):
        places.setdefault(event_id, []).append(index)
    failures: dict[int, Failure] = {}
    for item in items:
        if item.index is not None:
            found = [item.index] if 0 <= item.index < len(delivery) else []
        else:
            found = places.get((item.id or "").encode(errors="replace"), [])
        if not found:
            return _bad("the response names an event that was not in the request")
        failures.update(dict.fromkeys(found, _fail_item(item, credential)))
    return failures or None


def _fail_item(item: FailedItem, credential: Credential) -> Failure:
    recoverable = item.retry if item.retry is not None else item.status is None or is_recoverable(item.status)
    reason = ITEM_FAILED if item.status is None or not 100 <= item.status <= 599 else f"http_{item.status}"
    said = printable(credential.mask_text(item.reason)[:_MAX_REASON]) if item.reason else ""
    detail = "the receiver refused this event" + (f": {said}" if item.reason else "")
    return Failure(reason, detail, recoverable)


def _bad(detail: str) -> Failure:
    return Failure(BAD_RESPONSE, detail, recoverable=True)
