"""The last released version, from its wheel: a clean checkout may lack tags and history, so the wheel is checked in."""

import functools
import os
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WHEELS = REPOSITORY / "tests" / "releases"


@functools.cache
def unpacked_release() -> Path:
    """The folder with the unpacked wheel of the last release; it stays until this process ends."""
    (wheel,) = WHEELS.glob("penstock-*.whl")
    folder = tempfile.TemporaryDirectory(prefix="penstock-release-")
    _KEPT.append(folder)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder.name)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def environ_of(version: str) -> dict[str, str]:
    """The environment in which `python -P -m services.…` is of this version, `old` or `new`, with the packages of this one."""
    source = unpacked_release() if version == "old" else REPOSITORY
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(REPOSITORY)))}
