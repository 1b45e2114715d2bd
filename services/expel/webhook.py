"""A webhook: one attempt is one signed POST (Standard Webhooks)."""

import errno
import hashlib
import io
import time
from collections.abc import Callable, Sequence

from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientSSLError,
)
from yarl import URL

from services.core.broker.record import Batch
from services.core.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, SigningKey, sign
from services.expel.answer import excerpt, read_answer, read_outcome
from services.expel.body import BodyFormat, Rendered, Renderer, render
from services.expel.delivery import Delivery
from services.expel.dns import RefusedAddress
from services.expel.outcome import Failure, Outcome, fail_by_status
from services.expel.retry_after import parse_retry_after

_FRAME_BYTES = 2
"""What a body has beside its parts and one byte per part."""
_LARGE_BODY = 1 << 20
"""From here on aiohttp wants a stream, which it writes piece by piece instead of all at once."""
_ID_CHARS = bytes(code for code in range(0x21, 0x7F) if code != ord("."))
_MAX_ID = 200
_OUR_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""No file, memory or port of ours left: no receiver's fault, and no reason to give an event up."""


class WebhookSender:
    """`session` is the destination's own; `max_bytes` bounds a body; `wall_clock` in seconds since the epoch."""

    def __init__(
        self,
        session: ClientSession,
        url: str,
        pipe: str,
        body: BodyFormat,
        keys: Sequence[SigningKey],
        max_bytes: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._session, self._url = session, URL(url)
        self._pipe, self._body, self._keys = pipe, body, keys
        self._max_part = max_bytes - _FRAME_BYTES - 1
        self._wall_clock = wall_clock
        self._content = {"Content-Type": body.content_type}
        self._renderers: dict[str, Renderer] = {}

    def render(self, batch: Batch) -> Rendered:
        """As in Sender."""
        renderer = self._renderers.get(batch.topic)
        if renderer is None:
            renderer = self._renderers[batch.topic] = self._body.renderer_for(batch.topic)
        return render(batch, renderer, self._max_part)

    async def send(self, delivery: Delivery) -> Outcome:
        """As in Sender. The message id is the same for the same events, over retries and restarts."""
        body = self._body.join(delivery.parts)
        delivery.message_id = delivery.message_id or make_message_id(self._pipe, delivery.ids)
        data = body if len(body) <= _LARGE_BODY else io.BytesIO(body)
        try:
            async with self._session.post(
                self._url, data=data, headers=self._headers(delivery.message_id, body), allow_redirects=False
            ) as response:
                return await self._read(response, delivery)
        except TimeoutError:
            return Failure("timeout", "no complete answer in time", recoverable=True)
        except (ClientError, OSError) as error:
            return classify(error)

    def _headers(self, message_id: str, body: bytes) -> dict[str, str]:
        now = int(self._wall_clock())
        headers = {**self._content, ID_HEADER: message_id, TIMESTAMP_HEADER: str(now)}
        if self._keys:
            headers[SIGNATURE_HEADER] = sign(self._keys, message_id, now, body)
        return headers

    async def _read(self, response: ClientResponse, delivery: Delivery) -> Outcome:
        status = response.status
        if 200 <= status < 300:
            answer, whole = await read_answer(response)
            return read_outcome(status, answer, whole, delivery) if answer or status == 207 else None
        wish = parse_retry_after(response.headers.get("Retry-After"), now=self._wall_clock())
        try:
            answer, _ = await read_answer(response)  # reading it to its end keeps the connection
        except (TimeoutError, ClientError, OSError):
            answer = b""
        return fail_by_status(status, excerpt(answer), wish)


def make_message_id(pipe: str, ids: Sequence[bytes]) -> str:
    """`<pipe>:<event id>` for one event, `<pipe>:<hash of the ids in order>` for several, or for an id unfit for a header.

    The pipe is part of it because one event goes through several pipes, perhaps to one receiver, as different messages.
    """
    if len(ids) == 1 and len(ids[0]) <= _MAX_ID and not ids[0].translate(None, _ID_CHARS):
        return f"{pipe}:{ids[0].decode()}"
    digest = hashlib.blake2b(b"\n".join(ids), digest_size=16).hexdigest()
    return f"{pipe}:{digest}"


def classify(error: Exception) -> Failure:
    """All of these are recoverable: nothing says that the receiver refused the events themselves."""
    cause = error.os_error if isinstance(error, ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in _OUR_SHORTAGE:
        return Failure(
            "own_limits",
            f"no connection could be opened here: {errno.errorcode[cause.errno]}",
            recoverable=True,
            ours=True,
        )
    if isinstance(cause, RefusedAddress):
        return Failure("address_refused", str(cause), recoverable=True)
    if isinstance(error, ClientConnectorDNSError):
        return Failure("dns", "the host name was not found", recoverable=True)
    if isinstance(error, ClientSSLError):
        return Failure("tls", f"no trusted TLS connection: {type(error).__name__}", recoverable=True)
    return Failure("connection", f"the connection failed: {type(error).__name__}", recoverable=True)
