"""The header that proves our identity to a receiver: a secret from a file or variable, or a token (`oauth`)."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from typing import Protocol
from urllib.parse import quote, quote_plus

from services.core.http.failure import Failure
from services.core.security.credentials import BadCredential, LiveValue
from services.core.security.masking import MASK

_MIN_PREFIX = 4
"""A shorter beginning of a secret is no secret."""
_ESCAPED = re.compile(r"[\"&'+<>`\\]")
"""Some servers write these as \\u…. in JSON."""


class NoCredential(Exception):
    """There is no token to send. No request was sent to the receiver."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


@dataclass(frozen=True, slots=True, eq=False)
class Credential:
    """line: the complete header line, or nothing. secret: its secret part. No repr shows them."""

    line: bytes = field(default=b"", repr=False)
    secret: str = field(default="", repr=False)

    @classmethod
    def bearer(cls, token: str) -> "Credential":
        """`Authorization: Bearer …`."""
        return cls(f"Authorization: Bearer {token}\r\n".encode(), token)

    def mask(self, body: bytes, *, whole: bool) -> bytes:
        """The body of an answer, with `***` in place of the secret: some receivers quote the request. As `mask_secret`."""
        return mask_secret(body, self.secret, whole=whole) if self.secret else body

    def mask_text(self, text: str) -> str:
        """A text out of a body: the body may have had the secret in a form that `mask` does not know."""
        return self.mask(text.encode(errors="replace"), whole=True).decode(errors="replace")


NO_CREDENTIAL = Credential()


def mask_secret(body: bytes, secret: str, *, whole: bool) -> bytes:
    """Masks the secret as it is, in JSON, HTML and a URL. whole: the body is complete; else a beginning of the secret may end
    it."""
    in_json = json.dumps(secret)[1:-1]
    forms = {one.replace("/", slash) for one in (secret, in_json) for slash in ("/", "\\/")}
    forms |= {quote(secret, safe=""), quote_plus(secret), escape(secret)}
    forms |= {
        _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", secret),
        _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04X}", secret),
    }
    forms |= {
        part for form in forms if len(part := form.partition(" ")[2]) >= _MIN_PREFIX
    }  # Basic …, without its scheme
    for form in sorted((form.encode() for form in forms), key=len, reverse=True):
        body = body.replace(form, MASK.encode())
        if not whole:
            cut = next((n for n in range(min(len(form), len(body)), _MIN_PREFIX - 1, -1) if body.endswith(form[:n])), 0)
            body = body[: len(body) - cut] + MASK.encode() if cut else body
    return body


class Authorization(Protocol):
    """Gives each request its credential."""

    async def get(self) -> Credential:
        """The credential for the next request. Bounded in time. Raises NoCredential."""

    async def renew(self, refused: Credential) -> Credential | None:
        """The receiver answered 401 to this credential: another one to try once. None: there is no other. Raises NoCredential."""


class NoAuthorization:
    """Sends nothing."""

    async def get(self) -> Credential:
        return NO_CREDENTIAL

    async def renew(self, refused: Credential) -> Credential | None:
        return None


READ_TIMEOUT_S = 2.0


class SecretHeader:
    """A header with a secret value. make: the credential of a value. read: reads the value's file now; blocking. None: no file.

    When the receiver refuses the value, it may just have been rotated: then the file is read at once, not within a second. One
    read serves all refused requests, and a file system that hangs blocks only one thread.
    """

    def __init__(
        self, value: LiveValue[str], make: Callable[[str], Credential], read: Callable[[], str] | None
    ) -> None:
        self._value, self._make, self._read = value, make, read
        self._made = make(value.current)
        self._reading: asyncio.Task[None] | None = None

    async def get(self) -> Credential:
        if self._made.secret != self._value.current:
            self._made = self._make(self._value.current)
        return self._made

    async def renew(self, refused: Credential) -> Credential | None:
        if self._read is None:
            return None
        if self._value.current == refused.secret:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._load(self._read), name="read a refused credential")
            done, _ = await asyncio.wait({self._reading}, timeout=READ_TIMEOUT_S)
            if not done:
                raise NoCredential(Failure("http_401", _NOT_READ, recoverable=True))
        renewed = await self.get()
        return None if renewed.secret == refused.secret else renewed

    async def _load(self, read: Callable[[], str]) -> None:
        with suppress(BadCredential):  # the watch of the file reports it
            self._value.current = await asyncio.to_thread(read)


_NOT_READ = "the receiver answered 401, and the file of the credential cannot be read in time"
