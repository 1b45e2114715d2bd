"""What a member may commit, and in which order it drains."""

import asyncio
import dataclasses
from collections.abc import Awaitable
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.structs import ConsumerRecord
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.errors import DataDamaged, OffsetOutOfRange, PositionLost
from services.core.broker.existing import ExistingTopics
from services.core.broker.kafka import consumer as consumer_module
from services.core.broker.kafka.aiokafka_internals import FetchBudget, Generation
from services.core.broker.kafka.assignment import Assignment
from services.core.broker.kafka.cluster import Cluster, Timing
from services.core.broker.kafka.consumer import FreezeDetector, KafkaConsumer, SharedResources
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.positions import GroupStarts, StartPositions
from services.core.broker.kafka.reader import Damaged
from services.core.broker.record import Batch, Damage, Record, TopicPartition
from services.core.event import TIME, read_arrival
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.stream import Stream

_ONE, _TWO = TopicPartition("t", 1), TopicPartition("t", 2)


_CLUSTER = Cluster("unused:1", "unit", Timing())
_SHARED = SharedResources(_CLUSTER, GroupStarts(_CLUSTER, AsyncMock(), AsyncMock()), FetchBudget())


_READER = SimpleNamespace(_fetcher=SimpleNamespace(epochs_between=lambda *_: []))


def _at(positions: dict[TopicPartition, int]) -> StartPositions:
    return StartPositions(positions, metadata=dict.fromkeys(positions, CommitMetadata(4, "id")))


class Member:
    """An Assignment with a recording on_revoke."""

    def __init__(self, *, drain: float = 5) -> None:
        self.lost = False
        self.owned_while_draining: list[frozenset[TopicPartition]] = []
        self.hang = False
        self.own = Assignment(self._on_revoke, drain, lambda: Generation(-1, "") if self.lost else Generation(1, "m"))

    async def _on_revoke(self, partitions: frozenset[TopicPartition]) -> None:
        self.owned_while_draining.append(self.own.owned)
        if self.hang:
            await asyncio.Event().wait()


async def test_draining_comes_before_letting_go() -> None:
    """If it fails, nothing can be committed while draining: each rebalance delivers twice what was in flight."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE, _TWO])
    await member.own.on_partitions_revoked([_ONE, _TWO])
    assert member.owned_while_draining == [{_ONE, _TWO}]
    assert not member.own.owned


async def test_what_was_lost_is_let_go_first() -> None:
    """If it fails, a member that was expelled commits over its successor while it drains."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.lost = True
    await member.own.on_partitions_revoked([_ONE])
    assert member.owned_while_draining == [frozenset()]


async def test_a_cancelled_reassignment_leaves_no_partition_unread() -> None:
    """If it fails, a topic made anew in the middle of a cancelled poll is read by nobody until a member comes or goes."""
    member = Member()
    member.hang = True
    await member.own.on_partitions_assigned([_ONE, _TWO])
    reassigning = asyncio.create_task(member.own.reassign({_ONE}))
    while not member.owned_while_draining:
        await asyncio.sleep(0)
    reassigning.cancel()
    await asyncio.wait({reassigning})
    assert member.own.owned == {_ONE, _TWO}
    assert _ONE in member.own.unpositioned


async def test_a_drain_that_hangs_is_cut_off() -> None:
    """If it fails, one hung destination holds up the whole group's rebalance for ever."""
    member = Member(drain=0.01)
    member.hang = True
    await member.own.on_partitions_assigned([_ONE])
    await member.own.on_partitions_revoked([_ONE])
    assert not member.own.owned


async def test_nothing_is_drained_twice_or_taken_while_closing() -> None:
    """If it fails, a rebalance during shutdown drains again, or gives work to a member that is leaving."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    await asyncio.gather(member.own.close(), member.own.on_partitions_revoked([_ONE]))
    await member.own.on_partitions_assigned([_TWO])
    assert member.owned_while_draining == [{_ONE}]
    assert not member.own.owned


async def test_commits_of_an_earlier_ownership_are_refused() -> None:
    """If it fails, a late commit of a partition that came back moves the group behind what another member settled."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.own.begin_at(_at({_ONE: 100}))
    assert member.own.select_commits({_ONE: 98, _TWO: 5}) == ({}, {_ONE, _TWO})
    assert member.own.select_commits({_ONE: 99}) == ({_ONE: 100}, set())


