"""The end of a certificate's validity. It parses only so much of X.509 (RFC 5280, 4.1) as that needs."""

import datetime
import re
import ssl

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----.+?-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL)
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
