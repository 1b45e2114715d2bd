"""Copies of tables, with which a new replica begins: `GET /v1/snapshot/{stream}`, and the fetching of one.

A copy is of one moment, and has its positions. A replica checks all of it before it uses it: the hash, the format, the topic, and
that the stream still has the offsets and the tombstones behind it. Otherwise it reads the stream from the beginning. The reason
is logged and counted.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import aiohttp
import apsw
import structlog

from services.core import metrics
from services.core.broker.contract import PartitionRange
from services.core.security.file_watch import UnusableFile, read_private
from services.core.times import now_ms
from services.table import problems
from services.table.follower import Follower
from services.table.http_server import Request
from services.table.problems import Refused
from services.table.store import Meta, Rebuild, Store

log = structlog.get_logger()
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MEDIA = b"application/vnd.sqlite3"
HASH = "Penstock-SHA256"
CHUNK = 1 << 18
_COPY = ".sending"
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10.0, sock_connect=10.0, sock_read=300.0)
"""The first byte comes when the copy is made."""


class Snapshots:
    """Sends copies, one at a time: each takes as much of the disk as its table."""

    def __init__(self) -> None:
        self._is_busy = False

    async def send(self, follower: Follower, store: Store, request: Request) -> None:
        """Make a copy, send it, remove it. Raises Refused, ConnectionError."""
        if self._is_busy:
            raise Refused(problems.BUSY, "Another snapshot is under way.", retry_after=30)
        self._is_busy = True
        path = store.path.with_name(follower.stream + _COPY)
        try:
            try:
                size, digest = await _to_the_end(_make_copy, store, path)
            except (OSError, apsw.Error, Rebuild) as error:
                log.warning("snapshot_failed", stream=follower.stream, error=str(error))
                detail = "The copy could not be made; perhaps there is no room on the disk."
                raise Refused(problems.BUSY, detail, retry_after=60) from None
            connection = request.connection
            more = b"Content-Length: %d\r\n%b: %b\r\n" % (size, HASH.encode(), digest.encode())
            await connection.write(connection.start_stream(MEDIA, more))
            for at in range(0, size, CHUNK):
                await connection.write(await asyncio.to_thread(_read, path, at))
        finally:
            await _to_the_end(self._remove, path)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        finally:
            self._is_busy = False


def remove_left_copies(folder: Path) -> None:
    """Of a service that was killed while it sent one. Raises OSError. Blocking."""
    for path in folder.glob(f"*{_COPY}"):
        path.unlink(missing_ok=True)


async def _to_the_end(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **more: Arguments.kwargs
) -> Result:
    """Run it in a thread, to its end. A client that leaves cancels its request: the removal must not be dropped by that, nor run
    before the copy has ended."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **more))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait({running})


def _make_copy(store: Store, path: Path) -> tuple[int, str]:
    """The size and the hash."""
    path.unlink(missing_ok=True)
    store.copy_to(path)
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, at: int) -> bytes:
    """A chunk. The file is open for this call only: a cancelled `to_thread` would leave an open one behind."""
    with path.open("rb") as file:
        file.seek(at)
        return file.read(CHUNK)


class NoSnapshot(Exception):
    """No copy could be used. reason: a word for the metric. The text is for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class SnapshotSource(NamedTuple):
    """Another replica. key: the file with its API key."""

    url: str
    key: Path | None

    async def begin(
        self, path: Path, meta: Meta, stored: Mapping[int, PartitionRange], max_age_ms: int, turn: Callable[[], None]
    ) -> None:
        """Put a checked copy of the other replica's table at `path`, if there is one. stored: the stored ranges of the stream.
        turn: called while it makes progress."""
        draft = path.with_name(f"{meta.stream}.fetched")
        try:
            try:
                await self._fetch(draft, meta.stream, turn)
                await asyncio.to_thread(_check, draft, meta, stored, max_age_ms)
                await asyncio.to_thread(draft.replace, path)
            except UnusableFile as error:
                raise NoSnapshot("key", f"{self.key} {error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise NoSnapshot("unreachable", f"{type(error).__name__}: {error}") from error
            except OSError as error:
                raise NoSnapshot("no_room", str(error)) from error
        except NoSnapshot as error:
            metrics.TABLE_SNAPSHOTS.labels(meta.stream, error.reason).inc()
            hint = "the table is read from the beginning of its stream"
            log.warning(
                "snapshot_not_used",
                stream=meta.stream,
                source=self.url,
                reason=error.reason,
                error=str(error),
                hint=hint,
            )
        else:
            metrics.TABLE_SNAPSHOTS.labels(meta.stream, "used").inc()
            log.info("snapshot_used", stream=meta.stream, source=self.url)
        finally:
            await asyncio.to_thread(Store.remove, draft)

    async def _fetch(self, path: Path, stream: str, turn: Callable[[], None]) -> None:
        headers = {}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {(await asyncio.to_thread(read_private, self.key)).strip()}"
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers, auto_decompress=False) as session,
            session.get(f"{self.url}/v1/snapshot/{stream}", allow_redirects=False) as answer,
        ):
            expected, size = answer.headers.get(HASH), answer.content_length
            if answer.status != 200 or expected is None or size is None:
                raise NoSnapshot("refused", f"the answer is {answer.status} {answer.reason}, and no snapshot")
            if size > (await asyncio.to_thread(shutil.disk_usage, path.parent)).free:
                raise NoSnapshot("no_room", f"{path.parent} has no room for {size} bytes")
            digest = hashlib.sha256()
            with await asyncio.to_thread(path.open, "wb") as file:
                async for chunk in answer.content.iter_chunked(CHUNK):
                    digest.update(chunk)
                    await asyncio.to_thread(file.write, chunk)
                    turn()
            if digest.hexdigest() != expected:
                raise NoSnapshot("hash", "its bytes are not those that were sent")


def _check(path: Path, meta: Meta, stored: Mapping[int, PartitionRange], max_age_ms: int) -> None:
    """Raises NoSnapshot."""
    try:
        store = Store(path, meta)
        positions = store.positions()
        store.close()
    except Rebuild as error:
        raise NoSnapshot(error.reason, str(error)) from error
    for partition, position in positions.items():
        one = stored.get(partition)
        if one is None or not one.start <= position.next <= one.end:
            detail = f"its position {position.next} is not in {meta.stream}[{partition}]"
            raise NoSnapshot("position_out_of_range", detail)
        if now_ms() - position.fresh_ms >= max_age_ms:
            raise NoSnapshot("too_old", "tombstones behind it may be gone")
