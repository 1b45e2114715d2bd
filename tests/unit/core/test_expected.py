"""The list of services that a fleet needs, and the figures of its disks."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from services.core.pipe_file.pipes import PipeFile
from services.core.process import disk
from services.core.process.disk import measure_disks, show_disk
from services.core.process.expected import list_expected, show_expected

STREAMS: dict[str, object] = {"orders": {}}
WEBHOOK = {"name": "crm", "webhook": {"url": "https://crm.example.com/", "secret": {"env": "CRM"}}}
COPY = {"sources": ["orders"], "destinations": [{"name": "archive", "stream": "archive"}]}


def test_only_needed_services_are_expected() -> None:
    """Broken: a dead service pages nobody, or one that no pipe needs pages everybody."""

    def expected(*, ledger: bool = True, **more: object) -> list[tuple[str, str]]:
        return list_expected(PipeFile.model_validate({"streams": {**STREAMS, "archive": {}}, **more}), ledger=ledger)

    assert expected() == [("ingest", ""), ("observer", "")]
    assert expected(pipes={"copy": COPY}, ledger=False) == [("ingest", ""), ("expel", "copy")]
    crm = {"sources": ["orders"], "transform": {"sql": "SELECT * FROM orders"}, "destinations": [WEBHOOK]}
    assert expected(pipes={"shop": crm}) == [
        ("ingest", ""),
        ("retrier", ""),
        ("observer", ""),
        ("expel", "shop"),
        ("transform", "shop"),
    ]
    assert ("table", "") in list_expected(PipeFile.model_validate({"streams": {"a": {"compact": True}}}), ledger=True)
    assert ("expel", "") in expected(removed={"shop/old": {"bury": "it was closed"}})


def test_the_list_is_replaced() -> None:
    """Broken: a service that the pipe file no longer needs is missed for ever."""
    pipes = PipeFile.model_validate({"streams": STREAMS})
    show_expected(pipes, ledger=True, registry=True)
    assert REGISTRY.get_sample_value("penstock_fleet_expected", {"service": "registry", "pipe": ""}) == 1
    show_expected(pipes, ledger=False, registry=False)
    assert REGISTRY.get_sample_value("penstock_fleet_expected", {"service": "ingest", "pipe": ""}) == 1
    assert REGISTRY.get_sample_value("penstock_fleet_expected", {"service": "observer", "pipe": ""}) is None
    assert REGISTRY.get_sample_value("penstock_fleet_expected", {"service": "registry", "pipe": ""}) is None


async def test_a_disk_is_measured_again_when_no_thread_was_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after two seconds without a free thread the metric is NaN until a restart, and no alert comes of a full disk."""
    monkeypatch.setattr(disk, "_LIMIT_S", 0.01)
    free, threads = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(free.wait)
    show_disk(tmp_path)
    await measure_disks()

    def measured() -> float:
        return REGISTRY.get_sample_value("penstock_disk_free_bytes", {"folder": str(tmp_path)}) or math.nan

    assert math.isnan(measured())
    free.set()
    async with asyncio.timeout(600):
        while math.isnan(measured()):
            await asyncio.sleep(0.01)
            await measure_disks()


async def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a disk fills unseen; one that is away takes all metrics with it; or two scrapes at once spoil the values."""
    gone = tmp_path / "gone"
    for folder in (tmp_path, gone):
        show_disk(folder)
    await measure_disks()
    monkeypatch.setattr(disk, "_asked", {tmp_path})  # by another scrape, at this moment
    await measure_disks()
    values = {
        name: REGISTRY.get_sample_value(f"penstock_disk_{name}", {"folder": str(tmp_path)})
        for name in ("free_bytes", "size_bytes")
    }
    assert 0 < (values["free_bytes"] or 0) < (values["size_bytes"] or 0)
    assert f'penstock_disk_free_bytes{{folder="{gone}"}} NaN' in generate_latest(REGISTRY).decode()
