"""Limits of the machine: a full disk, ten times the load, no file descriptors left, clients that do not read.

Rows 4, 20 and 26 of the fault matrix.
"""

import asyncio
import gzip
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.core.jvm.kafka import KafkaCluster
from services.core.security.keys import add_key, make_key
from services.fleet.folder import read_state
from tests.faults.conftest import Report
from tests.faults.fleet import DEADLINE, wait_until
from tests.faults.trial import open_trial
from tests.faults.unread import Flood
from tests.integration.fleet_process import Desk, living
from tests.support.oracle import Fate
from tests.support.raw_http import Client, make_request

DISK = 16 << 20
"""Bytes. The small disk."""
SPARE = 256 << 10
"""Bytes that are left on it when it is filled."""
PATIENT = ("--head-timeout", "600s", "--body-timeout", "600s", "--idle-timeout", "600s")
"""What a busy machine has received and not yet read comes late, and that is not tested here."""
UNREAD = 1000
"""Clients that do not read."""
PACKED = 200
"""Small bodies that unpack into large ones, before the trial ends."""
EVENTS_OF_LISTS = b"[" + b",".join([b'{"a":[' + b"[]," * 330_000 + b"0]}"] * 4) + b"]"
LIST_OF_LISTS = b"[" + b"[]," * 1_600_000 + b"0]"
LINES_OF_LISTS = (b'{"a":[' + b"[]," * 20_000 + b"0]}\n") * 80
LIST_OF_NUMBERS = b"[" + b"0," * 2_400_000 + b"0]"
SMALL_SEGMENTS = {"log.index.size.max.bytes": "4096", "offsets.topic.num.partitions": "1"}
"""So that an empty Kafka fits on the small disk."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK bytes in memory. Needs root; without it the test fails, because nothing would be proved."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(place)], check=True, timeout=10)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


async def test_full_disk(small_disk: Path, tmp_path: Path, report: Report) -> None:
    """If it fails, a full disk loses events, stops deliveries as well, or needs a person beside the one who frees space."""
    async with open_trial("4 disk full", f"log://{small_disk / 'data'}", tmp_path, timeout="45s") as trial:
        ingest = await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
            trial.sink.hold.clear()
            await asyncio.sleep(1)
            await asyncio.to_thread(fill, small_disk)
            full = time.monotonic()
            await wait_until(lambda: "storage-full" in trial.sender.reasons)
            trial.sink.hold.set()
            await wait_until(lambda: not [n for n in trial.ledger.lost() if trial.ledger.fate[n] == Fate.OBLIGED])
            assert trial.sender.answers[500] == 0, trial.sender.reasons
            assert ingest.is_running
            (small_disk / "ballast").unlink()
            freed = time.monotonic()
            await trial.recover(freed)
            trial.gap = trial.sender.longest_gap(full, time.monotonic())
        await trial.settle()
        assert trial.fleet.restarts == 0
        report(await trial.judge())


async def test_full_disk_under_the_supervisor(small_disk: Path, tmp_path: Path) -> None:
    """If it fails, the first service that is started again on a full disk takes the supervisor and all others along."""
    desk, data = Desk(tmp_path), small_disk / "data"
    desk.write_pipes()
    async with desk.receive(), desk.up("--data", str(data)) as fleet:
        await desk.send(desk.write_events(50))
        await wait_until(lambda: len(desk.ids) == 50)
        before = await asyncio.to_thread(read_state, data)
        assert before is not None
        pids = {process.service: process.pid for process in before.processes}
        assert pids["expel"] is not None
        await asyncio.to_thread(fill, small_disk, 0)
        os.kill(pids["expel"], signal.SIGKILL)
        await wait_until(lambda: "fleet.json cannot be written: No space left on device" in fleet.err)
        assert fleet.process.returncode is None
        assert len(living([pids["ingest"], pids["observer"], pids["retrier"]])) == 3
        (small_disk / "ballast").unlink()

        async def is_known() -> bool:
            state = await asyncio.to_thread(read_state, data)
            return state is not None and all(living([process.pid]) for process in state.processes)

        await wait_until(is_known)
        after = await asyncio.to_thread(read_state, data)
        assert after is not None
        assert {one.service: one.pid for one in after.processes}["ingest"] == pids["ingest"]
        await desk.send(desk.write_events(100))
        await wait_until(lambda: len(desk.ids) == 100)
        assert await fleet.interrupt() == 0


@pytest.mark.kafka
async def test_full_disk_of_kafka(small_disk: Path, tmp_path: Path, report: Report) -> None:
    """If it fails, events are acknowledged that Kafka could not write, or nothing goes on after space was freed."""
    cluster = await asyncio.to_thread(KafkaCluster, small_disk / "kafka", brokers=1, settings=SMALL_SEGMENTS)
    await asyncio.to_thread(cluster.start)
    try:
        async with open_trial("4 disk full", f"kafka://{cluster.bootstrap}", tmp_path) as trial:
            ingest = await trial.start_ingest()
            await trial.start_expel()
            async with trial.load():
                await wait_until(lambda: len(trial.sender.acks) > 20)
                full = time.monotonic()
                await asyncio.to_thread(fill, small_disk, 0)
                await trial.wait_refused()
                assert ingest.is_running
                (small_disk / "ballast").unlink()
                freed = time.monotonic()
                await asyncio.to_thread(cluster.kill, 1)
                await asyncio.to_thread(cluster.restart)
                await trial.recover(freed)
                trial.gap = trial.sender.longest_gap(full, time.monotonic())
            await trial.settle()
            assert trial.fleet.restarts == 0
            report(await trial.judge(strikes=2))
    finally:
        await asyncio.to_thread(cluster.stop, grace_s=0)


async def test_ten_times_the_load(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a client that sends more than it may, or more than fits, takes the memory or the time of all."""
    async with open_trial("20 far more than the quota and the queue", url, tmp_path, batch=100, workers=48) as trial:
        token, entry = make_key(streams=[trial.stream], rate=2000, created="2026-01-02T03:04:05Z")
        await asyncio.to_thread(add_key, tmp_path / "keys.yaml", entry)
        trial.sender.headers["Authorization"] = f"Bearer {token}"
        keys = ["--keys", str(tmp_path / "keys.yaml")]
        ingest = await trial.start_ingest("ingest-1", *keys, *PATIENT, "--max-in-flight", "300KB")
        await trial.start_expel()
        trial.sender.set_rate(60_000)
        async with trial.load(), asyncio.timeout(DEADLINE):
            await asyncio.sleep(4)
            while not (trial.sender.answers[429] and trial.sender.reasons["overloaded"]):  # the quota, and the queue
                await asyncio.sleep(0.1)
            trial.sender.set_rate(300)
            await trial.recover(time.monotonic())
        await trial.settle()
        assert set(trial.sender.answers) - {0} <= {200, 207, 429, 503}, trial.sender.answers  # 0: the client gave up
        assert ingest.starts == 1
        report(await trial.judge())


