"""Ingest as a process over the embedded log: start, readiness, drain, kill -9, several on one port, keys, metrics."""

import asyncio
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from services.core import event
from services.core.security.keys import add_key, make_key, revoke_key
from tests.integration.ingest_process import (
    PIPES,
    Ingest,
    create_topics,
    log_lines,
    log_url,
    read_all,
    run_to_end,
    running,
)
from tests.support.pacing import Pace
from tests.support.ports import free_port
from tests.support.raw_http import Client, make_request


async def send_until_cut(ingest: Ingest, name: str, acknowledged: set[str]) -> None:
    """Send batches of 20 events until the connection ends; remember the ids of every 200."""
    number = 0
    try:
        async with Client(ingest.port) as client:
            while True:
                ids = [f"{name}-{number}-{item}" for item in range(20)]
                body = orjson.dumps([{"id": one, "customer": one[-1]} for one in ids])
                reply = await client.request(make_request("/v1/streams/orders/events", body))
                assert reply.status == 200
                acknowledged.update(ids)
                number += 1
                if reply.closed:
                    return
    except (OSError, asyncio.IncompleteReadError):
        return


async def stored_ids(folder: Path) -> Counter[str]:
    """How often each event id stands in `orders`."""
    return Counter(event.read_id(record) or "" for record in await read_all(folder, "orders"))


async def test_it_starts_stores_and_drains(tmp_path: Path) -> None:
    """The whole way once: ready, 200, the record as the contract says, metrics, SIGTERM, status 0."""
    await create_topics(tmp_path)
    async with running(tmp_path) as ingest:
        await ingest.until_ready()
        assert (await ingest.get("/healthz"))[0] == 200
        body = b'[{"id":"o-1","customer":"c-1","at":"2025-01-02T03:04:05Z"},{"id":"o-2"},{"id":1.5}]'
        reply = await ingest.post(body, "orders")
        assert (reply.status, reply.json()["accepted"]) == (207, 2)
        records = {event.read_id(record): record for record in await read_all(tmp_path, "orders")}
        assert set(records) == {"o-1", "o-2"}
        assert (records["o-1"].key, records["o-1"].timestamp) == (b"c-1", 1735787045000)
        assert records["o-1"].value == b'{"id":"o-1","customer":"c-1","at":"2025-01-02T03:04:05Z"}'
        assert {event.Origin.unpack(r.header(event.ORIGIN) or b"").sequence for r in records.values()} <= {0, 1}
        await check_metrics(ingest)
        assert await ingest.end() == 0
    said = [line["event"] for line in log_lines(tmp_path)]
    assert said[-2:] == ["stopping", "drained"]


async def check_metrics(ingest: Ingest) -> None:
    """Every figure that the observer builds on is there within a second."""
    wanted = [
        r'penstock_ingest_events_accepted_total{stream="orders"} 2.0',
        r'penstock_ingest_events_refused_total{reason="bad-id",stream="orders"} 1.0',
        r'penstock_ingest_requests_total{status="207",stream="orders"} 1.0',
        r'penstock_lag_in_seconds_count{node="ingest",pipe="orders"} 2.0',
        r'penstock_lag_out_seconds_count{node="ingest",pipe="orders"} 2.0',
        r'penstock_ingest_time_seconds_count{stream="orders"} 1.0',
        r'penstock_ingest_payload_bytes_total{stream="orders"} 69.0',
        r"penstock_ingest_pending_bytes 0.0",
    ]
    async with asyncio.timeout(600):
        while True:
            _, text = await ingest.get("/metrics")
            if all(line in text for line in wanted):
                return
            await asyncio.sleep(0.1)


