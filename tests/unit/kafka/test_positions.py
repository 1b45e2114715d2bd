"""Where a member begins, by what the group has committed and what is on record of it."""

import random
from functools import partial
from typing import cast
from uuid import UUID

import pytest

from services.core.broker.contract import Start
from services.core.broker.errors import BrokerError, PositionLost, Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.offsets import CommitMetadata, Committed
from services.core.broker.kafka.positions import (
    GroupStart,
    GroupStarts,
    StartPositions,
    count_at_beginning,
    find_positions,
)
from services.core.broker.record import TopicPartition
from tests.support.group_model import EPOCH, GroupModel, OnRecord

_FOUR = [TopicPartition("t", number) for number in range(4)]
_END = 30
_ID = GroupModel(random.Random(0), 1, 1).id
_OTHER = "99999999-2222-3333-4444-555555555555"


def test_the_smallest_note_counts() -> None:
    """If it fails, a partition that was added later is read from "latest": its first records are skipped."""
    committed = {_FOUR[0]: Committed(5, CommitMetadata(2)), _FOUR[3]: Committed(0, CommitMetadata(3))}
    assert count_at_beginning(_FOUR, committed, {}) == {"t": 2}


def test_without_a_note_all_partitions_were_there() -> None:
    """If it fails, a group that an operator moved (or that others wrote) starts where nobody asked for."""
    for note in ("", "partitions=", "partitions=x", "something else"):
        assert count_at_beginning(_FOUR, {_FOUR[0]: Committed(5, CommitMetadata.parse(note))}, {}) == {"t": 4}
    assert count_at_beginning(_FOUR, {}, {}) == {"t": 4}


def test_the_record_counts_where_commits_are_gone() -> None:
    """If it fails, partitions that were added while a group's offsets expired are read from "latest"."""
    assert count_at_beginning(_FOUR, {}, {_FOUR[0]: GroupStart(_ID, 1)}) == {"t": 1}


async def _position(
    committed: dict[int, tuple[int, str]], begun: dict[int, GroupStart], start: Start = "latest", *, partitions: int = 2
) -> StartPositions:
    group = GroupModel(random.Random(0), partitions, _END)
    group.offsets = {TopicPartition("t", number): row for number, row in committed.items()}
    record = OnRecord({TopicPartition("t", number): row for number, row in begun.items()})
    return await find_positions(cast(Cluster, group), cast(GroupStarts, record), "g", group.sources, start)


async def test_a_new_group_begins_as_told_and_commits_that() -> None:
    """If it fails, "latest" means another moment after each restart."""
    placement = await _position({}, {})
    assert placement.position == {_FOUR[0]: _END, _FOUR[1]: _END}
    assert placement.fresh == {_FOUR[0], _FOUR[1]}
    assert placement.begun == {_FOUR[0]: GroupStart(_ID, 2), _FOUR[1]: GroupStart(_ID, 2)}
    assert placement.metadata[_FOUR[0]] == CommitMetadata(2, _ID, 1)


async def test_a_group_that_began_and_has_no_commit_stops() -> None:
    """If it fails, offsets that Kafka expired make a group skip what waits for it, or deliver everything again."""
    placement = await _position({1: (5, str(CommitMetadata(2, _ID)))}, {0: GroupStart(_ID, 2), 1: GroupStart(_ID, 2)})
    assert isinstance(placement.lost[_FOUR[0]](), PositionLost)
    assert placement.lost.keys() == {_FOUR[0]}
    assert placement.position == {_FOUR[0]: 0, _FOUR[1]: 5}
    assert not placement.fresh, "nothing is committed that nobody chose"


async def test_what_was_added_while_the_offsets_expired_is_read_whole() -> None:
    """If it fails, the first records of partitions that were added meanwhile are skipped."""
    placement = await _position({}, {0: GroupStart(_ID, 1)})
    assert placement.lost.keys() == {_FOUR[0]}
    assert (placement.position[_FOUR[1]], placement.fresh) == (0, {_FOUR[1]})


