"""The registry's log: entries are claimed once, in order; damage is loud; a start is quick."""

import asyncio
from pathlib import Path

import pytest

from services.core import metrics
from services.registry import object_log
from services.registry.catalog import Catalog
from services.registry.entries import SEGMENT, AddSchema, AddVersion, Damaged, entry_name, read_segment, segment_name
from services.registry.object_log import ObjectLog
from services.registry.objects import Folder, Objects, StoreUnavailable
from tests.support.memory_objects import MemoryObjects


class Member:
    """One registry of a store."""

    def __init__(self, objects: Objects) -> None:
        self.catalog = Catalog()
        self.log = ObjectLog(objects, self.catalog.clear, self.catalog.apply)

    async def add(self, name: str, subject: str = "s") -> int:
        """Register a schema that nobody else registers, as the registrar does. Returns its id."""
        while True:
            await self.log.refresh()
            after, new = self.log.number, self.catalog.next_id
            found = self.catalog.subjects.get(subject)
            version = AddVersion(subject, 1 if found is None else len(found.versions) + 1, new)
            if await self.log.append([self.schema(new, name), version], "", after):
                return new

    @staticmethod
    def schema(new: int, name: str) -> AddSchema:
        return AddSchema(new, name.encode().hex().ljust(64, "0"), "", "", name, '"string"')


async def opened(objects: Objects, names: str = "") -> Member:
    """names: the letters that it then adds, one after the other."""
    member = Member(objects)
    await member.log.load()
    for name in names:
        await member.add(name)
    return member


async def test_concurrent_registries_claim_each_id_and_version_once() -> None:
    """A failure means that two schemas can get one id, or that an id is skipped."""
    objects = MemoryObjects()
    members = [await opened(objects) for _ in range(4)]
    ids = await asyncio.gather(*(members[n % 4].add(f"n{n}") for n in range(40)))
    assert sorted(ids) == list(range(1, 41))
    reader = await opened(objects)
    assert sorted(reader.catalog.by_id) == list(range(1, 41))
    assert [version.number for version in reader.catalog.subjects["s"].versions] == list(range(1, 41))


