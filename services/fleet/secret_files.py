"""Reading a secret from the environment or from a file that others cannot read; never from a flag, which `ps` shows."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from services.fleet.problem import CommandFailed

MAX_BYTES = 10_000


def read_secret_file(path: Path) -> str:
    """The file's text without white space around it. Blocking. Raises CommandFailed, which never shows the content."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IRWXO:
                raise CommandFailed(
                    f"{path} can be read or written by everybody on this machine", f"chmod 600 {path}", status=2
                )
            return file.read(MAX_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}", status=2) from error


def read_api_key(key_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The key from the file, else from PENSTOCK_KEY, else None. Raises CommandFailed."""
    key = read_secret_file(key_file) if key_file is not None else environ.get("PENSTOCK_KEY")
    if key is not None and (not key or not key.isprintable() or " " in key):
        where = str(key_file) if key_file is not None else "PENSTOCK_KEY"
        raise CommandFailed(f"{where} holds no API key", "penstock keys create", status=2)
    return key
