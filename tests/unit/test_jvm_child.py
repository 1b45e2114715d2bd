"""Child processes end when they should, and only then."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.core.jvm.child import start_child, stop_child

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """If this fails, a killed test run or demo leaves brokers behind that hold memory and ports."""
    program = (
        "import sys, time; from pathlib import Path; from services.core.jvm.child import start_child\n"
        f"print(start_child({SLEEP!r}, log=Path({str(tmp_path / 'log')!r})).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(child)


def test_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """If this fails, a broker that a test restarts through asyncio.to_thread dies with that test's event loop."""
    children: list[subprocess.Popen[bytes]] = []
    asker = threading.Thread(target=lambda: children.append(start_child(SLEEP, log=tmp_path / "log")))
    asker.start()
    asker.join()
    (child,) = children
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    finally:
        stop_child(child, grace_s=0)


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    """If this fails, what a broker said before its restart is lost."""
    log = tmp_path / "log"
    for word in ("one", "two"):
        assert start_child(["/bin/sh", "-c", f"echo {word}; echo {word} >&2"], log=log).wait(600) == 0
    assert log.read_text().split() == ["one", "one", "two", "two"]


def test_stop_is_gentle_first_and_firm_then(tmp_path: Path) -> None:
    """If this fails, a broker gets no time to stop in good order, or one that ignores SIGTERM never ends."""
    gentle = start_child(
        ["/bin/sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done"], log=tmp_path / "a"
    )
    stubborn = start_child(["/bin/sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"], log=tmp_path / "b")
    for log in (tmp_path / "a", tmp_path / "b"):
        deadline = time.monotonic() + 30
        while "up" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert stop_child(gentle, grace_s=30) == 7
    assert stop_child(stubborn, grace_s=0.3) == -signal.SIGKILL


def test_child_does_not_hear_the_terminal(tmp_path: Path) -> None:
    """If this fails, Ctrl-C kills the brokers while the fleet still drains into them."""
    child = start_child(SLEEP, log=tmp_path / "log")
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
    finally:
        stop_child(child, grace_s=0)
