"""Create-only objects: a folder of this machine, or a bucket of S3, Google Cloud or Azure through `obstore`.

An object is created once and never changes; nothing deletes it. Of several creators of one name exactly one succeeds, and an
object that anybody has seen is durable. A folder needs code of our own for that: `obstore` creates a file atomically there, but
does not sync it. No method repeats a failed request: only `ObjectLog` knows whether a repeat is safe.
"""

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from services.core import metrics
from services.core.process.disk import show_disk

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Of one request to a bucket."""
_AT_ONCE = 32
"""Requests to a bucket at the same time."""
_SCRATCH = ".new-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SCHEMES = ("s3", "gs", "az")


class StoreUnavailable(Exception):
    """The store did not answer, or refused. Whether an object was created is unknown. The message names the store."""


class NotStored(StoreUnavailable):
    """The store refused to create an object: a full disk, a read-only folder, a missing right. It was certainly not created."""


class Objects(Protocol):
    """A place for objects. A name is `folder/name`. The methods raise StoreUnavailable, `create` also NotStored."""

    url: str
    failed: str | None
    """Why nothing can be created until a restart."""

    async def create(self, name: str, content: bytes) -> bool:
        """True: it is durable now. False: an object of this name exists already."""

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The contents in the order of the names; None for an object that does not exist."""

    async def names_after(self, name: str) -> list[str]:
        """The names in the folder of `name` that sort behind it, in order."""


def open_objects(url: str) -> Objects:
    """The store at this URL: file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix.

    The environment has the credentials (AWS_…, GOOGLE_…, AZURE_…). Raises ValueError, whose message is for a person.
    """
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme != "file":
        return Bucket(url)
    folder = Path(unquote(parts.path))
    show_disk(folder)
    return Folder(folder)


def check_url(url: str) -> None:
    """Raises ValueError, whose message is for a person."""
    parts = urlsplit(url)
    is_folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    if not is_folder and not (parts.scheme in _SCHEMES and parts.netloc):
        raise ValueError(
            "a folder or a bucket is needed. Try: file:///var/lib/penstock/schemas, or s3://bucket/schemas"
        )


