"""A process of Spark that works for one command: started, waited for, and gone with its children when the command ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from services.core.jvm.child import start_child
from services.core.sample import PHASE
from services.fleet.console import print_note
from services.fleet.problem import CommandFailed
from services.fleet.up.output import describe_line

LIMIT_S = 300.0
"""Spark's start and the work take no longer. The time limit of a live batch is the same (`--batch-timeout`)."""
SAY_EVERY_S = 15.0
_LAST_LINES = 15
_GONE_WITHIN_S = 5


class TooSlow(Exception):
    """The process has not ended within LIMIT_S."""


def run_spark(module: str, arguments: Sequence[str | Path], scratch: Path, remedy: str) -> None:
    """Run a module of `spark` until it ends. Blocking. Its output is in `scratch`. Raises TooSlow, CommandFailed (remedy).

    Says on stderr every SAY_EVERY_S what it is doing, from the file PHASE in `scratch`.
    """
    command: list[str | Path] = [sys.executable, "-m", module, *arguments]
    with _running(command, scratch / "output") as child:
        status = _wait(child, scratch / PHASE)
    if status:
        lines = "\n".join(last_lines((scratch / "output").read_bytes()))
        raise CommandFailed(f"Spark ended with status {status}. It printed last:\n{lines}", remedy)


def _wait(child: subprocess.Popen[bytes], phase: Path) -> int:
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < LIMIT_S:
        try:
            return child.wait(min(SAY_EVERY_S, LIMIT_S - waited))
        except subprocess.TimeoutExpired:
            doing = phase.read_text() if phase.exists() else "Spark starts"
            print_note(f"{doing} ({time.monotonic() - begun:.0f} s so far)", "dim")
    raise TooSlow


@contextmanager
def _running(command: list[str | Path], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own. At the end it is killed with its children, Java among them, and they are gone."""
    child = start_child(command, log=output)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for _ in range(_GONE_WITHIN_S * 100):
                os.killpg(child.pid, 0)
                time.sleep(0.01)


def last_lines(output: bytes) -> list[str]:
    """The end of what a process printed, for a person."""
    return [describe_line(line)[1] for line in output.splitlines() if line.strip()][-_LAST_LINES:]
