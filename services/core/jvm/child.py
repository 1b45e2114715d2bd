"""Child processes that end with this process, also when it is killed.

On Linux the kernel kills such a child as soon as the *thread* that started it ends. So one thread, which lives as long
as this process, starts them all. On other systems a child outlives a killed parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

# Runs in the child: requests SIGKILL (9) at the parent's death (PR_SET_PDEATHSIG is 1), then executes the command.
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str | Path]) -> list[str]:
    """The command (an absolute path first) with a launcher in front, so that it dies with the thread that starts it."""
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
    return [*launcher, *(str(part) for part in command)]


def start_child(command: Sequence[str | Path], *, log: Path) -> subprocess.Popen[bytes]:
    """Start the command (an absolute path first) in its own session, which Ctrl-C does not reach. Appends its output to `log`.

    Blocks for milliseconds. The caller stops the child and waits for it.
    """
    return _starter(os.getpid()).submit(_start, [str(part) for part in command], log).result()


def stop_child(child: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """Send SIGTERM, then SIGKILL after `grace_s` seconds (0: at once). Blocks until the end. Returns the exit status."""
    if grace_s > 0:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            return child.wait(grace_s)
    child.kill()
    return child.wait()


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603  the callers' own commands
            bind_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@lru_cache(maxsize=1)
def _starter(_pid: int) -> ThreadPoolExecutor:
    # By process id: a forked child has a copy of the memory, but not the thread.
    return ThreadPoolExecutor(1, thread_name_prefix="child-starter")
