"""All streams of a pipe file: when it is ready, and what it says meanwhile."""

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from services.autoscaler.shards.figures import RULES
from services.autoscaler.shards.scaler import ShardScaler
from services.core.metrics import BROKER_PARTITION_BYTES
from tests.support.metrics_port import serve_metrics
from tests.unit.autoscaler.stream_service import StreamService


async def test_without_targets_it_is_ready_and_says_so_once(tmp_path: Path) -> None:
    """Broken: an autoscaler that is there for the groups is never ready, and its rollout never ends."""
    scaler = ShardScaler(
        ["t"], StreamService((0,)), str(tmp_path / "none.json"), dry_run=False, rules=RULES, every=0.01
    )
    stopping = asyncio.Event()
    with capture_logs() as logs:
        running = asyncio.create_task(scaler.run(stopping))
        async with asyncio.timeout(600):
            while not logs:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        stopping.set()
        await running
    assert scaler.waits_for is None
    assert [one["event"] for one in logs] == ["no_targets"]


async def test_it_asks_whom_a_name_stands_for() -> None:
    """Broken: in a cluster, where a name stands for the fleet, no stream is looked at."""
    stopping, service = asyncio.Event(), StreamService((0,))
    BROKER_PARTITION_BYTES.labels("t", "0").inc()
    async with serve_metrics(["penstock_broker_partition_bytes_total"]) as address:
        scaler = ShardScaler(["t"], service, f"dns://{address}", dry_run=True, rules=RULES, every=0.01)
        running = asyncio.create_task(scaler.run(stopping))
        async with asyncio.timeout(600):
            while not service.samples:
                await asyncio.sleep(0.01)
        stopping.set()
        await running
    assert scaler.waits_for is None
