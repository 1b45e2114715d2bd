"""What a service says: all of it goes to its log file, warnings also to the console, the last lines are remembered.

One thread per process reads its pipe, so that neither a slow disk nor a talkative service blocks the event loop.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import orjson

from services.core.masking import mask_text
from services.core.metrics import FLEET_LOG_LINES_LOST
from services.fleet.rotation import RotatedLog

MAX_LINE_BYTES = 64_000
REMEMBERED = 15
SHOWN_AT_ONCE = 5
SHOWN_PER_S = 0.5
_SHOWN = {"warning", "error", "critical"}
_NOT_REPEATED = {"event", "level", "timestamp", "service", "exception"}

Say = Callable[[str, str], None]
"""Called from other threads: (level, one line for a person)."""


class Output:
    """The reading side of one process run. `writer` is the descriptor that the child inherits; close it after the start."""

    def __init__(self, name: str, log: Path, say: Say) -> None:
        self._name, self._log, self._say = name, log, say
        reader, self.writer = os.pipe()
        self._budget, self._budget_at = float(SHOWN_AT_ONCE), time.monotonic()
        self._losing = False
        self._last: deque[str] = deque(maxlen=REMEMBERED)
        self._thread = threading.Thread(target=self._read, args=(reader,), name=f"output of {name}", daemon=True)
        self._thread.start()

    def last_lines(self, timeout: float) -> list[str]:
        """The end of what was said. Blocks up to `timeout` seconds for what is still in the pipe of an ended process."""
        self._thread.join(timeout)
        return list(self._last)

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as pipe, RotatedLog(self._log) as log:
            while line := pipe.readline(MAX_LINE_BYTES):
                self._keep(log, line)
                level, text = describe_line(line)
                self._last.append(text)
                if level in _SHOWN and (budget := self._take_budget()):
                    more = "" if budget >= 1 else f" (and more, in {self._log})"
                    self._say(level, f"{self._name}: {text}{more}")

    def _keep(self, log: RotatedLog, line: bytes) -> None:
        """What cannot be kept is counted: were it an error, nobody would read the pipe, and the service would stop."""
        try:
            log.write(line)
        except OSError as error:
            FLEET_LOG_LINES_LOST.labels(self._name).inc()
            if not self._losing:
                hint = "what the service says is lost until it can be. Try: freeing space there"
                self._say("error", f"{self._log} cannot be written: {error.strerror}; {hint}")
            self._losing = True
        else:
            self._losing = False

    def _take_budget(self) -> float:
        """How many more lines the console may get now; 0: none. A service in trouble must not flood it."""
        now = time.monotonic()
        self._budget = min(SHOWN_AT_ONCE, self._budget + (now - self._budget_at) * SHOWN_PER_S)
        self._budget_at = now
        if self._budget < 1:
            return 0.0
        self._budget -= 1
        return max(self._budget, 0.01)


def describe_line(line: bytes) -> tuple[str, str]:
    """(level, text for a person) of one line of a service's output; level "" when it is no line of our logs."""
    text = line.decode(errors="replace").rstrip()
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "", mask_text(text)
    if not isinstance(entry, dict) or "event" not in entry:
        return "", mask_text(text)
    details = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _NOT_REPEATED)
    return str(entry.get("level", "")), mask_text(f"{entry['event']} {details}".rstrip())
