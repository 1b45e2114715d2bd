"""The output of a service: all lines go to its log file, warnings also to the console; the last lines are kept in memory.

One thread per process reads its pipe, so that neither a slow disk nor a verbose service blocks the event loop.
"""

import errno
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

from services.core.metrics import FLEET_LOG_LINES_LOST
from services.core.security.masking import mask_text

MAX_BYTES = 10_000_000
KEPT = 3


class RotatedLog:
    """Appends lines to `path`; keeps at most `KEPT + 1` files of about `max_bytes` each. Blocking; for one thread."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file: io.FileIO | None = None
        self._size = 0
        self._torn = False

    def write(self, line: bytes) -> None:
        """Append one line without buffering. On OSError this line is lost; later ones may succeed."""
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


MAX_LINE_BYTES = 64_000
REMEMBERED = 15
SHOWN_AT_ONCE = 5
SHOWN_PER_S = 0.5
_SHOWN = {"warning", "error", "critical"}
_NOT_REPEATED = {"event", "level", "timestamp", "service", "exception"}

Notify = Callable[[str, str], None]
"""Called from other threads: (level, one line for a person)."""


class Output:
    """Reads the output of one process run. The child inherits the descriptor `writer`; close it after the start."""

    def __init__(self, name: str, log: Path, notify: Notify) -> None:
        self._name, self._log, self._notify = name, log, notify
        reader, self.writer = os.pipe()
        self._budget, self._budget_at = float(SHOWN_AT_ONCE), time.monotonic()
        self._losing = False
        self._last: deque[str] = deque(maxlen=REMEMBERED)
        self._thread = threading.Thread(target=self._read, args=(reader,), name=f"output of {name}", daemon=True)
        self._thread.start()

    def last_lines(self, timeout: float) -> list[str]:
        """The last lines. Blocks up to `timeout` seconds for the rest of the pipe of an ended process."""
        self._thread.join(timeout)
        return list(self._last)

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as pipe, RotatedLog(self._log) as log:
            while line := pipe.readline(MAX_LINE_BYTES):
                self._keep(log, line if line.startswith(b"{") else _masked(line))
                level, text = describe_line(line)
                self._last.append(text)
                if level in _SHOWN and (budget := self._use_budget()):
                    more = "" if budget >= 1 else f" (and more, in {self._log})"
                    self._notify(level, f"{self._name}: {text}{more}")

    def _keep(self, log: RotatedLog, line: bytes) -> None:
        """Write a line to the log. One that cannot be written is counted; raising would end the reader and stop the service."""
        try:
            log.write(line)
        except OSError as error:
            FLEET_LOG_LINES_LOST.labels(self._name).inc()
            if not self._losing:
                hint = "the service's output is lost until it can be written. Try: freeing space there"
                self._notify("error", f"{self._log} cannot be written: {error.strerror}; {hint}")
            self._losing = True
        else:
            self._losing = False

    def _use_budget(self) -> float:
        """How many more lines the console may get now. A failing service must not flood it."""
        now = time.monotonic()
        self._budget = min(SHOWN_AT_ONCE, self._budget + (now - self._budget_at) * SHOWN_PER_S)
        self._budget_at = now
        if self._budget < 1:
            return 0.0
        self._budget -= 1
        return max(self._budget, 0.01)


def _masked(line: bytes) -> bytes:
    """A line that is not of our log format, as of Spark's Java: nobody has masked it."""
    return mask_text(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def describe_line(line: bytes) -> tuple[str, str]:
    """(level, text for a person) of one line of output; level "" when it is not a line of our log format."""
    text = line.decode(errors="replace").rstrip()
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "", mask_text(text)
    if not isinstance(entry, dict) or "event" not in entry:
        return "", mask_text(text)
    details = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _NOT_REPEATED)
    return str(entry.get("level", "")), mask_text(f"{entry['event']} {details}".rstrip())
