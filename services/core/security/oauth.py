"""OAuth 2.0 client credentials (RFC 6749, 4.4): tokens from a token server, for the requests of one destination, or for Kafka.

A token is used until shortly before it expires. One request fetches the next one, and the others wait for it. When the token
server fails, the token in use stays while it is valid. After that the destination counts as failed: its events wait as behind a
receiver that cannot be reached.
"""

import asyncio
import base64
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec
import structlog

from services.core.http.client import BadResponse, Response
from services.core.http.failure import BAD_RESPONSE, MAX_HOLD, Failure, classify, excerpt, parse_retry_after
from services.core.pipe_file.webhook import OAuth
from services.core.security.authorization import Credential, NoCredential, mask_secret
from services.core.security.credentials import MAX_VALUE, LiveValue

log = structlog.get_logger()

NO_TOKEN = "no_token"  # noqa: S105
GRANTED = "ok"
"""The word for a request that gave a token; the alert PenstockTokenRefused looks for it."""
MAX_TOKEN_RESPONSE = 65_536
"""Bytes."""
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 5.0
"""After a failure the server is asked again after FIRST_WAIT_S, and twice that each time, up to MAX_WAIT_S. The circuit breaker
waits at least as long for its probe, so that each probe asks the server."""
RENEW_EVERY_S = 10.0
"""At most so often a 401 of the receiver makes us fetch a token before its time."""
_UNKNOWN_LIFETIME_S, _MAX_LIFETIME_S = 3600.0, 86_400.0
_MARGIN_S, _MARGIN_SHARE = 30.0, 0.1
"""A token is replaced so long before it expires; a short-lived one, this share of its lifetime."""
_TOKEN = re.compile(r"[!-~]+")
_ERRORS = frozenset(
    {
        "invalid_request",
        "invalid_client",
        "invalid_grant",
        "unauthorized_client",
        "unsupported_grant_type",
        "invalid_scope",
        "invalid_target",
    }
)
"""RFC 6749, 5.2, and RFC 8707."""
_MAYBE_WAY = frozenset({"invalid_client", "invalid_request", "unauthorized_client", "http_400", "http_401"})
"""Answers with which servers may refuse the place of the client's secret, not the secret."""


