"""Masks secrets in text, for log lines and messages."""

import re

_SECRET_VALUE = re.compile(
    r"whsec_[A-Za-z0-9+/=_-]+|psk_[A-Za-z0-9_-]+|eyJ[A-Za-z0-9_-]{12,}(?:\.[A-Za-z0-9_-]*)+|(?<=://)[^/\s@]+(?=@)|(?<!auth\.)(?i:bearer)\s+\S+"
)
"""eyJ: a token in the form of JSON (JWT). `auth.bearer` is a key of the pipe file; no token follows it."""
MASK = "***"


def mask_text(text: str) -> str:
    """The text with signing secrets, API keys, bearer tokens, JWTs and the user part of URLs replaced by `***`."""
    return _SECRET_VALUE.sub(MASK, text)
