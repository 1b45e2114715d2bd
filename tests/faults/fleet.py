"""The services under fault: real processes, which die with the test; killed, frozen and started again on command."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from services.core.jvm.child import start_child, stop_child
from tests.support.pacing import Pace
from tests.support.ports import free_port

DEADLINE = 600.0
"""Seconds that a condition may take before a test fails: generous, a busy machine is no defect."""
DRAIN = "300s"
"""How long a service may take to end in good order: it is no fault that a busy machine needs long."""
_SAMPLE_S = 0.2


@dataclass
class Service:
    """One service, over all its runs. peak_rss in bytes, the highest of any run."""

    name: str
    module: str
    arguments: Sequence[str]
    folder: Path
    management: str = ""
    starts: int = 0
    peak_rss: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it says, over all its runs."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the current or the last run."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process exists. A frozen one does."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start it, without waiting until it is ready."""
        assert not self.is_running, f"{self.name} runs"
        self.management = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", self.module, *self.arguments]
        command += ["--management", self.management, "--drain", DRAIN]
        self._process = await asyncio.to_thread(start_child, command, log=self.log)
        self.starts += 1

    async def wait_ready(self) -> None:
        """Until it says that it is ready. Fails when it ends instead."""
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while not await self.is_ready():
                assert self.is_running, f"{self.name} ended: {self.log.read_text()[-2000:]}"
                await pace.rest()

    async def wait_answering(self) -> None:
        """Until its management port answers, ready or not. Fails when it ends instead."""
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while not await self.samples("process_start_time_seconds"):
                assert self.is_running, f"{self.name} ended: {self.log.read_text()[-2000:]}"
                await pace.rest()

    async def is_ready(self) -> bool:
        """What /readyz says; False without an answer."""
        try:
            return await self._get("/readyz") is not None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels; 0 when it does not answer."""
        return sum(value for _, value in await self.samples(name, **labels))

    async def samples(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """(labels, value) of each sample of this name with these labels."""
        try:
            text = await self._get("/metrics") or ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return []
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    async def _get(self, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{self.management}{path}") as answer,
        ):
            return await answer.text() if answer.status == 200 else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the running process."""
        self.sample()
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self.wait_end()

    async def wait_end(self, limit: float = DEADLINE) -> int:
        """Its exit status."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, limit)

    def sample(self) -> None:
        """Note the highest memory of this run so far."""
        if self.is_running:
            for line in _read(Path(f"/proc/{self.pid}/status")).splitlines():
                if line.startswith("VmHWM:"):
                    self.peak_rss = max(self.peak_rss, 1024 * int(line.split()[1]))

    def rss(self) -> int:
        """Memory now, in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def close(self) -> None:
        """Kill it, frozen or not, and collect it. Blocks for milliseconds."""
        if self._process is not None:
            stop_child(self._process, grace_s=0)


@dataclass
class Fleet:
    """All services of one trial."""

    services: dict[str, Service] = field(default_factory=dict)

    async def add(self, service: Service, *, ready: bool = True) -> Service:
        """Start it; the fleet owns it from now on."""
        self.services[service.name] = service
        await service.start()
        if ready:
            await service.wait_ready()
        return service

    def of(self, module: str) -> list[Service]:
        """Those of one kind that run now."""
        return [one for one in self.services.values() if one.module.endswith(module) and one.is_running]

    @property
    def restarts(self) -> int:
        """Starts beyond the first of each."""
        return sum(one.starts - 1 for one in self.services.values())

    async def total(self, name: str, **labels: str) -> float:
        """A metric over all that answer."""
        return sum([await one.metric(name, **labels) for one in self.services.values() if one.is_running])

    async def watch(self) -> None:
        """Sample memory until cancelled."""
        while True:
            for service in self.services.values():
                service.sample()
            await asyncio.sleep(_SAMPLE_S)


@asynccontextmanager
async def open_fleet() -> AsyncIterator[Fleet]:
    """An empty fleet; whatever runs at the end is killed."""
    fleet = Fleet()
    watch = asyncio.create_task(fleet.watch())
    try:
        yield fleet
    finally:
        watch.cancel()
        for service in fleet.services.values():
            service.close()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended just now
        return ""


async def wait_until(condition: object, limit: float = DEADLINE) -> None:
    """Poll a condition (a plain or an async callable) until it holds; fails after `limit` seconds."""
    assert callable(condition)
    end = time.monotonic() + limit
    pace = Pace()
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < end, f"{condition} did not come to hold within {limit:.0f} s"
        await pace.rest()
