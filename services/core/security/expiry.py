"""When a certificate, a token or another secret ends.

It parses only so much of X.509 (RFC 5280, 4.1) and of JWT (RFC 7519) as that needs. A secret that has no date of its own may have
one beside it, in a line of the same file or variable: `# expires: 2027-01-31`.
"""

import base64
import datetime
import math
import re
import ssl

import msgspec

from services.core import metrics
from services.core.times import parse_date

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----.+?-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL)
_NOTE = re.compile(r"^[ \t]*#[ \t]*expires\b[ \t]*:?[ \t]*(.*?)[ \t\r]*$\n?", re.MULTILINE)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


def untils_of_pem(content: bytes) -> list[float]:
    """When each certificate of a PEM file expires, in seconds since the epoch, in the order of the file. Raises ValueError."""
    return [until_of(ssl.PEM_cert_to_DER_cert(_plain(one))) for one in _PEM.findall(content)]


def _plain(pem: bytes) -> str:
    return pem.decode("ascii", errors="replace").replace("TRUSTED CERTIFICATE", "CERTIFICATE")


def until_of(der: bytes) -> float:
    """notAfter of a certificate, in seconds since the epoch. Raises ValueError."""
    tag, certificate, _ = _read(der)
    tag, fields, _ = _read(certificate)
    if tag != _SEQUENCE:
        raise ValueError("not a certificate")
    tag, _, rest = _read(fields)
    if tag == _VERSION:
        _, _, rest = _read(rest)  # the serial number
    for _ in range(2):  # the signature's algorithm, the issuer
        _, _, rest = _read(rest)
    tag, validity, _ = _read(rest)
    _, _, after = _read(validity)
    tag, text, _ = _read(after)
    return _parse_time(tag, text.decode("ascii", errors="replace"))


def _read(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and content of the first element, and the bytes behind it."""
    if len(der) < 2:
        raise ValueError("the certificate is cut off")
    length, start = der[1], 2
    if length & 0x80:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start])
    if len(der) < start + length:
        raise ValueError("the certificate is cut off")
    return der[0], der[start : start + length], der[start + length :]


def _parse_time(tag: int, text: str) -> float:
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError("the certificate has no end")
    when = datetime.datetime.strptime(text, form).replace(tzinfo=datetime.UTC)
    if tag == _UTC_TIME and when.year >= 2050:  # two digits mean 1950 to 2049
        when = when.replace(year=when.year - 100)
    return when.timestamp()


def term_of_token(value: str) -> tuple[float | None, float] | None:
    """When a token was issued and when it ends (`iat`, `exp`), in seconds since the epoch. No signature is checked.

    value: of a header, with or without a word before the token. None: it is no JWT that can be read, or one without an end.
    """
    parts = value.rpartition(" ")[2].split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(
            base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), altchars=b"-_", validate=True)
        )
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(claims, dict) or (until := _read_date(claims.get("exp"))) is None:
        return None
    issued = _read_date(claims.get("iat"))
    return (issued if issued is not None and issued < until else None), until


def _read_date(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < 1e12 and math.isfinite(value) else None


def split_notes(text: str) -> tuple[str, float | None]:
    """The text of a secret without its lines `# expires: …`, and the earliest of their dates, in seconds since the epoch.

    Raises ValueError for a date that cannot be read; its text is for a person, and shows nothing else of the secret.
    """
    untils = [parse_date(match[1]) for match in _NOTE.finditer(text)]
    return _NOTE.sub("", text), min(untils, default=None)


def show_secret(name: str, key: str, until: float | None, written: float | None) -> None:
    """Show when a secret ends and when it was made, in seconds since the epoch. None: nobody knows."""
    for gauge, value in ((metrics.SECRET_EXPIRY, until), (metrics.SECRET_WRITTEN, written)):
        if value is None:
            gauge.remove(name, key)
        else:
            gauge.labels(name, key).set(value)
