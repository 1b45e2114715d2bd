"""Standard Webhooks signatures: how receivers know that a request is ours, and was not altered or replayed.

Signed is `{webhook-id}.{webhook-timestamp}.{body}` with HMAC-SHA256; the header carries one `v1,<base64>` per key, so that
keys can be rotated: add the new one, let receivers change, take the old one away.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
PREFIX = "whsec_"
TOLERANCE = 300.0
"""Seconds that a request's timestamp may be off before `verify` takes it for a replay."""
_MIN_BYTES, _MAX_BYTES = 24, 64
_BLOCK_BYTES = 64
"""Of SHA-256; no secret is longer."""
_MAX_SIGNATURES = 20


class BadSecret(ValueError):
    """Not a signing secret; the message never repeats it. Try: whsec_ + base64 of 24 to 64 random bytes."""


class BadSignature(Exception):
    """The request is not authentic, or too old or too new."""


class SigningKey:
    """A secret in use. Its repr shows nothing."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
            raise BadSecret(f"a signing secret has {_MIN_BYTES} to {_MAX_BYTES} bytes. Try: openssl rand -base64 32")
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    @classmethod
    def parse(cls, text: str) -> "SigningKey":
        """From `whsec_…` or the base64 alone, with or without padding. Raises BadSecret."""
        encoded = text.strip().removeprefix(PREFIX).rstrip("=")
        try:
            return cls(base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True))
        except (binascii.Error, UnicodeEncodeError, ValueError) as error:
            if isinstance(error, BadSecret):
                raise
            raise BadSecret("a signing secret is whsec_ followed by base64. Try: openssl rand -base64 32") from None

    def digest(self, *pieces: bytes) -> bytes:
        """HMAC-SHA256 (RFC 2104) of the pieces joined. Its two hashes are copied, not begun anew: half the time of hmac's."""
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
    """The webhook-id of an authentic request. `headers` is case-insensitive or lower-case; `now` in seconds since the epoch.

    Raises BadSignature. Compares in constant time.
    """
    message_id, stamp = headers.get(ID_HEADER), headers.get(TIMESTAMP_HEADER)
    given = headers.get(SIGNATURE_HEADER)
    if not message_id or not stamp or not given:
        raise BadSignature(f"{ID_HEADER}, {TIMESTAMP_HEADER} and {SIGNATURE_HEADER} are needed")
    if not stamp.isascii() or not stamp.isdigit() or len(stamp) > 12:
        raise BadSignature(f"{TIMESTAMP_HEADER} is no number of seconds")
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
