"""A service that does nothing but run, for tests of the supervisor. Its behaviour is in SAMPLE_* variables."""

import asyncio
import os
import sys
from pathlib import Path
from typing import ClassVar

import structlog

from services.core.process.lifecycle import Supervision, run_service
from services.core.process.management import serve_management
from services.core.process.settings import Settings
from services.core.yaml_source import BadConfiguration, Problem

MODE_FILE = "mode"
"""Stands beside the notes: the mode of the starts from now on."""
LET_GO = "let-go"
"""In mode `draining` the drain, and in mode `slow` the start, lasts until this file stands beside the notes."""
HANGS = "hangs"
"""While this file stands beside the notes, the service says that it hangs."""


class SampleSettings(Settings):
    """A sample service."""

    section: ClassVar[str] = "ingest"

    name: str = "sample"


async def start(settings: SampleSettings, supervision: Supervision) -> None:
    """Note the start and the end in $SAMPLE_NOTES; behave as $SAMPLE_MODE says."""
    notes = Path(os.environ["SAMPLE_NOTES"])
    changed = notes.with_name(MODE_FILE)
    mode = changed.read_text() if changed.exists() else os.environ.get("SAMPLE_MODE", "")
    mode, _, only = mode.partition(":")  # slow:expel: only the process of that name
    mode = mode if only in ("", settings.name) else ""
    _write(notes, f"{settings.name} started {os.getpid()}")
    if mode == "bad":
        raise BadConfiguration([Problem("pipes.yaml:3", "pipes.p", "cannot work")])
    if mode == "crash":
        raise RuntimeError("boom")
    structlog.get_logger().warning("look here", token="abc", count=3)
    reason = "still warming up" if mode == "unready" else None
    while mode == "slow" and not notes.with_name(LET_GO).exists():
        await asyncio.sleep(0.02)
    hangs = notes.with_name(HANGS)
    async with serve_management(
        settings.management, lambda: reason, why_not_alive=lambda: "it stands still" if hangs.exists() else None
    ):
        await supervision.stopping.wait()
        if mode == "stuck":
            while True:
                os.sched_yield()
        while mode == "draining" and not notes.with_name(LET_GO).exists():
            await asyncio.sleep(0.02)
    _write(notes, f"{settings.name} drained")


def _write(notes: Path, line: str) -> None:
    with notes.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(run_service(SampleSettings, start, sys.argv[1:], {}))