@dataclass(frozen=True, slots=True)
class Token:
    """replace_at, expires_at: on the client's clock, in seconds."""

    credential: Credential
    replace_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A request for a token that failed. word: for the metric. error: of the OAuth answer, or empty."""

    word: str
    failure: Failure
    error: str = ""

    @property
    def may_want_other_way(self) -> bool:
        """Whether the server may accept id and secret in another place of the request."""
        return self.word in _MAYBE_WAY


class Poster(Protocol):
    """Posts to the token server: an `HttpClient` does."""

    async def post(self, headers: bytes, body: bytes) -> Response:
        """As `HttpClient.post`."""


class OAuthClient:
    """`Authorization` by tokens. `client` posts to the token server.

    name: `pipe/destination`, for the log. secret: read for each fetch. count: called with the outcome of each fetch: `ok`, or a
    word from a bounded set. clock: monotonic seconds. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        config: OAuth,
        secret: LiveValue[str],
        client: Poster,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._config, self._secret, self._client, self._count, self._clock = config, secret, client, count, clock
        self._server = urlsplit(config.token_url).netloc
        self._lock = asyncio.Lock()
        self._token: Token | None = None
        self._in_body: bool | None = None
        """Whether this server reads id and secret in the body, not in the Authorization header. None: unknown."""
        self._failure: Failure | None = None
        self._word = ""
        self._failures = 0
        self._ask_at = 0.0
        self._renewed_at = float("-inf")

    async def get(self) -> Credential:
        token = self._token
        if token is not None and self._clock() < (token.expires_at if self._lock.locked() else token.replace_at):
            return token.credential  # also while another request fetches the next one
        async with self._lock:
            return await self._find()

    async def renew(self, refused: Credential) -> Credential | None:
        async with self._lock:
            if self._token is not None and self._token.credential.secret == refused.secret:
                now = self._clock()
                if now < self._token.replace_at:
                    if now < self._renewed_at + RENEW_EVERY_S:
                        return None
                    self._renewed_at = now
                self._token = None
            renewed = await self._find()
            return None if renewed.secret == refused.secret else renewed

    async def _find(self) -> Credential:
        """Under the lock: the token in use, or the next one. Raises NoCredential."""
        token, now = self._token, self._clock()
        if token is not None and now < token.replace_at:
            return token.credential
        if self._failure is None or now >= self._ask_at:
            found = await self._fetch()
            self._count(found.word if isinstance(found, _Refusal) else GRANTED)
            if isinstance(found, Token):
                if self._failure is not None:
                    log.info("token_server_answers_again", lane=self._name)
                self._token, self._failure, self._failures = found, None, 0
                return found.credential
            self._record(found)
        if token is not None and self._clock() < token.expires_at:
            return token.credential
        assert self._failure is not None
        raise NoCredential(replace(self._failure, retry_after=max(0.0, self._ask_at - self._clock())))

    def _record(self, refusal: _Refusal) -> None:
        failure = refusal.failure
        wait = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures, 8))
        self._failures += 1
        if self._failure is None or self._word != refusal.word:  # the details of some servers differ each time
            log.warning("token_server_failed", lane=self._name, reason=failure.reason, detail=failure.detail)
        self._failure, self._word = failure, refusal.word
        self._ask_at = self._clock() + max(wait, min(MAX_HOLD, failure.retry_after or 0.0))

    async def _fetch(self) -> "Token | _Refusal":
        """Ask the server once. While it is unknown how it wants the client's secret, ask in both ways (RFC 6749, 2.3.1)."""
        if self._in_body is not None:
            found = await self._ask(in_body=self._in_body)
            if isinstance(found, _Refusal) and found.may_want_other_way:
                self._in_body = None
            return found
        found = await self._ask(in_body=False)
        if isinstance(found, Token):
            self._in_body = False
        elif found.may_want_other_way:
            other = await self._ask(in_body=True)
            if isinstance(other, Token):
                self._in_body = True
                return other
            if other.error and not other.may_want_other_way:
                return other
        return found

    async def _ask(self, *, in_body: bool) -> "Token | _Refusal":
        config, secret, asked_at = self._config, self._secret.current, self._clock()
        given = {"scope": config.scope, "audience": config.audience, "resource": config.resource}
        fields = {"grant_type": "client_credentials"} | {
            name: value for name, value in given.items() if value is not None
        }
        pair = base64.b64encode(f"{quote_plus(config.client_id)}:{quote_plus(secret)}".encode())
        if in_body:
            fields |= {"client_id": config.client_id, "client_secret": secret}
        head = b"" if in_body else b"Authorization: Basic %b\r\n" % pair
        try:
            response = await self._client.post(head, urlencode(fields).encode())
        except (OSError, BadResponse) as error:
            failure = classify(error)
            return _Refusal(failure.reason, failure if failure.ours else self._fail(failure.detail))
        if not 200 <= response.status < 300:
            return self._refuse(response, (secret, pair.decode()))
        token = read_token(response, asked_at)
        return token if isinstance(token, Token) else _Refusal(BAD_RESPONSE, self._fail(token))

    def _refuse(self, response: Response, secrets: Sequence[str]) -> _Refusal:
        text = _mask_all(response.body, secrets, whole=response.whole)
        wait = parse_retry_after(response.retry_after, now=time.time())
        answered = f"it answered {response.status}"
        if (found := _read_error(text)) is not None:
            error, description = found
            said = excerpt(_mask_all(description, secrets, whole=True))
            return _Refusal(
                error, self._fail(f"{answered} {error}: {said}" if said else f"{answered} {error}", wait), error
            )
        said = excerpt(text)
        return _Refusal(f"http_{response.status}", self._fail(f"{answered}: {said}" if said else answered, wait))

    def _fail(self, detail: str, retry_after: float | None = None) -> Failure:
        return Failure(NO_TOKEN, f"no token from {self._server}: {detail}", recoverable=True, retry_after=retry_after)


def _mask_all(text: bytes, secrets: Sequence[str], *, whole: bool) -> bytes:
    for secret in secrets:
        text = mask_secret(text, secret, whole=whole)
    return text


def _read_error(body: bytes) -> tuple[str, bytes] | None:
    """The error of an OAuth answer, and its description. None when there is none that we know."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, str) or error not in _ERRORS:
        return None
    said = content.get("error_description")
    return error, said.encode(errors="replace") if isinstance(said, str) else b""


def read_token(response: Response, asked_at: float) -> Token | str:
    """The token of a 2xx answer, or the reason why there is none, for a person. asked_at: seconds on the client's clock."""
    if not response.whole:
        return f"its answer is not complete, or has more than {MAX_TOKEN_RESPONSE} bytes"
    try:
        content = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, RecursionError):
        return "its answer is not JSON"
    if not isinstance(content, dict):
        return "its answer is not a JSON object"
    text, kind = content.get("access_token"), content.get("token_type", "Bearer")
    if not isinstance(text, str) or not _TOKEN.fullmatch(text) or len(text) > MAX_VALUE:
        return f"its answer has no access_token of at most {MAX_VALUE} printable ASCII characters"
    if not isinstance(kind, str) or kind.lower() != "bearer":
        return "its answer has a token_type other than Bearer"
    credential, given = Credential.bearer(text), content.get("expires_in")
    if given is None:
        return Token(credential, asked_at + _UNKNOWN_LIFETIME_S, float("inf"))
    lifetime = _read_lifetime(given)
    if lifetime is None:
        return "its answer has an expires_in that is not a number of seconds above 0"
    return Token(credential, asked_at + lifetime - min(_MARGIN_S, _MARGIN_SHARE * lifetime), asked_at + lifetime)


def _read_lifetime(value: object) -> float | None:
    """Seconds, at most _MAX_LIFETIME_S; some servers write the number as a text. None when it is no number above 0."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return None
    return float(min(value, _MAX_LIFETIME_S))
