"""The registry's store in a folder that refuses: a full or read-only disk, a disk that fails, damage that readers see."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.core.process.disk import measure_disks
from services.registry.entries import entry_name
from services.registry.objects import Folder, NotStored, StoreUnavailable, open_objects
from tests.faults.registry_child import make_schema, open_registrar
from tests.unit.registry.service import running_registry

NAME = entry_name(1)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, where: Callable[[Any], bool]) -> None:
    """A function of `os` fails with this error for descriptors or paths that `where` takes."""
    original = getattr(os, name)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if where(first):
            raise OSError(number, os.strerror(number), None)
        return original(first, *args, **kwargs)

    monkeypatch.setattr(os, name, call)


def is_scratch(what: Any) -> bool:
    """Of a path, or a descriptor."""
    path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what
    return "/.new-" in str(path)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("open", errno.ENOSPC),
        ("open", errno.EROFS),
        ("open", errno.EACCES),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
    ],
)
async def test_a_disk_that_refuses_stores_nothing_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Broken: a full disk leaves half an object, or stops the registry until a restart although there is room again."""
    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, call, number, is_scratch)
        with pytest.raises(NotStored, match=os.strerror(number)):
            await folder.create(NAME, b"x")
    assert os.listdir(tmp_path / "log") == []  # noqa: PTH208
    assert await folder.create(NAME, b"x")


async def test_the_disk_of_a_folder_is_watched(tmp_path: Path) -> None:
    """Broken: the disk of the schemas fills, and the first sign is a registration that fails."""
    open_objects(tmp_path.as_uri())
    await measure_disks()
    assert REGISTRY.get_sample_value("penstock_disk_free_bytes", {"folder": str(tmp_path)})


async def test_a_full_disk_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a client waits for 15 seconds, and then does not know whether its schema was registered."""
    async with running_registry(Folder(tmp_path)) as client:
        first = await client.register("s", make_schema("a", 0))
        failing(monkeypatch, "open", errno.ENOSPC, is_scratch)
        refused = await client.ask("POST", "/v1/schemas", {"schema": make_schema("a", 1), "subject": "s"}, status=503)
        assert refused["type"] == "urn:penstock:problem:not-stored"
        assert os.strerror(errno.ENOSPC) in refused["detail"]
        assert (await client.ask("GET", f"/schemas/ids/{first['id']}"))["guid"] == first["guid"]
        monkeypatch.undo()
        assert (await client.register("s", make_schema("a", 1)))["id"] == 2


@pytest.mark.parametrize("where", [is_scratch, lambda what: not is_scratch(what)], ids=["file", "folder"])
async def test_after_a_failed_sync_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Callable[[Any], bool]
) -> None:
    """Broken: a disk that has lost what it took answers the next sync with success, and an id is given twice."""
    folder = Folder(tmp_path)
    assert await folder.create(NAME, b"x")
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, where)
        with pytest.raises(StoreUnavailable):
            await folder.create(entry_name(2), b"x")
    with pytest.raises(NotStored, match="restart the registry"):
        await folder.create(entry_name(3), b"x")


async def test_clocks_that_differ_change_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a registry whose clock is a year behind registers a version before an earlier one, or is refused."""
    url = f"file://{tmp_path}"
    ahead, behind = await open_registrar(url), await open_registrar(url)
    await ahead.register("s", await ahead.read(make_schema("a", 0)), "")
    monkeypatch.setattr("services.registry.object_log.time.time_ns", lambda: 1_000_000_000)
    version = await behind.register("s", await behind.read(make_schema("a", 1)), "")
    monkeypatch.undo()
    later = await ahead.register("s", await ahead.read(make_schema("a", 2)), "")
    assert (version.number, later.number) == (2, 3)
    reader = await open_registrar(url)
    assert [one.number for one in reader.catalog.subjects["s"].versions] == [1, 2, 3]
    assert not reader.log.damage


async def test_leftovers_and_foreign_files_are_no_objects(tmp_path: Path) -> None:
    """Broken: a file that a person or a backup put into the folder stops the registry at its start."""
    url = f"file://{tmp_path}"
    registrar = await open_registrar(url)
    await registrar.register("s", await registrar.read(make_schema("a", 0)), "")
    for name in ("log/.new-000000000002-aa", "log/notes.txt", "log/000000000001.bak", "segments/README", "log/~"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"penstock-regi")
    again = await asyncio.wait_for(open_registrar(url), 60)
    assert not again.log.damage
    assert (await again.register("s", await again.read(make_schema("a", 1)), "")).number == 2


async def test_a_folder_that_goes_away_is_not_empty(tmp_path: Path) -> None:
    """Broken: a disk is unmounted under a registry. It says that all is well, and then stores an entry where the disk was."""
    url = f"file://{tmp_path / 'schemas'}"
    registrar = await open_registrar(url)
    await registrar.register("s", await registrar.read(make_schema("a", 0)), "")
    (tmp_path / "schemas").rename(tmp_path / "elsewhere")
    (tmp_path / "schemas").mkdir()  # as the place of a mount is
    for ask in (registrar.log.refresh, registrar.log.verify):
        with pytest.raises(StoreUnavailable, match=r"schemas/log: the folder is gone; is its disk mounted\?"):
            await ask()
    with pytest.raises(StoreUnavailable, match="is its disk mounted"):
        await registrar.register("s", await registrar.read(make_schema("a", 1)), "")
    assert os.listdir(tmp_path / "schemas") == []  # noqa: PTH208
    (tmp_path / "schemas").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "schemas")
    assert (await registrar.register("s", await registrar.read(make_schema("a", 1)), "")).number == 2
    assert not registrar.log.damage
