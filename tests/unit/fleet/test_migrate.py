"""Migrations of a live stream from log to log: writers and a group go on, and the migration is killed at any step and goes on."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.core.broker.contract import Appended, Broker, PartitionRange, TopicSpec
from services.core.broker.errors import AccessRefused, NotAllowed, OutcomeUnknown, Unavailable
from services.core.broker.log import LogBroker
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.retention import remove_before
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.homes import Home, MigrationStep
from services.core.pipe_file.pipes import PipeFile
from services.fleet.migrate import exact_copy, positions, steps
from services.fleet.migrate.copying import Complete, CopyDiffers
from services.fleet.migrate.exact_copy import ExactCopy
from services.fleet.migrate.movable import check_movable, load_movable
from services.fleet.migrate.steps import Migration
from services.fleet.problem import CommandFailed
from tests.support.migrations import GROUP, KEYS, STREAM, Killed, World, run_history, shorten_times


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_times(monkeypatch)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    found = World(f"log://{tmp_path / 'own'}", f"log://{tmp_path / 'second'}")
    await found.set_up()
    return found


async def test_a_stream_moves_while_it_is_written_and_read(world: World) -> None:
    """Without a kill only an append in doubt is there twice: one that ended after the short lease, on a machine with other work.

    Each key of two writers has at most one under way at each of two moves.
    """
    assert await run_history(world, seed=0, kills=0) <= 2 * 2 * KEYS
    assert sum(map(len, world.acknowledged.values())) > 0


@pytest.mark.parametrize("seed", range(1, 4))
async def test_killed_at_any_step(world: World, seed: int) -> None:
    """Each step may be repeated: nothing is lost, keys stay in order, only appends in doubt are there twice."""
    assert await run_history(world, seed, kills=4) <= 2 * KEYS * 8


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 24))
async def test_killed_at_any_step_in_many_histories(world: World, seed: int) -> None:
    """As above."""
    assert await run_history(world, seed, kills=6) <= 2 * KEYS * 12


async def expire(folder: Path, before: int) -> None:
    """As retention does, in partition 0."""

    def cut() -> None:
        store = TopicStore.open(DataFolder(folder), STREAM)
        try:
            remove_before(store, 0, before)
        finally:
            store.close()

    await asyncio.to_thread(cut)


async def _fill(world: World, count: int) -> None:
    async with world.process() as (broker, _), Producer(broker.appender) as producer:
        records = [Record(None, b"%d" % number, 0) for number in range(count)]
        (await producer.send_to(STREAM, {0: records})).raise_first()


async def test_a_group_continues_at_its_event_and_offsets_stay(world: World, tmp_path: Path) -> None:
    """Also when retention has removed the beginning, so the copy's offsets on its broker are others."""
    await _fill(world, 10)
    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 6, 1: -1})
        await expire(tmp_path / "own", 4)
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert (result.events, result.groups) == (6, 1)
        assert (await broker.reader.describe(STREAM))[0] == PartitionRange(4, 10)
        assert await broker.admin.positions(GROUP, STREAM) == {0: 7, 1: 0}
        batch = await broker.reader.read(STREAM, 0, 7, max_records=1)
        assert batch is not None
        assert (list(batch.offsets), batch.records[0].value) == ([7], b"7")
    async with LogBroker.open(str(tmp_path / "second")) as there:
        assert (await there.reader.describe(STREAM))[0] == PartitionRange(0, 6)
        assert await there.admin.positions(GROUP, STREAM) == {0: 3, 1: 0}


async def test_a_group_with_a_gap_is_named_before_anything_is_held(world: World, tmp_path: Path) -> None:
    """At its new place the gap would be silent."""
    await _fill(world, 10)
    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 1})
        await expire(tmp_path / "own", 4)
        with pytest.raises(CommandFailed, match=f"the group {GROUP} has not read events"):
            await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert places.home(STREAM).state == "copying"
        assert (await Migration(broker, places, world.load, STREAM, "test").undo()).home.state is None
    async with LogBroker.open(str(tmp_path / "second")) as there:
        assert STREAM not in await there.admin.topics()


