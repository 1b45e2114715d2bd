"""Ingest over the embedded log beside a bare aiohttp handler: CPU-seconds per million events, seen from outside the process.

python -m bench.ingest_log [events per request:requests …]
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop

from bench.load import Load
from bench.processes import Child, free_port
from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec

CONNECTIONS = 64
WARM_UP = 500
PIPES = "version: 1\nstreams:\n  plain: {}\n  named: {id: id, key: user, time: time}\n"


async def make_topics(url: str) -> None:
    """The streams of PIPES in a fresh log."""
    async with open_broker(url) as broker:
        for name in ("plain", "named"):
            await broker.admin.create_topic(TopicSpec(name))


def measure(child: Child, url: str, events: int, requests: int) -> str:
    """One row: CPU-seconds per million events, rates, latencies."""
    uvloop.run(Load(url, events, WARM_UP).run(CONNECTIONS))
    used = child.cpu_seconds()
    report = uvloop.run(Load(url, events, requests).run(CONNECTIONS))
    used = child.cpu_seconds() - used
    cpu = used / (requests * events) * 1e6
    rate = requests / float(str(report["seconds"]))
    return f"{cpu:8.2f} {rate:9.0f} {report['p50_ms']:>9} {report['p99_ms']:>9}  {report['statuses']}"


def main(plan: list[tuple[int, int]]) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "pipes.yaml").write_text(PIPES)
        url = f"log://{folder}/log"
        asyncio.run(make_topics(url))
        port, management, floor = free_port(), free_port(), free_port()
        flags = ["--broker", url, "--pipes", str(folder / "pipes.yaml"), "--listen", f"127.0.0.1:{port}"]
        print("events  what       CPU-s/M  requests/s   p50 ms    p99 ms")
        with Child(folder, "bench.floors", "http", str(floor)) as bare:
            bare.wait_port(floor)
            for events, requests in plan:
                print(
                    f"{events:6}  floor   {measure(bare, f'http://127.0.0.1:{floor}/', events, requests)}", flush=True
                )
        with Child(folder, "services.ingest", *flags, "--management", f"127.0.0.1:{management}") as ingest:
            ingest.wait_ready(management)
            for events, requests in plan:
                for stream in ("plain", "named"):
                    target = f"http://127.0.0.1:{port}/v1/streams/{stream}/events"
                    print(f"{events:6}  {stream}   {measure(ingest, target, events, requests)}", flush=True)
            print(f"RSS {ingest.rss() / 1e6:.0f} MB")


if __name__ == "__main__":
    main(
        [(int(one), int(two)) for one, _, two in (argument.partition(":") for argument in sys.argv[1:])]
        or [(100, 3000), (1, 20000)]
    )