async def test_a_missing_topic_is_unready_and_503_until_it_is_there(tmp_path: Path) -> None:
    """Declared in the pipe file but not in the broker: nothing may be lost or refused for good; the reason names the stream."""
    await create_topics(tmp_path, ["plain"])
    async with running(tmp_path) as ingest:
        reason = await ingest.until_ready(ready=False)
        async with asyncio.timeout(600):
            while "orders does not exist" not in reason:
                reason = await ingest.until_ready(ready=False)
        reply = await ingest.post(b"{}", "orders")
        assert (reply.status, reply.problem) == (503, "stream-not-ready")
        assert (await ingest.post(b"{}", "plain")).status == 200
        await create_topics(tmp_path, ["orders"])
        await ingest.until_ready()
        assert (await ingest.post(b"{}", "orders")).status == 200


async def test_sigterm_under_load_loses_no_acknowledged_event(tmp_path: Path) -> None:
    """A rolling restart under load: drained with status 0, and every 200 is in the log exactly once."""
    await create_topics(tmp_path)
    async with running(tmp_path) as ingest:
        await ingest.until_ready()
        acknowledged: set[str] = set()
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(send_until_cut(ingest, f"s{number}", acknowledged))
            while len(acknowledged) < 2000:
                await asyncio.sleep(0.01)
            ingest.process.send_signal(signal.SIGTERM)
        assert await ingest.ended() == 0
    stored = await stored_ids(tmp_path)
    assert acknowledged - set(stored) == set()
    assert {stored[one] for one in acknowledged} == {1}


async def test_kill_9_loses_no_acknowledged_event(tmp_path: Path) -> None:
    """The promise itself: what got a 200 is on the disk, whatever happens to the process; the next one starts at once."""
    await create_topics(tmp_path)
    acknowledged: set[str] = set()
    for round_number in range(2):
        async with running(tmp_path) as ingest:
            await ingest.until_ready()
            enough = len(acknowledged) + 1000
            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(send_until_cut(ingest, f"k{round_number}-{number}", acknowledged))
                while len(acknowledged) < enough:
                    await asyncio.sleep(0.01)
                ingest.process.kill()
            assert await ingest.ended() == -signal.SIGKILL
    stored = await stored_ids(tmp_path)
    assert acknowledged - set(stored) == set()
    origins = [record.header(event.ORIGIN) for record in await read_all(tmp_path, "orders")]
    assert len(set(origins)) == len(origins)


async def test_two_processes_share_a_port(tmp_path: Path) -> None:
    """More cores, one address: the kernel spreads connections; either may stop without the other noticing."""
    await create_topics(tmp_path)
    port = free_port()
    async with running(tmp_path, port=port) as first, running(tmp_path, port=port) as second:
        await first.until_ready()
        await second.until_ready()
        for _ in range(40):
            assert (await first.post(b"{}")).status == 200
        incarnations = Counter(
            event.Origin.unpack(record.header(event.ORIGIN) or b"").incarnation
            for record in await read_all(tmp_path, "plain")
        )
        assert len(incarnations) == 2
        assert await first.end() == 0
        for _ in range(10):
            assert (await second.post(b"{}")).status == 200
    assert len(await read_all(tmp_path, "plain")) == 50


async def test_without_sharing_a_taken_port_is_an_error(tmp_path: Path) -> None:
    """Two fleets by accident would each take half of the events."""
    await create_topics(tmp_path)
    port = free_port()
    async with running(tmp_path, "--reuse-port", "false", port=port) as first:
        await first.until_ready()
        async with running(tmp_path, "--reuse-port", "false", port=port) as second:
            async with asyncio.timeout(600):
                assert await second.process.wait() == 1
    assert any("Try: another --listen" in str(line.get("error")) for line in log_lines(tmp_path))


async def test_keys_guard_and_change_while_it_runs(tmp_path: Path) -> None:
    """A key made or revoked on the command line counts within seconds."""
    await create_topics(tmp_path)
    path = tmp_path / "keys.yaml"
    token, entry = make_key(streams=["plain"], created="2026-01-02T03:04:05Z")
    await asyncio.to_thread(add_key, path, entry)
    async with running(tmp_path, "--keys", str(path)) as ingest:
        await ingest.until_ready()
        bearer = {"Authorization": f"Bearer {token}"}
        assert (await ingest.post(b"{}")).status == 401
        assert (await ingest.post(b"{}", **bearer)).status == 200
        assert (await ingest.post(b"{}", "orders", **bearer)).status == 404
        await asyncio.to_thread(revoke_key, path, entry.id, "2026-02-02T00:00:00Z")
        async with asyncio.timeout(600):
            while (await ingest.post(b"{}", **bearer)).status != 401:
                await asyncio.sleep(0.1)
        assert await ingest.end() == 0
    assert token.split("_")[2] not in (tmp_path / "ingest.log").read_text()


