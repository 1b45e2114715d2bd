"""Ingest as a user starts it: a process of its own over the embedded log in a folder of the test."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.record import Record
from services.core.ledger.report import TELEMETRY
from tests.contract.traffic import ignore_revoke
from tests.integration.fleet_process import DRAIN
from tests.support.pacing import Pace
from tests.support.ports import free_port
from tests.support.raw_http import Client, Reply, make_request

START_S = 600.0
END_S = 600.0
PIPES = "version: 1\nstreams:\n  plain: {}\n  orders: {id: id, key: customer, time: at}\n"
_LIMITED = (
    "import os, resource, sys; files = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)); "
    "os.execv(sys.executable, [sys.executable, '-m', 'services.ingest', *sys.argv[2:]])"
)
TOPICS = ("plain", "orders")


def log_url(folder: Path) -> str:
    """The log of a test."""
    return f"log://{folder}/log"


async def create_topics(folder: Path, topics: Sequence[str] = (*TOPICS, TELEMETRY)) -> None:
    """What `penstock up` does before it starts ingest."""
    async with open_broker(log_url(folder)) as broker:
        for topic in topics:
            await broker.admin.create_topic(TopicSpec(topic, partitions=3))


async def read_all(folder: Path, topic: str) -> list[Record]:
    """Every record of the topic in the test's log."""
    async with open_broker(log_url(folder)) as broker:
        return await read_topic(broker, topic)


async def read_topic(broker: Broker, topic: str) -> list[Record]:
    """Every record of the topic, by a group of its own."""
    records: list[Record] = []

    ranges = await broker.reader.describe(topic)
    expected = sum(one.end - one.start for one in ranges.values())
    async with broker.consumer(f"reader-{uuid4()}", [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
        async with asyncio.timeout(600):
            while len(records) < expected:
                for batch in await consumer.poll(max_records=10_000, max_wait=0.5):
                    records.extend(batch.records)
    return records


class Ingest:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, management: int) -> None:
        self.process, self.port, self.management = process, port, management

    async def get(self, path: str) -> tuple[int, str]:
        """From the management port; (0, "") when nobody answers."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.management}{path}")

    async def until_ready(self, *, ready: bool = True) -> str:
        """Wait for /readyz to say so; what it says."""
        async with asyncio.timeout(START_S):
            pace = Pace()
            while True:
                status, body = await self.get("/readyz")
                if status == (200 if ready else 503):
                    return body
                if self.process.returncode is not None:
                    raise AssertionError(f"ended with {self.process.returncode}")
                await pace.rest()

    async def post(self, body: bytes, stream: str = "plain", **headers: str) -> Reply:
        """One request on a connection of its own."""
        async with Client(self.port) as client:
            return await client.request(make_request(f"/v1/streams/{stream}/events", body, **headers))

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; the exit status."""
        async with asyncio.timeout(END_S):
            return await self.process.wait()


@asynccontextmanager
async def running(
    folder: Path,
    *flags: str,
    port: int | None = None,
    broker: str | None = None,
    files: int | None = None,
    pipes: Path | None = None,
) -> AsyncIterator[Ingest]:
    """Start it; whatever is left of it is killed at the end. Its log is `ingest.log` in the folder.

    broker: another one than the folder's log. files: its limit on open files. pipes: another pipe file than PIPES.
    """
    pipe_file = pipes or folder / "pipes.yaml"
    if pipes is None:
        await asyncio.to_thread(pipe_file.write_text, PIPES)
    port, management = port or free_port(), free_port()
    arguments = ["--broker", broker or log_url(folder), "--pipes", str(pipe_file), "--listen", f"127.0.0.1:{port}"]
    arguments += ["--management", f"127.0.0.1:{management}", "--drain", DRAIN, *flags]
    output = await asyncio.to_thread((folder / "ingest.log").open, "ab")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *(["-m", "services.ingest"] if files is None else ["-c", _LIMITED, str(files)])),
            *arguments,
            stdout=output,
            stderr=output,
        )
    finally:
        output.close()
    try:
        yield Ingest(process, port, management)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_to_end(*arguments: str, timeout: float = START_S) -> tuple[int, str]:
    """Start ingest with exactly these arguments and wait for its end: (status, stderr)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.ingest", *arguments, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    async with asyncio.timeout(timeout):
        _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


def log_lines(folder: Path) -> list[dict[str, object]]:
    """The process's log, parsed."""
    return [json.loads(line) for line in (folder / "ingest.log").read_text().splitlines()]


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
