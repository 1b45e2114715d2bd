"""The registry's store under kill -9, lost answers and power cuts: no duplicate, no gap, no loss."""

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.registry import object_log, objects
from services.registry.entries import entry_name
from services.registry.objects import Bucket, NotStored, Objects, StoreUnavailable, open_objects
from tests.faults.registry_child import make_schema, open_registrar
from tests.faults.registry_storm import run_storm, s3_environ
from tests.support.object_store import BUCKET, ObjectStoreServer

DEADLINE = 600


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environ(server).items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own for each test."""
    if request.param == "folder":
        return f"file://{tmp_path}/store"
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}-{random.randrange(1 << 30)}"


async def test_killed_registries_leave_no_duplicate_no_gap_and_no_loss(url: str, tmp_path: Path) -> None:
    """If it fails, two schemas share an id, or a client's version is gone. tests/faults/registry_storm.py is the long form."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    storm = await run_storm(url, seed, tmp_path, registrations=80, kill_after=8)
    assert storm.kills >= 5, "the fault never bit"


async def test_of_concurrent_creators_one_succeeds(url: str) -> None:
    """If it fails, two registries both believe that an id is theirs."""
    stores = [open_objects(url) for _ in range(8)]
    for number in range(1, 6):
        contents = [b"%d" % index * 1000 for index in range(len(stores))]
        won = await asyncio.gather(
            *(store.create(entry_name(number), content) for store, content in zip(stores, contents, strict=True))
        )
        assert sum(won) == 1
        assert await stores[0].get([entry_name(number)]) == [contents[won.index(True)]]
    assert await stores[0].names_after(entry_name(3)) == [entry_name(4), entry_name(5)]
    assert await stores[0].get([entry_name(6)]) == [None]


def _too_late() -> int:
    time.sleep(1.0)
    return True


_NEVER: Callable[[], int] = lambda: 0  # noqa: E731


@pytest.mark.parametrize(
    ("refuse", "lose"),
    [
        (_NEVER, lambda: True),
        (_NEVER, lambda: 503),
        (_NEVER, lambda: 500),
        (_NEVER, _too_late),
        (lambda: 503, _NEVER),
        (lambda: 409, _NEVER),
    ],
    ids=["no answer", "503 after storing", "500 after storing", "too late", "SlowDown", "conflict"],
)
async def test_a_lost_answer_of_s3_is_found_again(
    s3: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[], int], lose: Callable[[], int]
) -> None:
    """If it fails, a registration whose answer was lost is refused as incompatible with itself, or gets a second id."""
    monkeypatch.setattr(object_log, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(objects, "TIMEOUT_S", 0.5)
    registrar = await open_registrar(f"s3://{BUCKET}/lost-{random.randrange(1 << 30)}")
    faults = [True, False, True]
    bites: list[int] = []

    def is_next(method: str, fault: Callable[[], int]) -> int:
        """The fault of the first, third and fifth PUT."""
        if method != "PUT" or fault is _NEVER or not (faults and faults.pop(0)):
            return 0
        bites.append(1)
        return fault()

    monkeypatch.setattr(s3, "refuse", lambda method, _path: is_next(method, refuse))
    monkeypatch.setattr(s3, "lose", lambda method, _path: is_next(method, lose))
    versions = [
        await registrar.register("s", await registrar.read(make_schema("a", number)), "") for number in range(3)
    ]
    assert len(bites) == 2
    assert [version.schema.id for version in versions] == [1, 2, 3]


async def test_a_bucket_that_refuses_is_told_at_once(s3: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a client waits 15 seconds to learn that the registry lacks a right, and then not which outcome it has."""
    registrar = await open_registrar(f"s3://{BUCKET}/right-{random.randrange(1 << 30)}")
    monkeypatch.setattr(s3, "refuse", lambda method, _path: 403 * (method == "PUT"))
    candidate = await registrar.read(make_schema("a", 0))
    with pytest.raises(NotStored, match="log/0"):
        await registrar.register("s", candidate, "")
    monkeypatch.setattr(s3, "refuse", lambda _method, _path: 0)
    assert (await registrar.register("s", candidate, "")).schema.id == 1


def test_a_kill_between_any_two_steps_of_a_registration(tmp_path: Path) -> None:
    """If it fails, a registry that was killed at one place leaves an id without a version, a gap, or a store that is stuck."""
    command = [sys.executable, "-m", "tests.faults.registry_steps", str(tmp_path)]
    ran = subprocess.run(command, check=True, timeout=DEADLINE, stdout=subprocess.PIPE)
    found = json.loads(ran.stdout)
    assert {"mkdir", "open", "fsync", "link", "unlink"} <= set(found["killed"])
    catalog = asyncio.run(open_registrar(f"file://{tmp_path}")).catalog
    numbers = [version.number for version in catalog.subjects["s"].versions]
    assert numbers == list(range(1, len(numbers) + 1))
    assert sorted(catalog.by_id) == numbers, "each schema was registered once"
    for fact in found["answered"]:
        version = catalog.subjects["s"].versions[fact["version"] - 1]
        assert (version.schema.id, version.schema.stored.fingerprint) == (fact["id"], fact["fingerprint"])


async def test_a_store_that_is_away_is_an_error_and_heals(
    s3: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a registry hangs while its bucket is away, or says that a schema is not there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away: Objects = Bucket(f"s3://{BUCKET}/away")
    with pytest.raises(StoreUnavailable, match="away"):
        await away.get([entry_name(1)])
    with pytest.raises(StoreUnavailable):
        await away.create(entry_name(1), b"x")


def test_an_object_is_synced_before_anybody_can_see_it(tmp_path: Path) -> None:
    """If it fails, a power cut takes an id that a client was given, and the next schema gets the same one."""
    assert shutil.which("strace"), "nothing proves the syncs. Try: apt-get install strace"
    trace, url = tmp_path / "trace", f"file://{tmp_path}/store"
    child = [sys.executable, "-m", "tests.faults.registry_child", url, "p", "5", "2"]
    options = ["-f", "-qq", "-y", "-e", "trace=fsync,link,linkat,write", "-o", str(trace)]
    subprocess.run(["strace", *options, *child], check=True, timeout=DEADLINE, stdout=subprocess.PIPE)
    steps: list[str] = []
    for line in trace.read_text().splitlines():
        if re.search(r"fsync\(\d+<[^>]*/log/\.new-", line):
            steps.append("file synced")
        elif re.search(r"link(at)?\(.*/log/\.new-", line):
            steps.append("linked")
        elif re.search(r"fsync\(\d+<[^>]*/log>", line):
            steps.append("folder synced")
        elif "write(1<" in line and "number" in line:
            steps.append("answered")
    told = " ".join(steps)
    assert told.count("answered") == 5
    assert re.fullmatch(r"(file synced linked folder synced (folder synced )*answered ?)+", told), told