async def test_nobody_reads_there_before_the_last_member_has_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that does not follow the moves still delivers from the former topic: its commits would not count any more."""
    monkeypatch.setattr(positions, "LEAVE_S", 0.5)
    await _fill(world, 10)

    async def revoke(_partitions: frozenset[TopicPartition]) -> None:
        """Nothing is under way."""

    async with world.process() as (broker, places):
        async with (
            LogBroker.open(str(tmp_path / "own")) as old,
            old.consumer(GROUP, [STREAM], start="earliest", on_revoke=revoke) as member,
        ):
            async with asyncio.timeout(600):
                while not (batches := await member.poll(max_records=4, max_wait=0.1)):
                    pass
            await member.commit({batches[0].source: 1})
            with pytest.raises(CommandFailed, match=f"members of {GROUP} still read {STREAM} on default"):
                await Migration(broker, places, world.load, STREAM, "test").run("second")
            assert places.home(STREAM).state == "written"
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert result.home.readers == "second"
        assert (await broker.admin.positions(GROUP, STREAM))[0] == 2


def _with_destination(world: World, name: str, *, instead: bool = False) -> PipeFile:
    """The pipe file with one more destination that begins at the latest event. instead: of the one that is there."""
    data = world.pipes.model_dump(mode="json", by_alias=True, exclude_unset=True)
    more = {"name": name, "start": "latest", "webhook": {"url": "https://x.example/"}}
    found = data["pipes"]["shop"]["destinations"]
    data["pipes"]["shop"]["destinations"] = [more] if instead else [*found, more]
    return PipeFile.model_validate(data)


@pytest.mark.parametrize("step", ["copy", "after held", "after written", "groups"])
async def test_a_destination_that_is_added_while_the_stream_is_copied_skips_nothing(world: World, step: str) -> None:
    """Its lane has begun at the latest event, and got some. Without a position in the copy it would begin at the latest again."""
    await _fill(world, 10)
    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 3})
        await broker.admin.set_committed("shop.new", STREAM, {0: 6, 1: -1})
        added = _with_destination(world, "new")

        def edit(now: str) -> None:
            if now == step:
                world.pipes = added

        result = await Migration(broker, places, world.load, STREAM, "test", before=edit).run("second")
        assert result.groups == 2
        assert await broker.admin.positions("shop.new", STREAM) == {0: 7, 1: 0}
        assert (await broker.admin.positions(GROUP, STREAM))[0] == 4


async def test_members_of_a_destination_that_was_added_are_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they commit at the former home after their position was copied is delivered again."""
    monkeypatch.setattr(positions, "LEAVE_S", 0.5)
    await _fill(world, 10)

    async def revoke(_partitions: frozenset[TopicPartition]) -> None:
        """Nothing is under way."""

    added = _with_destination(world, "new")

    def edit(step: str) -> None:
        if step == "copy":
            world.pipes = added

    async with world.process() as (broker, places):
        async with (
            LogBroker.open(str(tmp_path / "own")) as old,
            old.consumer("shop.new", [STREAM], start="earliest", on_revoke=revoke) as member,
        ):
            async with asyncio.timeout(600):
                while not await member.poll(max_records=4, max_wait=0.1):
                    pass
            with pytest.raises(CommandFailed, match=r"members of shop\.new still read orders on default"):
                await Migration(broker, places, world.load, STREAM, "test", before=edit).run("second")
        assert places.home(STREAM).state == "written"


async def test_a_destination_that_was_removed_meanwhile_keeps_its_position(world: World) -> None:
    """Its lane runs until the fleet starts again, and the edit may be taken back."""
    await _fill(world, 10)

    def edit(step: str) -> None:
        if step == "after held":
            world.pipes = _with_destination(world, "other", instead=True)

    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 6, 1: -1})
        await Migration(broker, places, world.load, STREAM, "test", before=edit).run("second")
        assert await broker.admin.positions(GROUP, STREAM) == {0: 7, 1: 0}


