"""The lock by which others tell a dead member from a silent one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.core.broker.log.leases import MemberLocks

DEADLINE = 600.0

CHILD = """
import os, sys
from services.core.broker.log.leases import MemberLocks
alive = MemberLocks(sys.argv[1])
alive.acquire("m")
if sys.argv[2] == "fork":
    if os.fork():
        os.close(0)
    else:
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
        os._exit(0)
else:
    os.write(1, b"%d\\n" % os.getpid())
os.read(0, 1) if sys.argv[2] != "fork" else os.wait()
"""


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[MemberLocks]:
    """The file as another process sees it."""
    with closing(MemberLocks(tmp_path / "alive")) as alive:
        yield alive


@contextmanager
def child(path: Path, how: str = "plain") -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A process in which "m" lives, once it does so; and the process id of the one that said so."""
    command = [sys.executable, "-c", CHILD, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def wait_until_dead(alive: MemberLocks) -> None:
    """Until "m" is dead; a process may take a moment to end."""
    end = time.monotonic() + DEADLINE
    while alive.is_alive("m"):
        assert time.monotonic() < end, "the lock of a dead process is still held"
        time.sleep(0.005)


def test_a_member_lives_from_begin_to_end(alive: MemberLocks, tmp_path: Path) -> None:
    """If it fails, members of one process take each other for dead, and a partition has two owners."""
    assert not alive.is_alive("m")
    alive.acquire("m")
    alive.acquire("m")
    alive.acquire("n")
    with closing(MemberLocks(tmp_path / "alive")) as other:
        for seen_by in (alive, other):
            assert seen_by.is_alive("m")
            assert seen_by.is_alive("n")
    assert alive.is_alive("m"), "closing another one's file ended our members"
    alive.release("m")
    assert not alive.is_alive("m")
    assert alive.is_alive("n")


def test_a_killed_process_is_dead_and_a_frozen_one_is_not(alive: MemberLocks, tmp_path: Path) -> None:
    """If it fails, partitions of a killed process wait for its lease, or a frozen one loses them while its lease holds."""
    with child(tmp_path / "alive") as (process, _):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert alive.is_alive("m")
        process.kill()
        wait_until_dead(alive)


def test_a_forked_child_does_not_keep_its_dead_parent_alive(alive: MemberLocks, tmp_path: Path) -> None:
    """If it fails, a worker that a killed process had forked holds all its partitions for a whole lease."""
    with child(tmp_path / "alive", "fork") as (process, forked):
        assert alive.is_alive("m"), "the fork ended its parent's membership"
        process.kill()
        wait_until_dead(alive)
        os.kill(forked, 0)  # the child is still there: it ends when its standard input does


def test_a_started_program_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    """If it fails, any program that a service starts does what a forked child must not do."""
    path = tmp_path / "alive"
    alive = MemberLocks(path)
    alive.acquire("m")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        try:
            alive.close()
            with closing(MemberLocks(path)) as other:
                assert not other.is_alive("m")
        finally:
            program.kill()
