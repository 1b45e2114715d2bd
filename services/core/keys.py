"""API keys: their form, how they are hashed and checked, and the file that keeps them.

A key is `psk_<id>_<secret>`. The id (8 characters) names it in files, logs and metrics. The secret is 160 random bits,
shown once, when the key is made; only its SHA-256 is stored. A slow, salted hash defends passwords that people choose
and that can be guessed; nobody guesses 160 random bits, and a slow hash on every request would be a way to overload us.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.core.pipes import NAME_PATTERN
from services.core.yaml_source import BadConfiguration, Problem, load_yaml, validate_document

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


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: list[ApiKey] = Field(default_factory=list)

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        if len({key.id for key in self.keys}) != len(self.keys):
            raise ValueError("two keys have the same id")
        return self


def load_keys(path: Path) -> list[ApiKey]:
    """All keys, the revoked ones too. Raises BadConfiguration, also when others may read or write the file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        problem = Problem(str(path), "", f"cannot be read: {error.strerror}. Try: penstock keys create")
        raise BadConfiguration([problem]) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadConfiguration([Problem(str(path), "", f"others can read or write it. Try: chmod 600 {path}")])
    document = load_yaml(path)
    if document.data is None:  # it is being written, or was cut off: not that every key was revoked
        raise BadConfiguration([Problem(str(path), "", "is empty. Try: keys: []")])
    return validate_document(document, KeyFile).keys


def add_key(path: Path, entry: ApiKey) -> None:
    """Append one key; makes the file (mode 600) when there is none. Raises BadConfiguration, OSError."""
    _change(path, lambda keys: [*keys, entry])


def revoke_key(path: Path, key_id: str, revoked: str) -> bool:
    """Mark a key as revoked at this time (RFC 3339); False when there is none with this id. Raises BadConfiguration, OSError."""
    found = False

    def mark(keys: Sequence[ApiKey]) -> list[ApiKey]:
        nonlocal found
        found = any(key.id == key_id for key in keys)
        return [key.model_copy(update={"revoked": key.revoked or revoked}) if key.id == key_id else key for key in keys]

    _change(path, mark)
    return found


def _change(path: Path, change: Callable[[Sequence[ApiKey]], list[ApiKey]]) -> None:
    """Read, change and replace the file under a lock beside it, so that two changes at once both count."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load_keys(path) if path.exists() else []
        _replace(path, KeyFile(keys=change(keys)))
    finally:
        os.close(lock)


def _replace(path: Path, content: KeyFile) -> None:
    """Readers see the old file or the new one, never a part: written beside it, synced, renamed."""
    text = yaml.safe_dump(content.model_dump(exclude_none=True), sort_keys=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
