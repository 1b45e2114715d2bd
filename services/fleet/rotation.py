"""A log file that never grows beyond a bound: when it is full it becomes `.1`, the former `.1` becomes `.2`, …"""

from pathlib import Path
from types import TracebackType
from typing import Self

MAX_BYTES = 10_000_000
KEPT = 3


class RotatedLog:
    """Appends lines to `path`; at most `KEPT + 1` files of about `max_bytes` each. Blocking; for one thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = path.open("ab")
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Append one line, unbuffered as far as the operating system."""
        if self._size + len(line) > self._max_bytes and self._size:
            self._rotate()
        self._file.write(line)
        self._file.flush()
        self._size += len(line)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(KEPT, 0, -1):
            older = self._numbered(number - 1) if number > 1 else self._path
            if older.exists():
                older.replace(self._numbered(number))
        self._file = self._path.open("ab")
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
