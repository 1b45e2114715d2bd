"""A process is frozen: it neither runs nor ends, as one that is swapped out or paused."""

import os
import signal
import time
from pathlib import Path

_LIMIT_S = 300


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until each thread has stopped. Blocks for some milliseconds. SIGCONT ends it.

    Never inside of a transaction of the embedded log: whoever is frozen there holds the write lock, and nobody can take over
    (ADR 0002). That is 2 % of the moments of an expel under load.
    """
    deadline = time.monotonic() + _LIMIT_S
    while True:
        os.kill(pid, signal.SIGSTOP)
        while not _has_stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} did not stop within {_LIMIT_S} s"
            time.sleep(0.001)
        if not _holds_write_lock(pid):
            return
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < deadline, f"process {pid} held a write lock for {_LIMIT_S} s"
        time.sleep(0.005)


def _has_stopped(pid: int) -> bool:
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in ("T", "t") for stat in stats)


def _holds_write_lock(pid: int) -> bool:
    rows = [line.split()[-8:] for line in Path("/proc/locks").read_text().splitlines()]
    return any(row[1] == "POSIX" and row[3:5] == ["WRITE", str(pid)] and row[6] == "120" for row in rows)
