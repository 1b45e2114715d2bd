"""Watches the keys file: a new, changed or revoked key counts within seconds, without a restart."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from services.core import metrics
from services.core.expiry import show_secret
from services.core.file_watch import FileWatch
from services.core.keys import ApiKey, KeyRing, read_ring
from services.core.times import parse_date
from services.core.yaml_source import BadConfiguration
from services.ingest.access import Access

log = structlog.get_logger()

_MOST_SHOWN = 100
_STALE = "a key that was revoked since is still valid in this process. Try: correct the file, or restart ingest"


def watch_keys(path: Path, access: Access, clock: Callable[[], float] = time.monotonic) -> FileWatch[KeyRing]:
    """Sets `access.ring` whenever the file at `path` changes. `load` raises BadConfiguration.

    The metrics show when the keys expire.
    """
    terms = _Terms()

    def read(known: bytes) -> tuple[bytes, KeyRing] | None:
        found = read_ring(path, known)
        ring = access.ring if found is None else found[1]
        if ring is not None:
            terms.show(ring)
        return found

    def use(ring: KeyRing) -> None:
        access.ring = ring
        log.info("keys_loaded", valid=len(ring))

    return FileWatch(
        f"the keys file {path}",
        read,
        use,
        expected=BadConfiguration,
        failed=metrics.INGEST_KEYS_FAILURES.inc,
        stale=_STALE,
        age=metrics.INGEST_KEYS_AGE,
        clock=clock,
    )


class _Terms:
    """The ends of the keys in the metrics. A key that has expired is no longer there: its client gets a 401."""

    def __init__(self) -> None:
        self._shown: dict[str, ApiKey] = {}

    def show(self, ring: KeyRing) -> None:
        current = {key.id: key for key in ring.expiring(_MOST_SHOWN)}
        if current == self._shown:
            return
        for key_id in self._shown.keys() - current.keys():
            show_secret("ingest", key_id, None, None)
        for key in current.values():
            show_secret("ingest", key.id, key.until, _made(key))
        self._shown = current


def _made(key: ApiKey) -> float | None:
    """People may have written any text into the file."""
    with suppress(ValueError):
        return parse_date(key.created)
    return None