async def test_what_the_pipe_file_forbids_meanwhile_is_refused_before_anything_is_held(world: World) -> None:
    """A transform that reads the stream would stay on the former topic, silently."""
    await _fill(world, 3)

    def edit(step: str) -> None:
        if step == "copy":
            data = world.pipes.model_dump(mode="json", by_alias=True, exclude_unset=True)
            data["pipes"]["shop"]["transform"] = {"sql": "SELECT event FROM orders"}
            world.pipes = PipeFile.model_validate(data)

    async with world.process() as (broker, places):
        with pytest.raises(CommandFailed, match="the transform of shop reads orders"):
            await Migration(broker, places, world.load, STREAM, "test", before=edit).run("second")
        assert places.home(STREAM).state == "copying"


@pytest.mark.parametrize(
    ("text", "message"),
    [("streams: [", "not valid YAML"), ("streams: {other: {}}\nbrokers: {second: 'log:///x'}", "no stream orders")],
)
@pytest.mark.parametrize(("step", "state"), [("copy", "copying"), ("after held", "written")])
async def test_a_pipe_file_that_cannot_be_used_ends_the_command_without_half_a_step(
    world: World, tmp_path: Path, text: str, message: str, step: str, state: str
) -> None:
    """It is mended, and the same command goes on."""
    await _fill(world, 10)
    path = tmp_path / "pipes.yaml"
    stored = good = json.dumps(world.pipes.model_dump(mode="json", by_alias=True, exclude_unset=True))

    def load(to: str | None) -> PipeFile:
        path.write_text(stored)
        return load_movable(path, STREAM, world.url, to)

    def edit(now: str) -> None:
        nonlocal stored
        if now == step:
            stored = text

    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 6, 1: -1})
        with pytest.raises(CommandFailed, match="the pipe file has changed") as refused:
            await Migration(broker, places, load, STREAM, "test", before=edit).run("second")
        assert message in refused.value.what
        assert "the same command, which goes on" in refused.value.remedy
        assert ("no event of orders is delivered" in refused.value.what) == (state == "written")
        assert places.home(STREAM).state == state
        second = await broker.brokers.named("second")
        assert await second.admin.positions(GROUP, STREAM) == {}
        stored = good
        assert (await Migration(broker, places, load, STREAM, "test").run("second")).groups == 1
        assert await broker.admin.positions(GROUP, STREAM) == {0: 7, 1: 0}


@pytest.mark.parametrize("end", ["finish", "back"])
async def test_what_came_late_to_the_former_topic_is_stored(world: World, tmp_path: Path, end: str) -> None:
    """A service that was started without `brokers` has acknowledged it. Both ends delete the former topic."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        await Migration(broker, places, world.load, STREAM, "test").run("second")
        async with LogBroker.open(str(tmp_path / "own")) as own:
            await own.appender.append(STREAM, 0, [Record(None, b"late", 0)], timeout=600)
        migration = Migration(broker, places, world.load, STREAM, "test")
        assert (await (migration.finish() if end == "finish" else migration.run("default"))).late == 1
        batch = await broker.reader.read(STREAM, 0, 3, max_records=1)
        assert batch is not None
        assert batch.records[0].value == b"late"


async def test_a_former_topic_that_answers_nothing_is_not_deleted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment: its late events would be gone."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        await Migration(broker, places, world.load, STREAM, "test").run("second")
        async with LogBroker.open(str(tmp_path / "own")) as own:
            await own.appender.append(STREAM, 0, [Record(None, b"late", 0)], timeout=600)
            with monkeypatch.context() as patch:
                patch.setattr((await broker.brokers.named("default")).reader, "read", AsyncMock(return_value=None))
                with pytest.raises(Unavailable, match="what is before its end is not seen"):
                    await Migration(broker, places, world.load, STREAM, "test").finish()
            assert STREAM in await own.admin.topics()
        assert (await Migration(broker, places, world.load, STREAM, "test").finish()).late == 1


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_control_topic_that_is_away_for_a_moment_ends_no_finish(world: World, is_stored: bool) -> None:
    """Kafka's coordinator is loading, so the last step is not recorded; the person sees an error after the topic is deleted."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        migration = Migration(broker, places, world.load, STREAM, "test")
        await migration.run("second")
        record = places.record

        async def away(*args: Any, **more: Any) -> bool:
            places.record = record  # type: ignore[method-assign]
            if is_stored:
                await record(*args, **more)
                raise OutcomeUnknown("no answer")
            raise Unavailable("the coordinator is loading")

        places.record = away  # type: ignore[method-assign]
        assert (await migration.finish()).home.former == ""
        assert (await broker.reader.describe(STREAM))[0].end == 3


