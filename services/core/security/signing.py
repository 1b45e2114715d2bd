"""Standard Webhooks signatures, and their secrets.

The signature proves to a receiver that a request is ours and was not altered or replayed. It is the HMAC-SHA256 of
`{webhook-id}.{webhook-timestamp}.{body}`. The header has one `v1,<base64>` per key. To rotate a key, add the new one, change the
receivers, remove the old one. A secret is in a file that other users cannot read, or in an environment variable, never in the
pipe file. The files are watched: a rotation needs no restart.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from services.core import metrics
from services.core.pipe_file.webhook import Secret
from services.core.security.expiry import show_secret, split_notes
from services.core.security.file_watch import FileWatch, UnusableFile, changed_at, read_private

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
PREFIX = "whsec_"
TOLERANCE = 300.0
"""Seconds by which a request's timestamp may differ from our clock; beyond that `verify` refuses it as a replay."""
_MIN_BYTES, _MAX_BYTES = 24, 64
_BLOCK_BYTES = 64
"""The block size of SHA-256. No secret is longer."""
_MAX_SIGNATURES = 20


class BadSecret(ValueError):
    """Not a signing secret. The message never shows it. Try: whsec_ + base64 of 24 to 64 random bytes."""


class BadSignature(Exception):
    """The request is not authentic, or too old or too new."""


def make_secret() -> str:
    """A new secret, `whsec_…`."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


class SigningKey:
    """A secret in use. Its repr does not show it."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
            raise BadSecret(f"a signing secret has {_MIN_BYTES} to {_MAX_BYTES} bytes. Try: openssl rand -base64 32")
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    @classmethod
    def parse(cls, text: str) -> "SigningKey":
        """From `whsec_…` or only the base64, with or without padding. Raises BadSecret."""
        encoded = text.strip().removeprefix(PREFIX).rstrip("=")
        try:
            return cls(base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True))
        except (binascii.Error, UnicodeEncodeError, ValueError) as error:
            if isinstance(error, BadSecret):
                raise
            raise BadSecret("a signing secret is whsec_ followed by base64. Try: openssl rand -base64 32") from None

    def digest(self, *pieces: bytes) -> bytes:
        """HMAC-SHA256 (RFC 2104) of the joined pieces. Copies of two prepared hashes take half the time of module hmac."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for piece in pieces:
            inner.update(piece)
        outer.update(inner.digest())
        return outer.digest()

    def __repr__(self) -> str:
        return "SigningKey(***)"


def sign(keys: Sequence[SigningKey], message_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` header: one signature per key, space-separated. timestamp in seconds since the epoch."""
    head = b"%b.%d." % (message_id.encode(), timestamp)
    return " ".join(["v1," + binascii.b2a_base64(key.digest(head, body), newline=False).decode() for key in keys])


def verify(keys: Sequence[SigningKey], headers: Mapping[str, str], body: bytes, *, now: float) -> str:
    """The webhook-id of an authentic request. headers: case-insensitive or lower-case. now: seconds since the epoch.

    Raises BadSignature. Compares in constant time.
    """
    message_id, stamp = headers.get(ID_HEADER), headers.get(TIMESTAMP_HEADER)
    given = headers.get(SIGNATURE_HEADER)
    if not message_id or not stamp or not given:
        raise BadSignature(f"{ID_HEADER}, {TIMESTAMP_HEADER} and {SIGNATURE_HEADER} are needed")
    if not stamp.isascii() or not stamp.isdigit() or len(stamp) > 12:
        raise BadSignature(f"{TIMESTAMP_HEADER} is not a number of seconds")
    if abs(now - int(stamp)) > TOLERANCE:
        raise BadSignature(f"{TIMESTAMP_HEADER} is more than {TOLERANCE:.0f} s off")
    message = b"%b.%b.%b" % (message_id.encode(errors="surrogateescape"), stamp.encode(), body)
    digests = [key.digest(message) for key in keys]
    for part in given.split(" ")[:_MAX_SIGNATURES]:
        version, _, encoded = part.partition(",")
        try:
            signature = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            continue
        if version == "v1" and any(hmac.compare_digest(signature, digest) for digest in digests):
            return message_id
    raise BadSignature("no signature matches")


