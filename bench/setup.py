"""What every measurement shares: where it runs, how much it sends, topics, load, and what it tells meanwhile."""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.processes import run_json
from services.core.broker.connect import open_broker
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics

CPU = "CPU-s per million events"
SERVER_JAVA = ("-XX:+UseG1GC",)
"""Java's options of a broker. Tests use its quick compiler, whose code encrypts so slowly that polls are small."""


@dataclass(frozen=True, slots=True)
class Setup:
    """bootstrap: "" when no Kafka runs. events: of one round of ingest in requests of 100; a tenth of it in requests of 1."""

    folder: Path
    bootstrap: str
    events: int
    rounds: int

    @property
    def kafka(self) -> str:
        """The broker URL."""
        return f"kafka://{self.bootstrap}"

    def log(self, name: str) -> str:
        """The URL of an embedded log of this name."""
        return f"log://{self.folder / name}"

    def count(self, size: int) -> int:
        """How many events a round in requests of `size` sends."""
        return self.events if size > 1 else self.events // 10


def make_topics(url: str, pipes: Path) -> None:
    """The topics that a pipe file implies; those that exist stay."""

    async def create() -> None:
        file = await asyncio.to_thread(load_pipes, pipes)
        async with open_broker(url, existing_topics(file)) as broker:
            await ensure_topics(broker.admin, file)

    asyncio.run(create())


def send_load(url: str, size: int, requests: int) -> dict[str, Any]:
    """Run the load generator, 64 connections; its report. Every answer must be a 200."""
    command = (url, "--events", str(size), "--requests", str(requests), "--connections", "64")
    report: dict[str, Any] = orjson.loads(run_json("bench.load", *command))
    if report["statuses"] != {"200": requests}:
        raise RuntimeError(f"not every request was accepted: {report['statuses']}")
    return report


def tell(text: str) -> None:
    """A line about how it goes, on stderr: the figures have stdout for themselves."""
    print(f"[load {os.getloadavg()[0]:4.1f}] {text}", file=sys.stderr, flush=True)
