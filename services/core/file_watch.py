"""Keeps what is in use equal to a file that people change while we run: keys for senders, secrets that sign webhooks.

The file's bytes are compared, not its times: nothing that changes a file escapes. A load that failed is tried again until one
succeeds, whatever mended it, and until then the age of what is in use grows. It stays in use meanwhile: a typing mistake must
not lock everybody out, or stop every delivery.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
from prometheus_client import Gauge

from services.core.lifecycle import wait_for_stop

log = structlog.get_logger()

READ_EVERY_S = 1.0
STALE_AFTER_S = 60.0
"""Without a good load for so long, the service says so as an error, and again after each further such time."""

Content = TypeVar("Content")
Read = Callable[[bytes], tuple[bytes, Content] | None]
"""Given the digest of what is in use: the file's digest and what is in it; None while the digest is the same. Blocking."""


class FileWatch(Generic[Content]):
    """One file. what: for a person, e.g. `the keys file data/keys.yaml`. use: takes what is in it now, on the loop.

    expected: what `read` raises for a file that cannot be used; its text is for a person and holds no secret. failed: called
    each time. stale: what an old content means, and what to try. age: shows `age` while `run` runs. clock: monotonic seconds.
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
        self._good = self._said = clock()

    @property
    def age(self) -> float:
        """Seconds since what is in use was last seen to be what the file says."""
        return self._clock() - self._good

    async def load(self) -> None:
        """Read the file once, off the loop. Raises what is `expected`, and leaves what is in use as it was then."""
        began = self._clock()
        found = await asyncio.to_thread(self._read, self._digest)
        if found is not None:
            self._digest, content = found
            self._use(content)
        if self._problem is not None:
            log.info("file_usable_again", what=self._what)
        self._problem, self._good, self._said = None, began, began

    async def run(self, stopping: asyncio.Event) -> None:
        """Load again and again until `stopping` is set. A file system that hangs holds one thread of ours."""
        self._age_gauge.set_function(lambda: self.age)
        loading: asyncio.Task[None] | None = None
        try:
            while not stopping.is_set():
                loading = loading or asyncio.create_task(self._try(), name=f"load {self._what}")
                await asyncio.wait({loading}, timeout=READ_EVERY_S)
                if loading.done():
                    await loading
                    loading = None
                self._complain()
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
                log.warning(
                    "file_unusable", what=self._what, problems=str(error), hint="what is in use stays as it was"
                )
            self._problem = str(error)

    def _complain(self) -> None:
        if self._clock() - self._said < STALE_AFTER_S:
            return
        self._said = self._clock()
        log.error(
            "file_stale",
            what=self._what,
            seconds=round(self.age),
            problems=self._problem or "reading it does not end",
            hint=self._stale,
        )
