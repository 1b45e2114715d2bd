"""Where signing secrets come from: a file that others cannot read, or an environment variable. Never a pipe file itself."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from services.core.pipes import Secret
from services.core.signature import BadSecret, SigningKey

_MAX_FILE_BYTES = 10_000
_MAX_KEYS = 10


def read_signing_keys(secret: Secret, folder: Path, environ: Mapping[str, str]) -> tuple[SigningKey, ...]:
    """The keys, newest first, at least one. A relative file is looked for in `folder` (the pipe file's). Blocking.

    Raises BadSecret for a person; the message names the file or variable, never its content.
    """
    return parse_secret(*read_secret(secret, folder, environ))


def read_secret(secret: Secret, folder: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """What is in the file or variable, and its name for a person. Blocking. Raises BadSecret."""
    if secret.env is not None:
        text, where = environ.get(secret.env), f"the variable {secret.env}"
        if text is None:
            raise BadSecret(f"{where} is not set. Try: put a line into it that `penstock keys secret` made")
        return text, where
    assert secret.file is not None
    path = folder / secret.file
    return _read_private(path), str(path)


def parse_secret(text: str, where: str) -> tuple[SigningKey, ...]:
    """The keys, newest first, at least one. Raises BadSecret, which names `where` and never the text."""
    lines = [line for line in text.split() if line]
    if not 1 <= len(lines) <= _MAX_KEYS:
        raise BadSecret(f"{where} holds {len(lines)} secrets; 1 to {_MAX_KEYS} are needed, one a line")
    try:
        return tuple(SigningKey.parse(line) for line in lines)
    except BadSecret as error:
        raise BadSecret(f"{where}: {error}") from None


def _read_private(path: Path) -> str:
    try:
        # not blocking: a pipe in this place must be refused, not waited for
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise BadSecret(f"{path} is no plain file")
            if mode & stat.S_IRWXO:
                raise BadSecret(f"{path} can be read by everybody on this machine. Try: chmod 600 {path}")
            return file.read(_MAX_FILE_BYTES).decode("ascii", errors="replace")
    except FileNotFoundError as error:
        raise BadSecret(f"{path} cannot be read: {error.strerror}. Try: penstock keys secret {path}") from None
    except OSError as error:
        raise BadSecret(f"{path} cannot be read: {error.strerror}") from None
