"""Leases: one owner per partition, even shares, nothing moves without need, and the dead are replaced."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.broker.errors import GroupHasMembers
from services.core.broker.log import leases as leases_module
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import CommitRequest, GroupPosition, GroupsFile
from services.core.broker.log.leases import Leases
from services.core.broker.record import TopicPartition

LEASE_MS = 1000


class Group:
    """Members of one group over one file, with a clock of their own; each does what `LogMembership` does."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, topics: dict[str, int]) -> None:
        self.folder = DataFolder.prepare(path)
        self.offsets = GroupsFile(self.folder)
        self.leases = Leases(self.folder, LEASE_MS)
        self.now = 1_000_000
        monkeypatch.setattr(leases_module, "boot_ms", lambda: self.now)
        self.topics = topics
        self.held: dict[str, dict[TopicPartition, int]] = {}

    def beat(self, member: str) -> frozenset[TopicPartition]:
        """One heartbeat; releases what is surplus at once. Gives what was lost."""
        held = self.held.setdefault(member, {})
        beat = self.leases.heartbeat("g", member, self.topics, held)
        for source in beat.lost:
            del held[source]
        held.update(beat.acquired)
        if beat.surplus:
            self.leases.release("g", member, {source: held.pop(source) for source in beat.surplus})
        self.check()
        return beat.lost

    def leave(self, member: str) -> None:
        """A clean end."""
        self.leases.release("g", member, self.held.pop(member), leave=True)

    def check(self) -> None:
        """No partition has two owners whose leases are valid."""
        rows = self.leases._connection.execute("SELECT topic, partition, owner, epoch FROM leases").fetchall()
        owners = {(topic, partition): (owner, epoch) for topic, partition, owner, epoch in rows}
        valid = [(s, m) for m, held in self.held.items() for s, epoch in held.items() if owners[s] == (m, epoch)]
        assert max(Counter(source for source, _ in valid).values(), default=0) <= 1

    def close(self) -> None:
        """Close the files."""
        self.leases.close()
        self.offsets.close()


@settings(max_examples=40)
@given(
    partitions=st.integers(1, 9),
    steps=st.lists(st.tuples(st.sampled_from(["beat", "leave", "die", "sleep"]), st.integers(0, 4)), max_size=40),
)
def test_any_coming_and_going_ends_in_even_shares(
    tmp_path_factory: pytest.TempPathFactory, partitions: int, steps: list[tuple[str, int]]
) -> None:
    """If it fails, a partition has two owners, or none, or one instance does all the work."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        group = Group(tmp_path_factory.mktemp("leases"), monkeypatch, {"t": partitions, "u": 1})
        try:
            for what, number in steps:
                member = f"m{number}"
                if what == "beat":
                    group.beat(member)
                elif what == "leave" and member in group.held:
                    group.leave(member)
                elif what == "die":
                    group.held.pop(member, None)
                elif what == "sleep":
                    group.now += LEASE_MS // 3
            group.now += LEASE_MS + 1  # the dead are dead
            alive = sorted({*group.held, "last"})
            for _ in range(4):
                for member in alive:
                    group.beat(member)
            counts = [sum(source.topic == "t" for source in group.held[member]) for member in alive]
            assert sum(counts) == partitions
            assert max(counts) - min(counts) <= 1
            before = {member: dict(held) for member, held in group.held.items()}
            for member in alive:
                group.beat(member)
            assert group.held == before, "partitions move although nobody came or went"
        finally:
            group.close()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Four partitions."""
    return Group(tmp_path, monkeypatch, {"t": 4})


def test_a_newcomer_moves_only_its_share(group: Group) -> None:
    """If it fails, every scale-out interrupts all instances."""
    try:
        group.beat("a")
        before = dict(group.held["a"])
        group.beat("b")
        group.beat("a")
        group.beat("b")
        assert len(group.held["a"]) == len(group.held["b"]) == 2
        assert group.held["a"].items() <= before.items(), "what stayed got a new lease"
    finally:
        group.close()


