"""API keys and the file that keeps them: what ingest believes and `penstock keys` writes."""

import asyncio
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import yaml
from prometheus_client import REGISTRY
from pydantic import ValidationError

from services.core.security import file_watch, key_watch
from services.core.security.file_watch import FileWatch
from services.core.security.key_watch import watch_keys
from services.core.security.keys import ApiKey, KeyRing, add_key, expire_key, load_keys, make_key, read_ring, revoke_key
from services.core.times import format_time
from services.core.yaml_source import BadConfiguration
from services.ingest.access import Access
from tests.support.clock import Clock

CREATED = "2026-01-02T03:04:05Z"


def make_file(path: Path, count: int = 1) -> list[str]:
    """A keys file with so many keys; their tokens."""
    tokens = []
    for _ in range(count):
        token, entry = make_key(streams=["orders"], created=CREATED)
        add_key(path, entry)
        tokens.append(token)
    return tokens


def test_a_key_opens_and_its_secret_is_kept_nowhere(tmp_path: Path) -> None:
    """Whoever reads the file must not be able to send."""
    path = tmp_path / "keys.yaml"
    token, entry = make_key(streams=["orders"], name="shop", rate=5, created=CREATED)
    add_key(path, entry)
    prefix, key_id, secret = token.split("_")
    assert (prefix, key_id, len(secret)) == ("psk", entry.id, 40)
    assert secret not in path.read_text()
    assert entry.hash not in repr(entry)
    found = KeyRing(load_keys(path)).find(token)
    assert found == entry
    assert KeyRing(load_keys(path)).find(f"psk_{key_id}_{secret[::-1]}") is None


def test_two_keys_never_look_alike() -> None:
    """Ids and secrets come from the system's random numbers."""
    tokens = {make_key(streams=["*"], created=CREATED)[0] for _ in range(100)}
    assert len({token.split("_")[1] for token in tokens} | {token.split("_")[2] for token in tokens}) == 200