async def test_undo_is_for_what_was_not_handed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever repeats it, because the command was killed, must not move the stream anywhere."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        migration = Migration(broker, places, world.load, STREAM, "test")
        with pytest.raises(CommandFailed, match="is not being moved"):
            await migration.undo()
        with monkeypatch.context() as patch:
            patch.setattr(migration, "_move_groups", AsyncMock(side_effect=Killed))
            with pytest.raises(Killed):
                await migration.run("second")
        with pytest.raises(CommandFailed, match="is stored on second already") as refused:
            await migration.undo()
        assert "--to second, which completes the move" in refused.value.remedy
        await migration.run("second")
        with pytest.raises(CommandFailed, match="has moved to second") as refused:
            await migration.undo()
        assert "--to default, which moves it back" in refused.value.remedy
        assert (await migration.run("default")).home.readers == "default"


async def test_no_group_continues_behind_the_end_of_the_copy(world: World, tmp_path: Path) -> None:
    """It may have read an append that came late to the former topic: the next events of the stream have these offsets."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: 2})
        migration = Migration(broker, places, world.load, STREAM, "test")
        move_groups = migration._move_groups

        async def read_late_events() -> None:
            async with LogBroker.open(str(tmp_path / "own")) as own:
                await own.appender.append(STREAM, 0, [Record(None, b"late", 0)] * 2, timeout=600)
                await own.admin.set_committed(GROUP, STREAM, {0: 4})
            await move_groups()

        migration._move_groups = read_late_events  # type: ignore[method-assign]
        await migration.run("second")
        assert (await broker.admin.positions(GROUP, STREAM))[0] == 3
        assert (await Migration(broker, places, world.load, STREAM, "test").finish()).late == 2


async def test_a_command_that_was_frozen_deletes_nothing(world: World) -> None:
    """Somebody else has moved the stream meanwhile, and it lives where its former topic was."""
    await _fill(world, 3)
    async with world.process() as (broker, places), world.process() as (other, others):
        migration = Migration(broker, places, world.load, STREAM, "test")
        await migration.run("second")
        named = migration._named

        async def freeze(name: str) -> Broker:
            migration._named = named  # type: ignore[method-assign]
            rival = Migration(other, others, world.load, STREAM, "rival")
            await rival.finish()
            await rival.run("default")
            return await named(name)

        migration._named = freeze  # type: ignore[method-assign]
        with pytest.raises(CommandFailed, match="somebody else has moved orders"):
            await migration.finish()
        assert (await broker.reader.describe(STREAM))[0].end == 3


async def test_a_command_that_was_frozen_moves_no_group(world: World) -> None:
    """Somebody else has completed the move, and the group has read on: it would get these events again."""
    await _fill(world, 10)
    async with world.process() as (broker, places), world.process() as (other, others):
        await broker.admin.set_committed(GROUP, STREAM, {0: 3, 1: -1})
        migration = Migration(broker, places, world.load, STREAM, "test")
        same_offset, frozen = migration._same_offset, list[int]()

        async def freeze(home: Home, partition: int, offset: int) -> int:
            if not frozen:
                frozen.append(partition)
                await Migration(other, others, world.load, STREAM, "rival").run("second")
                await other.admin.set_committed(GROUP, STREAM, {0: 8})
            return await same_offset(home, partition, offset)

        migration._same_offset = freeze  # type: ignore[method-assign]
        with pytest.raises(CommandFailed, match="somebody else has moved orders"):
            await migration.run("second")
        assert (await other.admin.positions(GROUP, STREAM))[0] == 9


async def test_a_copy_that_was_handed_over_or_given_up_is_written_no_more(world: World) -> None:
    """A second command may have done it while this one was frozen."""
    await _fill(world, 3)
    async with world.process() as (broker, places), world.process() as (other, others):
        migration = Migration(broker, places, world.load, STREAM, "test")
        for end in ("undo", "run"):
            await migration._begin("second")
            copy = places.home(STREAM).copy
            await migration._require_copying(copy)
            rival = Migration(other, others, world.load, STREAM, "rival")
            await others.refresh()
            await (rival.undo() if end == "undo" else rival.run("second"))
            with pytest.raises(CommandFailed, match="somebody else has moved orders"):
                await migration._require_copying(copy)


async def test_a_hold_that_is_always_too_short_ends_the_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partitions, or many events: each turn would hold the writers again, for ever."""
    monkeypatch.setattr(steps, "_MOST_VOID_TURNS", 1)
    await _fill(world, 3)
    async with world.process() as (broker, places):
        record = places.record

        async def too_late(stream: str, step: MigrationStep, home: Home | None = None) -> bool:
            if step.state == "written":
                await record(stream, MigrationStep("released", by="a writer"))
            return await record(stream, step, home)

        places.record = too_late  # type: ignore[method-assign]
        with pytest.raises(CommandFailed, match="the writers went on 2 times"):
            await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert places.home(STREAM).writers == "default"


