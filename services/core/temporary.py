"""Temporary folders, which end with the process, also when it is killed: the next one removes them."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "penstock.lock"
"""A folder has a file of this name from when the file is locked. Nobody holds the lock of a process that was killed."""


class TemporaryFolder:
    """A new folder `penstock-KIND-*`. Removes those of the same kind and user that a killed process left. Blocking.

    parent: where; by default the temporary folder of the system. Raises OSError.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        prefix = f"penstock-{kind}-"
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _remove_left(parent, prefix)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = os.open(self.folder / f".{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.folder / f".{_LOCK}").rename(self.folder / _LOCK)

    def remove(self) -> None:
        """Files that a child still writes may stay. Blocking."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def keep(self) -> None:
        """Leave the folder to the user: no later process removes it."""
        (self.folder / _LOCK).unlink(missing_ok=True)
        os.close(self._lock)


@contextmanager
def temporary_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """The folder of a `TemporaryFolder`, removed at the end."""
    made = TemporaryFolder(kind, parent)
    try:
        yield made.folder
    finally:
        made.remove()


def _remove_left(parent: Path, prefix: str) -> None:
    """What cannot be removed stays: it is somebody else's, or in use."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / _LOCK).lstat()  # its process may have kept it just now
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