async def test_bad_configuration_is_status_2_and_names_the_mistake(tmp_path: Path) -> None:
    """An operator gets file, key and remedy, all before anything starts; never a stack, never a secret."""
    pipes, keys = tmp_path / "pipes.yaml", tmp_path / "keys.yaml"
    pipes.write_text(PIPES)
    _, entry = make_key(streams=["plain"], created="2026-01-02T03:04:05Z")
    await asyncio.to_thread(add_key, keys, entry)
    keys.chmod(0o644)
    fine = ["--broker", log_url(tmp_path), "--pipes", str(pipes), "--listen", "127.0.0.1:0"]
    for flags, message in (
        (["--listen", "0.0.0.0:0"], r"listen.*penstock keys create"),
        (["--keys", str(keys)], r"keys\.yaml.*chmod 600"),
        (["--keys", str(tmp_path / "none.yaml")], r"none\.yaml.*penstock keys create"),
        (["--pipes", str(tmp_path / "none.yaml")], r"none\.yaml"),
        (["--broker", "redis://x"], r"redis"),
        (["--max-body", "5"], r"--max-body.*unit"),
    ):
        status, errors = await run_to_end(*fine, *flags)
        assert status == 2, errors
        assert re.search(message, errors), errors
        assert "Traceback" not in errors
        assert entry.hash not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_stops_while_the_broker_cannot_be_opened(tmp_path: Path, number: signal.Signals) -> None:
    """It waits for its broker, unready and alive; a stop must not have to wait for the broker, too."""
    async with running(tmp_path, broker=f"kafka://127.0.0.1:{free_port()}") as ingest:
        async with asyncio.timeout(600):
            pace = Pace()
            while (await ingest.get("/healthz"))[0] != 200:
                assert ingest.process.returncode is None, (tmp_path / "ingest.log").read_text()
                await pace.rest()
        assert "the broker" in await ingest.until_ready(ready=False)
        assert await ingest.end(number) == 0


async def test_a_broker_that_waiting_does_not_help_ends_it(tmp_path: Path) -> None:
    """Broken: it waits for ever for a broker that a person must mend first. The other services end, too."""
    (tmp_path / "log").write_text("a file where the data folder should be")
    async with running(tmp_path) as ingest:
        assert await ingest.ended() == 2
    assert "--broker" in (tmp_path / "ingest.log").read_text()


async def test_few_file_descriptors_mean_503_not_the_end(tmp_path: Path) -> None:
    """Ten times the connections that the system allows: the surplus is told so, those inside go on, and later all is well."""
    await create_topics(tmp_path)
    async with running(tmp_path, "--idle-timeout", "600s", files=130) as ingest, AsyncExitStack() as stack:
        await ingest.until_ready()
        inside = await stack.enter_async_context(Client(ingest.port))
        request = make_request("/v1/streams/plain/events", b"{}")
        assert (await inside.request(request)).status == 200
        crowd = [await stack.enter_async_context(Client(ingest.port)) for _ in range(300)]
        refused = 0
        for client in crowd[-50:]:
            try:
                refused += (await client.reply()).status == 503
            except (OSError, asyncio.IncompleteReadError):
                refused += 1
        assert refused == 50
        assert (await inside.request(request)).status == 200
        await stack.aclose()
        async with asyncio.timeout(600):
            while True:
                try:
                    if (await ingest.post(b"{}")).status == 200:
                        break
                except (OSError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.1)
        assert await ingest.end() == 0
