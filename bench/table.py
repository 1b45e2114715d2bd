"""Tables: point reads, the time from an acknowledged write to its being readable, and memory, with many keys.

    .venv/bin/python -m bench.table [--keys 1000000]

The floor of a point read is a bare aiohttp handler on uvloop that answers as many bytes. CPU is that of the server's process,
read from outside, because the machine has other work. The log is filled through the broker layer, not through ingest.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.partitioner import split_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.offset_token import mark_of
from tests.support.ports import free_port

STREAM, PARTITIONS = "accounts", 4
VALUE = b'{"id": "%b", "owner": "Ada Lovelace", "limit": 100, "note": "' + b"x" * 220 + b'"}'
CONNECTIONS, PIPELINED = 16, 8
FLOOR = """
import sys, uvloop
from aiohttp import web
BODY = b"x" * 300
async def answer(request):
    return web.Response(body=BODY, content_type="application/json", headers={"ETag": '"0:1"'})
app = web.Application()
app.router.add_get("/v1/tables/{stream}/{key}", answer)
uvloop.install()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""


def key(number: int) -> bytes:
    """One of the keys."""
    return b"account-%07d" % number


async def fill(producer: Producer, keys: int) -> None:
    """One event for each key."""
    for first in range(0, keys, 2000):
        records = [Record(key(n), VALUE % key(n), 1) for n in range(first, min(first + 2000, keys))]
        (await producer.send_to(STREAM, split_by_key(records, PARTITIONS, 0))).raise_first()


async def read_points(port: int, keys: int, seconds: float) -> int:
    """Read random keys for so long, on CONNECTIONS connections with PIPELINED requests under way each; gives the number."""
    deadline = time.monotonic() + seconds
    count = 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < deadline:
            wanted = [key(random.randrange(keys)) for _ in range(PIPELINED)]
            writer.write(
                b"".join(
                    [b"GET /v1/tables/%b/%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (STREAM.encode(), k) for k in wanted]
                )
            )
            for _ in wanted:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                at = head.lower().index(b"content-length: ") + 16
                await reader.readexactly(int(head[at : head.index(b"\r", at)]))
            count += len(wanted)
        writer.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return count


async def measure_reads(process: psutil.Process, port: int, keys: int) -> tuple[float, float]:
    """(reads per second, reads per second of the server's CPU)."""
    before, start = process.cpu_times(), time.monotonic()
    count = await read_points(port, keys, 5.0)
    after = process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return count / (time.monotonic() - start), count / cpu


async def measure_writes(producer: Producer, port: int, count: int, topic: str) -> list[float]:
    """Milliseconds from the acknowledgement of each write to the answer of a read that asks for it by its token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for number in range(count):
        name = key(number)
        (part,) = (await producer.send(STREAM, [Record(name, VALUE % name, 1)])).parts
        start = time.monotonic()
        token = b"%b.%d:%d" % (topic.encode(), part.partition, part.last)
        writer.write(
            b"GET /v1/tables/%b/%b?at_least=%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (STREAM.encode(), name, token)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        found.append((time.monotonic() - start) * 1000)
        assert head.startswith(b"HTTP/1.1 200"), head
        at = head.lower().index(b"content-length: ") + 16
        await reader.readexactly(int(head[at : head.index(b"\r", at)]))
        await asyncio.sleep(0.02 * random.random())
    writer.close()
    return sorted(found)


async def wait_ready(port: int, path: bytes) -> None:
    """Until the server answers with 200."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            if b" 200 " in head[:15]:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)


async def run(keys: int) -> None:
    """Measure everything, and print it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "pipes.yaml").write_text(f"version: 1\nstreams:\n  {STREAM}: {{compact: true, retention: 7d}}\n")
        async with LogBroker.open(str(path / "log")) as broker, Producer(broker.appender) as producer:
            await broker.admin.create_topic(TopicSpec(STREAM, PARTITIONS, retention_ms=7 * 86_400_000, compact=True))
            await fill(producer, keys)
            topic = mark_of(await broker.admin.incarnation(STREAM))
            port, floor_port = free_port(), free_port()
            arguments = ["--broker", f"log://{path}/log", "--pipes", f"{path}/pipes.yaml", "--data", f"{path}/tables"]
            start = time.monotonic()
            server = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.table",
                *arguments,
                "--listen",
                f"127.0.0.1:{port}",
                "--log-level",
                "warning",
            )
            floor = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOR, str(floor_port))
            try:
                await wait_ready(port, b"/v1/tables/%b/%b" % (STREAM.encode(), key(keys - 1)))
                print(f"from nothing to ready with {keys:,} keys: {time.monotonic() - start:.0f} s")
                await wait_ready(floor_port, b"/v1/tables/a/b")
                process, bare = psutil.Process(server.pid), psutil.Process(floor.pid)
                for _ in range(5):
                    rate, per_cpu = await measure_reads(process, port, keys)
                    _, floor_per_cpu = await measure_reads(bare, floor_port, keys)
                    print(
                        f"reads/s {rate:,.0f}, per CPU second {per_cpu:,.0f}; floor {floor_per_cpu:,.0f}; load "
                        f"{os.getloadavg()[0]:.1f}"
                    )
                for _ in range(3):
                    times = await measure_writes(producer, port, 300, topic)
                    print(
                        f"write to readable, ms: P50 {times[150]:.1f}, P99 {times[296]:.1f}; load {os.getloadavg()[0]:.1f}"
                    )
                print(f"RSS {process.memory_info().rss / 1e6:.0f} MB")
            finally:
                for one in (server, floor):
                    one.terminate()
                    await one.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    asyncio.run(run(parser.parse_args().keys))