_MAX_KEYS = 10
KEY = "secret"
"""In the pipe file, and in the metrics."""


def read_signing_keys(secret: Secret, folder: Path, environ: Mapping[str, str]) -> tuple[SigningKey, ...]:
    """The keys, newest first, at least one. folder: of the pipe file, for a relative path. Blocking.

    Raises BadSecret; the message is for a person and names the file or variable, never the content.
    """
    return _parse(*_read_secret(secret, folder, environ))[0]


def _read_secret(secret: Secret, folder: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The text of the file or variable, and its name for a person. Blocking. Raises BadSecret."""
    if secret.env is not None:
        text, where = environ.get(secret.env), f"the variable {secret.env}"
        if text is None:
            raise BadSecret(f"{where} is not set. Try: set it to a line that `penstock keys secret` wrote")
        return text, where
    assert secret.file is not None
    path = folder / secret.file
    try:
        return read_private(path, f"penstock keys secret {path}"), str(path)
    except UnusableFile as error:
        raise BadSecret(f"{path} {error}") from None


def _parse(text: str, where: str) -> tuple[tuple[SigningKey, ...], float | None]:
    """The keys, newest first, at least one; and when the first of them ends by its note. Raises BadSecret, which names `where`,
    never the text."""
    try:
        text, until = split_notes(text)
    except ValueError as error:
        raise BadSecret(f"{where}: {error}") from None
    lines = text.split()
    if not 1 <= len(lines) <= _MAX_KEYS:
        raise BadSecret(f"{where} has {len(lines)} secrets; 1 to {_MAX_KEYS} are needed, one per line")
    try:
        return tuple(SigningKey.parse(line) for line in lines), until
    except BadSecret as error:
        raise BadSecret(f"{where}: {error}") from None


log = structlog.get_logger()

_STALE = (
    "requests are signed with the old keys, also with a key that was revoked since. Try: correct the file, or restart the "
    "service"
)


class SigningKeys:
    """`current`: newest first, read for each request. Empty: requests are not signed.

    until: when the first of those that were read at the start ends by its note, in seconds since the epoch.
    """

    def __init__(self, current: Sequence[SigningKey] = (), until: float | None = None) -> None:
        self.current = tuple(current)
        self.until = until

    @classmethod
    def read(cls, secret: Secret, folder: Path, environ: Mapping[str, str]) -> "SigningKeys":
        """As `read_signing_keys`."""
        return cls(*_parse(*_read_secret(secret, folder, environ)))


def watch_secret(
    name: str, secret: Secret, folder: Path, keys: SigningKeys, clock: Callable[[], float] = time.monotonic
) -> FileWatch[tuple[SigningKey, ...]]:
    """Keeps `keys` equal to the file of a secret. `load` raises BadSecret. name: of the keys, e.g. `pipe/destination`."""

    def use(current: tuple[SigningKey, ...]) -> None:
        keys.current = current
        log.info("signing_keys_loaded", name=name, keys=len(current))

    return FileWatch(
        f"the signing secret of {name}",
        lambda known: _read(name, secret, folder, known),
        use,
        expected=BadSecret,
        failed=metrics.SIGNING_KEYS_FAILURES.labels(name).inc,
        stale=_STALE,
        age=metrics.SIGNING_KEYS_AGE.labels(name),
        clock=clock,
    )


def _read(name: str, secret: Secret, folder: Path, known: bytes) -> tuple[bytes, tuple[SigningKey, ...]] | None:
    text, where = _read_secret(secret, folder, {})
    digest = hashlib.sha256(text.encode()).digest()
    if digest == known:
        return None
    keys, until = _parse(text, where)
    show_secret(name, KEY, until, changed_at(folder / str(secret.file)))
    return digest, keys
