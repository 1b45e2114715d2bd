"""Files of secrets: reads them, and loads them again when people change them while we run.

The content is compared, not the file's times, so that no change is missed. A failed load is repeated until one succeeds. The old
content stays in use meanwhile, and its age grows: a typing mistake must not lock everybody out, or stop every delivery.
"""

import asyncio
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from prometheus_client import Gauge

from services.core.process.lifecycle import wait_for_stop

log = structlog.get_logger()

READ_EVERY_S = 1.0
STALE_AFTER_S = 60.0
"""After so long without a good load an error is logged, and again each time so long passes."""
MAX_PRIVATE_BYTES = 10_000


class UnusableFile(Exception):
    """The file cannot be used. The message is for a person, without the file's name; it never shows the content."""


def read_private(path: Path, remedy: str = "") -> str:
    """The first MAX_PRIVATE_BYTES of a regular file that other users cannot access. Blocking. Raises UnusableFile.

    remedy: for a person, if the file is missing.
    """
    return read_regular(path, MAX_PRIVATE_BYTES, remedy=remedy).decode("ascii", errors="replace")


def read_regular(path: Path, limit: int, *, private: bool = True, remedy: str = "") -> bytes:
    """The first `limit` bytes of a regular file. private: other users must not have access. As `read_private` otherwise."""
    try:
        # without blocking: a named pipe is refused; opening it would wait for a writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UnusableFile("is not a regular file")
            if private and mode & stat.S_IRWXO:
                raise UnusableFile(f"can be read or written by everybody on this machine. Try: chmod 600 {path}")
            return file.read(limit)
    except OSError as error:
        hint = f". Try: {remedy}" if remedy and isinstance(error, FileNotFoundError) else ""
        raise UnusableFile(f"cannot be read: {error.strerror}{hint}") from error


def changed_at(path: Path) -> float | None:
    """When the file was last changed, in seconds since the epoch. None: it is gone. Blocking."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


Content = TypeVar("Content")
Read = Callable[[bytes], tuple[bytes, Content] | None]
"""From the digest of the content in use: the file's digest and content; None while the digest is the same. Blocking."""


class FileWatch(Generic[Content]):
    """One file. what: its name for a person, e.g. `the keys file data/keys.yaml`. use: called on the loop with new content.

    expected: the error that `read` raises for an unusable file; its text is for a person, without secrets. failed: called for
    each of them. stale: the consequence of old content, and a remedy. age: shows `age` while `run` runs. clock: monotonic s.
    """

    def __init__(
        self,
        what: str,
        read: Read[Content],
        use: Callable[[Content], None],
        *,
        expected: type[Exception],
        failed: Callable[[], None],
        stale: str,
        age: Gauge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._read, self._use, self._clock = what, read, use, clock
        self._expected, self._failed, self._stale = expected, failed, stale
        self._age_gauge = age
        self._digest = b""
        self._problem: str | None = None
        self._good = self._logged = clock()

    @property
    def age(self) -> float:
        """Seconds since the content in use was last equal to the file."""
        return self._clock() - self._good

    async def load(self) -> None:
        """Read the file once, in a thread. Raises the `expected` error; the old content then stays in use."""
        began = self._clock()
        found = await asyncio.to_thread(self._read, self._digest)
        if found is not None:
            self._digest, content = found
            self._use(content)
        if self._problem is not None:
            log.info("file_usable_again", what=self._what)
        self._problem, self._good, self._logged = None, began, began

    async def run(self, stopping: asyncio.Event) -> None:
        """Load every READ_EVERY_S until `stopping` is set. A file system that hangs blocks only one thread."""
        self._age_gauge.set_function(lambda: self.age)
        loading: asyncio.Task[None] | None = None
        try:
            while not stopping.is_set():
                loading = loading or asyncio.create_task(self._try(), name=f"load {self._what}")
                await asyncio.wait({loading}, timeout=READ_EVERY_S)
                if loading.done():
                    await loading
                    loading = None
                self._log_if_stale()
                await wait_for_stop(stopping, READ_EVERY_S)
        finally:
            if loading is not None:
                loading.cancel()

    async def _try(self) -> None:
        try:
            await self.load()
        except self._expected as error:
            self._failed()
            if str(error) != self._problem:
                log.warning("file_unusable", what=self._what, problems=str(error), hint="the old content stays in use")
            self._problem = str(error)

    def _log_if_stale(self) -> None:
        if self._clock() - self._logged < STALE_AFTER_S:
            return
        self._logged = self._clock()
        problems = self._problem or "reading it does not end"
        log.error("file_stale", what=self._what, seconds=round(self.age), problems=problems, hint=self._stale)
