"""Bearer tokens that a server and its clients read from one file: who may ask it.

The file holds one token a line, and is not readable by others. A client sends the first; a server takes each, so that tokens are
rotated by putting a new one first and taking the old one out when every client has the new.
"""

import base64
import binascii
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

import structlog

from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()

CHECK_EVERY_S = 2.0
MAX_TOKENS = 10
_MAX_BYTES = 10_000
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
    """A server's. `allows` is for the event loop; `refresh` blocks. What cannot be read leaves the tokens as they were."""

    def __init__(self, path: Path) -> None:
        """Blocking. Raises BadConfiguration."""
        self._path = path
        self._tokens = read_tokens(path)
        self._is_failing = False

    def refresh(self) -> None:
        """Read the file again. A failure is said once."""
        try:
            self._tokens, self._is_failing = read_tokens(self._path), False
        except BadConfiguration as error:
            if not self._is_failing:
                log.warning("tokens_unreadable", error=str(error), hint="those of before go on; it is tried again")
            self._is_failing = True

    def allows(self, authorization: str) -> bool:
        """Whether this header carries one of the tokens: as Bearer, or as Basic's password (a browser asks for it).

        Takes as long for a wrong one as for a right one.
        """
        said = _credential(authorization).encode(errors="surrogateescape")
        found = [hmac.compare_digest(said, token.encode()) for token in self._tokens]
        return any(found)


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
