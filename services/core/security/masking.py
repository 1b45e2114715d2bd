"""Masks secrets in text, for messages and for log lines, where `services.core.process.lifecycle` installs it."""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

_SECRET_VALUE = re.compile(
    r"whsec_[A-Za-z0-9+/=_-]+|psk_[A-Za-z0-9_-]+|eyJ[A-Za-z0-9_-]{12,}(?:\.[A-Za-z0-9_-]*)+|(?<=://)[^/\s@]+(?=@)|(?<!auth\.)(?i:bearer)\s+\S+"
)
"""eyJ: a token in the form of JSON (JWT). `auth.bearer` is a key of the pipe file; no token follows it."""
_SECRET_KEY = re.compile(r"secret|password|token|authorization|api_?key|signature|cookie", re.IGNORECASE)
MASK = "***"


def mask_text(text: str) -> str:
    """The text with signing secrets, API keys, bearer tokens, JWTs and the user part of URLs replaced by `***`."""
    return _SECRET_VALUE.sub(MASK, text)


def mask_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask values of secret-looking keys, and secret-looking parts of every text, at any depth."""
    for key, value in event.items():
        event[key] = _masked(key, value)
    return event


def _masked(key: object, value: Any) -> Any:
    if isinstance(key, str) and _SECRET_KEY.search(key):
        return MASK
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(inner): _masked(inner, content) for inner, content in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked("", item) for item in value]
    return mask_text(value if isinstance(value, str) else str(value))
