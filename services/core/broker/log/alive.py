"""Telling a dead member from a silent one: while it lives, each member locks one byte of `groups.alive`.

The kernel lets go of the lock when the last process that has the file description open ends, however it ends; a process
that is only frozen keeps it. A member's byte follows from its name, which is never used again, so nothing is left to clean
up and no process id is looked at. Locks belong to the open file, not to the process (OFD locks), so members of one process
see each other; a forked child closes its copy at once, else it would keep its dead parent alive.
"""

import fcntl
import os
import struct
import weakref
from hashlib import blake2b
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


class Alive:
    """The file, open. Calls do not wait; they raise OSError."""

    def __init__(self, path: Path) -> None:
        self._held, self._seen = -1, -1  # two descriptions: a lock does not show on the one that holds it
        self._held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._seen = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _OPEN.add(self)

    def begin(self, member: str) -> None:
        """Be alive until `end`, `close` or the end of the process."""
        fcntl.fcntl(self._held, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, member))

    def end(self, member: str) -> None:
        """Others may take over from this member now."""
        fcntl.fcntl(self._held, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, member))

    def is_alive(self, member: str) -> bool:
        """Whether the member began, in any process, and has not ended."""
        found = fcntl.fcntl(self._seen, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, member))
        kind: int = _FLOCK.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """End all members that began here."""
        held, seen, self._held, self._seen = self._held, self._seen, -1, -1
        for fd in (held, seen):
            if fd >= 0:
                os.close(fd)


def _byte(kind: int, member: str) -> bytes:
    place = int.from_bytes(blake2b(member.encode(), digest_size=8).digest(), "big") >> 2
    return _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0)


_OPEN: "weakref.WeakSet[Alive]" = weakref.WeakSet()


def _close_in_child() -> None:
    for alive in list(_OPEN):
        alive.close()


os.register_at_fork(after_in_child=_close_in_child)
