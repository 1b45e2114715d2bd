"""API keys: how they look, how they are hashed, how one is checked. `key_file` says how they are kept.

A key is `psk_<id>_<secret>`. The id (8 characters) names it in files, logs and metrics. The secret is 160 random bits,
shown once, when the key is made; only its SHA-256 is stored. A slow, salted hash defends passwords that people choose
and that can be guessed; nobody guesses 160 random bits, and a slow hash on every request would be a way to overload us.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.core.pipes import NAME_PATTERN

PREFIX = "psk"
EVERY_STREAM = "*"
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_NO_KEY = hashlib.sha256(secrets.token_bytes(20)).digest()

Scope = Literal["ingest", "manage"]
"""What a key may do: `ingest` sends events; `manage` is for the management API."""


class ApiKey(BaseModel):
    """One key as it is kept: everything but its secret. `rate`: events a second at most, per ingest process; None: no quota."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9]{8}$")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    name: str = Field("", max_length=200)
    streams: list[Annotated[str, Field(pattern=rf"{NAME_PATTERN}|^\*$")]] = Field(min_length=1, max_length=1000)
    scopes: list[Scope] = Field(min_length=1)
    rate: int | None = Field(None, ge=1)
    created: str = ""
    revoked: str | None = None

    def covers(self, stream: str) -> bool:
        """Whether this stream is among the key's."""
        return stream in self.streams or EVERY_STREAM in self.streams


class KeyRing:
    """The keys that are valid now, for look-ups on the hot path (1 to 2 us each)."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = {key.id: (key, bytes.fromhex(key.hash)) for key in keys if key.revoked is None}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: str) -> ApiKey | None:
        """The key of this token; None when it is malformed, unknown, wrong or revoked, all in the same time."""
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        key, expected = self._keys.get(key_id, (None, _NO_KEY))
        matches = hmac.compare_digest(_digest(secret), expected)
        return key if matches and prefix == PREFIX else None


def make_key(
    *,
    streams: Sequence[str],
    scopes: Sequence[Scope] = ("ingest",),
    name: str = "",
    rate: int | None = None,
    created: str,
) -> tuple[str, ApiKey]:
    """A new key: (the token, to be shown once and never stored; the entry to keep).

    created: RFC 3339. Raises pydantic.ValidationError.
    """
    key_id = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    secret = secrets.token_hex(20)
    entry = ApiKey(
        id=key_id,
        hash=_digest(secret).hex(),
        name=name,
        streams=list(streams),
        scopes=list(scopes),
        rate=rate,
        created=created,
    )
    return f"{PREFIX}_{key_id}_{secret}", entry


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
