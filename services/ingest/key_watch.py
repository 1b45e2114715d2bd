"""Keeps the keys that are in use equal to the keys file: a new or revoked key counts within seconds, without a restart.

The file's bytes are compared, not its times: nothing that changes a file escapes. A load that failed is tried again until one
succeeds, whatever mended it, and until then the age of the ring grows. The ring stays in use meanwhile: a typing mistake must not
lock everybody out.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from services.core import metrics
from services.core.key_file import load_keys
from services.core.keys import KeyRing
from services.core.lifecycle import wait_for_stop
from services.core.yaml_source import MAX_FILE_BYTES, BadConfiguration
from services.ingest.access import Access

log = structlog.get_logger()

READ_EVERY_S = 1.0
STALE_AFTER_S = 60.0
"""Without a good load for so long, ingest says so as an error, and again after each further such time."""


class KeyWatch:
    """The ring of `access`, kept like the file at `path`. `clock`: monotonic seconds."""

    def __init__(self, path: Path, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._access, self._clock = path, access, clock
        self._digest = b""
        self._problem: str | None = None
        self._good = self._said = clock()

    @property
    def age(self) -> float:
        """Seconds since the ring was last seen to be what the file says."""
        return self._clock() - self._good

    async def load(self) -> None:
        """Read the file once, off the loop. Raises BadConfiguration, and leaves the ring as it was then."""
        began = self._clock()
        found = await asyncio.to_thread(_read, self._path, self._digest)
        if found is not None:
            self._digest, self._access.ring = found
            log.info("keys loaded", valid=len(found[1]))
        if self._problem is not None:
            log.info("the keys file can be used again")
        self._problem, self._good, self._said = None, began, began

    async def run(self, stopping: asyncio.Event) -> None:
        """Load again and again until `stopping` is set."""
        metrics.INGEST_KEYS_AGE.set_function(lambda: self.age)
        loading: asyncio.Task[None] | None = None
        try:
            while not stopping.is_set():
                loading = loading or asyncio.create_task(self._try(), name="load keys")
                await asyncio.wait(
                    {loading}, timeout=READ_EVERY_S
                )  # a file system may hang; one thread of ours with it
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
        except BadConfiguration as error:
            metrics.INGEST_KEYS_FAILURES.inc()
            if str(error) != self._problem:
                log.warning("the keys file cannot be used; the keys stay as they were", problems=str(error))
            self._problem = str(error)

    def _complain(self) -> None:
        if self._clock() - self._said < STALE_AFTER_S:
            return
        self._said = self._clock()
        log.error(
            "keys_stale",
            seconds=round(self.age),
            file=str(self._path),
            problems=self._problem or "reading it does not end",
            hint="a key that was revoked meanwhile is still valid here. Try: mend the file, or restart ingest",
        )


def _read(path: Path, known: bytes) -> tuple[bytes, KeyRing] | None:
    """The digest of the file and its valid keys; None while its digest is the known one. Blocking. Raises BadConfiguration.

    The digest is of what was read first: when the file changes before it is parsed, the next look parses it again.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(MAX_FILE_BYTES + 1)).digest()
    except OSError:
        digest = b""  # load_keys says what is wrong
    if digest == known != b"":
        return None
    return digest, KeyRing(load_keys(path))