async def test_commits_and_records_of_another_topic_of_the_name_say_nothing() -> None:
    """If it fails, a topic that was made anew is read from where the group was in the old one."""
    for committed, begun in (
        ({0: (5, str(CommitMetadata(2, _OTHER, 0)))}, {}),
        ({}, {0: GroupStart(_OTHER, 2), 1: GroupStart(_OTHER, 2)}),
    ):
        placement = await _position(committed, begun)
        assert placement.position == {_FOUR[0]: 0, _FOUR[1]: 0}
        assert placement.fresh == {_FOUR[0], _FOUR[1]}
        assert not placement.lost


async def test_behind_a_cut_the_group_goes_on_at_the_cut() -> None:
    """If it fails, what is written below the group's position after a log lost its end is skipped."""
    placement = await _position(
        {0: (_END + 7, str(CommitMetadata(2, _ID, 1))), 1: (_END, str(CommitMetadata(2, _ID, 1)))}, {}
    )
    assert placement.position == {_FOUR[0]: _END, _FOUR[1]: _END}
    assert placement.fresh == {_FOUR[0]}
    assert placement.metadata[_FOUR[0]].epoch == EPOCH, (
        "of the last record below the cut: a second cut is noticed by it"
    )


async def test_a_leader_that_still_has_the_topic_of_before_is_not_asked() -> None:
    """If it fails, a group begins in a topic made anew where the deleted one began or ended, and skips what comes before."""
    group = GroupModel(random.Random(0), 1, _END)
    group.stale_id = _OTHER
    for offsets in ({}, {_FOUR[0]: (5, str(CommitMetadata(1, _ID, 1)))}):
        group.offsets = offsets
        with pytest.raises(Unavailable, match="another topic"):
            await find_positions(cast(Cluster, group), cast(GroupStarts, OnRecord()), "g", group.sources, "latest")


async def test_a_partition_that_was_added_after_the_group_dealt_them_out_is_new() -> None:
    """If it fails, a group that begins while a partition is added skips what that one has stored when somebody gets it."""
    group, record = GroupModel(random.Random(0), 2, _END), OnRecord()
    placement = await find_positions(
        cast(Cluster, group), cast(GroupStarts, record), "g", _FOUR[:1], "latest", dealt={"t": 1}
    )
    assert placement.metadata[_FOUR[0]].partitions == 1
    later = await _position({0: (_END, str(placement.metadata[_FOUR[0]]))}, {0: placement.begun[_FOUR[0]]})
    assert later.position == {_FOUR[0]: _END, _FOUR[1]: 0}


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_former_leader_that_hears_no_news_is_asked_again(is_new: bool) -> None:
    """If it fails, a partition stops until a person comes, or a group begins at an offset of a log that is cut off."""
    group = GroupModel(random.Random(0), 1, _END)
    group.cut, group.former = 3, 1
    group.offsets = {} if is_new else {_FOUR[0]: (5, str(CommitMetadata(1, _ID, EPOCH + 1)))}
    find = partial(find_positions, cast(Cluster, group), cast(GroupStarts, OnRecord()), "g", group.sources, "latest")
    with pytest.raises(Unavailable, match="former leader"):
        await find()
    placement = await find()
    assert (placement.position, placement.lost) == ({_FOUR[0]: _END if is_new else 5}, {})


async def test_a_partition_that_a_node_does_not_know_is_waited_for() -> None:
    """If it fails, a topic that was made anew with fewer partitions, or a node that hears no news, ends the membership."""
    group = GroupModel(random.Random(0), 2, _END)
    with pytest.raises(Unavailable, match=r"t\[2\]"):
        await find_positions(cast(Cluster, group), cast(GroupStarts, OnRecord()), "g", _FOUR, "latest")


async def test_a_topic_without_an_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a member waits for ever, and nobody hears of it: by the id of zeros no node knows a topic."""
    monkeypatch.setattr(GroupModel, "id", str(UUID(int=0)))
    with pytest.raises(BrokerError, match="Try:"):
        await _position({}, {})


async def test_an_epoch_that_no_node_knows_stops() -> None:
    """If it fails, a group is placed by a guess on a log that was put back from long ago."""
    placement = await _position({0: (5, str(CommitMetadata(2, _ID, 8)))}, {}, partitions=1)
    assert placement.lost.keys() == {_FOUR[0]}
    assert not placement.fresh
