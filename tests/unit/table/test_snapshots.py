"""A new replica begins with the copy of another one, if that can be used; else it reads the stream. It is complete anyway."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.security.keys import KeyRing, make_key
from services.core.times import now_ms
from services.table import app, snapshots
from services.table.follower import Follower
from services.table.snapshots import NoSnapshot, SnapshotSource
from services.table.store import FORMAT, Change, Meta, Position, Store
from tests.unit.table.running import AGE_MS, STREAM, Table, following, make_get, running

KEYS = 30


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_table_{name}_total", {"stream": STREAM, **labels}) or 0.0


async def fill(table: Table) -> None:
    for number in range(KEYS):
        await table.put(f"k{number:02}", b"%d" % number)
    await table.put("k00", None)
    await table.until(lambda: sum(table.follower.nexts.values()) == KEYS + 1)
    await table.caught_up()


async def until_ready(follower: Follower) -> None:
    async with asyncio.timeout(600):
        while follower.why_not_ready(300_000) is not None:
            await asyncio.sleep(0.01)


def keys_of(follower: Follower) -> list[bytes]:
    assert follower.store is not None
    return [row.key for row in follower.store.scan(b"", None, 1000, 1 << 20)]


EXPECTED = [b"k%02d" % number for number in range(1, KEYS)]


async def test_a_new_replica_begins_with_a_copy_and_follows(tmp_path: Path) -> None:
    """Broken: a new replica reads millions of events again; or it has fewer rows than the other, or misses what came since."""
    (tmp_path / "new").mkdir()
    async with running(tmp_path) as table:
        await fill(table)
        used, read = metric("snapshots", result="used"), metric("records")
        source = SnapshotSource(f"http://127.0.0.1:{table.port}", None)
        async with following(table.broker, tmp_path / "new", begin=source.begin) as follower:
            await until_ready(follower)
            assert keys_of(follower) == EXPECTED
            assert metric("snapshots", result="used") == used + 1
            assert metric("records") == read, "nothing of the stream was read again"
            await table.put("k01", b"9")
            async with asyncio.timeout(600):
                while sum(follower.nexts.values()) <= KEYS + 1:
                    await asyncio.sleep(0.01)
            assert follower.store is not None
            row = follower.store.get(b"k01")
            assert row is not None
            assert row.value == b"9"
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{STREAM}.db"]
        await table.until(lambda: not list(tmp_path.glob("*.sending")))


def test_a_copy_of_a_killed_service_goes_at_its_next_start(tmp_path: Path) -> None:
    """Broken: each kill while a replica begins leaves a file as large as the table."""
    (tmp_path / f"{STREAM}.sending").write_bytes(b"half")
    (tmp_path / f"{STREAM}.db").write_bytes(b"whole")
    app._prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{STREAM}.db"]


async def test_a_broker_that_does_not_answer_costs_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a leader is elected while a new replica starts, and it reads millions of events instead of fetching a copy."""
    (tmp_path / "new").mkdir()
    async with running(tmp_path) as table, LogBroker.open(str(tmp_path / "log")) as broker:
        await fill(table)
        describe, used = broker.reader.describe, metric("snapshots", result="used")
        failures = [Unavailable("no leader")]

        async def fail_once(topic: str) -> dict[int, PartitionRange]:
            if failures:
                raise failures.pop()
            return await describe(topic)

        monkeypatch.setattr(broker.reader, "describe", fail_once)
        source = SnapshotSource(f"http://127.0.0.1:{table.port}", None)
        async with following(broker, tmp_path / "new", begin=source.begin) as follower:
            await until_ready(follower)
            assert keys_of(follower) == EXPECTED
        assert not failures
        assert metric("snapshots", result="used") == used + 1


