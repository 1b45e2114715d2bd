"""Offsets of groups that are lost: such a group reads again from the beginning, whatever its start is, and is named."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged, Unavailable
from services.core.broker.log import LogBroker, sqlite_file
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition, GroupsFile
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.broker.log.repair import repair, verify
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.record import TopicPartition
from tests.contract.traffic import ignore_revoke
from tests.unit.log.sample import TOPIC, records

DEADLINE = 600.0


async def join(broker: LogBroker, group: str, wanted: int) -> list[int]:
    """The first `wanted` records that a member gets whose group starts at the latest record; all are committed."""
    found: list[int] = []
    async with (
        asyncio.timeout(DEADLINE),
        broker.consumer(group, [TOPIC], start="latest", on_revoke=ignore_revoke) as consumer,
    ):
        while len(found) < wanted:
            batches = await consumer.poll(max_records=100, max_wait=1.0)
            found += [int(record.value or b"") for batch in batches for record in batch.records]
            await consumer.commit({batch.source: batch.offsets[-1] for batch in batches})
    return sorted(found)


async def fill(broker: LogBroker, first: int) -> None:
    """Five records in each of two partitions."""
    for partition in (0, 1):
        await broker.appender.append(TOPIC, partition, records(first + 5 * partition, 5), timeout=600)


def lose_all(folder: Path) -> None:
    """As a disk that lost the files, and an operator who made away with the rest."""
    for file in folder.glob("groups.*"):
        file.unlink()


def lose_database(folder: Path) -> None:
    """The marks are still there."""
    for file in folder.glob("groups.db*"):
        file.unlink()


def lose_a_row(folder: Path) -> None:
    """One row of committed offsets is not there any more."""
    connection = sqlite_file.connect(DataFolder(folder).groups.db)
    connection.execute("DELETE FROM offsets WHERE grp='behind' AND partition=1")
    connection.close()


def lose_what_was_last_seen(folder: Path) -> None:
    """The group's count of partitions is gone, and one offset."""
    lose_a_row(folder)
    connection = sqlite_file.connect(DataFolder(folder).groups.db)
    connection.execute("DELETE FROM offsets WHERE grp='behind' AND partition=-1")
    connection.close()


