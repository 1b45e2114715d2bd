"""Keeps the keys that are in use equal to the keys file: a new or revoked key counts within seconds, without a restart."""

import asyncio
from pathlib import Path

import structlog

from services.core.key_file import load_keys
from services.core.keys import KeyRing
from services.core.lifecycle import wait_for_stop
from services.core.yaml_source import BadConfiguration
from services.ingest.access import Access

log = structlog.get_logger()

LOOK_EVERY_S = 1.0

Stamp = tuple[int, int, int]
"""What changes when the file is replaced or written: modification time, size, inode."""


def read_ring(path: Path) -> tuple[KeyRing, Stamp | None]:
    """The valid keys and the stamp of the file before it was read. Blocking. Raises BadConfiguration."""
    stamp = _stamp(path)
    return KeyRing(load_keys(path)), stamp


async def watch_keys(path: Path, access: Access, stamp: Stamp | None, stopping: asyncio.Event) -> None:
    """Reload the file whenever it changes, until `stopping` is set. A file that cannot be used leaves the keys as they were."""
    while not stopping.is_set():
        now = await asyncio.to_thread(_stamp, path)
        if now != stamp:
            stamp = now
            await _reload(path, access)
        await wait_for_stop(stopping, LOOK_EVERY_S)


async def _reload(path: Path, access: Access) -> None:
    try:
        ring, _ = await asyncio.to_thread(read_ring, path)
    except BadConfiguration as error:
        log.warning("the keys file cannot be used; the keys stay as they were", problems=str(error))
    else:
        access.ring = ring
        log.info("keys loaded", valid=len(ring))


def _stamp(path: Path) -> Stamp | None:
    """None when there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
