"""Bearer tokens that a server and its clients read from one file: who may ask it.

The file holds one token a line, and is not readable by others. A client sends the first; a server takes each, so that tokens are
rotated by putting a new one first and taking the old one out when every client has the new.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.core import metrics
from services.core.file_watch import FileWatch
from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()

MAX_TOKENS = 10
_MAX_BYTES = 10_000
_STALE = "a token that was taken out meanwhile still opens. Try: mend the file, or restart the service"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{20,200}")


def make_token() -> str:
    """A new one."""
    return secrets.token_hex(32)


def read_tokens(path: Path) -> tuple[str, ...]:
    """At least one. Blocking. Raises BadConfiguration, whose text never shows what the file holds."""
    try:
        # not blocking: a pipe in this place must be refused, not waited for
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _problem(path, "is no plain file")
            if mode & stat.S_IRWXO:
                raise _problem(path, f"can be read or written by everybody on this machine. Try: chmod 600 {path}")
            lines = file.read(_MAX_BYTES).decode("ascii", errors="replace").split()
    except OSError as error:
        remedy = f"openssl rand -hex 32 > {path} && chmod 600 {path}"
        raise _problem(path, f"cannot be read: {error.strerror}. Try: {remedy}") from error
    if not 1 <= len(lines) <= MAX_TOKENS or not all(_TOKEN.fullmatch(line) for line in lines):
        wanted = f"1 to {MAX_TOKENS} tokens are needed, one a line, each of 20 to 200 letters and digits"
        raise _problem(path, f"{wanted}. Try: openssl rand -hex 32")
    return tuple(lines)


def _problem(path: Path, text: str) -> BadConfiguration:
    return BadConfiguration([Problem(str(path), "", text)])


class Tokens:
    """Those that a server takes; `current` is what it looks at for each request."""

    def __init__(self, current: Sequence[str]) -> None:
        self.current = tuple(current)

    def allows(self, authorization: str) -> bool:
        """Whether this header carries one of the tokens: as Bearer, or as Basic's password (a browser asks for it).

        Takes as long for a wrong one as for a right one.
        """
        said = _credential(authorization).encode(errors="surrogateescape")
        found = [hmac.compare_digest(said, token.encode()) for token in self.current]
        return any(found)


def watch_tokens(path: Path, tokens: Tokens, clock: Callable[[], float] = time.monotonic) -> FileWatch[tuple[str, ...]]:
    """Keeps `tokens` like the file at `path`: a token is rotated without a restart. `load` raises BadConfiguration."""

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
    current = read_tokens(path)
    digest = hashlib.sha256("\n".join(current).encode()).digest()
    return None if digest == known else (digest, current)


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
