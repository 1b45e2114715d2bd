"""Announced windows in which loss and silence are expected and raise no alarm: a deploy, a change of scale, a pause.

The autoscaler's windows excuse silence and lag, but no loss: scaling must lose nothing.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Kind = Literal["deploy", "scaling", "pause"]
MAX_WINDOWS = 200
MAX_LENGTH_MS = 86_400_000
AUTOSCALER = "autoscaler"
"""The beginning of `by` in the autoscaler's announcements."""


class TooManyWindows(ValueError):
    """More windows than are allowed."""


class NoSuchWindow(LookupError):
    """No window of the last day has this id."""


class Window(msgspec.Struct, frozen=True):
    """pipe: None for all. Times in ms of the wall clock. by: as the client says. asked_with: the name of the token that the
    client sent. cancelled_by, cancelled_with: the same, of the client that ended it early."""

    kind: Kind
    pipe: str | None
    from_ms: int
    until_ms: int
    by: str
    asked_with: str = ""
    cancelled_by: str | None = None
    cancelled_with: str = ""

    @property
    def id(self) -> str:
        """Stays when the window is cancelled. Two windows with the same id are the same announcement."""
        what = f"{self.kind} {self.pipe} {self.from_ms} {self.by}"
        return hashlib.blake2b(what.encode(errors="replace"), digest_size=4).hexdigest()

    @property
    def excuses_loss(self) -> bool:
        """Whether it explains missing events."""
        return not self.by.startswith(AUTOSCALER)

    def replaces(self, other: "Window") -> bool:
        """Only the autoscaler's last announcement is kept of each group or stream."""
        return not self.excuses_loss and self.pipe == other.pipe and _subject(self.by) == _subject(other.by)


class PlannedWindows:
    """At most MAX_WINDOWS; past windows are dropped after a day. current: a pipe's present name, from a former one or itself: a
    window that was announced under a former name counts for the present one."""

    def __init__(self, windows: Sequence[Window] = (), current: Callable[[str], str] = str) -> None:
        self._windows, self._current = list(windows), current

    def announce(self, window: Window, now: int) -> None:
        """Raises TooManyWindows."""
        recent = (one for one in self._windows if one.until_ms > now - MAX_LENGTH_MS)
        self._windows = [one for one in recent if not window.replaces(one)]
        if len(self._windows) >= MAX_WINDOWS:
            raise TooManyWindows(f"{MAX_WINDOWS} windows are announced already. Try: one window for all pipes")
        self._windows.append(window)

    def cancel(self, name: str, now: int, by: str, asked_with: str) -> Window:
        """End the window with this id now; one that is over stays as it is. What it has excused stays excused. Gives the window.

        Raises NoSuchWindow.
        """
        for index, window in enumerate(self._windows):
            if window.id == name:
                if window.until_ms > now:
                    window = msgspec.structs.replace(
                        window, until_ms=max(now, window.from_ms), cancelled_by=by, cancelled_with=asked_with
                    )
                    self._windows[index] = window
                return window
        raise NoSuchWindow(name)

    def all(self) -> tuple[Window, ...]:
        """In the order of announcement."""
        return tuple(self._windows)

    def covers(self, pipe: str, from_ms: int, until_ms: int, *, loss: bool = False) -> Window | None:
        """A window that overlaps this time. pipe: its present name. loss: only one that excuses loss."""
        for window in self._windows:
            is_of = window.pipe is None or self._current(window.pipe) == pipe
            if is_of and window.from_ms < until_ms and from_ms < window.until_ms and (window.excuses_loss or not loss):
                return window
        return None


def _subject(by: str) -> str:
    """The group in `autoscaler/groups/expel out 2 -> 3`; the whole text of other announcements."""
    return by.partition(" ")[0] if by.startswith(f"{AUTOSCALER}/") else by