async def test_few_file_descriptors(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, many connections at once end ingest, or it never takes new ones again."""
    async with open_trial("20 no file descriptors left", url, tmp_path) as trial:
        ingest = await trial.start_ingest()
        await trial.start_expel()
        host, port = trial.listen.split(":")
        async with trial.load():
            await asyncio.sleep(1)
            used = count_descriptors(ingest.pid)
            limits = resource.prlimit(ingest.pid, resource.RLIMIT_NOFILE, (used + 8, used + 100))
            streams = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
            await asyncio.sleep(3)
            held = count_descriptors(ingest.pid)
            for _, writer in streams:
                writer.close()
            await trial.recover(time.monotonic())
        await trial.settle()
        assert held <= used + 8 < limits[0]
        assert ingest.starts == 1
        trial.evidence["held"] = held - used
        report(await trial.judge())


async def test_pipelines_that_nobody_reads(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a thousand clients that send and do not read take the memory of all, or those who read get no answer."""
    async with open_trial("26 pipelines that nobody reads", log_url, tmp_path) as trial:
        ingest = await trial.start_ingest("ingest-1", "--max-connections", str(UNREAD + 100))
        await trial.start_expel()
        flood = Flood(int(trial.listen.rpartition(":")[2]), UNREAD, trial.stream)
        async with trial.load():
            await asyncio.sleep(1)
            async with flood.run():
                await wait_until(lambda: flood.sent > UNREAD * 100_000)  # the clients are in the way
                await flood.until_still()
                await trial.recover(time.monotonic())
        await trial.settle()
        assert ingest.starts == 1
        trial.evidence["ended"] = flood.ended
        report(await trial.judge())


async def test_small_bodies_of_millions_of_brackets(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a few kilobytes take hundreds of megabytes, or end ingest, or let nobody else in."""
    async with open_trial("26 small bodies of millions of brackets", log_url, tmp_path) as trial:
        ingest = await trial.start_ingest("ingest-1", *PATIENT)
        await trial.start_expel()
        port, refused, stopping = int(trial.listen.rpartition(":")[2]), Counter[tuple[int, str]](), asyncio.Event()

        async def attack(wire: bytes) -> None:
            while not stopping.is_set():
                async with Client(port) as client:
                    reply = await client.request(wire)
                    refused[reply.status, reply.problem] += 1

        async with trial.load(), asyncio.TaskGroup() as group:
            await asyncio.sleep(1)
            for body in (EVENTS_OF_LISTS, LIST_OF_LISTS, LINES_OF_LISTS, LIST_OF_NUMBERS):
                for media in ("application/json", "application/x-ndjson"):
                    headers = {"media": media, "Content_Encoding": "gzip"}
                    group.create_task(
                        attack(make_request(f"/v1/streams/{trial.stream}/events", gzip.compress(body), **headers))
                    )
            await wait_until(lambda: sum(refused.values()) > PACKED)
            await trial.recover(time.monotonic())
            stopping.set()
        await trial.settle()
        assert {status for status, _ in refused} <= {400, 413, 422, 503}, refused
        assert refused[413, "too-many-containers"] > 0, refused
        assert ingest.starts == 1
        trial.evidence["refused"] = sum(refused.values())
        report(await trial.judge())


def count_descriptors(pid: int) -> int:
    """How many a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def fill(disk: Path, spare: int = SPARE) -> None:
    """Write until only so many bytes are left."""
    with (disk / "ballast").open("wb") as ballast:
        for _ in range(1000):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - spare
            if free <= 0:
                return
            with suppress(OSError):  # somebody else took some of it meanwhile
                os.posix_fallocate(ballast.fileno(), 0, os.fstat(ballast.fileno()).st_size + free)
