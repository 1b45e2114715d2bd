"""A member whose topic was made anew, or whose log was cut off, while it reads."""

import asyncio
import random
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest
from aiokafka.errors import CorruptRecordException, OffsetOutOfRangeError
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.errors import NotOwner, Unavailable
from services.core.broker.kafka.aiokafka_internals import FetchBudget, generation_of
from services.core.broker.kafka.assignment import Assignment
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.consumer import FreezeDetector, KafkaConsumer, SharedResources
from services.core.broker.kafka.positions import GroupStarts
from services.core.broker.record import TopicPartition
from tests.support.group_model import EPOCH, TOPIC, Client, GroupModel, OnRecord

_SOURCE = TopicPartition(TOPIC, 0)


class Reader:
    """The only member of its group; it reads three records at a time, written under EPOCH."""

    def __init__(self) -> None:
        self.group = GroupModel(random.Random(0), 1, 9)
        self.group.faulty = False
        self.client = Client(self.group)
        self.client.epoch = EPOCH
        self.revoked: list[frozenset[TopicPartition]] = []
        self.own = Assignment(self._on_revoke, 5.0, lambda: generation_of(self.client))
        shared = SharedResources(cast(Cluster, self.group), cast(GroupStarts, OnRecord()), FetchBudget())
        self.consumer = KafkaConsumer(shared, cast(Any, self.client), self.own, "g", "earliest", FreezeDetector(600.0))

    async def _on_revoke(self, partitions: frozenset[TopicPartition]) -> None:
        self.revoked.append(partitions)
        with pytest.raises(NotOwner):
            await self.consumer.commit({_SOURCE: 2})

    async def join(self) -> None:
        """Own the partition, read three records and commit them."""
        coordinator = self.client._coordinator
        coordinator.generation, coordinator.member_id = self.group.generation, "m"
        self.group.members = {"m"}
        await self.own.on_partitions_assigned([_SOURCE])
        assert await self.read() == [0, 1, 2]
        await self.consumer.commit({_SOURCE: 2})

    async def read(self) -> list[int]:
        """The next offsets; a poll that brings nothing is made again."""
        for _ in range(3):
            if batches := await self.consumer.poll(max_records=10, max_wait=0):
                return [offset for batch in batches for offset in batch.offsets]
        return []


async def test_another_leader_of_the_same_log_is_read_on() -> None:
    """If it fails, each election makes members drain and read again."""
    reader = Reader()
    await reader.join()
    reader.client.epoch, reader.group.cut = EPOCH + 1, 3
    assert await reader.read() == [3, 4, 5]
    assert reader.revoked == []


async def test_a_log_that_was_cut_off_in_service_is_read_from_the_cut() -> None:
    """If it fails, what was written below the position since the log lost its end is skipped."""
    reader = Reader()
    await reader.join()
    reader.client.epoch, reader.group.cut = EPOCH + 1, 1
    assert await reader.read() == [1, 2, 3]
    assert reader.revoked == [{_SOURCE}]
    offset, note = reader.group.offsets[_SOURCE]
    assert (offset, note.rpartition(";")[2]) == (1, f"epoch={EPOCH}"), (
        "else a second cut before the next commit is not noticed"
    )


async def test_a_cut_is_noticed_though_nothing_is_stored_behind_it() -> None:
    """If it fails, what a new leader stored in place of as many lost records waits until something else comes."""
    reader = Reader()
    reader.group.end = 3
    await reader.join()
    assert await reader.read() == []
    reader.client.epoch, reader.group.cut = EPOCH + 1, 1
    reader.consumer._checked_at = float("-inf")
    assert await reader.read() == [1, 2]
    assert reader.revoked == [{_SOURCE}]