def test_a_new_file_is_private(tmp_path: Path) -> None:
    """Hashes are not secrets, but names and streams are nobody's business."""
    path = tmp_path / "keys.yaml"
    make_file(path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    """Configuration error, naming file and remedy: whoever can write it can let himself in."""
    path = tmp_path / "keys.yaml"
    make_file(path)
    path.chmod(mode)
    with pytest.raises(BadConfiguration, match=r"keys\.yaml.*chmod 600"):
        load_keys(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is empty. Try: keys: \[\]"),
        ("version: 2\nkeys: []", "version"),
        ("keys:\n  - {id: abcdefgh}", "hash"),
        ("keys:\n  - {id: abcdefgh, hash: secret, streams: [a], scopes: [ingest], created: x}", r"keys\.yaml:2.*hash"),
        ("keys: []\nmore: 1", "more"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, content: str, message: str) -> None:
    """And never shows what stands there: it may be a secret put in the wrong place."""
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(BadConfiguration, match=message) as caught:
        load_keys(path)
    assert "secret" not in str(caught.value).replace(str(path), "")


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    """An operator who mistyped the path."""
    with pytest.raises(BadConfiguration, match="Try: penstock keys create"):
        load_keys(tmp_path / "none.yaml")


def test_streams_and_rates_are_checked() -> None:
    """A misspelt stream name would make a key that opens nothing."""
    wrong: list[tuple[list[str], int | None]] = [([], None), (["No Such"], None), (["a"], 0)]
    for streams, rate in wrong:
        with pytest.raises(ValidationError):
            make_key(streams=streams, rate=rate, created=CREATED)


def test_a_revoked_key_stays_listed_and_opens_nothing(tmp_path: Path) -> None:
    """The list must tell when it was revoked; a second revocation does not move that time."""
    path = tmp_path / "keys.yaml"
    first, second = make_file(path, 2)
    key_id = first.split("_")[1]
    assert revoke_key(path, key_id, "2026-02-02T00:00:00Z")
    assert revoke_key(path, key_id, "2026-03-03T00:00:00Z")
    assert not revoke_key(path, "zzzzzzzz", CREATED)
    keys = load_keys(path)
    assert [key.revoked for key in keys] == ["2026-02-02T00:00:00Z", None]
    ring = KeyRing(keys)
    assert ring.find(first) is None
    assert ring.find(second) is not None


def test_a_key_with_an_end(tmp_path: Path) -> None:
    """Broken: a key that expired still opens; the one behind it does not; or its end is nowhere to be seen, or stays there."""
    path, now = tmp_path / "keys.yaml", [0.0]
    token, entry = make_key(streams=["orders"], created=CREATED, expires="2027-01-31")
    add_key(path, entry)
    (other,) = make_file(path)
    add_key(path, make_key(streams=["a"], created="long ago", expires="2028-01-01T01:00:00+01:00")[1])
    keys = load_keys(path)
    assert [key.until for key in keys] == [1801353600.0, float("inf"), 1830297600.0]
    ring = KeyRing(keys, lambda: now[0])
    assert [key.id for key in ring.expiring(9)] == [keys[0].id, keys[2].id]
    now[0] = 1801353599.9
    assert ring.find(token) == entry
    assert (len(ring), ring.expiring(1)) == (3, [entry])
    now[0] = 1801353600.0
    assert ring.find(token) is None
    assert ring.find(other) is not None
    assert (len(ring), ring.expiring(1)) == (2, [keys[2]])
    assert expire_key(path, entry.id, None)
    assert not expire_key(path, "zzzzzzzz", None)
    assert KeyRing(load_keys(path), lambda: now[0]).find(token) is not None


@pytest.mark.parametrize("date", ["soon", "2027-01-31T08:00:00", "20270131", "2027-13-01", ""])
def test_a_date_that_nobody_can_read_is_refused(date: str) -> None:
    """Broken: a key with a misspelt end never ends."""
    with pytest.raises(ValidationError, match="Try: 2027-01-31"):
        make_key(streams=["orders"], created=CREATED, expires=date)


@pytest.mark.parametrize("service", ["ingest", "registry", "table"])
async def test_the_ends_of_keys_are_shown(tmp_path: Path, service: str) -> None:
    """Broken: a key ends, and no alert came before; or the alert of a key that was revoked, prolonged or has ended stays."""
    path = tmp_path / "keys.yaml"
    soon, late = (
        make_key(streams=["orders"], created=CREATED, expires=format_time(int((time.time() + left) * 1000)))[1]
        for left in (0.2, 1000)
    )
    for entry in (soon, late, make_key(streams=["orders"], created=CREATED)[1]):
        await asyncio.to_thread(add_key, path, entry)

    def shown(entry: ApiKey) -> list[float | None]:
        labels = {"name": service, "key": entry.id}
        return [
            REGISTRY.get_sample_value(f"penstock_secret_{word}_timestamp_seconds", labels)
            for word in ("expiry", "written")
        ]

    access = Access(KeyRing([]))
    watch = watch_keys(service, path, access)
    await watch.load()
    assert shown(late) == [late.until, 1767323045.0]
    while shown(soon) != [None, None]:  # the same file: only the time has passed
        await asyncio.sleep(0.01)
        await watch.load()
    assert shown(late) == [late.until, 1767323045.0]
    await asyncio.to_thread(revoke_key, path, late.id, CREATED)
    await watch.load()
    assert shown(late) == [None, None]


def test_two_ids_alike_are_refused(tmp_path: Path) -> None:
    """Which of them is meant would be chance."""
    path = tmp_path / "keys.yaml"
    make_file(path)
    document = yaml.safe_load(path.read_text())
    document["keys"] *= 2
    path.write_text(yaml.safe_dump(document).replace("&id001", "").replace("*id001", ""))
    with pytest.raises(BadConfiguration):
        load_keys(path)


def test_changes_at_once_all_count(tmp_path: Path) -> None:
    """Two operators at once: neither's key may vanish."""
    path = tmp_path / "keys.yaml"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=make_file, args=(path, 3)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    assert len(load_keys(path)) == 9


@dataclass
class Watched:
    """A keys file that is watched."""

    path: Path
    access: Access
    watch: FileWatch[KeyRing]
    clock: Clock

    def opens(self, token: str) -> bool:
        return self.access.ring is not None and self.access.ring.find(token) is not None

    async def until(self, token: str, *, opens: bool) -> None:
        while self.opens(token) is not opens:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[Watched]:
    """Watch a keys file that exists until the context is left."""
    access, clock, stopping = Access(KeyRing([])), Clock(0.0), asyncio.Event()
    watch = watch_keys("ingest", path, access, clock)
    await watch.load()
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        group.create_task(watch.run(stopping))
        yield Watched(path, access, watch, clock)
        stopping.set()


def failures() -> float:
    return REGISTRY.get_sample_value("penstock_ingest_keys_load_failures_total") or 0.0


def age() -> float:
    return REGISTRY.get_sample_value("penstock_ingest_keys_age_seconds") or 0.0


async def fail_more(count: int) -> None:
    """Wait until so many more loads failed."""
    wanted = failures() + count
    while failures() < wanted:
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "READ_EVERY_S", 0.01)


async def test_a_changed_file_is_taken_over_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """Revoking must work without a restart; a typing mistake must not lock everybody out."""
    path = tmp_path / "keys.yaml"
    (first,) = await asyncio.to_thread(make_file, path)
    async with watched(path) as keys:
        assert keys.opens(first)
        (second,) = await asyncio.to_thread(make_file, path)
        await keys.until(second, opens=True)
        await asyncio.to_thread(path.write_text, "keys: 7")
        await fail_more(2)
        assert keys.opens(first)
        assert keys.opens(second)
        await asyncio.to_thread(os.remove, path)
        await asyncio.to_thread(make_file, path)
        await keys.until(first, opens=False)


async def test_a_load_that_failed_is_tried_until_one_succeeds(tmp_path: Path) -> None:
    """Broken: a key is revoked in a file that others may read; after the `chmod 600` that the log asks for it is still valid."""
    path = tmp_path / "keys.yaml"
    (token,) = await asyncio.to_thread(make_file, path)
    async with watched(path) as keys:
        scratch = tmp_path / "scratch.yaml"
        await asyncio.to_thread(shutil.copy, path, scratch)
        await asyncio.to_thread(revoke_key, scratch, token.split("_")[1], CREATED)
        await asyncio.to_thread(scratch.chmod, 0o644)
        await asyncio.to_thread(scratch.replace, path)
        await fail_more(2)
        assert keys.opens(token)
        await asyncio.to_thread(path.chmod, 0o600)
        await keys.until(token, opens=False)


async def test_a_change_that_leaves_time_and_size_as_they_were_counts(tmp_path: Path) -> None:
    """Broken: a revocation restored from a backup with its times, or two writes within one tick of the clock, are not seen."""
    path = tmp_path / "keys.yaml"
    (token,) = await asyncio.to_thread(make_file, path)
    async with watched(path) as keys:

        def change() -> None:
            before = path.stat()
            text = path.read_text()
            digest = load_keys(path)[0].hash
            path.write_text(text.replace(digest, digest[::-1]))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert path.stat().st_size == before.st_size

        await asyncio.to_thread(change)
        await keys.until(token, opens=False)


async def test_without_a_good_load_the_age_grows_and_ingest_says_so(tmp_path: Path) -> None:
    """Broken: nobody learns that revoked keys are still valid: one line of a warning, a week ago."""
    path = tmp_path / "keys.yaml"
    await asyncio.to_thread(make_file, path)
    with structlog.testing.capture_logs() as logs:
        async with watched(path) as keys:

            def said() -> list[Any]:
                return [entry for entry in logs if entry["log_level"] == "error"]

            await asyncio.to_thread(path.chmod, 0o644)
            await asyncio.to_thread(path.write_text, "keys: []\n# others may read this")
            await fail_more(2)
            keys.clock.now += file_watch.STALE_AFTER_S - 1
            await fail_more(2)
            assert (age(), said()) == (file_watch.STALE_AFTER_S - 1, [])
            keys.clock.now += 1
            await fail_more(2)
            assert [entry["seconds"] for entry in said()] == [60]
            assert "chmod 600" in said()[0]["problems"]
            assert "Try: " in said()[0]["hint"]
            keys.clock.now += file_watch.STALE_AFTER_S
            await fail_more(2)
            assert [entry["seconds"] for entry in said()] == [60, 120]
            assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1
            await asyncio.to_thread(path.chmod, 0o600)
            while age():
                await asyncio.sleep(0.005)


async def test_a_file_system_that_hangs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a network file system hangs, one thread after the other with it, and nobody is told how old the keys are."""
    path = tmp_path / "keys.yaml"
    await asyncio.to_thread(make_file, path)
    hangs, reads = threading.Event(), 0
    real = read_ring

    def read(path: Path, known: bytes) -> tuple[bytes, KeyRing] | None:
        nonlocal reads
        reads += 1
        assert hangs.wait(600)
        return real(path, known)

    with structlog.testing.capture_logs() as logs:
        async with watched(path) as keys:
            monkeypatch.setattr(key_watch, "read_ring", read)
            while not reads:
                await asyncio.sleep(0.005)
            keys.clock.now += file_watch.STALE_AFTER_S
            while not any(entry["log_level"] == "error" for entry in logs):
                await asyncio.sleep(0.005)
            assert (reads, age()) == (1, file_watch.STALE_AFTER_S)
            hangs.set()
            while age():
                await asyncio.sleep(0.005)