def test_a_silent_member_loses_its_partitions_only_after_the_lease(group: Group) -> None:
    """If it fails, a short pause costs a rebalance, or a dead process blocks its partitions."""
    try:
        group.beat("a")
        group.now += LEASE_MS
        group.beat("b")
        assert not group.held["b"]
        group.now += 1
        group.beat("b")
        assert len(group.held["b"]) == 4
        assert len(group.beat("a")) == 4
    finally:
        group.close()


def test_an_expired_lease_that_nobody_took_goes_on(group: Group) -> None:
    """If it fails, every laptop that slept starts all its partitions anew."""
    try:
        group.beat("a")
        before = dict(group.held["a"])
        group.now += LEASE_MS * 10
        assert not group.beat("a")
        assert group.held["a"] == before
    finally:
        group.close()


def test_leases_of_another_boot_are_void(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, after a reboot nobody reads until leases of processes that are gone run out, on another clock."""
    try:
        group.beat("a")
        group.leases._boot = "another boot"
        group.now = 5
        group.beat("b")
        assert len(group.held["b"]) == 4
    finally:
        group.close()


def test_commits_are_fenced_by_the_epoch(group: Group) -> None:
    """If it fails, a process that was frozen takes back what its successor committed."""
    try:
        group.offsets.enter("g", "t", b"i", dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0))
        group.beat("a")
        source = TopicPartition("t", 0)
        old = group.held["a"][source]
        assert group.offsets.commit([CommitRequest("g", "a", {source: (old, 10)})]) == [frozenset()]
        group.now += LEASE_MS + 1
        group.beat("b")
        claims = [
            CommitRequest("g", "a", {source: (old, 50)}),
            CommitRequest("g", "b", {source: (group.held["b"][source], 20)}),
        ]
        assert group.offsets.commit(claims) == [frozenset({source}), frozenset()]
        assert group.offsets.progress("g", "t")[0].processed == 20
        assert group.offsets.commit([CommitRequest("g", "b", {source: (group.held["b"][source], 15)})]) == [frozenset()]
        assert group.offsets.progress("g", "t")[0].processed == 20, "a late commit went back"
    finally:
        group.close()


def test_a_moved_group_is_not_moved_back_by_a_frozen_member(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a process that hung while an operator set the group back commits over it: nothing is delivered again."""
    monkeypatch.setattr("services.core.broker.log.groups.boot_ms", lambda: group.now)
    try:
        group.offsets.enter("g", "t", b"i", dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0))
        group.beat("a")
        source = TopicPartition("t", 0)
        frozen = CommitRequest("g", "a", {source: (group.held["a"][source], 10)})
        assert group.offsets.commit([frozen]) == [frozenset()]
        back = {source: GroupPosition(b"i", 3, 2)}
        with pytest.raises(GroupHasMembers):
            group.offsets.move("g", "t", back)
        assert group.offsets.progress("g", "t")[0].processed == 10
        group.now += LEASE_MS + 1
        group.offsets.move("g", "t", back)
        assert group.offsets.commit([frozen]) == [frozenset({source})]
        assert source in group.beat("a"), "it does not know that it lost the partition"
        assert group.offsets.progress("g", "t")[0].next == 3
    finally:
        group.close()


def test_single_partition_topics_spread_over_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one instance gets all small topics and the others idle."""
    group = Group(tmp_path, monkeypatch, {f"topic-{n}": 1 for n in range(40)})
    try:
        group.held = {"a": {}, "b": {}}
        for member in "ab":  # both are members before either takes anything
            group.leases.heartbeat("g", member, {}, {})
        for _ in range(3):
            for member in "ab":
                group.beat(member)
        assert min(len(group.held["a"]), len(group.held["b"])) >= 8
    finally:
        group.close()
