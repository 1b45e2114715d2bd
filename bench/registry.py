"""The registry: reads by fingerprint beside a bare handler, and a start with many schemas.

    .venv/bin/python -m bench.registry [--schemas 10000]

The floor is that of tables: aiohttp on uvloop, which answers 300 bytes. CPU is that of the server's process, read from
outside, because the machine has other work.
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

from bench.table import FLOOR, wait_ready
from tests.faults.registry_child import make_schema, open_registrar
from tests.support.ports import free_port

CONNECTIONS, SECONDS, ROUNDS = 16, 5.0, 5
SUBJECTS = 100


async def fill(url: str, count: int) -> list[bytes]:
    """So many schemas; the path of each."""
    registrar = await open_registrar(url)
    paths = []
    for number in range(count):
        candidate = await registrar.read(make_schema("a", number))
        await registrar.register(f"s{number % SUBJECTS}", candidate, "")
        paths.append(b"/v1/schemas/%b" % candidate.parsed.fingerprint.encode())
    return paths


async def read(port: int, paths: list[bytes]) -> int:
    """Read random paths on CONNECTIONS connections, one request under way on each; gives the number."""
    deadline, count = time.monotonic() + SECONDS, 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < deadline:
            writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % random.choice(paths))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            at = head.lower().index(b"content-length: ") + 16
            await reader.readexactly(int(head[at : head.index(b"\r", at)]))
            count += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return count


async def per_cpu_second(process: psutil.Process, port: int, paths: list[bytes]) -> float:
    """Reads for each second of the server's CPU."""
    before = process.cpu_times()
    count = await read(port, paths)
    after = process.cpu_times()
    return count / (after.user + after.system - before.user - before.system)


async def run(schemas: int) -> None:
    """Measure everything, and print it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "pipes.yaml").write_text("version: 1\nstreams: {a: {}}\n")
        paths = await fill(f"file://{path}/store", schemas)
        port, floor_port = free_port(), free_port()
        arguments = [
            "--pipes",
            f"{path}/pipes.yaml",
            "--store",
            f"file://{path}/store",
            "--listen",
            f"127.0.0.1:{port}",
        ]
        for last in (False, False, True):
            start = time.monotonic()
            server = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.registry", *arguments, "--log-level", "warning"
            )
            await wait_ready(port, paths[-1])
            process = psutil.Process(server.pid)
            cpu = sum(process.cpu_times()[:2])
            print(
                f"from nothing to ready with {schemas:,} schemas: {time.monotonic() - start:.2f} s, {cpu:.2f} s of CPU with "
                f"Python's own start; load {os.getloadavg()[0]:.1f}"
            )
            if not last:
                server.terminate()
                await server.wait()
        floor = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOR, str(floor_port))
        try:
            await wait_ready(floor_port, b"/v1/tables/a/b")
            for _ in range(ROUNDS):
                ours = await per_cpu_second(process, port, paths)
                bare = await per_cpu_second(psutil.Process(floor.pid), floor_port, [b"/v1/tables/a/b"])
                print(f"reads per CPU second {ours:,.0f}; floor {bare:,.0f}; load {os.getloadavg()[0]:.1f}")
        finally:
            for one in (server, floor):
                one.terminate()
                await one.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=10_000)
    asyncio.run(run(parser.parse_args().schemas))
