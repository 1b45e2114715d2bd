"""The scratch folder of Spark: shuffled and spilled blocks, copies of jars, unpacked native libraries. Blocking.

It is below the data folder, so that it is on the disk that the operator chose, and so that the next start finds the rest of a
process that was killed. Each process has a folder and a lock of its own: it removes only folders whose process has ended.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.get_logger()

_LOCK = "lock"
_PREFIX = "spark-"
_TEMPORARY = "penstock-spark-"
"""In the temporary folder of the system."""
_NEW_S = 60.0
"""A younger folder there may not be locked yet."""


class Scratch:
    """The folder of this process, in `scratch/` of the data folder. Removes those of processes that have ended.

    Where the data folder cannot be written (the checkpoints may be in an object store), it is in the temporary folder of the
    system. Raises OSError when that cannot be written either.
    """

    def __init__(self, data: Path) -> None:
        self._lock: int | None = None
        root = data.absolute() / "scratch"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root):
                _remove_abandoned(root)
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
                self._lock = _acquire(self.folder, wait=False)
        except OSError as error:
            _remove_abandoned(Path(tempfile.gettempdir()), _TEMPORARY, _NEW_S)
            self.folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
            self._lock = _acquire(self.folder, wait=False)
            log.info("scratch_in_temporary_folder", folder=str(self.folder), reason=str(error))

    def remove(self) -> None:
        """Remove the folder. Nothing may use it any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(root: Path, prefix: str = _PREFIX, min_age_s: float = 0.0) -> None:
    """Folders that cannot be removed now are tried again at the next start."""
    for folder in root.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # anybody may put a link there
                continue
            if found.st_mtime > time.time() - min_age_s:
                continue
            lock = _acquire(folder, wait=False)
        except OSError:  # its process runs, or another user owns it
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """While a process looks for abandoned folders, no other one creates a folder that is not locked yet."""
    lock = _acquire(root, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _acquire(folder: Path, *, wait: bool) -> int:
    """A descriptor that holds the lock of the folder until it is closed, also by the end of the process. Raises OSError."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock
