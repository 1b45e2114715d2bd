"""Folders whose names survive a power cut. Blocking."""

import os
from pathlib import Path


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make the folder and every missing parent; each new name is synced into the folder that holds it.

    `mode` is that of all folders that are made here, less the umask. A folder that exists is left as it is. Raises OSError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make created, renamed and deleted names in this folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