async def test_commits_of_what_was_not_read_are_refused() -> None:
    """If it fails, marks of a topic that was made anew are committed onto the new one: its records are never delivered."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    assert member.own.select_commits({_ONE: 0}) == ({}, {_ONE})
    member.own.begin_at(_at({_ONE: 100}))
    member.own.record_read(_ONE, 110, [])
    assert member.own.select_commits({_ONE: 111}) == ({}, {_ONE})
    assert member.own.select_commits({_ONE: 110}) == ({_ONE: 111}, set())


async def test_a_commit_never_goes_back_within_one_ownership() -> None:
    """If it fails, a commit that overtakes another moves the group back: a crash then delivers again what was settled."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.own.begin_at(_at({_ONE: 100}))
    member.own.record_read(_ONE, 110, [])
    assert member.own.select_commits({_ONE: 108}) == ({_ONE: 109}, set())
    assert member.own.select_commits({_ONE: 104}) == ({_ONE: 109}, set())


async def test_a_lost_position_is_not_committed() -> None:
    """If it fails, a partition that waits for an operator gets an offset that nobody chose."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    placement = _at({_ONE: 100})
    placement.lost[_ONE] = lambda: PositionLost("g", "t", 1, 100, 120)
    member.own.begin_at(placement)
    with pytest.raises(PositionLost, match=r"offsets\.retention\.minutes"):
        member.own.raise_failed()
    assert member.own.select_commits({_ONE: 99}) == ({}, {_ONE})


async def test_what_is_no_longer_stored_is_drained_and_placed_anew() -> None:
    """If it fails, marks of a topic that was made anew stay with its reader, or the partition is never read again."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE, _TWO])
    member.own.begin_at(_at({_ONE: 100, _TWO: 7}))
    member.own.paused.add(_ONE)
    await member.own.reassign({_ONE})
    assert member.owned_while_draining == [{_TWO}]
    assert member.own.owned == {_ONE, _TWO}
    assert member.own.unpositioned == {_ONE}
    assert not member.own.paused
    assert member.own.select_commits({_ONE: 99, _TWO: 6}) == ({_TWO: 7}, {_ONE})


async def test_a_stuck_partition_is_loud_until_it_is_paused() -> None:
    """If it fails, a gap is reported once and then forgotten, or it stops partitions that are well."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.own.failed[_ONE] = lambda: OffsetOutOfRange("t", 1, 5, 10, 20)
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange):
            member.own.raise_failed()
    member.own.paused.add(_ONE)
    member.own.raise_failed()


def _row(offset: int) -> ConsumerRecord[bytes | None, bytes | None]:
    return ConsumerRecord("t", 1, offset, 5, 0, None, b"%d" % offset, None, -1, 1, ())


@pytest.mark.parametrize("offsets", [[3, 4, 5], [3, 7, 8, 20]], ids=["dense", "compacted"])
async def test_offsets_belong_to_their_records(offsets: list[int]) -> None:
    """If it fails, in a compacted topic offsets and records do not fit: wrong commits, wrong statuses."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.own.begin_at(_at({_ONE: 0}))
    consumer = KafkaConsumer(_SHARED, _READER, member.own, "g", "earliest", FreezeDetector(5.0))
    (batch,) = consumer._make_batches(
        {KafkaPartition("t", 1): [_row(offset) for offset in offsets]}, {KafkaPartition("t", 1): []}
    )
    assert list(batch.offsets) == offsets
    assert [record.value for record in batch.records] == [b"%d" % offset for offset in offsets]
    assert member.own.next_read == {_ONE: offsets[-1] + 1}


async def test_a_header_of_ours_means_nothing_in_a_topic_of_others() -> None:
    """If it fails, a producer forges the arrival of an event by a header, and with it the event is outside of the loss table."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    member.own.begin_at(_at({_ONE: 0}))
    shared = _SHARED._replace(existing=ExistingTopics({"t": "t"}, {"t": Translation(Stream(topic="t"))}))
    consumer = KafkaConsumer(shared, _READER, member.own, "g", "earliest", FreezeDetector(5.0))
    row = dataclasses.replace(_row(3), timestamp=9_000, headers=((TIME, b"1"),))
    (batch,) = consumer._make_batches({KafkaPartition("t", 1): [row]}, {KafkaPartition("t", 1): []})
    assert batch.records[0].timestamp == read_arrival(batch.records[0]) == 9_000


async def test_what_came_before_placing_is_not_returned() -> None:
    """If it fails, records of a partition without a decided position are returned, and again after it is decided."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE])
    consumer = KafkaConsumer(_SHARED, _READER, member.own, "g", "earliest", FreezeDetector(5.0))
    assert consumer._make_batches({KafkaPartition("t", 1): [_row(3)], KafkaPartition("t", 2): [_row(4)]}, {}) == []


