"""Commits of a member, each under the generation in which its partitions were assigned.

aiokafka's own commit takes the generation of the moment at which it sends, and sends again after a failure. So a commit that
waited for a coordinator while the group rebalanced went out under the next generation: Kafka took it although its partitions
had another owner.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiokafka import errors as kafka
from aiokafka.protocol.commit import OffsetCommitRequest

from services.core.broker.kafka.commit_note import CommitNote
from services.core.broker.kafka.faults import raise_for
from services.core.broker.kafka.offsets import by_topic
from services.core.broker.record import TopicPartition

_PAUSE = 0.1
_REJOIN = kafka.RebalanceInProgressError.errno
_FENCED = frozenset({kafka.IllegalGenerationError.errno, kafka.UnknownMemberIdError.errno, _REJOIN})
_MOVED = frozenset(
    error.errno
    for error in (
        kafka.GroupCoordinatorNotAvailableError,
        kafka.NotCoordinatorForGroupError,
        kafka.RequestTimedOutError,
    )
)
_LOADING = kafka.GroupLoadInProgressError.errno


class Membership(NamedTuple):
    """Under what a member was given its partitions. member: "" when it belongs to no group."""

    generation: int
    member: str


def membership_of(coordinator: Any) -> Membership:
    """aiokafka's own view of this moment."""
    return Membership(coordinator.generation, coordinator.member_id)


async def send_commit(
    coordinator: Any, group: str, membership: Membership, rows: Mapping[TopicPartition, tuple[int, CommitNote]]
) -> frozenset[TopicPartition]:
    """Commit (next offset to read, note) by partition; those that Kafka refuses because the group has moved on.

    Sends again while the coordinator moves: bound it. Raises KafkaError, BrokerError. When it raises or is cancelled some may
    be committed.
    """
    left = dict(rows)
    while left:
        await coordinator.ensure_coordinator_known()
        if not membership.member or membership_of(coordinator) != membership:
            return frozenset(left)  # expelled, or in the next generation already
        offsets = by_topic((source, (position, str(note))) for source, (position, note) in left.items())
        request = OffsetCommitRequest(group, membership.generation, membership.member, -1, offsets)
        try:
            answer = await coordinator._send_req(request)
        except kafka.KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(_PAUSE)
            continue
        codes = {TopicPartition(topic, number): code for topic, rest in answer.topics for number, code in rest}
        if fenced := {code for code in codes.values() if code in _FENCED}:
            _leave_generation(coordinator, membership, fenced)
            return frozenset(source for source in left if codes.get(source) in _FENCED)
        if not _MOVED.isdisjoint(codes.values()):
            coordinator.coordinator_dead()
        for source, code in codes.items():
            if code not in _MOVED and code != _LOADING:
                raise_for(code, f"commit of group {group} in {source.topic}[{source.partition}]")
                left.pop(source, None)
        if left:
            await asyncio.sleep(_PAUSE)
    return frozenset()


def _leave_generation(coordinator: Any, membership: Membership, codes: set[int]) -> None:
    """Have aiokafka join anew, unless it did so while the answer was on its way."""
    if membership_of(coordinator) != membership:
        return
    if codes == {_REJOIN}:
        coordinator.request_rejoin()
    else:
        coordinator.reset_generation()
