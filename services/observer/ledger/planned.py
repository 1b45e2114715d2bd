"""Announced windows in which loss and silence are expected: a deploy, a change of scale, a pause. Alarms keep quiet."""

from typing import Literal

import msgspec

Kind = Literal["deploy", "scaling", "pause"]
MAX_WINDOWS = 200
MAX_LENGTH_MS = 86_400_000


class TooMany(ValueError):
    """More windows than anybody can mean."""


class Window(msgspec.Struct, frozen=True):
    """pipe: None for all. Times in ms of the wall clock."""

    kind: Kind
    pipe: str | None
    from_ms: int
    until_ms: int
    by: str


class Planned:
    """Bounded; past windows are dropped after a day."""

    def __init__(self, windows: tuple[Window, ...] = ()) -> None:
        self._windows = list(windows)

    def announce(self, window: Window, now: int) -> None:
        """Raises TooMany."""
        self._windows = [one for one in self._windows if one.until_ms > now - MAX_LENGTH_MS]
        if len(self._windows) >= MAX_WINDOWS:
            raise TooMany(f"{MAX_WINDOWS} windows are announced already. Try: one window for all pipes")
        self._windows.append(window)

    def all(self) -> tuple[Window, ...]:
        """In the order of announcement."""
        return tuple(self._windows)

    def covers(self, pipe: str, from_ms: int, until_ms: int) -> Window | None:
        """A window that overlaps this time."""
        for window in self._windows:
            if window.pipe in (None, pipe) and window.from_ms < until_ms and from_ms < window.until_ms:
                return window
        return None
