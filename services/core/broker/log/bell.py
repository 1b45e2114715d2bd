"""A few shared bytes that change when something happened: other processes look at them for next to nothing."""

import os
from contextlib import suppress
from pathlib import Path


class Bell:
    """Rung by any process, heard by all that have it open. `ring` may wait for the disk; a `Listener` never does."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def ring(self) -> None:
        """Tell everybody. Those who cannot hear, because the disk is full say, look by themselves now and then."""
        with suppress(OSError):
            os.pwrite(self._fd, os.urandom(8), 0)

    def look(self) -> bytes:
        """The bytes now, without waiting for a disk; empty when that is not possible."""
        sound = bytearray(8)
        try:
            size = os.preadv(self._fd, [sound], 0, os.RWF_NOWAIT)
        except OSError:
            return b""
        return bytes(sound[:size])

    def close(self) -> None:
        """Close the file. Later calls fail: the number must never reach whatever file gets it next."""
        fd, self._fd = self._fd, -1
        os.close(fd)


class Listener:
    """One who waits for the bell."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._last = bell.look()

    def heard(self) -> bool:
        """Whether it rang since the last call."""
        last, self._last = self._last, self._bell.look()
        return last != self._last
