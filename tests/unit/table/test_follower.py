"""A table follows its stream through whatever happens, and never in silence."""

import asyncio
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import apsw
import orjson
import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.retention import enforce
from services.core.security.keys import KeyRing, make_key
from services.table import follower, http_server
from services.table.store import FORMAT, Change, Meta, Position, Store
from tests.unit.table.running import STREAM, Table, make_get, running


def rebuilds(reason: str) -> float:
    labels = {"stream": STREAM, "reason": reason}
    return REGISTRY.get_sample_value("penstock_table_rebuilds_total", labels) or 0.0


async def rows_of(table: Table) -> dict[str, object]:
    await table.caught_up()
    return {row["key"]: row["value"] for row in (await table.get("?limit=1000")).json()["rows"]}


async def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Broken: each restart reads the whole stream again, or skips what came meanwhile."""
    async with running(tmp_path) as table:
        for number in range(20):
            await table.put(f"k{number % 7}", b"%d" % number)
        await table.until(lambda: sum(table.follower.nexts.values()) == 20)
    async with running(tmp_path) as table:
        await table.until(lambda: table.follower.store is not None)
        assert sum(table.follower.nexts.values()) == 20
        await table.put("k0", None)
        await table.until(lambda: sum(table.follower.nexts.values()) == 21)
        assert await rows_of(table) == {f"k{n % 7}": n for n in range(13, 20) if n % 7}


@pytest.mark.parametrize("stored", [0, 3])
async def test_a_topic_that_was_created_again(tmp_path: Path, stored: int) -> None:
    """Broken: rows of the former topic stay for ever, or offsets of the new one are taken for known ones; or the reason is called
    another one, when the new topic ends before the table's position.
    """
    before = rebuilds("topic_created_again")
    async with running(tmp_path, partitions=1) as table:
        await table.put("old", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        await table.broker.admin.delete_topic(STREAM)
        await table.broker.admin.create_topic(TopicSpec(STREAM, 1, retention_ms=3_600_000, compact=True))
        for number in range(stored):
            await table.put("new", b"%d" % number)
        await table.until(lambda: rebuilds("topic_created_again") > before)
        for number in range(stored, 3):
            await table.put("new", b"%d" % number)
        await table.until(lambda: table.follower.nexts.get(0) == 3)
        assert await rows_of(table) == {"new": 2}


async def test_a_damaged_file_is_built_again(tmp_path: Path) -> None:
    """Broken: a client reads an altered value."""
    before = rebuilds("damaged_file")
    async with running(tmp_path, partitions=1) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        await table.caught_up()
        connection = apsw.Connection(str(tmp_path / f"{STREAM}.db"))
        connection.set_busy_timeout(600_000)  # the follower notes how fresh the table is
        connection.execute("UPDATE rows SET value = x'39'")
        connection.close()
        assert (await table.get("/a")).status == 503
        await table.until(lambda: rebuilds("damaged_file") > before)
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        assert await rows_of(table) == {"a": 1}


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """Broken: the service does not start on a broken file, although the stream has everything."""
    before = rebuilds("damaged_file")
    (tmp_path / f"{STREAM}.db").write_bytes(b"x" * 10_000)
    async with running(tmp_path) as table:
        await table.put("a", b"1")
        await table.until(lambda: sum(table.follower.nexts.values()) == 1)
        assert await rows_of(table) == {"a": 1}
    assert rebuilds("damaged_file") == before + 1


async def test_a_table_that_was_away_for_longer_than_tombstones_stay(tmp_path: Path) -> None:
    """Broken: a key that was deleted meanwhile stays in the table for ever, because its tombstone is gone."""
    before = rebuilds("away_too_long")
    async with running(tmp_path, partitions=1, age_ms=1000) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        await table.put("b", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 2)
        table.follower._round = _hang  # type: ignore[method-assign, assignment]
        await table.put("a", None)
        await table.put("z", b"1")
        later = 10_000 + time.time_ns() // 1_000_000
        folder = DataFolder(tmp_path / "log")
        for shift in (0, 5_000):
            await asyncio.to_thread(enforce, folder, STREAM, later + shift)
        batch = await table.broker.reader.read(STREAM, 0, 0, max_records=10)
        assert batch is not None
        assert [record.key for record in batch.records] == [b"b", b"z"], "the tombstone must be gone"
        await asyncio.sleep(1.1)  # longer than the retention, by the wall clock
    async with running(tmp_path, partitions=1, age_ms=1000) as table:
        await table.until(lambda: rebuilds("away_too_long") > before)
        await table.until(lambda: table.follower.nexts.get(0) == 4 and 0 in table.follower.reached)
        assert await rows_of(table) == {"b": 1, "z": 1}


async def _hang(*_: object) -> bool:
    await asyncio.sleep(0.01)
    return False


async def test_a_table_that_stands_still_falls_behind(tmp_path: Path) -> None:
    """Broken: the broker does not answer, the figure keeps its last value, and no alert fires."""
    async with running(tmp_path, partitions=1) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        table.follower._round = AsyncMock(side_effect=Unavailable("away"))  # type: ignore[method-assign]
        await table.until(
            lambda: (REGISTRY.get_sample_value("penstock_table_behind_seconds", {"stream": STREAM}) or 0.0) > 2.0
        )


async def test_damage_in_the_stream_stops_the_table_and_is_said(tmp_path: Path) -> None:
    """Broken: the table passes over damaged events in silence, and serves older values as the newest."""
    async with running(tmp_path, partitions=1) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        stopped, whole = asyncio.Event(), table.follower._round

        async def stop(_: asyncio.Event) -> bool:
            stopped.set()
            await asyncio.sleep(0.01)
            return False

        table.follower._round = stop  # type: ignore[method-assign, assignment]
        await stopped.wait()
        await table.put("b", b"1")
        await table.put("c", b"1")
        connection = apsw.Connection(str(tmp_path / "log" / "topics" / f"{STREAM}.db"))
        connection.set_busy_timeout(600_000)
        connection.execute("UPDATE batches SET crc = crc + 1 WHERE pos = 1")
        connection.close()
        table.follower._round = whole  # type: ignore[method-assign]
        await table.until(lambda: "missing or altered" in (table.follower.trouble or ""))
        assert table.follower.nexts[0] == 1


async def test_changes(tmp_path: Path) -> None:
    """Broken: a follower misses a change, gets one of before its token, or cannot go on from the last id."""
    async with running(tmp_path, partitions=1) as table:
        topic, first = await table.topic(), await table.put("a", b'{"n":\n1}')
        await table.put("b", b"2")
        await table.until(lambda: table.follower.nexts.get(0) == 2)
        await table.caught_up()
        reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/tables/{STREAM}?changes_after={first}"))
        assert (await read_events(reader, 1))[0][:2] == ("put", {"key": "b", "value": 2, "token": f"{topic}.0:1"})
        await table.put("a", None)
        ((name, data, last),) = await read_events(reader, 1)
        assert (name, data) == ("delete", {"key": "a", "token": f"{topic}.0:2"})
        writer.close()
        table.follower._recent.clear()  # what is no longer in memory is read from the stream
        await table.put("c", b"3")
        await table.until(lambda: table.follower.nexts.get(0) == 4)
        for since, count in ((last, 1), ("", 4)):
            reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
            writer.write(make_get(f"/v1/tables/{STREAM}", Accept="text/event-stream", Last_Event_ID=since))
            found = await read_events(reader, count)
            assert [data["key"] for _, data, _ in found] == ["a", "b", "a", "c"][-count:]
            writer.close()


async def read_events(reader: asyncio.StreamReader, count: int) -> list[tuple[str, dict[str, object], str]]:
    """(name, data, id) of so many events; the id of the last of a group counts for all."""
    found: list[tuple[str, dict[str, object]]] = []
    last = name = ""
    async with asyncio.timeout(600):
        while len(found) < count or not last:
            line = (await reader.readline()).decode().rstrip("\n")
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                found.append((name, orjson.loads(value)))
                last = ""
            elif field == "id":
                last = value
    return [(name, data, last) for name, data in found]


async def test_the_id_of_a_client_that_is_behind_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a client that reads old changes, and is cut, goes on with an id that hides which tombstones it has missed."""
    monkeypatch.setattr("services.table.api.HEARTBEAT_S", 0.5)
    async with running(tmp_path, partitions=1) as table:
        for number in range(3):
            await table.put("a", b"%d" % number)
        await table.until(lambda: table.follower.nexts.get(0) == 3)
        await table.caught_up()
        since, topic = time.time_ns() // 1_000_000 - 60_000, await table.topic()
        reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/tables/{STREAM}?changes_after={topic}.0:0@{since}"))
        assert (await read_events(reader, 2))[-1][2] == f"{topic}.0:2@{since}"
        table.follower.built += 1
        assert b"event: end\n" in await reader.readuntil(b"event: end\n"), "it is told, however late it looks"
        writer.close()