class Watched:
    """A store whose last answer is in the metric: 0 when it gave none, or when it can create nothing more."""

    def __init__(self, objects: Objects) -> None:
        self._objects, self.url = objects, objects.url

    async def create(self, name: str, content: bytes) -> bool:
        with self._show():
            return await self._objects.create(name, content)

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._show():
            return await self._objects.get(names)

    async def names_after(self, name: str) -> list[str]:
        with self._show():
            return await self._objects.names_after(name)

    @contextmanager
    def _show(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            metrics.REGISTRY_STORE_UP.set(0)
            raise
        metrics.REGISTRY_STORE_UP.set(self._objects.failed is None)


class Folder:
    """Objects as files. An object appears whole and synced: a link to a file that was written and synced under another name.

    After a failed sync it creates nothing more: nobody knows what the disk has, and a second sync may wrongly succeed. A folder
    that was there and is gone, as one whose disk is no longer mounted, is away, and neither empty nor made anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[Path] = set()
        self.failed: str | None = None
        self.url = f"file://{path}"

    async def create(self, name: str, content: bytes) -> bool:
        return await asyncio.to_thread(self._guarded, lambda: self._create(self._path / name, content))

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        return await asyncio.to_thread(self._guarded, lambda: self._get([self._path / name for name in names]))

    async def names_after(self, name: str) -> list[str]:
        return await asyncio.to_thread(self._guarded, lambda: self._names_after(name))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise StoreUnavailable(f"{error.filename or self.url}: {error.strerror}") from error

    def _create(self, path: Path, content: bytes) -> bool:
        if self.failed is not None:
            raise NotStored(f"{self.url}: {self.failed}. Try: check the disk, then restart the registry")
        scratch = path.with_name(f"{_SCRATCH}{path.name}-{secrets.token_hex(8)}")
        try:
            try:
                self._write(scratch, content)
            except OSError as error:
                raise NotStored(f"{path.parent}: {error.strerror}") from error
            try:
                os.link(scratch, path)
            except FileExistsError:
                return False
        finally:
            scratch.unlink(missing_ok=True)
        self._sync(path.parent)
        return True

    def _write(self, path: Path, content: bytes) -> None:
        if not path.parent.exists():
            self._require_new(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sync(path.parent.parent)
        self._known.add(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            self._fsync(descriptor, passing=_FULL)  # nobody has seen this file, and the next try writes another one

    def _get(self, paths: Sequence[Path]) -> list[bytes | None]:
        """Another process may have linked a file and not synced the folder yet. Nobody may build on it before."""
        found = [_read(path) for path in paths]
        for folder in {path.parent for path, content in zip(paths, found, strict=True) if content is not None}:
            self._sync(folder)
        for folder in {path.parent for path, content in zip(paths, found, strict=True) if content is None}:
            if not folder.exists():
                self._require_new(folder)
        return found

    def _names_after(self, name: str) -> list[str]:
        folder, _, last = name.rpartition("/")
        try:
            found = os.listdir(self._path / folder)  # noqa: PTH208  names, not paths
        except FileNotFoundError:
            self._require_new(self._path / folder)
            return []
        self._known.add(self._path / folder)
        return [f"{folder}/{each}" for each in sorted(found) if each > last and not each.startswith(".")]

    def _require_new(self, folder: Path) -> None:
        """Raises OSError for a folder that was there before."""
        if folder in self._known:
            raise FileNotFoundError(errno.ENOENT, "the folder is gone; is its disk mounted?", str(folder))

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._fsync(descriptor)
        finally:
            os.close(descriptor)

    def _fsync(self, descriptor: int, passing: frozenset[int] = frozenset()) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in passing:
                raise
            self.failed = f"a sync failed ({error.strerror})"
            raise


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


class Bucket:
    """Objects in a bucket. Creating is one conditional request (`If-None-Match: *`)."""

    def __init__(self, url: str) -> None:
        within = timedelta(seconds=TIMEOUT_S)
        store = from_url(
            url,
            client_options={
                "timeout": within,
                "connect_timeout": within,
                "allow_http": True,
            },  # as AWS_ENDPOINT_URL says
            retry_config={"max_retries": 0, "retry_timeout": within},
        )
        assert isinstance(store, S3Store | GCSStore | AzureStore), url
        self._store = store
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.failed: str | None = None
        self.url = url

    async def create(self, name: str, content: bytes) -> bool:
        try:
            await obstore.put_async(self._store, name, content, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except (PermissionDeniedError, UnauthenticatedError, FileNotFoundError) as error:  # the last: no such bucket
            raise NotStored(str(self._explain(name, error))) from error
        except (BaseError, OSError) as error:
            raise self._explain(name, error) from error
        return True

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        if len(names) == 1:
            return [await self._get(names[0])]
        return list(await asyncio.gather(*map(self._get, names)))

    async def names_after(self, name: str) -> list[str]:
        folder, found = name.rpartition("/")[0], []
        try:
            async for page in obstore.list(self._store, prefix=folder, offset=name):
                found += [each["path"] for each in page]
        except (BaseError, OSError) as error:
            raise self._explain(f"{folder}/", error) from error
        return sorted(found)

    async def _get(self, name: str) -> bytes | None:
        async with self._slots:
            try:
                answer = await obstore.get_async(self._store, name)
                return bytes(await answer.bytes_async())
            except FileNotFoundError:
                return None
            except (BaseError, OSError) as error:
                raise self._explain(name, error) from error

    def _explain(self, name: str, error: Exception) -> StoreUnavailable:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StoreUnavailable(f"{self.url}, object {name}: {first[:300]}")
