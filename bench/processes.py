"""Processes under measurement: started as a user would, asked for their CPU seconds and resident memory from outside."""

import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

import psutil

GRACE_S = 30.0
_number = itertools.count(1)
_CPUCLOCK_SCHED = 2
"""Linux: the CPU clock of process p is (~p << 3) | 2, as clock_getcpuclockid(3) makes it."""


def free_port() -> int:
    """A loopback port that is free now, outside of the range that the kernel gives to outgoing connections."""
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports is free")


class Child:
    """`python -m module args`, as a context manager that ends it. Its output goes to `log` in the work folder."""

    def __init__(self, folder: Path, module: str, *args: str, environ: Mapping[str, str] | None = None) -> None:
        self.log = folder / f"{module}-{next(_number)}.log"
        self._command = [sys.executable, "-m", module, *args]
        self._environ = {**os.environ, **(environ or {})}

    def __enter__(self) -> Self:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environ)
        self._watched = psutil.Process(self._process.pid)
        return self

    def wait_port(self, port: int, timeout_s: float = 60.0) -> None:
        """Until it listens on this loopback port; raises when it ends or takes longer."""
        self._wait(lambda: _listens(port), timeout_s)

    def wait_ready(self, management_port: int, timeout_s: float = 60.0) -> None:
        """Until its /readyz answers 200."""
        self._wait(lambda: _answers(f"http://127.0.0.1:{management_port}/readyz"), timeout_s)

    def wait_said(self, text: str, timeout_s: float = 180.0) -> None:
        """Until its output has this text."""
        self._wait(lambda: text in self.log.read_text(errors="replace"), timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {' '.join(self._command)}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """User and system time of the process with all its threads, since its start, to the nanosecond."""
        return time.clock_gettime((~self._process.pid << 3) | _CPUCLOCK_SCHED)

    def family_cpu(self) -> float:
        """User and system time of it and everything that it started and that still runs, in hundredths of a second."""
        total = 0.0
        for member in (self._watched, *self._watched.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                used = member.cpu_times()
                total += used.user + used.system
        return total

    def rss(self) -> int:
        """Resident bytes of the process now."""
        return int(self._watched.memory_info().rss)

    def family_rss(self) -> int:
        """Resident bytes now of it and everything that it started. What processes share counts in each, but for those that are
        younger than a second: until such a one runs a program of its own, all of its parent's memory is its, too."""
        total = self.rss()
        for member in self._watched.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended just now
                total += int(member.memory_info().rss) if time.time() - member.create_time() > 1 else 0
        return total

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self._process.send_signal(number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_json(module: str, *args: str, timeout_s: float = 300.0) -> bytes:
    """Run `python -m module args` to its end and return its last line of output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
        env=dict(os.environ),
    )
    return done.stdout.strip().splitlines()[-1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def fetch_metric(management_port: int, name: str) -> float:
    """The sum of a metric's samples on this management port, over all labels."""
    with urlopen(f"http://127.0.0.1:{management_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))