async def test_a_client_leaves_before_the_copy_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: on a busy machine the copy stays on the disk, and no replica gets one any more: another is under way for ever."""
    free, read = threading.Event(), snapshots._read
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(threads)

    def read_and_be_busy(path: Path, at: int) -> bytes:
        threads.submit(free.wait)
        return read(path, at)

    async with running(tmp_path) as table:
        await fill(table)
        monkeypatch.setattr(snapshots, "_read", read_and_be_busy)
        reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/snapshot/{STREAM}"))
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(size)
        (sending,) = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_wait"]
        writer.close()
        await table.until(lambda: sending.done() or sending.cancelling())
        free.set()
        monkeypatch.undo()
        await table.until(lambda: not list(tmp_path.glob("*.sending")))
        await table.until(sending.done)
        assert (await table.ask(f"/v1/snapshot/{STREAM}")).status == 200


@pytest.mark.parametrize("reason", ["unreachable", "refused", "hash", "damaged_file", "no_room", "key"])
async def test_a_copy_that_cannot_be_used(tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a replica serves a copy that is not whole, does not start without the other one, or falls back in silence."""
    (tmp_path / "new").mkdir()
    text, entry = make_key(streams=["other"], scopes=["read"], created="2026-01-01T00:00:00Z")
    key = tmp_path / "key"
    key.write_text(text)
    key.chmod(0o644 if reason == "key" else 0o600)
    if reason == "hash":
        make = snapshots._make_copy
        monkeypatch.setattr(snapshots, "_make_copy", lambda store, path: (make(store, path)[0], "0" * 64))
    elif reason == "damaged_file":
        copy = Store.copy_to

        def damage(store: Store, path: Path) -> None:
            copy(store, path)
            with path.open("r+b") as file:
                file.write(b"no database here")

        monkeypatch.setattr(Store, "copy_to", damage)
    elif reason == "no_room":

        def full(_path: Path) -> object:
            return type("Usage", (), {"free": 10})

        monkeypatch.setattr(shutil, "disk_usage", full)
    ring = KeyRing([entry]) if reason == "refused" else None
    async with running(tmp_path, ring=ring) as table:
        await fill(table)
        before = metric("snapshots", result=reason)
        port = 9 if reason == "unreachable" else table.port
        source = SnapshotSource(f"http://127.0.0.1:{port}", key)
        async with following(table.broker, tmp_path / "new", begin=source.begin) as follower:
            await until_ready(follower)
            assert keys_of(follower) == EXPECTED
        assert metric("snapshots", result=reason) == before + 1
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{STREAM}.db"]


@pytest.mark.parametrize(
    ("reason", "incarnation", "held", "age_ms"),
    [
        (None, "now", {0: PartitionRange(0, 5)}, AGE_MS),
        ("topic_created_again", "then", {0: PartitionRange(0, 5)}, AGE_MS),
        ("position_out_of_range", "now", {0: PartitionRange(4, 5)}, AGE_MS),
        ("position_out_of_range", "now", {0: PartitionRange(0, 2)}, AGE_MS),
        ("position_out_of_range", "now", {}, AGE_MS),
        ("too_old", "now", {0: PartitionRange(0, 5)}, 0),
    ],
)
def test_a_copy_is_checked_against_the_stream(
    tmp_path: Path, reason: str | None, incarnation: str, held: dict[int, PartitionRange], age_ms: int
) -> None:
    """Broken: a table goes on from offsets of another topic, or without tombstones that are gone."""
    path = tmp_path / "t.fetched"
    store = Store(path, Meta(FORMAT, STREAM, "now"))
    store.apply(0, [Change(b"a", b"1", None, 2)], Position(3, now_ms()))
    store.close()
    if reason is None:
        snapshots._check(path, Meta(FORMAT, STREAM, incarnation), held, age_ms)
        return
    with pytest.raises(NoSnapshot) as raised:
        snapshots._check(path, Meta(FORMAT, STREAM, incarnation), held, age_ms)
    assert raised.value.reason == reason


async def test_one_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: some new replicas at once fill the disk of the one that answers."""
    begun, go_on, make = threading.Event(), threading.Event(), snapshots._make_copy

    def slow(store: Store, path: Path) -> tuple[int, str]:
        begun.set()
        assert go_on.wait(60)
        return make(store, path)

    monkeypatch.setattr(snapshots, "_make_copy", slow)
    async with running(tmp_path) as table:
        await fill(table)
        first = asyncio.create_task(table.ask(f"/v1/snapshot/{STREAM}"))
        await table.until(begun.is_set)
        try:
            reply = await table.ask(f"/v1/snapshot/{STREAM}")
            assert (reply.status, reply.problem) == (503, "busy")
            assert (await table.get("/k01")).status == 200, "reads go on meanwhile"
        finally:
            go_on.set()
        reply = await first
        assert reply.status == 200
        assert reply.body.startswith(b"SQLite format 3")
        assert (await table.ask("/v1/snapshot/none")).status == 404
