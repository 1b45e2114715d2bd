"""The transform service as a process of its own, for tests that kill it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


def start_service(folder: Path, broker: str, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, with the folder's pipes.yaml; what it says is added to `output`."""
    command = [sys.executable, "-m", "spark", "--broker", broker, "--data", str(folder)]
    command += ["--pipes", str(folder / "pipes.yaml"), *arguments]
    with output.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def kill_service(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL it, Java and all; waits until it is gone."""
    with contextlib.suppress(ProcessLookupError):  # ended by itself, and so did what it had started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
