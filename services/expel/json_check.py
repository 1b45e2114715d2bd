"""Is a payload one JSON text in UTF-8? Ours always are; what others wrote must not break its neighbours in a body."""

from collections.abc import Sequence

import msgspec

_scan = msgspec.json.Decoder(msgspec.Raw).decode
"""Checks the syntax without building anything, 0.17 us for 340 bytes; not the encoding."""


def is_json(value: bytes) -> bool:
    """Whether the value can be spliced into a body as it is."""
    try:
        _scan(value)
        if not value.isascii():
            value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def are_json(values: Sequence[bytes | None]) -> bool:
    """Whether all of them can; the loop is C. False for a None among them."""
    try:
        for _ in map(_scan, values):  # type: ignore[arg-type]
            pass
        if not all(map(bytes.isascii, values)):  # type: ignore[arg-type]
            b"".join(values).decode()  # type: ignore[arg-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        return False
    return True