class Client:
    """Notes where reading goes on; `found` is what a look at the stored batches brings, `meanwhile` happens during it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seeks: list[tuple[KafkaPartition, int]] = []
        self.found: dict[TopicPartition, Damaged] = {}
        self.meanwhile: list[Awaitable[None]] = []
        monkeypatch.setattr(consumer_module, "find_damage", self._find)

    async def _find(self, _cluster: object, _positions: object, _ids: object) -> dict[TopicPartition, Damaged]:
        for event in self.meanwhile:
            await event
        return self.found

    async def getmany(self, **_: object) -> dict[KafkaPartition, list[object]]:
        raise CorruptRecordException("checksum mismatch")

    def seek(self, source: KafkaPartition, offset: int) -> None:
        self.seeks.append((source, offset))

    def pause(self, *_: object) -> None:
        return

    resume = pause


def _damaged(source: TopicPartition, first: int, *, is_next: bool) -> Damaged:
    batch = Batch(*source, [first + 2], [Record(None, b"raw", 0)], Damage(first, first + 2, "checksum mismatch"))
    return Damaged(first, is_next, lambda: DataDamaged("t", (), ""), batch if is_next else None)


async def test_damage_of_a_partition_that_was_revoked_meanwhile_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a member that lost a damaged partition reads all others one record at a time, or returns what it lost."""
    member, client = Member(), Client(monkeypatch)
    await member.own.on_partitions_assigned([_ONE, _TWO])
    member.own.begin_at(_at({_ONE: 0, _TWO: 0}))
    consumer = KafkaConsumer(_SHARED, client, member.own, "g", "earliest", FreezeDetector(5.0))
    client.found = {_ONE: _damaged(_ONE, 9, is_next=False), _TWO: _damaged(_TWO, 0, is_next=True)}
    client.meanwhile = [
        member.own.on_partitions_revoked([_ONE, _TWO]),
        member.own.on_partitions_assigned([TopicPartition("t", 3)]),
    ]
    assert await consumer._examine(CorruptRecordException())
    assert not member.own.is_damage_near()
    assert member.own.pop_replacements() == []


async def test_damage_that_is_passed_over_comes_once_and_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a paused partition returns records, or damage is returned twice, or reading goes on inside of it."""
    member, client = Member(), Client(monkeypatch)
    await member.own.on_partitions_assigned([_ONE])
    member.own.begin_at(_at({_ONE: 7}))
    consumer = KafkaConsumer(_SHARED, client, member.own, "g", "earliest", FreezeDetector(5.0))
    client.found = {_ONE: _damaged(_ONE, 7, is_next=True)}
    assert await consumer._examine(CorruptRecordException())
    consumer.pause([_ONE])
    assert consumer._skip_damage() == []
    consumer.resume([_ONE])
    (batch,) = await consumer.poll(max_records=10, max_wait=1)
    assert batch.damage == Damage(7, 9, "checksum mismatch")
    assert client.seeks == [(KafkaPartition("t", 1), 7), (KafkaPartition("t", 1), 10)]
    assert consumer._skip_damage() == []


async def test_reading_is_careful_only_before_the_damage() -> None:
    """If it fails, records before damage are lost to it, or all of a member's reading stays slow after it."""
    member = Member()
    await member.own.on_partitions_assigned([_ONE, _TWO])
    member.own.begin_at(_at({_ONE: 0, _TWO: 0}))
    member.own.damaged_ahead[_ONE] = 5
    assert member.own.is_damage_near()
    member.own.paused.add(_ONE)
    assert not member.own.is_damage_near()
    member.own.paused.clear()
    member.own.next_read[_ONE] = 6
    assert not member.own.is_damage_near()