async def test_a_client_whose_key_is_revoked_gets_no_more(tmp_path: Path) -> None:
    """Broken: who has had a key once reads the table's changes for ever."""
    token, entry = make_key(streams=[STREAM], scopes=["read"], created="2026-01-01T00:00:00Z")
    async with running(tmp_path, partitions=1, ring=KeyRing([entry])) as table:
        await table.caught_up()
        reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/tables/{STREAM}?changes_after=", Authorization=f"Bearer {token}"))
        await reader.readuntil(b"\r\n\r\n")
        table.access.ring = KeyRing([])
        await table.put("a", b"1")
        assert b"no-valid-key" in await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_a_token_that_is_reached_before_the_wait_begins(tmp_path: Path) -> None:
    """Broken: a client that reads its own write gets 503 after the whole wait, on a stream that is quiet then."""
    async with running(tmp_path, partitions=1) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        waiting = table.follower.reach({0: 0})
        assert waiting is not None
        assert waiting.done()


async def test_a_token_ends_the_pause_of_a_quiet_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each read of one's own write waits for the next look at the stream."""
    over = asyncio.Event()

    async def wait(event: asyncio.Event, _limit: float) -> None:
        waits = [asyncio.ensure_future(one.wait()) for one in (event, over)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    async with running(tmp_path) as table:
        await table.caught_up()
        monkeypatch.setattr(follower, "wait_for_stop", wait)
        try:
            for number in range(5):
                token = await table.put("a", b"%d" % number)
                reply = await table.get(f"/a?at_least={token}")
                assert (reply.status, reply.body) == (200, b"%d" % number)
        finally:
            over.set()


def test_a_transaction_of_reads_ends_before_rows_are_written(tmp_path: Path) -> None:
    """Broken: a table shows old rows for ever, or its WAL grows without a bound."""
    store = Store(tmp_path / "table.db", Meta(FORMAT, STREAM, "1"))
    for number in range(5):
        store.end_read_transaction(allow_next=False)
        store.apply(0, [Change(b"a", b"%d" % number, None, number)], Position(number + 1, 1))
        with closing(apsw.Connection(str(store.path))) as other:
            busy, *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0]
        assert not busy, "a read keeps SQLite from emptying its WAL"
        store.end_read_transaction(allow_next=True)
        for _ in range(2):
            row = store.get(b"a")
            assert row is not None
            assert row.value == b"%d" % number
        assert [one.value for one in store.scan(b"", None, 10, 1000)] == [b"%d" % number]
    store.close()


