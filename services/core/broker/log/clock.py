"""Time for the log: one clock for records, another for leases.

Leases use CLOCK_BOOTTIME: all processes of a host share it, nobody can set it, and it goes on during suspend. It begins again
after a reboot, so a lease also names its boot.
"""

import time
from pathlib import Path

from services.core.clock import boot_ns

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_ms() -> int:
    """Milliseconds since the machine started; the same in every process of the host, never set back."""
    return boot_ns() // 1_000_000


def boot_id() -> str:
    """Names this run of the machine."""
    return _BOOT_ID.read_text().strip()


class WallClock:
    """Wall time that a change of the system's clock cannot move while the process lives: fixed once, then monotonic.

    Retention compares ages; a clock set one hour ahead must not delete an hour of records early.
    """

    def __init__(self) -> None:
        self._offset = time.time_ns() - boot_ns()

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return (boot_ns() + self._offset) // 1_000_000