async def test_a_decision_on_an_old_state_is_not_stored() -> None:
    """A failure means that a schema is registered that was compared with an older version than the latest."""
    objects = MemoryObjects()
    first, second = await opened(objects), await opened(objects)
    await first.add("a")
    assert not await second.log.append([Member.schema(1, "b")], "", 0)
    await second.log.refresh()
    assert not await second.log.append([Member.schema(1, "b")], "", 0)  # the state has moved on in this process, too
    assert list(objects.contents) == [entry_name(1)]


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_lost_answer_claims_one_id(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a request whose answer was lost gives an id twice, or none."""
    monkeypatch.setattr(object_log, "_FIRST_WAIT", 0.001)
    objects = MemoryObjects()
    member = await opened(objects)
    faults = [fault]
    objects.fault = lambda _name: faults.pop() if faults else None
    assert await member.add("a") == 1
    assert await member.add("b") == 2
    assert objects.created == [entry_name(1), entry_name(2)]


async def test_an_append_without_an_answer_ends_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that a client waits for ever, or that its repeat gets a second id."""
    monkeypatch.setattr(object_log, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(object_log, "WITHIN_S", 0.05)
    objects = MemoryObjects()
    member = await opened(objects)
    objects.fault = lambda _name: "after"
    with pytest.raises(StoreUnavailable):
        await member.add("a")
    objects.fault = lambda _name: None
    assert await member.add("b") == 2  # the first one is there, and keeps its id
    assert member.catalog.by_id[1].stored.name == "a"


async def test_a_start_reads_segments_and_the_rest() -> None:
    """A failure means that a start with many schemas needs a request for each of them."""
    objects = MemoryObjects()
    member = await opened(objects)
    for number in range(SEGMENT + 5):
        await member.add(f"n{number}", subject=f"s{number % 7}")
    assert len(read_segment(0, objects.contents[segment_name(0)])) == SEGMENT
    objects.reads = 0
    reader = await opened(objects)
    assert len(reader.catalog.by_id) == SEGMENT + 5
    assert reader.log.number == SEGMENT + 5
    assert objects.reads < SEGMENT * 2
    assert await reader.add("more") == SEGMENT + 6


async def test_a_segment_that_was_not_written_is_written_at_the_next_start() -> None:
    """A failure means that one crash makes every later start slow."""
    objects = MemoryObjects()
    objects.fault = lambda name: "before" if name.startswith("segments/") else None
    member = await opened(objects)
    for number in range(SEGMENT):
        await member.add(f"n{number}")
    assert segment_name(0) not in objects.contents
    objects.fault = lambda _name: None
    await opened(objects)
    assert segment_name(0) in objects.contents


async def test_an_altered_object_is_loud_and_blocks_registrations() -> None:
    """A failure means that a flipped bit changes a schema silently, or that ids behind it are given again."""
    objects = MemoryObjects()
    await opened(objects, "abc")
    before = objects.alter(entry_name(2))
    reader = await opened(objects)
    assert reader.log.incomplete
    assert set(reader.catalog.by_id) == {1, 3}  # what can be read by id is there
    assert metrics.REGISTRY_DAMAGED._value.get() == 1
    with pytest.raises(Damaged, match=entry_name(2)):
        await reader.add("d")
    with pytest.raises(Damaged, match="altered"):
        await reader.log.refresh()
    objects.contents[entry_name(2)] = before
    await reader.log._mend()
    assert set(reader.catalog.by_id) == {1, 2, 3}
    assert metrics.REGISTRY_DAMAGED._value.get() == 0
    assert await reader.add("d") == 4


@pytest.mark.parametrize("restored", [2, 3])
async def test_a_replaced_object_is_mended_whichever_of_the_two_it_was(restored: int) -> None:
    """A failure means that the damage ends although it is there, or stays after the repair until a restart."""
    objects = MemoryObjects()
    await opened(objects, "abcd")
    before, other = objects.contents[entry_name(restored)], MemoryObjects()
    await opened(other, "wxyz")
    objects.contents[entry_name(restored)] = other.contents[entry_name(restored)]
    reader = await opened(objects)
    assert entry_name(restored) in reader.log.damage
    await reader.log._mend()
    assert entry_name(restored) in reader.log.damage
    objects.contents[entry_name(restored)] = before
    await reader.log._mend()
    assert (reader.log.damage, metrics.REGISTRY_DAMAGED._value.get()) == ({}, 0)
    assert await reader.add("e") == 5


async def test_a_store_that_answers_again_is_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that the metric, and readiness, speak of a store that is away until somebody restarts the registry."""
    monkeypatch.setattr(object_log, "MEND_EVERY_S", 0.001)
    objects, stopping = MemoryObjects(), asyncio.Event()
    await opened(objects, "abc")
    before = objects.alter(entry_name(2))
    reader = await opened(objects)
    shown = metrics.REGISTRY_STORE_UP._value.get

    def incomplete() -> bool:
        return reader.log.incomplete

    assert (shown(), incomplete()) == (1, True)
    real = objects.names_after

    async def fails(name: str) -> list[str]:
        objects.names_after, objects.away = real, True  # type: ignore[method-assign]
        return await real(name)

    objects.names_after = fails  # type: ignore[method-assign]  # the store goes away while everything is read again
    objects.contents[entry_name(2)] = before
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        group.create_task(reader.log.run(stopping))
        while shown():
            await asyncio.sleep(0.001)
        assert incomplete()
        objects.away = False
        while incomplete() or not shown():
            await asyncio.sleep(0.001)
        assert set(reader.catalog.by_id) == {1, 2, 3}
        objects.away = True  # nobody asks for anything: only the registry itself finds out
        while shown():
            await asyncio.sleep(0.001)
        objects.away = False
        while not shown():
            await asyncio.sleep(0.001)
        stopping.set()


async def test_a_missing_object_is_no_end_of_the_log() -> None:
    """A failure means that ids behind a deleted object are given a second time."""
    objects = MemoryObjects()
    await opened(objects, "abc")
    del objects.contents[entry_name(2)]
    reader = await opened(objects)
    assert set(reader.catalog.by_id) == {1, 3}
    with pytest.raises(Damaged, match="missing"):
        await reader.add("d")


@pytest.mark.parametrize("harm", ["alter", "delete", "replace"])
async def test_verifying_finds_what_was_changed_while_it_ran(harm: str) -> None:
    """A failure means that damage shows only at the next start, when the only whole copy is gone."""
    objects = MemoryObjects()
    member = await opened(objects, "abc")
    await member.log.verify()
    assert not member.log.damage
    if harm == "alter":
        objects.alter(entry_name(2))
    elif harm == "delete":
        del objects.contents[entry_name(2)]
    else:
        other = MemoryObjects()
        await opened(other, "xy")
        objects.contents[entry_name(2)] = other.contents[entry_name(2)]
    await member.log.verify()
    assert list(member.log.damage) == [entry_name(2)]
    assert not member.log.incomplete  # this process knows the whole one, and answers reads
    await member.log.refresh()
    with pytest.raises(Damaged):
        await member.add("d")


@pytest.mark.parametrize("name", [entry_name(999_999_999_999), segment_name(99_999_999)])
async def test_an_object_far_ahead_is_named_and_read_by_nobody(name: str) -> None:
    """A failure means that one foreign object makes a start read a million objects that do not exist, and run out of memory."""
    objects = MemoryObjects()
    await opened(objects, "a")
    objects.contents[name] = b"x"
    member = await opened(objects)
    assert objects.reads < 100
    assert set(member.log.damage) == {name}
    assert member.catalog.by_id[1].stored.name == "a"
    with pytest.raises(Damaged, match="remove it"):
        await member.add("b")
    del objects.contents[name]
    await member.log._mend()
    assert await member.add("b") == 2


async def test_a_damaged_segment_costs_nothing_but_is_loud() -> None:
    """A failure means that the copy for a quick start can lose schemas."""
    objects = MemoryObjects()
    member = await opened(objects)
    for number in range(SEGMENT + 1):
        await member.add(f"n{number}")
    objects.alter(segment_name(0))
    reader = await opened(objects)
    assert len(reader.catalog.by_id) == SEGMENT + 1
    assert list(reader.log.damage) == [segment_name(0)]


async def test_an_object_under_another_name_is_refused() -> None:
    """A failure means that a restored backup with mixed-up files gives ids twice."""
    objects = MemoryObjects()
    await opened(objects, "ab")
    objects.contents[entry_name(2)] = objects.contents[entry_name(1)]
    reader = await opened(objects)
    assert list(reader.log.damage) == [entry_name(2)]


async def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """A failure means that an older registry misreads what a newer one stored."""
    objects = Folder(tmp_path)
    await opened(objects, "a")
    path = tmp_path / entry_name(1)
    path.write_bytes(path.read_bytes().replace(b"penstock-registry 1 ", b"penstock-registry 2 "))
    reader = await opened(objects)
    assert "reads format 1" in reader.log.damage[entry_name(1)]


async def test_a_folder_survives_leftovers_of_killed_processes(tmp_path: Path) -> None:
    """A failure means that half of a file, left by a kill -9, is read as an object."""
    objects = Folder(tmp_path)
    await opened(objects, "a")
    (tmp_path / "log" / ".new-000000000002-aa").write_bytes(b"penstock-regi")
    reader = await opened(objects)
    assert not reader.log.damage
    assert await reader.add("b") == 2


async def test_concurrent_reads_share_a_look_at_the_store() -> None:
    """A failure means that a thousand readers cause a thousand requests to the bucket."""
    objects = MemoryObjects()
    member = await opened(objects)
    objects.reads = 0
    await asyncio.gather(*(member.log.refresh() for _ in range(100)))
    assert objects.reads <= 2


async def test_a_refresh_sees_what_was_appended_before_it_began() -> None:
    """A failure means that a client does not find the version that another registry has just confirmed."""
    objects = MemoryObjects()
    first, second = await opened(objects), await opened(objects)
    for number in range(20):
        waiting = asyncio.create_task(second.log.refresh())
        await asyncio.sleep(0)
        await first.add(f"n{number}")
        await second.log.refresh()
        assert second.log.number == first.log.number
        await waiting
