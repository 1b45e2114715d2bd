"""The free space of the disks of data folders, as a metric: an alert comes before a disk is full."""

import asyncio
import math
import os
from pathlib import Path

from services.core.metrics import DISK_FREE, DISK_SIZE

_LIMIT_S = 2.0
"""A disk that does not answer must not hold up the other metrics."""
_folders: set[Path] = set()
_asked: set[Path] = set()
"""Their disks are being measured in a thread."""


def show_disk(folder: Path) -> None:
    """Measure the disk of this folder from now on, at each `measure_disks`. Later calls for one folder change nothing."""
    _folders.add(folder)


async def measure_disks() -> None:
    """Set the metrics. NaN for a folder that cannot be reached, or not within two seconds."""
    await asyncio.gather(*map(_measure, _folders))


async def _measure(folder: Path) -> None:
    if folder in _asked:  # by another scrape; when that one gave up, NaN stays until the disk answers
        return
    _asked.add(folder)
    asking = asyncio.create_task(_ask(folder))
    done, _ = await asyncio.wait({asking}, timeout=_LIMIT_S)  # never cancelled: the thread may not be free yet
    free = size = math.nan
    if done and (disk := asking.result()) is not None:
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    DISK_FREE.labels(str(folder)).set(free)
    DISK_SIZE.labels(str(folder)).set(size)


async def _ask(folder: Path) -> os.statvfs_result | None:
    try:
        return await asyncio.to_thread(os.statvfs, folder)
    except OSError:
        return None
    finally:
        _asked.discard(folder)
