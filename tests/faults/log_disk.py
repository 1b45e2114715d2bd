"""A disk that forgets: notes every write, sync and rename below a folder, and builds what a crash would have left of it.

Two kinds of crash. *kill*: every process dies; what was written stays, the write under way is torn. *cut*: the power goes;
what was not synced is there or not, sector by sector in any order, and names (create, rename, unlink) that were not synced
are a prefix of what was done. `log_disk_listen` tells it what SQLite and the log do.
"""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SECTOR = 512

Choose = Callable[[int], int]
"""A number below its argument."""

Write = tuple[int, bytes]
"""Where, what. Nothing at all: the file was cut off there."""


class Names(NamedTuple):
    """Names change: `new` appears for file `number` (None: nothing appears), `old` vanishes ("": nothing does)."""

    old: str
    new: str
    number: int | None


class File:
    """One file: what is on the disk, and what was written since the last sync."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced
        self.pending: list[Write] = []

    def whole(self) -> bytes:
        """With everything written."""
        data = bytearray(self.synced)
        for write in self.pending:
            _apply(data, write)
        return bytes(data)

    def torn(self, choose: Choose) -> bytes:
        """Each sector as it was after some of the writes to it; a cut-off file with the first of its writes."""
        if any(not data for _, data in self.pending):
            data = bytearray(self.synced)
            for write in self.pending[: choose(len(self.pending) + 1)]:
                _apply(data, write)
            return bytes(data)
        found = bytearray(self.synced)
        versions: dict[int, list[Write]] = {}
        for write in self.pending:
            for piece in _pieces(write):
                versions.setdefault(piece[0] // SECTOR, []).append(piece)
        for pieces in versions.values():
            for piece in pieces[: choose(len(pieces) + 1)]:
                _apply(found, piece)
        return bytes(found)


class Crash:
    """The disk at one moment: `under_way` was about to be written."""

    def __init__(self, disk: "Disk", under_way: tuple[int, Write] | None) -> None:
        self._under_way = under_way
        self._files = {number: (file.synced, list(file.pending)) for number, file in disk.files.items()}
        self._names, self._synced, self._renames = dict(disk.names), dict(disk.synced), list(disk.renames)

    def kill(self, target: Path, choose: Choose, disk: "Disk") -> None:
        """Build what is left when all processes died. `disk` goes on there: what was not synced still is not."""
        files = {number: self._file(number) for number in self._files}
        if self._under_way is not None:
            number, write = self._under_way
            pieces = _pieces(write)
            files[number].pending += pieces[: choose(len(pieces) + 1)]
        for name, number in self._names.items():
            _put(target / name, files[number].whole())
        disk.load(target)
        disk.files, disk.names = files, dict(self._names)
        disk.synced, disk.renames = dict(self._synced), list(self._renames)

    def cut(self, target: Path, choose: Choose, disk: "Disk") -> None:
        """Build what is left when the power went. `disk` goes on there."""
        names = dict(self._synced)
        for change in self._renames[: choose(len(self._renames) + 1)]:
            _rename(names, change)
        for name, number in names.items():
            file = self._file(number)
            if self._under_way is not None and self._under_way[0] == number:
                file.pending.append(self._under_way[1])
            _put(target / name, file.torn(choose))
        disk.load(target)

    def _file(self, number: int) -> File:
        synced, pending = self._files[number]
        file = File(synced)
        file.pending = list(pending)
        return file


class Disk:
    """`crashes`: a list that gets a Crash before each change. `crash_in`: before the n-th change make `crash` only."""

    def __init__(self) -> None:
        self.root = Path()
        self.files: dict[int, File] = {}
        self.names: dict[str, int] = {}
        self.synced: dict[str, int] = {}
        self.renames: list[Names] = []
        self.crashes: list[Crash] | None = None
        self.crash_in: int | None = None
        self.crash: Crash | None = None
        self._lock = threading.RLock()
        self._next = 0

    def load(self, root: Path) -> None:
        """Listen to this folder instead; all that is there is on the disk."""
        self.root = root
        self.files, self.names, self.renames = {}, {}, []
        self.crash_in = self.crash = None
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.name.endswith("-shm"):
                self.files[self._next] = File(path.read_bytes())
                self.names[str(path.relative_to(root))] = self._next
                self._next += 1
        self.synced = dict(self.names)

    def name(self, path: str | os.PathLike[str] | None) -> str | None:
        """Its name below the folder; None for files that do not count."""
        text = "" if path is None else os.fspath(path)
        prefix = f"{self.root}/"
        return text[len(prefix) :] if text.startswith(prefix) and not text.endswith("-shm") else None

    def changes(self, under_way: tuple[int, Write] | None = None) -> None:
        """Called before each change."""
        if self.crashes is not None:
            self.crashes.append(Crash(self, under_way))
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in, self.crash = None, Crash(self, under_way)

    def opened(self, name: str) -> int:
        """The file of this name; a new one when there is none."""
        with self._lock:
            if name not in self.names:
                self.changes()
                self.files[self._next] = File()
                self._change(Names("", name, self._next))
                self._next += 1
            return self.names[name]

    def wrote(self, number: int, offset: int, data: bytes) -> None:
        """About to be written; no data: about to be cut off there."""
        with self._lock:
            if data or offset != len(self.files[number].whole()):
                self.changes((number, (offset, data)))
                self.files[number].pending.append((offset, data))

    def sync(self, number: int) -> None:
        """Synced."""
        with self._lock:
            self.changes()
            file = self.files[number]
            file.synced, file.pending = file.whole(), []

    def sync_names(self) -> None:
        """A folder was synced: all names are on the disk."""
        with self._lock:
            self.changes()
            self.synced, self.renames = dict(self.names), []

    def rename(self, old: str, new: str) -> None:
        """Renamed, or removed when `new` is ""."""
        with self._lock:
            if old in self.names:
                self.changes()
                self._change(Names(old, new, self.names[old] if new else None))

    def _change(self, change: Names) -> None:
        _rename(self.names, change)
        self.renames.append(change)


def _pieces(write: Write) -> list[Write]:
    """The sectors of a write."""
    offset, data = write
    cuts = [offset, *range((offset // SECTOR + 1) * SECTOR, offset + len(data), SECTOR), offset + len(data)]
    return [(a, data[a - offset : b - offset]) for a, b in itertools.pairwise(cuts)]


def _apply(data: bytearray, write: Write) -> None:
    offset, new = write
    if not new:
        del data[offset:]
        return
    data.extend(bytes(max(0, offset - len(data))))
    data[offset : offset + len(new)] = new


def _rename(names: dict[str, int], change: Names) -> None:
    names.pop(change.old, None)
    if change.number is not None:
        names[change.new] = change.number


def _put(path: Path, data: bytes | bytearray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
