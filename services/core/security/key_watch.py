"""Watches the keys file of a service: a new, changed or revoked key counts within seconds, without a restart.

The metrics show when the keys expire, under the service's name.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog
from prometheus_client import Counter, Gauge

from services.core import metrics
from services.core.security.expiry import show_secret
from services.core.security.file_watch import FileWatch
from services.core.security.keys import ApiKey, KeyRing, read_ring
from services.core.times import parse_date
from services.core.yaml_source import BadConfiguration

log = structlog.get_logger()

_MOST_SHOWN = 100
_METRICS: dict[str, tuple[Gauge, Counter]] = {
    "ingest": (metrics.INGEST_KEYS_AGE, metrics.INGEST_KEYS_FAILURES),
    "registry": (metrics.REGISTRY_KEYS_AGE, metrics.REGISTRY_KEYS_FAILURES),
    "table": (metrics.TABLE_KEYS_AGE, metrics.TABLE_KEYS_FAILURES),
}


class HasRing(Protocol):
    """Who checks keys. ring: may be replaced at any time; None: no key is needed."""

    ring: KeyRing | None


def watch_keys(
    service: str, path: Path, access: HasRing, clock: Callable[[], float] = time.monotonic
) -> FileWatch[KeyRing]:
    """Sets `access.ring` whenever the file at `path` changes. `load` raises BadConfiguration."""
    age, failures = _METRICS[service]
    terms = _Terms(service)

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
        failed=failures.inc,
        stale="a key that was revoked since is still valid in this process. "
        f"Try: correct the file, or restart the service {service}",
        age=age,
        clock=clock,
    )


class _Terms:
    """The ends of the keys in the metrics. A key that has expired is no longer there: its client gets a 401."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._shown: dict[str, ApiKey] = {}

    def show(self, ring: KeyRing) -> None:
        current = {key.id: key for key in ring.expiring(_MOST_SHOWN)}
        if current == self._shown:
            return
        for key_id in self._shown.keys() - current.keys():
            show_secret(self._service, key_id, None, None)
        for key in current.values():
            show_secret(self._service, key.id, key.until, _made(key))
        self._shown = current


def _made(key: ApiKey) -> float | None:
    """People may have written any text into the file."""
    with suppress(ValueError):
        return parse_date(key.created)
    return None
