"""Kafka as a part of `penstock up`: who starts it and who stops it never do so at once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.fleet.stop import Stop
from services.fleet.up import kafka


class FakeCluster:
    """A Kafka that has died, and whose restart ends when the test says so."""

    bootstrap = "127.0.0.1:1"

    def __init__(self, folder: Path, **_: Any) -> None:
        self.folder, self.brokers = folder, {1: self}
        self.is_running, self.pid = True, None
        self.restarting, self.may_restart = threading.Event(), threading.Event()
        self.done: list[str] = []
        made.append(self)

    def start(self) -> None:
        pass

    def restart(self) -> None:
        self.restarting.set()
        self.may_restart.wait(600)
        self.done.append("restarted")

    def stop(self, *, grace_s: float) -> None:
        self.done.append(f"stopped within {grace_s:g} s")


made: list[FakeCluster] = []


async def test_a_restart_under_way_ends_before_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: Kafka is started again by a thread while it is stopped, and runs on when the fleet has ended."""
    monkeypatch.setattr(kafka, "KafkaCluster", FakeCluster)
    monkeypatch.setattr(kafka, "WATCH_S", 0.01)
    said: list[str] = []
    leaving = asyncio.Event()

    async def run() -> None:
        async with kafka.run_kafka(tmp_path, lambda _, text: said.append(text), Stop()):
            await leaving.wait()

    running = asyncio.create_task(run())
    async with asyncio.timeout(600):
        while not made:
            await asyncio.sleep(0.01)
        (cluster,) = made
        cluster.is_running = False
        while not cluster.restarting.is_set():
            await asyncio.sleep(0.01)
        leaving.set()
        await asyncio.sleep(0.2)
        assert cluster.done == []
        cluster.may_restart.set()
        await running
    assert cluster.done == ["restarted", "stopped within 10 s"]
    assert said == [f"Kafka died and is restarted. Its log: {tmp_path}"]