@pytest.mark.parametrize("lose", [lose_all, lose_database, lose_a_row, lose_what_was_last_seen])
async def test_a_repair_begins_lost_groups_at_the_earliest_and_names_them(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """Broken: after a repair a destination with `start: latest` skips what it had not delivered, with lag 0."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        assert await join(broker, "behind", 0) == []
        await fill(broker, 0)
    assert (await asyncio.to_thread(verify, tmp_path)).is_sound
    await asyncio.to_thread(lose, tmp_path)
    report = await asyncio.to_thread(repair, tmp_path)
    assert any("'behind'" in problem and "orders[1]" in problem for problem in report.groups.problems)
    assert (await asyncio.to_thread(verify, tmp_path)).is_sound
    async with LogBroker.open(str(tmp_path)) as broker:
        assert sum(lag.records for lag in (await broker.admin.group_lag("behind", TOPIC)).values()) == 10
        assert await join(broker, "behind", 10) == list(range(10))
        assert await join(broker, "new", 0) == [], "a group that was never there has lost nothing"
        await fill(broker, 10)
        assert await join(broker, "new", 10) == list(range(10, 20))


async def test_without_a_repair_too(tmp_path: Path) -> None:
    """Broken: somebody removes every file of the groups, and `start: latest` skips what was not delivered."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "behind", 0)
        await fill(broker, 0)
    await asyncio.to_thread(lose_all, tmp_path)
    async with LogBroker.open(str(tmp_path)) as broker:
        assert await join(broker, "behind", 10) == list(range(10))


async def test_what_was_kept_is_not_read_again(tmp_path: Path) -> None:
    """Broken: one lost row makes every group deliver everything again."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "behind", 0)
        await join(broker, "other", 0)
        await fill(broker, 0)
        await join(broker, "behind", 10)
        await join(broker, "other", 10)
        await fill(broker, 10)
    await asyncio.to_thread(lose_a_row, tmp_path)
    report = await asyncio.to_thread(repair, tmp_path)
    assert not any("'other'" in problem for problem in report.groups.problems)
    async with LogBroker.open(str(tmp_path)) as broker:
        assert await join(broker, "behind", 15) == [5, 6, 7, 8, 9, *range(10, 20)]
        assert await join(broker, "other", 10) == list(range(10, 20))


async def test_partitions_that_a_group_has_not_seen_are_not_lost(tmp_path: Path) -> None:
    """Broken: growing a topic while a destination is away is reported as damage."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "behind", 0)
        await broker.admin.add_partitions(TOPIC, 3)
    assert (await asyncio.to_thread(verify, tmp_path)).is_sound


async def test_a_repaired_topic_still_knows_its_groups(tmp_path: Path) -> None:
    """Broken: a repair of the topic, then one of the groups, and a group skips what it had not read."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "behind", 0)
        await fill(broker, 0)
    folder = DataFolder(tmp_path)
    folder.topic(TOPIC).marks.unlink()
    await asyncio.to_thread(repair, tmp_path)
    await asyncio.to_thread(lose_all, tmp_path)
    async with LogBroker.open(str(tmp_path)) as broker:
        assert await join(broker, "behind", 10) == list(range(10))


async def test_an_altered_name_is_told(tmp_path: Path) -> None:
    """Broken: a flipped bit in a group's name makes it a group that was never there."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "behind", 0)
    await asyncio.to_thread(alter_name, tmp_path)
    report = await asyncio.to_thread(verify, tmp_path)
    assert any("1 groups are altered" in problem for problem in report.topics[0].problems)


def alter_name(folder: Path) -> None:
    """One letter."""
    store = TopicStore.open(DataFolder(folder), TOPIC)
    store.connection.execute("UPDATE groups SET grp='behinx'")
    store.close()


async def test_a_group_that_was_only_moved_is_known_too(tmp_path: Path) -> None:
    """Broken: a group that an operator moved, or that goes on for a renamed one, has not joined yet when the groups' files are
    lost; it begins at the latest record, and nobody gets what it had still to read."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await join(broker, "old", 0)
        await fill(broker, 0)
        await broker.admin.set_committed("moved", TOPIC, {0: 1, 1: 1})
        assert await broker.admin.copy_positions("old", "renamed", TOPIC)
        assert not await broker.admin.copy_positions("nobody", "new", TOPIC)
    await asyncio.to_thread(lose_all, tmp_path)
    async with LogBroker.open(str(tmp_path)) as broker:
        assert await join(broker, "new", 0) == []
        assert await join(broker, "moved", 10) == list(range(10))
        assert await join(broker, "renamed", 10) == list(range(10))


async def test_a_repair_waits_for_members_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: groups.db is replaced under living members; they renew leases in the old file, no commit of theirs is taken any
    more, and their destinations get the same events again without end."""
    monkeypatch.setattr("services.core.broker.log.repair._LOCK_SECONDS", 0.1)
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec(TOPIC, partitions=2))
        await fill(broker, 0)
        async with broker.consumer("g", [TOPIC], start="earliest", on_revoke=ignore_revoke) as consumer:
            while not (batches := await consumer.poll(max_records=10, max_wait=1.0)):
                pass
            await asyncio.to_thread(alter_offsets, tmp_path)
            with pytest.raises(DataDamaged):
                await consumer.commit({batch.source: batch.offsets[-1] for batch in batches})
            with pytest.raises(Unavailable, match="Try: stopping the fleet"):
                await asyncio.to_thread(repair, tmp_path)
    await asyncio.to_thread(repair, tmp_path)
    async with LogBroker.open(str(tmp_path)) as broker:
        assert await join(broker, "g", 10) == list(range(10))


def alter_offsets(folder: Path) -> None:
    """As one flipped bit in each row."""
    connection = sqlite_file.connect(DataFolder(folder).groups.db)
    connection.execute("UPDATE offsets SET crc=crc+1")
    connection.close()


def test_commits_of_another_process_while_the_file_is_opened_are_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a command or a member that opens the groups beside a busy fleet says that commits are missing, and gives up."""
    folder, source = DataFolder.prepare(tmp_path), TopicPartition(TOPIC, 0)
    committed: list[int] = []

    def commit() -> None:
        committed.append(len(committed))
        other.set_progress("g", {source: GroupPosition(b"0123456789abcdef", 0, committed[-1])})

    class BusyMarks(HighWaterMarks):
        def read(self, partitions: int) -> list[int]:
            commit()
            marks = super().read(partitions)
            commit()
            return marks

    with closing(GroupsFile(folder)) as other:
        commit()
        monkeypatch.setattr("services.core.broker.log.groups.HighWaterMarks", BusyMarks)
        GroupsFile(folder).close()
    assert len(committed) == 3
