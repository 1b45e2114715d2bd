"""Looks for the fault of a mend that is taken out, in processes of its own."""

import re
import subprocess
import sys

from tests.simulation.patches import OF_MIGRATIONS


def find_fault(name: str, first: int, count: int) -> tuple[int | None, str]:
    """The first seed that breaks a promise without this mend, and how; None: none does. Blocking.

    Raises RuntimeError when that seed breaks a promise with the mend, too: then it proves nothing, and is a fault to be mended.
    """
    kind = ["--migrations"] if name in OF_MIGRATIONS else []
    ran = _simulate("--without", name, "--first-failure", "--first", str(first), "--seeds", str(count), *kind)
    lines = ran.stdout.splitlines()
    for number, line in enumerate(lines):
        if found := re.match(r"seed (\d+): ", line):
            if _simulate("--first", found[1], "--seeds", "1", *kind).returncode:
                raise RuntimeError(f"{name}: seed {found[1]} breaks a promise with the mend, too")
            return int(found[1]), lines[number + 1].strip()
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return None, ""


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)