async def test_a_copy_that_fails_while_writers_are_held_begins_no_new_wait(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers would be held for one more lease, and go on before the rest is copied. The copy fails twice, if it is asked."""
    await _fill(world, 3)
    follow, failed = ExactCopy.follow, 0
    async with world.process() as (broker, places):

        async def fail_when_held(copy: ExactCopy) -> float:
            nonlocal failed
            if places.home(STREAM).state == "held" and failed < 2:
                failed += 1
                raise Unavailable("no node answers")
            return await follow(copy)

        monkeypatch.setattr(ExactCopy, "follow", fail_when_held)
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert (result.home.readers, result.events, failed) == ("second", 3, 1)


async def test_a_copy_that_is_found_to_differ_while_leases_end_holds_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers would be held until they go on by themselves."""
    await _fill(world, 3)
    async with world.process() as (broker, places):

        async def differ_when_held(copy: ExactCopy) -> float:
            if places.home(STREAM).state == "held":
                raise CopyDiffers("another event", "--undo")
            return 0.0

        monkeypatch.setattr(ExactCopy, "follow", differ_when_held)
        with pytest.raises(CopyDiffers):
            await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert places.home(STREAM).state == "copying"


async def test_a_hand_over_counts_only_while_its_own_hold_lasts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was slow: the writers went on, and a second command holds them again. What was acknowledged in between is no
    part of the copy that the first command has completed."""
    await _fill(world, 3)
    async with world.process() as (broker, places), world.process() as (_, others):
        complete, overtaken = ExactCopy.complete, list[int]()

        async def be_overtaken(copy: ExactCopy) -> Complete | None:
            found = await complete(copy)
            if not overtaken:
                overtaken.append(1)
                await others.refresh()
                assert await others.record(STREAM, MigrationStep("released", by="a writer"))
                await _fill(world, 1)
                assert await others.record(STREAM, MigrationStep("held", by="rival"))
                await places.refresh()
            return found

        monkeypatch.setattr(ExactCopy, "complete", be_overtaken)
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert (await broker.reader.describe(STREAM))[0] == PartitionRange(0, 4)
        assert result.events == 4


async def test_the_same_broker_by_another_name_is_refused(tmp_path: Path) -> None:
    """The move would succeed, and --finish delete the stream."""
    (tmp_path / "link").symlink_to(tmp_path / "own")
    world = World(f"log://{tmp_path / 'own'}", f"log://{tmp_path / 'link'}")
    await world.set_up()
    async with world.process() as (broker, places):
        with pytest.raises(CommandFailed, match="second and default are the same broker"):
            await Migration(broker, places, world.load, STREAM, "test").run("second")


async def test_an_undo_that_was_killed_is_completed(world: World, tmp_path: Path) -> None:
    """By the same command, and by the next migration."""
    await _fill(world, 3)
    async with world.process() as (broker, places):

        def die(step: str) -> None:
            if step == "held":
                raise Killed

        for attempt in range(2):
            migration = Migration(broker, places, world.load, STREAM, "test", before=die)
            with pytest.raises(Killed):
                await migration.run("second")
            migration._former.delete = AsyncMock(side_effect=Killed)  # type: ignore[method-assign]
            with pytest.raises(Killed):
                await migration.undo()
            async with LogBroker.open(str(tmp_path / "second")) as there:
                assert STREAM in await there.admin.topics()
                if attempt == 0:
                    await Migration(broker, places, world.load, STREAM, "test").undo()
                    assert STREAM not in await there.admin.topics()
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert (result.home.readers, result.events) == ("second", 3)


async def test_a_move_back_that_was_given_up_leaves_no_former_topic(world: World) -> None:
    """Its copy would be taken for late events of the stream, and sent again."""
    await _fill(world, 2)
    async with world.process() as (broker, places):
        await Migration(broker, places, world.load, STREAM, "test").run("second")
        await _fill(world, 5)

        def die(step: str) -> None:
            if step == "held":
                raise Killed

        back = Migration(broker, places, world.load, STREAM, "test", before=die)
        with pytest.raises(Killed):
            await back.run("default")
        back._former.delete = AsyncMock(side_effect=Killed)  # type: ignore[method-assign]
        with pytest.raises(Killed):
            await back.undo()
        migration = Migration(broker, places, world.load, STREAM, "test")
        with pytest.raises(CommandFailed, match="there is nothing to finish"):
            await migration.finish()
        result = await migration.run("default")
        assert (result.late, result.events, result.home.former) == (0, 7, "second")


async def test_a_missing_right_ends_the_command_at_once_and_repeats_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late events would be sent again with each try. A login that is refused is tried again, for seconds and not for a minute."""
    await _fill(world, 3)
    async with world.process() as (broker, places):
        await Migration(broker, places, world.load, STREAM, "test").run("second")
        async with LogBroker.open(str(tmp_path / "own")) as own:
            await own.appender.append(STREAM, 0, [Record(None, b"late", 0)], timeout=600)
        migration = Migration(broker, places, world.load, STREAM, "test")
        delete = migration._former.delete
        failures = [Unavailable("away"), NotAllowed("no right")]
        migration._former.delete = AsyncMock(side_effect=failures)  # type: ignore[method-assign]
        with pytest.raises(NotAllowed):
            await migration.run("default")
        monkeypatch.setattr(steps, "_REFUSED_S", 0.5)
        refused = migration._former.delete = AsyncMock(side_effect=AccessRefused("no token"))  # type: ignore[method-assign]
        with pytest.raises(AccessRefused):
            await migration.run("default")
        assert 2 <= refused.await_count <= 5, "a pause of a fifth of a second is behind each try"
        migration._former.delete = delete  # type: ignore[method-assign]
        assert (await migration.run("default")).late == 1
        assert sum(held.end for held in (await broker.reader.describe(STREAM)).values()) == 4


@pytest.mark.parametrize("answer", ["stored", "not stored", "a repeat"])
async def test_an_append_in_doubt_is_copied_once(world: World, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """It is looked for, then repeated as it is. Of a repeat (DUPLICATE_SEQUENCE) Kafka may not say the offset."""
    monkeypatch.setattr(exact_copy, "_AGAIN_S", 0.01)
    await _fill(world, 3)
    async with world.process() as (broker, places):
        appender = (await broker.brokers.named("second")).appender
        append, asked = appender.append, list[object]()

        async def doubt(topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
            asked.append(records)
            if len(asked) > 1 or answer != "not stored":
                found = await append(topic, partition, records, timeout=timeout)
            if len(asked) == 1 and answer == "a repeat":
                return Appended(-1, -1)
            if len(asked) == 1:
                raise OutcomeUnknown("no answer")
            return found

        monkeypatch.setattr(appender, "append", doubt)
        result = await Migration(broker, places, world.load, STREAM, "test").run("second")
        assert (result.events, len(asked)) == (3, 2 if answer == "not stored" else 1)
        assert all(one is asked[0] for one in asked)


async def test_a_copy_that_somebody_else_began_anew_is_compared_anew(world: World) -> None:
    """A command that slept would hand over what it never compared."""
    await _fill(world, 3)
    async with world.process() as (broker, places):

        def die(step: str) -> None:
            if step == "held":
                raise Killed

        slow = Migration(broker, places, world.load, STREAM, "slow", before=die)
        with pytest.raises(Killed):
            await slow.run("second")
        await Migration(broker, places, world.load, STREAM, "rival").undo()
        with pytest.raises(Killed):
            await Migration(broker, places, world.load, STREAM, "rival", before=die).run("second")
        slow._before = lambda _step: None
        assert (await slow.run("second")).events == 3


async def test_what_retention_removes_before_it_is_copied(world: World, tmp_path: Path) -> None:
    """The copy cannot begin there: it is given up, with the way on."""
    await _fill(world, 10)
    async with world.process() as (broker, places):
        migration = Migration(broker, places, world.load, STREAM, "test")
        follow = migration._follow

        async def lose() -> None:
            await expire(tmp_path / "own", 4)
            await follow()

        migration._follow = lose  # type: ignore[method-assign]
        with pytest.raises(CommandFailed, match="retention has removed offset 0") as refused:
            await migration.run("second")
        assert "--undo" in refused.value.remedy


async def test_another_writer_there_is_noticed(world: World, tmp_path: Path) -> None:
    """The copy would have other offsets: groups would skip events."""
    await _fill(world, 3)

    async def disturb() -> None:
        async with LogBroker.open(str(tmp_path / "second")) as there:
            await there.appender.append(STREAM, 0, [Record(None, b"foreign", 0)], timeout=600)

    async with world.process() as (broker, places):
        migration = Migration(broker, places, world.load, STREAM, "test")
        await migration._begin("second")
        await disturb()
        with pytest.raises(CommandFailed, match="another event in the copy"):
            await migration.run("second")
        assert places.home(STREAM).writers == "default"


async def test_a_topic_with_events_there_is_not_touched(world: World, tmp_path: Path) -> None:
    """It may be another fleet's."""
    async with LogBroker.open(str(tmp_path / "second")) as there:
        await there.admin.create_topic(TopicSpec(STREAM, 2))
        await there.appender.append(STREAM, 0, [Record(None, b"foreign", 0)], timeout=600)
    async with world.process() as (broker, places):
        with pytest.raises(CommandFailed, match="has a topic orders already"):
            await Migration(broker, places, world.load, STREAM, "test").run("second")


_PIPE = {"sources": ["s"], "destinations": [{"name": "d", "webhook": {"url": "https://x.example/"}}]}


@pytest.mark.parametrize(
    ("changes", "to", "text"),
    [
        ({}, "third", "no broker third"),
        ({"brokers": {}}, "default", "names no other broker"),
        ({"streams": {"s": {"compact": True}}}, "second", "is compacted"),
        ({"streams": {"s": {"topic": "theirs"}}}, "second", "a topic of others"),
        ({"pipes": {"p": _PIPE | {"transform": {"sql": "SELECT event FROM s"}}}}, "second", "transform of p reads s"),
    ],
)
def test_what_cannot_move_is_named(changes: dict[str, Any], to: str, text: str) -> None:
    """Before anything is done."""
    good = {"brokers": {"second": "log:///x"}, "streams": {"s": {}}, "pipes": {"p": _PIPE}}
    check_movable(PipeFile.model_validate(good), "s", "second", "log:///own")
    with pytest.raises(CommandFailed, match=text):
        check_movable(PipeFile.model_validate(good | changes), "s", to, "log:///own")


@pytest.mark.parametrize(("on", "to"), [("default", "second"), ("second", "default")])
def test_a_fleet_of_kinesis_moves_nothing(on: str, to: str) -> None:
    """Its processes read the controls too seldom."""
    file = {"brokers": {"second": "log:///x"}, "streams": {"s": {"on": on}}, "pipes": {"p": _PIPE}}
    with pytest.raises(CommandFailed, match="own broker is Kinesis"):
        check_movable(PipeFile.model_validate(file), "s", to, "kinesis://eu-west-1")


def test_a_fleet_of_kinesis_is_not_told_to_name_brokers() -> None:
    """The fleet would not start with them."""
    file = PipeFile.model_validate({"streams": {"s": {}}, "pipes": {"p": _PIPE}})
    with pytest.raises(CommandFailed, match="own broker is Kinesis"):
        check_movable(file, "s", "second", "kinesis://eu-west-1")