async def test_a_new_leader_that_cannot_be_asked_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one partition whose leader is away stops all partitions of the member."""
    reader = Reader()
    other = TopicPartition(TOPIC, 1)
    reader.group.sources.append(other)
    coordinator = reader.client._coordinator
    coordinator.generation, coordinator.member_id, reader.group.members = reader.group.generation, "m", {"m"}
    await reader.own.on_partitions_assigned(reader.group.sources)
    assert await reader.read() == [0, 1, 2, 0, 1, 2]
    describe = reader.group.describe

    async def move_one(*asked: Any) -> Any:
        found = await describe(*asked)
        partitions = dict(found[TOPIC].partitions)
        partitions[0] = replace(partitions[0], leader=-1, epoch=EPOCH + 1)
        return {TOPIC: replace(found[TOPIC], partitions=partitions)}

    monkeypatch.setattr(reader.group, "describe", move_one)
    reader.client.epoch, reader.group.cut = EPOCH + 1, 3
    reader.consumer._checked_at = float("-inf")
    assert await reader.consumer._log.find_changed({other: (3, EPOCH)}, {other: EPOCH + 1}) == set()
    reader.group.cut = 1
    assert await reader.consumer._log.find_changed({other: (3, EPOCH)}, {other: EPOCH + 1}) == {other}


async def test_a_former_leader_does_not_say_that_nothing_was_cut_off() -> None:
    """If it fails, what the new leader stored in place of lost records is skipped: the former one still has those."""
    reader = Reader()
    await reader.join()
    reader.client.epoch, reader.group.cut, reader.group.former = EPOCH + 1, 1, 1
    assert await reader.read() == [1, 2, 3]
    assert reader.revoked == [{_SOURCE}]


@pytest.mark.parametrize("number", [0, 1])
async def test_partitions_that_are_read_in_two_lives_of_a_topic(number: int) -> None:
    """If it fails, a member never notices that one of its partitions is made anew while another one has a new leader."""
    reader = Reader()
    reader.group.sources.append(TopicPartition(TOPIC, 1))
    coordinator = reader.client._coordinator
    coordinator.generation, coordinator.member_id, reader.group.members = reader.group.generation, "m", {"m"}
    await reader.own.on_partitions_assigned(reader.group.sources)
    assert await reader.read() == [0, 1, 2, 0, 1, 2]
    old, other = TopicPartition(TOPIC, number), TopicPartition(TOPIC, 1 - number)
    reader.own.metadata[old] = reader.own.metadata[old]._replace(topic=str(UUID(int=1)))
    reader.client.epoch, reader.group.cut = EPOCH + 1, 3
    assert await reader.consumer._log.find_changed({other: (3, EPOCH)}) == {old}


async def test_a_log_that_is_cut_off_while_records_are_examined_is_read_from_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it fails, records of the old log count as read under the new leader, and what it stored in their place is skipped."""
    reader = Reader()
    await reader.join()
    describe = reader.group.describe

    async def cut_off(*asked: Any) -> Any:
        found = await describe(*asked)
        reader.client.epoch, reader.group.cut = EPOCH + 1, 1  # aiokafka fetches on, from the new leader
        return found

    monkeypatch.setattr(reader.group, "describe", cut_off)
    reader.consumer._checked_at = float("-inf")
    assert await reader.read() == [3, 4, 5]
    assert await reader.read() == [1, 2, 3]
    assert reader.revoked == [{_SOURCE}]


@pytest.mark.parametrize("by", ["epoch", "time"])
async def test_a_topic_made_anew_in_service_is_read_from_its_oldest_record(by: str) -> None:
    """If it fails, the first events of the new topic are skipped, or the old one's marks are committed onto it."""
    reader = Reader()
    await reader.join()
    reader.group.make_anew()
    if by == "epoch":
        reader.client.epoch = EPOCH - 1
    else:
        reader.consumer._checked_at = float("-inf")
    assert await reader.read() == [0, 1, 2]
    assert reader.revoked == [{_SOURCE}]
    await reader.consumer.commit({_SOURCE: 2})
    assert reader.group.offsets[_SOURCE][1].startswith(f"partitions=1;topic={reader.group.id}")


async def test_a_pause_ends_when_the_topic_is_made_anew() -> None:
    """If it fails, a partition that was paused then is never read again by this member: whoever paused it was told it is over."""
    reader = Reader()
    await reader.join()
    reader.consumer.pause([_SOURCE])
    assert await reader.read() == []
    reader.group.make_anew()
    reader.consumer._checked_at = float("-inf")
    assert await reader.read() == [0, 1, 2]
    assert reader.revoked == [{_SOURCE}]


async def test_a_node_that_knows_a_deleted_topic_says_nothing_of_the_new_one() -> None:
    """If it fails, lag, and where damage is, are those of a topic that was deleted: its node answers by the name."""
    reader = Reader()
    await reader.join()
    reader.group.stale_id = "another"
    with pytest.raises(Unavailable):
        await reader.consumer.lag()
    with pytest.raises(Unavailable):
        await reader.consumer._examine(CorruptRecordException("checksum mismatch"))


async def test_an_offset_that_was_not_asked_for_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a group that comes back to a topic made anew stops: aiokafka reads at the old commit before we seek."""
    reader = Reader()
    await reader.join()
    getmany, errors = reader.client.getmany, [OffsetOutOfRangeError({KafkaPartition(*_SOURCE): 34})]

    async def fail_once(**asked: Any) -> Any:
        if errors:
            raise errors.pop()
        return await getmany(**asked)

    monkeypatch.setattr(reader.client, "getmany", fail_once)
    assert await reader.read() == [3, 4, 5]
    assert reader.revoked == []


@pytest.mark.parametrize("is_suspect", [False, True])
async def test_cancelling_a_poll_that_asks_about_the_log_loses_nothing(
    is_suspect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, what was fetched when a service's poll was cut short is never returned: events are skipped."""
    reader = Reader()
    await reader.join()
    reader.client.epoch = EPOCH + 1 if is_suspect else EPOCH
    reader.group.cut = 3
    reader.consumer._checked_at = float("-inf")
    asked = asyncio.Event()

    async def hang(topics: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(reader.group, "describe", hang)
        polling = asyncio.create_task(reader.consumer.poll(max_records=10, max_wait=0))
        await asked.wait()
        polling.cancel()
        await asyncio.wait([polling])
    assert await reader.read() == [3, 4, 5]
