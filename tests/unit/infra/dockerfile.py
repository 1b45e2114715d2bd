"""A Dockerfile, read as far as the tests need it: no here-documents, no other escape character."""

import re
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction; `stage` counts the FROMs before it, itself included."""

    stage: int
    name: str
    rest: str


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions in order, with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[Instruction] = []
    for line in filter(str.strip, joined.splitlines()):
        name, _, rest = line.partition(" ")
        stage = found[-1].stage if found else 0
        found.append(Instruction(stage + (name == "FROM"), name, rest.strip()))
    return found
