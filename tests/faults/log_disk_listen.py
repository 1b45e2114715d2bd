"""Telling a `Disk` what happens below its folder: SQLite through a VFS of apsw, the log's own files through `os`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.faults.log_disk import Disk

_FOLDER = -1


@contextmanager
def listening(disk: Disk) -> Iterator[None]:
    """From now on, in this process, until the end of the block."""
    vfs = _Vfs(disk)
    calls = _Calls(disk)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "pwrite", "fsync", "fdatasync", "rename", "unlink"):
            patch.setattr(os, name, getattr(calls, name))
        try:
            yield
        finally:
            vfs.unregister()


class _Vfs(apsw.VFS):
    """SQLite's way to the disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        super().__init__("disk", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> "_File":  # noqa: N802 - apsw's name
        return _File(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802 - apsw's name
        name = self._disk.name(filename)
        if name is not None:
            self._disk.rename(name, "")
        super().xDelete(filename, syncdir)
        if name is not None and syncdir:
            self._disk.sync_names()


class _File(apsw.VFSFile):
    """One file that SQLite has open. Its first sync of a write-ahead log syncs the folder too, as SQLite does."""

    def __init__(self, disk: Disk, path: Any, flags: list[int]) -> None:
        self._disk = disk
        text = path.filename() if isinstance(path, apsw.URIFilename) else path
        name = disk.name(text)
        self._is_new = name is not None and name not in disk.names and bool(flags[0] & apsw.SQLITE_OPEN_WAL)
        super().__init__("unix", path, flags)
        self._number = None if name is None else disk.opened(name)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - apsw's name
        if self._number is not None:
            self._disk.wrote(self._number, offset, bytes(data))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802 - apsw's name
        if self._number is not None:
            self._disk.wrote(self._number, size, b"")
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802 - apsw's name
        super().xSync(flags)
        if self._number is not None:
            self._disk.sync(self._number)
            if self._is_new:
                self._is_new = False
                self._disk.sync_names()


class _Calls:
    """The functions of `os` by which the log changes files."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "fdatasync", "rename", "unlink")}

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        name = self._disk.name(path) if isinstance(path, str | Path) else None
        fd: int = self._real["open"](path, flags, *rest, **more)
        self._open.pop(fd, None)
        if flags & os.O_DIRECTORY:
            self._open[fd] = _FOLDER
        elif name is not None:
            self._open[fd] = number = self._disk.opened(name)
            if flags & os.O_TRUNC:
                self._disk.wrote(number, 0, b"")
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        number = self._open.get(fd)
        if number is not None:
            self._disk.wrote(number, offset, bytes(data))
        done: int = self._real["pwrite"](fd, data, offset)
        return done

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", fd)

    def rename(self, old: Any, new: Any, **more: Any) -> None:
        first, second = self._disk.name(old), self._disk.name(new)
        if first is not None and second is not None:
            self._disk.rename(first, second)
        self._real["rename"](old, new, **more)

    def unlink(self, path: Any, **more: Any) -> None:
        name = self._disk.name(path)
        if name is not None:
            self._disk.rename(name, "")
        self._real["unlink"](path, **more)

    def _sync(self, what: str, fd: int) -> None:
        self._real[what](fd)
        number = self._open.get(fd)
        if number == _FOLDER:
            self._disk.sync_names()
        elif number is not None:
            self._disk.sync(number)
