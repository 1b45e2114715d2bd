"""Bearer tokens: a server and its clients read them from the same file.

The file has one token per line, and other users cannot read it. A client sends the first token; a server accepts every one. To
rotate a token, put the new one first, and remove the old one when every client has the new one. For the metrics, a line
`# expires: 2027-01-31` says when they end.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.core import metrics
from services.core.security.expiry import show_secret, split_notes
from services.core.security.file_watch import FileWatch, UnusableFile, changed_at, read_private
from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()

MAX_TOKENS = 10
_STALE = "a token that was revoked since is still accepted. Try: correct the file, or restart the service"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{20,200}")


def make_token() -> str:
    """A new random token."""
    return secrets.token_hex(32)


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens of the file, at least one. Blocking. Raises BadConfiguration, whose text never shows the content."""
    return _read_file(path)[0]


def _read_file(path: Path) -> tuple[tuple[str, ...], float | None]:
    """The tokens, and when they end by their note, in seconds since the epoch."""
    try:
        text, until = split_notes(read_private(path, f"openssl rand -hex 32 > {path} && chmod 600 {path}"))
    except (UnusableFile, ValueError) as error:
        raise _problem(path, str(error)) from error
    lines = text.split()
    if not 1 <= len(lines) <= MAX_TOKENS or not all(_TOKEN.fullmatch(line) for line in lines):
        wanted = f"1 to {MAX_TOKENS} tokens are needed, one per line, each of 20 to 200 letters and digits"
        raise _problem(path, f"{wanted}. Try: openssl rand -hex 32")
    return tuple(lines), until


def _problem(path: Path, text: str) -> BadConfiguration:
    return BadConfiguration([Problem(str(path), "", text)])


class Tokens:
    """The tokens that a server accepts. `current` is read for each request."""

    def __init__(self, current: Sequence[str]) -> None:
        self.current = tuple(current)

    def allows(self, authorization: str) -> bool:
        """Whether this header carries one of the tokens: as Bearer, or as the password of Basic, which browsers send.

        Takes the same time for a wrong token as for a right one.
        """
        return self.find(authorization) is not None

    def find(self, authorization: str) -> str | None:
        """As `allows`: the name of the token, or None."""
        given = _credential(authorization).encode(errors="surrogateescape")
        found = [hmac.compare_digest(given, token.encode()) for token in self.current]
        return name_of(self.current[found.index(True)]) if any(found) else None


def name_of(token: str) -> str:
    """Tells a token from the others of its file without showing it: the start of its SHA-256."""
    return hashlib.sha256(token.encode()).hexdigest()[:8]


def watch_tokens(path: Path, tokens: Tokens, clock: Callable[[], float] = time.monotonic) -> FileWatch[tuple[str, ...]]:
    """Keeps `tokens` equal to the file at `path`, without a restart. `load` raises BadConfiguration."""

    def use(current: tuple[str, ...]) -> None:
        tokens.current = current
        log.info("tokens_loaded", tokens=len(current))

    return FileWatch(
        f"the token file {path}",
        lambda known: _read(path, known),
        use,
        expected=BadConfiguration,
        failed=metrics.OBSERVER_TOKENS_FAILURES.inc,
        stale=_STALE,
        age=metrics.OBSERVER_TOKENS_AGE,
        clock=clock,
    )


def _read(path: Path, known: bytes) -> tuple[bytes, tuple[str, ...]] | None:
    current, until = _read_file(path)
    digest = hashlib.sha256("\n".join([*current, str(until)]).encode()).digest()
    if digest == known:
        return None
    show_secret("observer", "tokens", until, changed_at(path))
    return digest, current


def _credential(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("ascii", errors="replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