async def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the whole service ends when one table's file has no room, and reads with it."""
    whole, left = Store.apply, [2]

    def apply(store: Store, *given: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise apsw.FullError("database or disk is full")
        whole(store, *given)

    monkeypatch.setattr(Store, "apply", apply)
    async with running(tmp_path, partitions=1) as table:
        await table.put("a", b"1")
        await table.until(lambda: table.follower.nexts.get(0) == 1)
        assert await rows_of(table) == {"a": 1}


async def test_clients_that_follow_are_bounded(tmp_path: Path) -> None:
    """Broken: a thousand browsers that follow a table take its memory."""
    async with running(tmp_path, max_changes=1) as table:
        await table.caught_up()
        reader, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/tables/{STREAM}?changes_after="))
        assert b"200" in await reader.readline()
        reply = await table.get("?changes_after=")
        assert (reply.status, reply.json()["type"].rpartition(":")[2]) == (503, "busy")
        writer.close()
        await table.until(lambda: REGISTRY.get_sample_value("penstock_table_following_clients") == 0)


async def test_a_slow_client_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a client that does not read holds its place, and what waits for it, for ever."""
    monkeypatch.setattr(http_server, "WRITE_S", 0.2)
    labels = {"reason": "slow_client"}
    before = REGISTRY.get_sample_value("penstock_table_connections_cut_off_total", labels) or 0.0
    async with running(tmp_path, partitions=1) as table:
        for number in range(40):
            await table.put(f"k{number}", b'"' + b"x" * 900_000 + b'"')
        await table.until(lambda: table.follower.nexts.get(0) == 40)
        await table.caught_up()
        _, writer = await asyncio.open_connection("127.0.0.1", table.port)
        writer.write(make_get(f"/v1/tables/{STREAM}?changes_after="))
        await table.until(
            lambda: (REGISTRY.get_sample_value("penstock_table_connections_cut_off_total", labels) or 0.0) > before
        )
        writer.close()


_CHILD = """
import asyncio, sys
from pathlib import Path
from services.core.broker.log import LogBroker
from tests.unit.table.running import following
async def main():
    path = Path(sys.argv[1])
    async with LogBroker.open(str(path / "log")) as broker:
        async with following(broker, path):
            await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_killed_in_the_middle_it_ends_with_the_same_table(tmp_path: Path) -> None:
    """Broken: after a kill -9 the positions are ahead of the rows, and events are missing for ever; or the other way round."""
    expected: dict[str, object] = {}
    (tmp_path / "work").mkdir()
    async with running(tmp_path / "work", partitions=2) as table:
        table.follower._round = _hang  # type: ignore[method-assign, assignment]
        number = 0
        for kill in range(4):
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", _CHILD, str(tmp_path / "work"))
            deadline = asyncio.get_running_loop().time() + 0.8 + 0.4 * kill
            while asyncio.get_running_loop().time() < deadline:
                key = f"k{number % 53}"
                value = None if number % 11 == 0 else b"%d" % number
                await table.put(key, value)
                expected.pop(key, None)
                if value is not None:
                    expected[key] = number
                number += 1
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
    async with running(tmp_path / "work", partitions=2) as table:
        await table.until(lambda: sum(table.follower.nexts.values()) == number)
        assert await rows_of(table) == expected
