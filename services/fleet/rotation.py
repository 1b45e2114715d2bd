"""A log file that never grows beyond a bound: when it is full it becomes `.1`, the former `.1` becomes `.2`, …"""

import errno
import io
import os
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_BYTES = 10_000_000
KEPT = 3


class RotatedLog:
    """Appends lines to `path`; at most `KEPT + 1` files of about `max_bytes` each. Blocking; for one thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: io.FileIO | None = None
        self._size = 0
        self._torn = False

    def write(self, line: bytes) -> None:
        """Append one line, unbuffered as far as the operating system. Raises OSError; then the line is lost, and later ones may
        be taken again."""
        file = self._file or self._open()
        if self._size + len(line) > self._max_bytes and self._size:
            self._rotate()
            file = self._open()
        whole = b"\n" + line if self._torn else line
        written = file.write(whole)
        self._size += written
        if written < len(whole):
            self._torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def _open(self) -> io.FileIO:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()
        return self._file

    def _rotate(self) -> None:
        self.close()
        for number in range(KEPT, 0, -1):
            older = self._numbered(number - 1) if number > 1 else self._path
            if older.exists():
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
