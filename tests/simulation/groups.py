"""The coordinator of the modelled broker: who is a member of which group, and who owns which partition.

A partition has one owner. It leaves an owner who lives when that has drained it, or after REBALANCE_S; one who is dead, frozen or
cut off, after SESSION_S, without a word.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition
from tests.simulation.store import Store

SESSION_S = 6.0
REBALANCE_S = 8.0


class Member(Protocol):
    """What a member's process hears, some milliseconds later."""

    @property
    def is_reachable(self) -> bool:
        """Whether it runs."""

    def hear_revoke(self, sources: frozenset[TopicPartition], *, lost: bool) -> None:
        """Drain these and release them; lost: they are another's already."""

    def hear_assign(self, source: TopicPartition, position: int, epoch: int) -> None:
        """This is its own now, to be read from there. epoch: of the ownership, which its commits carry."""


@dataclass
class _Joined:
    member: Member
    topics: frozenset[str]
    owns: set[TopicPartition] = field(default_factory=set)
    leaving: set[TopicPartition] = field(default_factory=set)
    """Owned, and asked for."""
    floors: dict[TopicPartition, int] = field(default_factory=dict)
    """Where each ownership began."""
    epochs: dict[TopicPartition, int] = field(default_factory=dict)


class Coordinator:
    """All groups. Runs in the world, not in a process; every call is what a request does when it arrives."""

    def __init__(
        self, store: Store, loop: asyncio.AbstractEventLoop, trace: Callable[[str], None], *, is_eager: bool
    ) -> None:
        """is_eager: as on Kafka, each change of the members takes everything from all of them, and then deals it out."""
        self._store, self._loop, self._trace, self._is_eager = store, loop, trace, is_eager
        self._moving_until = 0.0
        self._dealing: set[str] = set()
        """Groups that wait until their members have given up everything."""
        self._groups: dict[str, dict[int, _Joined]] = {}
        self._numbers = self._epochs = 0
        store.on_delete.append(self._deleted)
        store.on_create.append(self._created)

    def move(self, seconds: float) -> None:
        """Another node takes over the groups, with all that is stored; for so long it answers nobody."""
        self._moving_until = self._loop.time() + seconds

    def check(self) -> None:
        """Raises Unavailable while it moves."""
        if self._loop.time() < self._moving_until:
            raise Unavailable("the coordinator of the group moves")

    def join(self, group: str, member: Member, topics: Collection[str]) -> int:
        """The member's number."""
        self._numbers += 1
        self._groups.setdefault(group, {})[self._numbers] = _Joined(member, frozenset(topics))
        self._balance(group)
        return self._numbers

    def leave(self, group: str, number: int) -> None:
        """What it owned is free."""
        if self._groups.get(group, {}).pop(number, None) is not None:
            self._balance(group)

    def members(self, group: str) -> int:
        """How many there are."""
        return len(self._groups.get(group, {}))

    def groups(self) -> list[tuple[str, int]]:
        """All members by group and number."""
        return [(group, number) for group, members in self._groups.items() for number in members]

    def is_member(self, group: str, number: int) -> bool:
        """Whether the coordinator still counts it."""
        return number in self._groups.get(group, {})

    def owns(self, group: str, number: int, source: TopicPartition, mark: int, epoch: int) -> bool:
        """Whether this member may commit this."""
        joined = self._groups.get(group, {}).get(number)
        if joined is None or source not in joined.owns:
            return False
        return joined.epochs[source] == epoch and mark >= joined.floors[source]

    def is_current(self, group: str, number: int, source: TopicPartition, epoch: int) -> bool:
        """Whether this ownership has not ended."""
        joined = self._groups.get(group, {}).get(number)
        return joined is not None and source in joined.owns and joined.epochs[source] == epoch

    def release(self, group: str, number: int, drained: Mapping[TopicPartition, int]) -> None:
        """Drained; by epoch, because a request that is repeated may find the partition owned anew."""
        joined = self._groups.get(group, {}).get(number)
        if joined is not None:
            sources = {source for source, epoch in drained.items() if joined.epochs.get(source) == epoch}
            joined.owns -= sources
            joined.leaving -= sources
            if self._is_eager:
                self._deal(group)
            else:
                self._balance(group)

    def expire(self, group: str, number: int) -> None:
        """It is not heard of any more: its partitions are free, and it hears that late."""
        joined = self._groups.get(group, {}).pop(number, None)
        if joined is None:
            return
        self._trace(f"{group}: member {number} expired")
        joined.member.hear_revoke(frozenset(joined.owns), lost=True)
        self._balance(group)

    def _sources(self, topics: Collection[str]) -> list[TopicPartition]:
        return [
            TopicPartition(name, number)
            for name in sorted(topics)
            if name in self._store.topics
            for number in range(len(self._store.topics[name].partitions))
        ]

    def _balance(self, group: str) -> None:
        members = self._groups.get(group, {})
        if not members:
            return
        if self._is_eager:
            self._deal_anew(group, members)
            return
        topics: set[str] = set()
        for joined in members.values():
            topics |= joined.topics
        order = sorted(members)
        owners = {source: number for number, joined in members.items() for source in joined.owns}
        for index, source in enumerate(self._sources(topics)):
            wanted = order[(index + len(group)) % len(order)]
            owner = owners.get(source)
            if owner is None:
                self._assign(group, wanted, source)
            elif owner != wanted and source not in members[owner].leaving:
                self._ask_back(group, owner, source)

    def _deal_anew(self, group: str, members: dict[int, _Joined]) -> None:
        """Ask everything back, and wait for it; a change that comes meanwhile is a part of the same deal."""
        self._dealing.add(group)
        for number, joined in members.items():
            if asked := frozenset(joined.owns - joined.leaving):
                joined.leaving |= asked
                joined.member.hear_revoke(asked, lost=False)
                self._loop.call_later(REBALANCE_S, self._expire_if_leaving, group, number, asked)
        self._deal(group)

    def _deal(self, group: str) -> None:
        members = self._groups.get(group, {})
        if group not in self._dealing or not members or any(joined.owns for joined in members.values()):
            return
        self._dealing.discard(group)
        order = sorted(members)
        topics = {topic for joined in members.values() for topic in joined.topics}
        for index, source in enumerate(self._sources(topics)):
            self._assign(group, order[(index + len(group)) % len(order)], source)

    def _expire_if_leaving(self, group: str, number: int, asked: frozenset[TopicPartition]) -> None:
        joined = self._groups.get(group, {}).get(number)
        if joined is not None and asked & joined.leaving:
            self.expire(group, number)

    def _assign(self, group: str, number: int, source: TopicPartition) -> None:
        joined = self._groups[group][number]
        position = self._store.begin_at(group, source)
        joined.owns.add(source)
        self._epochs += 1
        joined.floors[source], joined.epochs[source] = position - 1, self._epochs
        joined.member.hear_assign(source, position, self._epochs)

    def _ask_back(self, group: str, number: int, source: TopicPartition) -> None:
        joined = self._groups[group][number]
        joined.leaving.add(source)
        joined.member.hear_revoke(frozenset({source}), lost=False)
        self._loop.call_later(REBALANCE_S, self._take_back, group, number, source)

    def _take_back(self, group: str, number: int, source: TopicPartition) -> None:
        joined = self._groups.get(group, {}).get(number)
        if joined is not None and source in joined.leaving:
            joined.member.hear_revoke(frozenset({source}), lost=True)
            self.release(group, number, {source: joined.epochs[source]})

    def _deleted(self, topic: str) -> None:
        """Nobody owns what is not there; the owners hear it late."""
        for members in self._groups.values():
            for joined in members.values():
                gone = frozenset(source for source in joined.owns if source.topic == topic)
                if gone:
                    joined.owns -= gone
                    joined.leaving -= gone
                    joined.member.hear_revoke(gone, lost=True)
        for group in sorted(self._dealing):
            self._deal(group)

    def _created(self, _topic: str) -> None:
        for group in list(self._groups):
            self._balance(group)
