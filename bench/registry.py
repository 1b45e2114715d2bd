"""The registry: reads by fingerprint beside a bare handler, and a start with many schemas, in a folder.

Reads are random, on 16 connections, one request under way on each. The floor is that of tables: aiohttp on uvloop, which
answers 300 bytes. CPU is that of the server's process, read from outside, because the machine has other work.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from bench.figures import Figure
from bench.setup import Setup, tell
from bench.table import FLOOR
from tests.faults.registry_child import make_schema, open_registrar
from tests.faults.registry_storm import s3_environ
from tests.support.object_store import BUCKET, ObjectStoreServer
from tests.support.ports import free_port

CONNECTIONS, SECONDS = 16, 5.0
SCHEMAS, SUBJECTS, STARTS = 10_000, 100, 5
READ_GOAL_US, START_GOAL_S = 100.0, 2.0
DEADLINE_S = 120.0


def registry_figures(setup: Setup) -> list[Figure]:
    """Medians; the single values are told meanwhile."""
    folder = setup.folder / "registry"
    folder.mkdir()
    (folder / "pipes.yaml").write_text("version: 1\nstreams: {a: {}}\n")
    return asyncio.run(_run(folder, setup.rounds))


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
            await ask(reader, writer, random.choice(paths))
            count += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return count


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes) -> None:
    """One read, which must find something."""
    writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    at = head.lower().index(b"content-length: ") + 16
    await reader.readexactly(int(head[at : head.index(b"\r", at)]))


async def wait_ready(port: int, path: bytes) -> None:
    """Until the server answers."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await ask(reader, writer, path)
            writer.close()
        except OSError:
            assert time.monotonic() < end, "no server answers"
            await asyncio.sleep(0.01)
        else:
            return


async def per_read(process: psutil.Process, port: int, paths: list[bytes]) -> float:
    """Microseconds of the server's CPU for each read."""
    before = process.cpu_times()
    count = await read(port, paths)
    after = process.cpu_times()
    return 1e6 * (after.user + after.system - before.user - before.system) / count


async def start(command: list[str], port: int, path: bytes) -> tuple[asyncio.subprocess.Process, float, float]:
    """A registry that answers, the seconds until then, and its CPU seconds."""
    began = time.monotonic()
    server = await asyncio.create_subprocess_exec(sys.executable, *command)
    await wait_ready(port, path)
    took = time.monotonic() - began
    return server, took, sum(psutil.Process(server.pid).cpu_times()[:2])


async def start_often(
    folder: Path, store: str, path: bytes
) -> tuple[asyncio.subprocess.Process, int, list[float], list[float]]:
    """Of STARTS starts, the last process, its port, the seconds until it was ready, and the CPU seconds."""
    port = free_port()
    options = {"pipes": f"{folder}/pipes.yaml", "store": store, "listen": f"127.0.0.1:{port}"}
    command = ["-m", "services.registry", "--log-level", "warning"]
    for name, value in options.items():
        command += [f"--{name}", value]
    walls, cpus = [], []
    while True:
        server, wall, cpu = await start(command, port, path)
        tell(f"ready with {SCHEMAS:,} schemas after {wall:.2f} s, {cpu:.2f} CPU-s with Python's own start")
        walls.append(wall)
        cpus.append(cpu)
        if len(walls) == STARTS:
            return server, port, walls, cpus
        server.terminate()
        await server.wait()


async def _start_on_s3(folder: Path, objects: Path, path: bytes) -> list[float]:
    """The seconds until a registry is ready whose store is a bucket of moto, on this machine, with the objects of this folder."""
    with ObjectStoreServer(folder) as moto:
        os.environ.update(s3_environ(moto))
        client = moto.client()

        def put(file: Path) -> None:
            client.put_object(Bucket=BUCKET, Key=f"store/{file.relative_to(objects)}", Body=file.read_bytes())

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            await asyncio.to_thread(lambda: list(pool.map(put, filter(Path.is_file, objects.rglob("*")))))
        server, _, walls, _ = await start_often(folder, f"s3://{BUCKET}/store", path)
        server.terminate()
        await server.wait()
        return walls


async def _run(folder: Path, rounds: int) -> list[Figure]:
    store = f"file://{folder}/store"
    paths = await fill(store, SCHEMAS)
    on_s3 = await _start_on_s3(folder, folder / "store", paths[-1])
    floor_port = free_port()
    server, port, walls, cpus = await start_often(folder, store, paths[-1])
    floor = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOR, str(floor_port))
    ours, bare = [], []
    try:
        await wait_ready(floor_port, b"/v1/tables/a/b")
        for _ in range(rounds):
            ours.append(await per_read(psutil.Process(server.pid), port, paths))
            bare.append(await per_read(psutil.Process(floor.pid), floor_port, [b"/v1/tables/a/b"]))
            tell(f"a read takes {ours[-1]:.1f} us of CPU, of the bare handler {bare[-1]:.1f} us")
    finally:
        for one in (server, floor):
            one.terminate()
            await one.wait()
    return [
        Figure("registry: a read by fingerprint", statistics.median(ours), "us of CPU", READ_GOAL_US),
        Figure(f"registry: ready with {SCHEMAS:,} schemas", statistics.median(walls), "s", START_GOAL_S),
        Figure("the same with its store in S3 (moto)", statistics.median(on_s3), "s", START_GOAL_S),
        Figure("its CPU, with Python's own start", statistics.median(cpus), "CPU-s", START_GOAL_S),
    ]
