"""Processes killed, disks that fail to sync: what was acknowledged is there, what failed was never acknowledged."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking, topics
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.repair import verify

TOPIC = "orders"
DEADLINE = 600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with one topic of one partition."""
    topics.create_topic(DataFolder.prepare(tmp_path / "log"), TopicSpec(TOPIC, partitions=1))
    return tmp_path / "log"


def command(folder: Path, name: str, count: int) -> list[str]:
    """The child that appends numbers."""
    return [sys.executable, "-m", "tests.faults.log_child", str(folder), TOPIC, name, str(count)]


def facts(lines: bytes) -> list[dict[str, int]]:
    """What a child said, complete lines only."""
    return [json.loads(line) for line in lines.split(b"\n")[:-1]]


def stored(folder: Path) -> list[str]:
    """Every value in the topic, in order."""
    held = blocking.ends(folder, TOPIC)[0]
    batches = blocking.read_range(folder, TOPIC, 0, held.start, held.end)
    return [(record.value or b"").decode() for batch in batches for record in batch.records]


@contextmanager
def running(folder: Path, name: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that appends until the end of the block, where it is killed."""
    with subprocess.Popen(command(folder, name, 0), stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


def acks(lines: bytes) -> list[int]:
    """The numbers that were stored, by what a child said. Behind a slow sync of the other one an append may fail."""
    return [fact["acked"] for fact in facts(lines) if "acked" in fact]


def read_acks(child: "subprocess.Popen[bytes]", count: int) -> list[int]:
    """Wait for so many."""
    assert child.stdout is not None
    found: list[int] = []
    while len(found) < count:
        line = child.stdout.readline()
        assert line, "the child ended"
        found += acks(line)
    return found


def test_killed_writers_lose_nothing_that_was_acknowledged(folder: Path) -> None:
    """If it fails, kill -9 of an ingest process loses events that clients were told are safe."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    acked: list[str] = []
    for round_number in range(4):
        names = [f"{round_number}{letter}" for letter in "ab"]
        with running(folder, names[0]) as one, running(folder, names[1]) as two:
            first = read_acks(one, 5), read_acks(two, 5)
            time.sleep(chance.random() * 0.2)
            for name, child, found in zip(names, (one, two), first, strict=True):
                child.send_signal(signal.SIGKILL)
                assert child.stdout is not None
                acked += [f"{name}:{number}" for number in (*found, *acks(child.stdout.read()))]
    values = stored(folder)
    assert set(acked) <= set(values)
    assert len(values) == len(set(values)), "something was stored twice"
    for prefix in {value.split(":")[0] for value in values}:
        numbers = [int(value.split(":")[1]) for value in values if value.startswith(f"{prefix}:")]
        assert numbers == sorted(numbers), "the order of one writer's appends changed"
    assert verify(folder).is_sound


def strace(folder: Path, trace: Path, *extra: str, count: int = 8) -> "subprocess.CompletedProcess[bytes]":
    """Run the child under strace. Fails when strace is missing: without it nothing proves the syncs."""
    assert shutil.which("strace"), "Try: apt-get install strace"
    options = ["-f", "-qq", "-y", "-e", "trace=fdatasync,fsync,write", "-o", str(trace), *extra]
    return subprocess.run(
        ["strace", *options, *command(folder, "traced", count)], stdout=subprocess.PIPE, timeout=DEADLINE, check=False
    )


def test_every_acknowledgement_follows_a_sync_of_the_log(folder: Path, tmp_path: Path) -> None:
    """If it fails, an acknowledged event is lost when the power goes (SQLite with synchronous=NORMAL does that)."""
    run = strace(folder, tmp_path / "trace")
    assert [fact["acked"] for fact in facts(run.stdout)] == list(range(8))
    synced, acks = False, 0
    for line in (tmp_path / "trace").read_text().splitlines():
        if re.search(r"f(data)?sync\(.*\.db-wal>\)\s*= 0", line):
            synced = True
        elif "write(1<" in line and "acked" in line:
            acks += 1
            assert synced, f"acknowledged without a sync: {line}"
            synced = False
    assert acks == 8


NEW_LOG = """
import asyncio, sys
from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from tests.faults.log_child import say

async def ignore(partitions):
    pass

async def main():
    async with LogBroker.open(sys.argv[1]) as broker:
        await broker.admin.create_topic(TopicSpec("orders", partitions=1))
        async with broker.consumer("g", ["orders"], start="earliest", on_revoke=ignore):
            await broker.appender.append("orders", 0, [Record(b"k", b"v", 0)], timeout=60)
            say({"acked": 0})

asyncio.run(main())
"""
"""Makes a log in new folders, a topic and a group, and says when the first record is stored."""


def test_each_new_name_is_synced_into_its_folder(tmp_path: Path) -> None:
    """If it fails, a power cut takes a new log's folder, with everything that was acknowledged into it."""
    assert shutil.which("strace"), "Try: apt-get install strace"
    trace, root = tmp_path / "trace", tmp_path.resolve() / "new" / "data" / "log"
    calls = "trace=mkdir,mkdirat,rename,openat,fsync,write"
    command = ["strace", "-f", "-qq", "-y", "-e", calls, "-o", str(trace), sys.executable, "-c", NEW_LOG, str(root)]
    subprocess.run(command, stdout=subprocess.PIPE, timeout=DEADLINE, check=True)
    unsynced: set[Path] = set()
    made: set[Path] = set()
    for line in trace.read_text().splitlines():
        if "write(1<" in line and "acked" in line:
            break
        if match := re.search(r'mkdir\("([^"]+)".*= 0|rename\(.*, "([^"]+)"\) = 0', line):
            unsynced.add(Path(match[1] or match[2]))
        elif match := re.search(r'openat\(AT_FDCWD<[^>]*>, "([^"]+\.(?:hwm|db-wal))", [^)]*O_CREAT.*= \d+', line):
            if Path(match[1]) not in made:
                unsynced.add(Path(match[1]))
        elif match := re.search(r"fsync\(\d+<([^>]+)>\)\s*= 0", line):
            made |= {path for path in unsynced if path.parent == Path(match[1])}
            unsynced -= made
    within = {path for path in made if path.is_relative_to(tmp_path.resolve())}
    folders = {root.parent.parent, root.parent, root, root / "topics"}
    names = {"orders.db", "orders.db-wal", "orders.hwm", "groups.db", "groups.db-wal", "groups.hwm"}
    assert folders <= within
    assert names <= {path.name for path in within}
    assert not {path for path in unsynced if path.is_relative_to(root.parent.parent)}


PAST_ALL = 40
"""Appends: strace counts per thread, and each append makes at least one sync on one of the writer's four threads; so
those after the 28th are past each thread's seventh sync."""


@pytest.mark.parametrize("failing", ["5", "6", "5+", "4..7"])
def test_failed_sync_is_never_acknowledged(folder: Path, tmp_path: Path, failing: str) -> None:
    """If it fails, a client is told that an event is safe although the disk refused it."""
    run = strace(folder, tmp_path / "trace", "-e", f"inject=fdatasync,fsync:error=EIO:when={failing}", count=PAST_ALL)
    said = facts(run.stdout)
    assert "INJECTED" in (tmp_path / "trace").read_text(), "no sync failed: the test proves nothing"
    failed = [fact for fact in said if "failed" in fact]
    assert failed, "every append was acknowledged although a sync failed"
    assert {fact["error"] for fact in failed} <= {"OutcomeUnknown", "Unavailable"}
    found = stored(folder)
    assert {f"traced:{fact['acked']}" for fact in said if "acked" in fact} <= set(found)
    if not failing.endswith("+"):
        assert "acked" in said[-1], "the writer did not come back after the disk did"
    assert verify(folder).is_sound


def test_full_disk_is_refused_and_heals(folder: Path, tmp_path: Path) -> None:
    """If it fails, a full disk loses events, or ingest needs a restart after space was freed."""
    full = ("-e", "trace=pwrite64", "-e", "inject=pwrite64:error=ENOSPC:when=20..23")
    run = strace(folder, tmp_path / "trace", *full, count=PAST_ALL)
    said = facts(run.stdout)
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert {fact["error"] for fact in said if "failed" in fact} <= {"StorageFull", "OutcomeUnknown", "Unavailable"}
    refused = [index for index, fact in enumerate(said) if "failed" in fact]
    assert any("acked" in fact for fact in said[min(refused, default=0) :]), "the writer did not come back"
    assert {f"traced:{fact['acked']}" for fact in said if "acked" in fact} <= set(stored(folder))
    assert verify(folder).is_sound


@pytest.mark.parametrize("end", ["db", "db-wal"])
def test_deleted_file_is_noticed_while_open(folder: Path, end: str) -> None:
    """If it fails, a process goes on acknowledging into a file that nobody will ever find again."""
    with running(folder, "a") as child:
        read_acks(child, 5)
        (folder / "topics" / f"{TOPIC}.{end}").unlink()
        assert child.stdout is not None
        for _ in range(1000):
            fact = json.loads(child.stdout.readline())
            if "failed" in fact:
                break
        assert fact.get("error") in ("OutcomeUnknown", "DataDamaged")
        os.kill(child.pid, 0)
