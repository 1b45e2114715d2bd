"""Watches the keys file: a new or revoked key counts within seconds, without a restart."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from services.core import metrics
from services.core.file_watch import FileWatch
from services.core.keys import KeyRing, load_keys
from services.core.yaml_source import MAX_FILE_BYTES, BadConfiguration
from services.ingest.access import Access

log = structlog.get_logger()

_STALE = "a key that was revoked since is still valid in this process. Try: correct the file, or restart ingest"


def watch_keys(path: Path, access: Access, clock: Callable[[], float] = time.monotonic) -> FileWatch[KeyRing]:
    """Sets `access.ring` whenever the file at `path` changes. `load` raises BadConfiguration."""

    def use(ring: KeyRing) -> None:
        access.ring = ring
        log.info("keys_loaded", valid=len(ring))

    return FileWatch(
        f"the keys file {path}",
        lambda known: _read(path, known),
        use,
        expected=BadConfiguration,
        failed=metrics.INGEST_KEYS_FAILURES.inc,
        stale=_STALE,
        age=metrics.INGEST_KEYS_AGE,
        clock=clock,
    )


def _read(path: Path, known: bytes) -> tuple[bytes, KeyRing] | None:
    """The digest of the file and its valid keys; None while its digest is the known one. Blocking. Raises BadConfiguration.

    The digest is of the bytes that were read first. When the file changes before it is parsed, the next check parses it again.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(MAX_FILE_BYTES + 1)).digest()
    except OSError:
        digest = b""  # load_keys raises the error
    if digest == known != b"":
        return None
    return digest, KeyRing(load_keys(path))
