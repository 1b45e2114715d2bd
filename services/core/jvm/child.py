"""Child processes that cannot outlive us, whatever ends us.

On Linux the kernel kills such a child as soon as the *thread* that started it ends. So one thread, which lives as long
as this process, starts them all: a child started from an event loop's short-lived executor survives the loop.
Elsewhere a child outlives a parent that is killed, and only `stop` ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

# Runs in the child: asks for SIGKILL (9) at the parent's death (PR_SET_PDEATHSIG is 1), then becomes the command.
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def bind_to_parent(command: Sequence[str | Path]) -> list[str]:
    """`command` (an absolute path first) behind a launcher, so that it dies with the thread of ours that starts it."""
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
    return [*launcher, *(str(part) for part in command)]


def start_child(command: Sequence[str | Path], *, log: Path) -> subprocess.Popen[bytes]:
    """Start `command` (an absolute path first) in a session of its own, its output appended to `log`.

    Blocks for milliseconds. The caller owns the child: it ends and waits for it. A terminal's Ctrl-C does not reach it.
    """
    return _starter(os.getpid()).submit(_start, [str(part) for part in command], log).result()


def stop_child(child: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """SIGTERM, then SIGKILL after `grace_s` seconds (0: at once). Blocks until it is gone. Its exit status."""
    if grace_s > 0:
        child.terminate()
        try:
            return child.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass  # the grace is over
    child.kill()
    return child.wait()


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603  commands of our own
            bind_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@lru_cache(maxsize=1)
def _starter(_pid: int) -> ThreadPoolExecutor:
    # By process id: a forked child has our memory but not our thread.
    return ThreadPoolExecutor(1, thread_name_prefix="child-starter")
