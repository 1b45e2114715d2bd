"""API keys: their form, their hash, and their file.

A key is `psk_<id>_<secret>`. The id (8 characters) names it in files, logs and metrics. The secret is 160 random bits, printed
once, when the key is created; only its SHA-256 is stored. A slow, salted hash would protect passwords that can be guessed. Nobody
guesses 160 random bits, and a slow hash for every request would let clients overload ingest.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from services.core.pipe_file.pipes import NAME_PATTERN
from services.core.times import parse_date
from services.core.yaml_source import MAX_FILE_BYTES, BadConfiguration, Problem, load_yaml, validate_document

PREFIX = "psk"
EVERY_STREAM = "*"
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_NO_KEY = hashlib.sha256(secrets.token_bytes(20)).digest()

Scope = Literal["ingest", "read", "manage"]
"""The permissions of a key: `ingest` sends events; `read` reads tables; `manage` is for the management API."""


def _check_date(text: str) -> str:
    parse_date(text)
    return text


class ApiKey(BaseModel):
    """The stored part of one key, without its secret. rate: events per second at most, per ingest process; None: no limit.

    expires: a date or a time (`parse_date`); from then on the key is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9]{8}$")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    name: str = Field("", max_length=200)
    streams: list[Annotated[str, Field(pattern=rf"{NAME_PATTERN}|^\*$")]] = Field(min_length=1, max_length=1000)
    scopes: list[Scope] = Field(min_length=1)
    rate: int | None = Field(None, ge=1)
    created: str = ""
    expires: Annotated[str, AfterValidator(_check_date)] | None = None
    revoked: str | None = None

    def covers(self, stream: str) -> bool:
        """Whether the key may send to this stream."""
        return stream in self.streams or EVERY_STREAM in self.streams

    @property
    def until(self) -> float:
        """When the key expires, in seconds since the epoch; infinity: never."""
        return float("inf") if self.expires is None else parse_date(self.expires)


class KeyRing:
    """The valid keys, for look-ups on the hot path (1 to 2 us each). clock: seconds since the epoch."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys = {key.id: (key, bytes.fromhex(key.hash), key.until) for key in keys if key.revoked is None}

    def __len__(self) -> int:
        now = self._clock()
        return sum(until > now for _, _, until in self._keys.values())

    def expiring(self, most: int) -> list[ApiKey]:
        """The keys that expire next, without those that have expired."""
        now = self._clock()
        found = sorted((until, key.id, key) for key, _, until in self._keys.values() if now < until < float("inf"))
        return [key for _, _, key in found[:most]]

    def find(self, token: str) -> ApiKey | None:
        """The key of this token; None when it is malformed, unknown, wrong, revoked or expired. Takes the same time each time."""
        prefix, _, rest = token.partition("_")
        key_id, _, secret = rest.partition("_")
        key, expected, until = self._keys.get(key_id, (None, _NO_KEY, 0.0))
        matches = hmac.compare_digest(_digest(secret), expected)
        return key if matches and prefix == PREFIX and self._clock() < until else None


def make_key(
    *,
    streams: Sequence[str],
    scopes: Sequence[Scope] = ("ingest",),
    name: str = "",
    rate: int | None = None,
    created: str,
    expires: str | None = None,
) -> tuple[str, ApiKey]:
    """A new key: (the token, to print once and never to store; the entry to store).

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
        expires=expires,
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
    """All keys, also the revoked ones. Raises BadConfiguration, also when other users may read or write the file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        problem = Problem(str(path), "", f"cannot be read: {error.strerror}. Try: penstock keys create")
        raise BadConfiguration([problem]) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadConfiguration([Problem(str(path), "", f"others can read or write it. Try: chmod 600 {path}")])
    document = load_yaml(path)
    if document.data is None:  # being written, or cut off; it does not mean that every key is revoked
        raise BadConfiguration([Problem(str(path), "", "is empty. Try: keys: []")])
    return validate_document(document, KeyFile).keys


def read_ring(path: Path, known: bytes) -> tuple[bytes, KeyRing] | None:
    """The digest of the file and its valid keys; None while its digest is the known one. Blocking. Raises BadConfiguration.

    The digest is of the bytes that were read first. When the file changes before it is parsed, the next check parses it again.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(MAX_FILE_BYTES + 1)).digest()
    except OSError:
        digest = b""  # load_keys raises the error
    if digest == known != b"":
        return None
    return digest, KeyRing(load_keys(path))


def add_key(path: Path, entry: ApiKey) -> None:
    """Append one key; creates a missing file with mode 600. Raises BadConfiguration, OSError."""
    _change(path, lambda keys: [*keys, entry])


def revoke_key(path: Path, key_id: str, revoked: str) -> bool:
    """Revoke a key at this time (RFC 3339). Returns False when the id is unknown. Raises BadConfiguration, OSError."""
    return _change_one(path, key_id, lambda key: {"revoked": key.revoked or revoked})


def expire_key(path: Path, key_id: str, expires: str | None) -> bool:
    """Set the date at which a key expires; None: never. False when the id is unknown. Raises BadConfiguration, OSError."""
    return _change_one(path, key_id, lambda _: {"expires": expires})


def _change_one(path: Path, key_id: str, make: Callable[[ApiKey], dict[str, str | None]]) -> bool:
    found = False

    def change(keys: Sequence[ApiKey]) -> list[ApiKey]:
        nonlocal found
        found = any(key.id == key_id for key in keys)
        return [key.model_copy(update=make(key)) if key.id == key_id else key for key in keys]

    _change(path, change)
    return found


def _change(path: Path, change: Callable[[Sequence[ApiKey]], list[ApiKey]]) -> None:
    """Read, change and replace the file under a lock in a second file, so that no concurrent change is lost."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load_keys(path) if path.exists() else []
        _replace(path, KeyFile(keys=change(keys)))
    finally:
        os.close(lock)


def _replace(path: Path, content: KeyFile) -> None:
    """Replace the file atomically and durably."""
    text = yaml.safe_dump(content.model_dump(exclude_none=True), sort_keys=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
