"""The free space of a data folder's disk, as a metric: an alert comes before the disk is full."""

import math
import os
from pathlib import Path

from services.core.metrics import DISK_FREE, DISK_SIZE


def show_disk(folder: Path) -> None:
    """Measured at each scrape. Without a value while the folder cannot be reached. Later calls for one folder change nothing."""
    DISK_FREE.labels(str(folder)).set_function(lambda: _measure(folder)[0])
    DISK_SIZE.labels(str(folder)).set_function(lambda: _measure(folder)[1])


def _measure(folder: Path) -> tuple[float, float]:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return math.nan, math.nan
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
