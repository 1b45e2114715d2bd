"""The time by which a process knows what others may have done meanwhile: leases and sessions run out while this machine is
suspended.

`time.monotonic` and the event loop's time stand still then (a laptop's lid, a paused virtual machine). So they fit waits and
deadlines of this process, and never the question whether it still owns something.
"""

import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux. On macOS CLOCK_MONOTONIC is the one that goes on during a suspend."""


def boot_seconds() -> float:
    """Seconds since the machine started, with those in which it was suspended. Never set back."""
    return time.clock_gettime(_BOOT)


def boot_ns() -> int:
    """`boot_seconds` in nanoseconds."""
    return time.clock_gettime_ns(_BOOT)
