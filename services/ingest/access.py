"""Who may send what: API keys in the Authorization header, and quotas per key."""

import time
from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl

from aiohttp.http import RawRequestMessage

from services.core.http.address import LOOPBACK_NAMES, is_loopback_authority
from services.core.security.keys import PREFIX, ApiKey, KeyRing
from services.ingest import problems
from services.ingest.problems import Refused

SCOPE = "ingest"
QUOTA_BYTES = 10_000
"""A larger event counts as several."""
_NAMED = 10
_URL_NAMES = frozenset(("key", "api_key", "apikey", "api-key", "token", "access_token", "authorization"))


class Access:
    """Checks keys. Without a `ring` no key is needed (loopback only, see settings). `ring` may be replaced at any time.

    quota_bytes: so many bytes of an unpacked body count as one event of the key's quota.
    """

    def __init__(
        self, ring: KeyRing | None, clock: Callable[[], float] = time.monotonic, *, quota_bytes: int = QUOTA_BYTES
    ) -> None:
        self.ring = ring
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def check_host(self, message: RawRequestMessage) -> None:
        """Raises Refused when no key is needed and the request names a host other than this machine."""
        if self.ring is not None:
            return
        named = message.headers.get("Host", "")
        target = message.url.raw_authority if message.path[:1] != "/" else ""  # of an absolute URL; it overrides Host
        if not is_loopback_authority(named) or (target and not is_loopback_authority(target)):
            raise Refused(problems.BAD_HOST, LOOPBACK_NAMES)

    def authenticate(self, message: RawRequestMessage) -> ApiKey | None:
        """The key of a request; None when none is needed. Raises one Refused for a missing, wrong, revoked or expired key."""
        if self.ring is None:
            return None
        given = message.headers.getall("Authorization", [])
        if len(given) == 1:
            scheme, _, token = given[0].partition(" ")
            if scheme.lower() == "bearer" and (key := self.ring.find(token.strip())) is not None:
                return key
        raise Refused(
            problems.NO_VALID_KEY,
            "The header Authorization is missing, has another scheme than Bearer, or its key is unknown, revoked or expired.",
        )

    def authorise(self, key: ApiKey | None, stream: str) -> None:
        """Raises Refused: 404 for a stream that the key may not use, as for an unknown one; 403 without the scope; 429."""
        if key is None:
            return
        if not key.covers(stream):
            raise unknown_stream()
        if SCOPE not in key.scopes:
            raise Refused(
                problems.SCOPE_MISSING, f"The key lacks the scope {SCOPE}. Send a key that was made for sending events."
            )
        if key.rate is not None:
            wait = self._bucket(key.id, key.rate).wait(self._clock())
            if wait > 0:
                detail = f"This key may send {key.rate} events per second. Wait as long as Retry-After says."
                raise Refused(problems.OVER_QUOTA, detail, retry_after=wait)

    def charge_bytes(self, key: ApiKey | None, size: int) -> int:
        """Count a body of this size, before it is parsed, against the key's quota. Returns the number of events counted."""
        events = -(-size // self._quota_bytes)
        self.charge(key, events)
        return events

    def charge(self, key: ApiKey | None, events: int) -> None:
        """Count events against the key's quota. A negative number counts as 0."""
        if events > 0 and key is not None and key.rate is not None:
            self._bucket(key.id, key.rate).charge(events, self._clock())

    def _bucket(self, key_id: str, rate: int) -> "_Bucket":
        bucket = self._buckets.get(key_id)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key_id] = _Bucket(rate, self._clock())
        return bucket


class _Bucket:
    """Tokens for the events of one second. A request may overdraw it; the next one waits until the debt is paid."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._tokens, self._at = float(rate), now

    def wait(self, now: float) -> float:
        """Seconds until the next request is accepted; 0 for now."""
        self._tokens = min(self.rate, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return max(0.0, -self._tokens / self.rate)

    def charge(self, events: int, now: float) -> None:
        self.wait(now)
        self._tokens -= events


def check_query(query: str) -> None:
    """Raises Refused when a key is in the URL, because proxies log URLs."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() in _URL_NAMES or value.startswith(f"{PREFIX}_"):
            detail = (
                "Proxies log URLs, so this key must be revoked. Send a new one as Bearer in the header Authorization."
            )
            raise Refused(problems.KEY_IN_URL, detail)


def unknown_stream(known: Sequence[str] = ()) -> Refused:
    """known: the streams that the client may know: all of them where no key is needed. Else the detail is the same for a stream
    that does not exist and for one that the key may not use."""
    detail = "The path names a stream that does not exist, or that this key may not use."
    if known:
        names = ", ".join(known[:_NAMED]) + (f" and {len(known) - _NAMED} more" if len(known) > _NAMED else "")
        detail = f"The path names a stream that does not exist. There are: {names}."
    return Refused(problems.STREAM_NOT_FOUND, detail)
