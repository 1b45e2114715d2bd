"""Kafka's groups as their coordinator keeps them: members, generations, commits. Members hear by answers only.

Written from what Kafka 4 does (`GroupCoordinator`, the classic protocol); nothing of it is copied. It believes a commit by its
generation and member id alone. A group without members may lose its commits.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ILLEGAL_GENERATION, UNKNOWN_MEMBER, REBALANCING = 22, 25, 27
_FIRST_DELAY_S = 0.1
"""For which the first member waits for others."""


@dataclass(eq=False)
class Member:
    """session, rebalance: seconds. joining, syncing: its request that waits. until: when it is missed."""

    name: str
    client: str
    session: float
    rebalance: float
    protocols: list[tuple[str, bytes]]
    until: float = 0.0
    assignment: bytes = b""
    joining: "asyncio.Future[Any] | None" = None
    syncing: "asyncio.Future[Any] | None" = None


@dataclass(eq=False)
class Group:
    """state: empty, preparing, completing, stable. offsets: (next to read, metadata) by topic and partition."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    generation: int = 0
    state: str = "empty"
    leader: str = ""
    offsets: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    round: int = 0
    """Counts what it waited for: a timer of an earlier round does nothing."""


class Groups:
    """All groups of one cluster. later: calls something in the world so many seconds from now."""

    def __init__(
        self, now: Callable[[], float], later: Callable[..., Any], future: Callable[[], "asyncio.Future[Any]"]
    ) -> None:
        self._now, self._later, self._future = now, later, future
        self.all: dict[str, Group] = {}
        self._names = 0

    def find(self, name: str) -> Group:
        """Made when it is first asked for."""
        return self.all.setdefault(name, Group(name))

    def join(
        self,
        name: str,
        member_id: str,
        client: str,
        session: float,
        rebalance: float,
        protocols: list[tuple[str, bytes]],
    ) -> "asyncio.Future[Any] | int":
        """A future of (generation, protocol, leader, own id, members with their metadata, which only the leader gets)."""
        group = self.find(name)
        if member_id and member_id not in group.members:
            return UNKNOWN_MEMBER
        if not member_id:
            self._names += 1
            member_id = f"member-{self._names}"
            group.members[member_id] = Member(member_id, client, session, rebalance, protocols)
            self._watch(group, group.members[member_id])
        member = group.members[member_id]
        member.protocols, member.until = protocols, self._now() + session
        _answer(member.joining, UNKNOWN_MEMBER)
        member.joining = joining = self._future()
        was_empty = group.state == "empty"
        self._prepare(group)
        if was_empty:
            self._later(_FIRST_DELAY_S, self._complete_if_all, group, group.round)
        else:
            self._complete_if_all(group, group.round)
        return joining

    def _watch(self, group: Group, member: Member) -> None:
        def look() -> None:
            if group.members.get(member.name) is not member:
                return
            if member.joining is None and self._now() >= member.until:
                self.remove(group.name, member.name)
            else:
                self._later(max(0.1, member.until - self._now()), look)

        member.until = self._now() + member.session
        self._later(member.session, look)

    def _prepare(self, group: Group) -> None:
        if group.state == "preparing":
            return
        group.state = "preparing"
        group.round += 1
        for member in group.members.values():
            _answer(member.syncing, REBALANCING)
            member.syncing = None
        longest = max((member.rebalance for member in group.members.values()), default=0.0)
        self._later(longest, self._complete, group, group.round)

    def _complete_if_all(self, group: Group, number: int) -> None:
        if all(member.joining is not None for member in group.members.values()):
            self._complete(group, number)

    def _complete(self, group: Group, number: int) -> None:
        if group.state != "preparing" or group.round != number:
            return
        group.members = {name: member for name, member in group.members.items() if member.joining is not None}
        group.generation += 1
        group.round += 1
        if not group.members:
            group.state = "empty"
            return
        group.state = "completing"
        if group.leader not in group.members:
            group.leader = next(iter(group.members))
        protocol = next(iter(group.members.values())).protocols[0][0]
        everybody = [(one.name, dict(one.protocols)[protocol]) for one in group.members.values()]
        for member in group.members.values():
            member.until = self._now() + member.session
            theirs = everybody if member.name == group.leader else []
            joining, member.joining = member.joining, None
            _answer(joining, (group.generation, protocol, group.leader, member.name, theirs))

    def _check(self, group: Group, member_id: str, generation: int) -> int:
        if member_id not in group.members:
            return UNKNOWN_MEMBER
        if generation != group.generation:
            return ILLEGAL_GENERATION
        group.members[member_id].until = self._now() + group.members[member_id].session
        return 0

    def sync(
        self, name: str, member_id: str, generation: int, shares: Mapping[str, bytes]
    ) -> "asyncio.Future[Any] | bytes | int":
        """The member's share, once the leader has dealt."""
        group = self.find(name)
        if code := self._check(group, member_id, generation):
            return code
        if group.state == "preparing":
            return REBALANCING
        member = group.members[member_id]
        if group.state == "stable":
            return member.assignment
        member.syncing = self._future()
        if member_id == group.leader:
            group.state = "stable"
            for one in group.members.values():
                one.assignment = shares.get(one.name, b"")
                syncing, one.syncing = one.syncing, None
                _answer(syncing, one.assignment)
            return member.assignment
        return member.syncing

    def heartbeat(self, name: str, member_id: str, generation: int) -> int:
        """The code of the answer."""
        group = self.find(name)
        return self._check(group, member_id, generation) or (REBALANCING if group.state == "preparing" else 0)

    def remove(self, name: str, member_id: str) -> int:
        """It leaves, or is missed."""
        group = self.find(name)
        member = group.members.pop(member_id, None)
        if member is None:
            return UNKNOWN_MEMBER
        for waiting in (member.joining, member.syncing):
            _answer(waiting, UNKNOWN_MEMBER)
        if not group.members:
            group.state, group.generation, group.round = "empty", group.generation + 1, group.round + 1
        else:
            self._prepare(group)
            self._complete_if_all(group, group.round)
        return 0

    def may_commit(self, name: str, member_id: str, generation: int) -> int:
        """The code of a commit. Without a generation it is an operator's, for a group without members."""
        group = self.find(name)
        if generation < 0 and not member_id:
            return UNKNOWN_MEMBER if group.members else 0
        return self._check(group, member_id, generation) or (REBALANCING if group.state == "completing" else 0)


def _answer(waiting: "asyncio.Future[Any] | None", result: Any) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(result)
