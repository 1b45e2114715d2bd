"""What every driver of groups must do, on a real supervisor, moto's AWS and a small Kubernetes API."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from services.autoscaler.groups.drivers.contract import Away, Group, GroupNotFound, SizeChanged
from services.autoscaler.groups.drivers.open import open_driver
from services.core.aws_emulator import CREDENTIALS
from tests.support.ports import free_port
from tests.unit.autoscaler.drivers.harness import Moto, Platform, aws_platform, fleet_platform, kubernetes_platform

DEADLINE = 600.0


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        server = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            yield Moto(f"http://{host}:{port}")
        finally:
            server.stop()


@pytest.fixture(params=["fleet", "aws", "kubernetes"])
async def platform(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Platform]:
    if request.param == "aws":
        context = aws_platform(request.getfixturevalue("moto"))
    else:
        context = {"fleet": fleet_platform, "kubernetes": kubernetes_platform}[request.param](tmp_path)
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(context)


async def until_there(platform: Platform, members: int) -> Group:
    """The group once it has so many members with an address."""
    async with asyncio.timeout(DEADLINE):
        while True:
            group = await platform.driver.describe(platform.group)
            if sum(one.address is not None for one in group.members) == members:
                return group
            await asyncio.sleep(0.05)


async def test_grows(platform: Platform) -> None:
    """Broken: an order is lost, or the new instances cannot be found."""
    group = await until_there(platform, 2)
    assert group.size == 2
    assert not any(one.leaving for one in group.members)
    await platform.driver.resize(platform.group, 2, 4)
    group = await until_there(platform, 4)
    assert (group.size, len({one.name for one in group.members}), len({one.address for one in group.members})) == (
        4,
        4,
        4,
    )


async def test_shrinks_by_one_and_shows_who_leaves(platform: Platform) -> None:
    """Broken: two leave at once, or an instance that drains counts as one that works."""
    before = await until_there(platform, 2)
    await platform.driver.resize(platform.group, 2, 1)
    group = await platform.driver.describe(platform.group)
    assert group.size == 1
    assert sum(not one.leaving for one in group.members) == 1
    if platform.shows_leaving:
        assert sum(one.leaving for one in group.members) == 1
    await platform.finish()
    group = await until_there(platform, 1)
    assert {one.name for one in group.members} < {one.name for one in before.members}


@pytest.mark.parametrize("platform", ["fleet", "kubernetes"], indirect=True)  # moto ends instances at once
async def test_the_next_waits_for_who_leaves(platform: Platform) -> None:
    """Broken: a second instance is taken away while the first still drains."""
    await until_there(platform, 2)
    await platform.driver.resize(platform.group, 2, 3)
    await until_there(platform, 3)
    await platform.ready()
    await platform.driver.resize(platform.group, 3, 2)
    with pytest.raises(SizeChanged):
        await platform.driver.resize(platform.group, 2, 1)
    await platform.driver.resize(platform.group, 2, 3)
    assert (await platform.driver.describe(platform.group)).size == 3


async def test_replaces_one_and_keeps_the_size(platform: Platform) -> None:
    """Broken: an instance that hangs stays for ever, or its end leaves the group smaller; or two drain at once."""
    before = await until_there(platform, 2)
    await platform.ready()
    hung = before.members[0].name
    with pytest.raises(SizeChanged):
        await platform.driver.replace(platform.group, "nobody")
    await platform.driver.replace(platform.group, hung)
    if not platform.shows_leaving:
        return  # moto keeps an unhealthy instance
    with pytest.raises(SizeChanged):
        await platform.driver.resize(platform.group, 2, 1)
    await platform.finish()
    async with asyncio.timeout(DEADLINE):
        while before.members[0] in (after := await until_there(platform, 2)).members:
            await asyncio.sleep(0.05)
    assert (after.size, sum(one.leaving for one in after.members)) == (2, 0)
    assert before.members[1].name in {one.name for one in after.members}


async def test_a_failed_one_leaves_first(platform: Platform) -> None:
    """Broken: a group with a broken instance loses one that works."""
    if "kubernetes" in type(platform.driver).__name__.lower():
        pytest.skip("Kubernetes chooses the pod itself")
    before = await until_there(platform, 2)
    oldest = before.members[0].name
    await platform.driver.resize(platform.group, 2, 1, {oldest})
    await platform.finish()
    assert oldest not in {one.name for one in (await until_there(platform, 1)).members}


async def test_what_was_decided_on_another_size_is_refused(platform: Platform) -> None:
    """Broken: an operator's change of size and ours undo each other."""
    await until_there(platform, 2)
    with pytest.raises(SizeChanged):
        await platform.driver.resize(platform.group, 3, 2)
    with pytest.raises(SizeChanged):
        await platform.driver.resize(platform.group, 1, 2)
    assert (await platform.driver.describe(platform.group)).size == 2


async def test_sizes_that_are_no_step_and_unknown_groups(platform: Platform) -> None:
    """Broken: a group is emptied, or a misspelt name looks like an empty group."""
    for seen, size in ((2, 0), (2, -1), (3, 1)):
        with pytest.raises(ValueError, match="cannot go from"):
            await platform.driver.resize(platform.group, seen, size)
    with pytest.raises(GroupNotFound):
        await platform.driver.describe("exple")
    with pytest.raises(GroupNotFound):
        await platform.driver.resize("exple", 1, 2)


@pytest.mark.parametrize("kind", ["fleet", "aws", "kubernetes"])
async def test_away(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a platform that is restarted ends the autoscaler."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "token").write_text("x")
    (tmp_path / "fleet.json").write_text(f'{{"management": "127.0.0.1:{free_port()}"}}')
    (tmp_path / "control.token").write_text("x")
    endpoint = f"endpoint=http://127.0.0.1:{free_port()}"
    url = {
        "fleet": f"fleet://{tmp_path}",
        "aws": f"aws://eu-central-1?{endpoint}",
        "kubernetes": f"kubernetes://penstock?{endpoint}&account={tmp_path}",
    }[kind]
    async with open_driver(url) as driver:
        with pytest.raises(Away):
            await driver.describe("expel")
        with pytest.raises(Away):
            await driver.resize("expel", 1, 2)
