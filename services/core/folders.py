"""Folders whose names survive a power cut. Blocking."""

import os
from pathlib import Path


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Create the folder and every missing parent, durably. mode: of each created folder, less the umask. Raises OSError."""
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
