"""Who may read which table: the API keys of ingest, with the scope `read`."""

from urllib.parse import parse_qsl

import structlog

from services.core.http.address import LOOPBACK_NAMES, is_loopback_authority
from services.core.security.keys import PREFIX, ApiKey, KeyRing
from services.table import problems
from services.table.http_server import Request
from services.table.problems import Refused

log = structlog.get_logger()

SCOPE = "read"


class Access:
    """Checks keys. Without a `ring` no key is needed (loopback only, see settings). `ring` may be replaced at any time."""

    def __init__(self, ring: KeyRing | None = None) -> None:
        self.ring = ring

    def authenticate(self, request: Request) -> ApiKey | None:
        """The key of a request; None when none is needed. Raises Refused, the same for a missing, a wrong and a revoked key."""
        if request.query and (f"{PREFIX}_" in request.query or "key=" in request.query or "token=" in request.query):
            _check_query(request.query)
        if self.ring is None:
            if not is_loopback_authority(request.headers["host"]):
                raise Refused(problems.BAD_HOST, LOOPBACK_NAMES)
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (key := self.ring.find(token.strip())) is not None:
            return key
        raise Refused(
            problems.NO_VALID_KEY,
            "The header Authorization is missing, has another scheme than Bearer, or its key is unknown, revoked or expired.",
        )

    def authorise(self, key: ApiKey | None, stream: str) -> None:
        """Raises Refused: 404 for a table that the key may not read, as for an unknown one; 403 without the scope."""
        if key is None:
            return
        if not key.covers(stream):
            raise unknown_table()
        if SCOPE not in key.scopes:
            raise Refused(
                problems.SCOPE_MISSING, f"The key lacks the scope {SCOPE}. Send a key that was made for reading."
            )


def unknown_table() -> Refused:
    """The same for a stream that does not exist, that is not compacted, and that the key may not read."""
    detail = "The path names a stream that does not exist, that is not compacted, or that this key may not read."
    return Refused(problems.TABLE_NOT_FOUND, detail)


def _check_query(query: str) -> None:
    """Raises Refused when a key is in the URL, because proxies log URLs."""
    names = ("key", "api_key", "apikey", "api-key", "token", "access_token", "authorization")
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() in names or value.startswith(f"{PREFIX}_"):
            detail = (
                "Proxies log URLs, so this key must be revoked. Send a new one as Bearer in the header Authorization."
            )
            raise Refused(problems.KEY_IN_URL, detail)
