"""A model of how Kafka's brokers store what producers send: leaders, replicas, what they remember, what they answer.

Written from what Kafka 4.0 does (`ReplicaManager`, `Partition`, `UnifiedLog`, `ProducerStateManager`, `ProducerStateEntry`,
`ProducerAppendInfo`); nothing of it is copied. A leader checks a batch in this order:

- is it the leader, are enough replicas in sync (19), the batch's size (10), its records' times (32);
- is it one of the last five batches of this producer id and epoch: then it answers as for the first one;
- is its epoch the last that was seen of this producer id, or a later one (47; until Kafka 2.6 the same code was called
  ProducerFenced). Only the last epoch's batches are remembered, so a repeat of a stored batch under an older epoch gets 47, too;
- does its number follow the last of its epoch (45). A later epoch begins at 0 (45).

Only then it appends, and answers when all in-sync replicas have the batch: 0, or 20 if too few are in sync by then, or 7 after
the producer's patience. A leader that hears of another one answers 6 to what still waits.

Two answers are of older Kafkas (`forgetful`). Up to 2.4 a producer that the leader does not know had to begin at 0 (59); later
Kafkas take any number. Up to 1.0 a repeat of a batch that is older than the five remembered ones got 46; since 1.1 it gets 45, as
any other number that does not follow. We need 2.1; others that speak Kafka's protocol may still answer 46.

Replicas follow their leader at once unless a node is frozen, or the two cannot reach each other. Who leads and who is in sync
is decided by a controller that every node hears unless it is frozen or cut off. Elections are clean: only a replica in sync is
elected; what it lacks is cut off elsewhere.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

NONE, UNKNOWN_TOPIC, NOT_LEADER, REQUEST_TIMED_OUT, MESSAGE_TOO_LARGE = 0, 3, 6, 7, 10
NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, INVALID_TIMESTAMP = 19, 20, 32
OUT_OF_ORDER, DUPLICATE, OLD_EPOCH, UNKNOWN_PRODUCER = 45, 46, 47, 59
REMEMBERED = 5
_WRAP = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class StoredBatch:
    """One batch as producers send it, and where a leader put it. `values`: of its records; the simulation has records here."""

    producer_id: int
    epoch: int
    first: int
    values: tuple[Any, ...]
    size: int
    offset: int = -1

    @property
    def after(self) -> int:
        """The offset behind it."""
        return self.offset + len(self.values)

    @property
    def next_number(self) -> int:
        """The sequence number that follows."""
        return (self.first + len(self.values)) & _WRAP


@dataclass(frozen=True, slots=True)
class View:
    """What the controller decided last, or what a node has heard of it."""

    epoch: int
    leader: int | None
    in_sync: frozenset[int]


@dataclass(slots=True, eq=False)
class Replica:
    """One node's copy of a partition. fetched: as leader, up to which offset each follower got in this epoch."""

    node: int
    view: View
    log: list[StoredBatch] = field(default_factory=list)
    high_water: int = 0
    fetched: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, "asyncio.Future[int]"]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The offset that the next record gets."""
        return self.log[-1].after if self.log else 0

    def last_of(self, producer_id: int, forgotten: int) -> list[StoredBatch]:
        """The remembered batches of this producer, newest first. `forgotten`: offset below which its state has expired."""
        own = (one for one in reversed(self.log) if one.producer_id == producer_id and one.offset >= forgotten)
        return [one for one, _ in zip(own, range(REMEMBERED), strict=False)]

    def fail_waiting(self, code: int) -> None:
        """Answer all that waits for its replicas."""
        for _, answer in self.waiting:
            if not answer.done():
                answer.set_result(code)
        self.waiting.clear()


@dataclass(slots=True, eq=False)
class Nodes:
    """Which nodes stand still, do not hear the controller, or do not reach each other."""

    names: tuple[int, ...] = (1, 2, 3)
    frozen: set[int] = field(default_factory=set)
    isolated: set[int] = field(default_factory=set)
    cut: set[frozenset[int]] = field(default_factory=set)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def hears(self, node: int) -> bool:
        """Whether the controller's news reach it."""
        return node not in self.frozen and node not in self.isolated

    def reach(self, one: int, other: int) -> bool:
        """Whether these two can exchange anything now."""
        return not {one, other} & self.frozen and frozenset((one, other)) not in self.cut

    async def until_thawed(self, node: int) -> None:
        """Wait while this node stands still."""
        while node in self.frozen:
            self.thawed.clear()
            await self.thawed.wait()


class Partition:
    """One partition with a replica on each node. Settings may be changed at any time."""

    def __init__(self, nodes: Nodes, leader: int, *, min_in_sync: int = 2, forgetful: bool = False) -> None:
        """forgetful: answers 59 and 46 as old Kafkas did, see the module."""
        self.nodes, self.min_in_sync, self.forgetful = nodes, min_in_sync, forgetful
        self.view = View(0, leader, frozenset(nodes.names))
        self.replicas = {node: Replica(node, self.view) for node in nodes.names}
        self.expired: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        """The last epoch that was seen of a producer id, where no batch of it is stored."""
        self.remembered = REMEMBERED
        """Of how many batches that all replicas have a repeat is known: fewer, as if newer batches had come meanwhile."""
        self.max_bytes = 1 << 20
        self.refuses_times = False
        """Whether batches with a record whose value begins with `!` are refused for its time."""

    def append(self, node: int, batch: StoredBatch) -> "int | tuple[int, asyncio.Future[int]]":
        """One produce request for this partition at this node: an error, or (base offset, the code once it is known)."""
        replica = self.replicas[node]
        if replica.view.leader != node:
            return NOT_LEADER
        if len(replica.view.in_sync) < self.min_in_sync:
            return NOT_ENOUGH_REPLICAS
        if batch.size > self.max_bytes:
            return MESSAGE_TOO_LARGE
        if self.refuses_times and any(value.startswith(b"!") for value in batch.values):
            return INVALID_TIMESTAMP
        found = self._number(replica, batch)
        if isinstance(found, int):
            return found
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        replica.waiting.append((found.after, answer))
        self.replicate()
        return found.offset, answer

    def _number(self, replica: Replica, batch: StoredBatch) -> StoredBatch | int:
        """The batch as it is stored, now or before; or the code of a number that does not follow."""
        known = replica.last_of(batch.producer_id, self.expired.get(batch.producer_id, 0))
        last_epoch = max(self.epochs.get(batch.producer_id, -1), known[0].epoch if known else -1)
        if batch.epoch < last_epoch:
            return OLD_EPOCH
        known = [one for one in known if one.epoch == batch.epoch]
        newest = known[: self.remembered]
        for one in known:
            is_remembered = one in newest or one.after > replica.high_water
            if is_remembered and (one.first, len(one.values)) == (batch.first, len(batch.values)):
                return one
        if known and known[0].next_number != batch.first:
            oldest = newest[-1].first if newest else known[0].next_number
            return DUPLICATE if self.forgetful and batch.next_number <= oldest else OUT_OF_ORDER
        if not known and batch.first and last_epoch >= 0:
            return OUT_OF_ORDER
        if not known and batch.first and self.forgetful:
            return UNKNOWN_PRODUCER
        number = (batch.producer_id, batch.epoch, batch.first)
        stored = StoredBatch(*number, batch.values, batch.size, replica.end)
        replica.log.append(stored)
        return stored

    def replicate(self) -> None:
        """Followers that can reach their leader copy what it has; leaders answer what is on all in-sync replicas."""
        for replica in self._leaders():
            for follower in self.replicas.values():
                if follower is not replica and self._follows(follower, replica):
                    self._fetch(follower, replica)
            self._confirm(replica)

    def _leaders(self) -> Iterator[Replica]:
        """Who takes itself for the leader, and moves."""
        for replica in self.replicas.values():
            if replica.view.leader == replica.node and replica.node not in self.nodes.frozen:
                yield replica

    def _follows(self, follower: Replica, leader: Replica) -> bool:
        same = follower.view.epoch == leader.view.epoch and follower.view.leader == leader.node
        return same and self.nodes.reach(follower.node, leader.node)

    def _fetch(self, follower: Replica, leader: Replica) -> None:
        common = min(len(follower.log), len(leader.log))
        while common and follower.log[common - 1] is not leader.log[common - 1]:
            common -= 1
        follower.log[common:] = leader.log[common:]
        leader.fetched[follower.node] = leader.end
        follower.high_water = max(follower.high_water, min(leader.high_water, follower.end))
        rejoins = follower.node not in self.view.in_sync and leader.view == self.view
        if rejoins and self.nodes.hears(leader.node) and self.nodes.hears(follower.node):
            self._decide(self.view.leader, self.view.in_sync | {follower.node})

    def _confirm(self, leader: Replica) -> None:
        others = [leader.fetched.get(node, 0) for node in leader.view.in_sync if node != leader.node]
        leader.high_water = max(leader.high_water, min([leader.end, *others]))
        code = NONE if len(leader.view.in_sync) >= self.min_in_sync else NOT_ENOUGH_REPLICAS_AFTER_APPEND
        still = []
        for needed, answer in leader.waiting:
            if answer.done():
                continue
            if leader.high_water >= needed:
                answer.set_result(code)
            else:
                still.append((needed, answer))
        leader.waiting[:] = still

    def _decide(self, leader: int | None, in_sync: frozenset[int]) -> None:
        """The controller's word; a new epoch when the leader is another."""
        epoch = self.view.epoch + (leader != self.view.leader)
        self.view = View(epoch, leader, in_sync)
        self.spread()

    def spread(self) -> None:
        """Every node that hears the controller acts on what it decided."""
        for replica in self.replicas.values():
            if replica.view != self.view and self.nodes.hears(replica.node):
                if replica.view.epoch != self.view.epoch:
                    replica.fetched.clear()
                    replica.fail_waiting(NOT_LEADER)
                replica.view = self.view
        self.replicate()

    def shrink(self) -> None:
        """The leader counts out the replicas that do not follow."""
        leader = self.view.leader
        if leader is None or not self.nodes.hears(leader) or self.replicas[leader].view != self.view:
            return
        own = self.replicas[leader]
        behind = {n for n in self.view.in_sync if n != leader and not self._follows(self.replicas[n], own)}
        if behind:
            self._decide(leader, self.view.in_sync - behind)

    def fence(self, node: int) -> None:
        """The controller missed this node's heartbeats: it is counted out, and another leads if one can."""
        left = self.view.in_sync - {node}
        if not left:  # the last replica in sync stays the only one that may lead
            self._decide(None if self.view.leader == node else self.view.leader, self.view.in_sync)
        else:
            self._decide(self._choose(left) if self.view.leader == node else self.view.leader, left)

    def elect(self, node: int | None = None) -> None:
        """Another replica in sync leads from now on: this one, or any that hears the controller."""
        chosen = self._choose(frozenset({node} if node is not None else self.view.in_sync) & self.view.in_sync)
        if chosen is not None:
            self._decide(chosen, self.view.in_sync)

    def _choose(self, candidates: frozenset[int]) -> int | None:
        return min((node for node in candidates if self.nodes.hears(node)), default=None)

    def fence_producers(self) -> None:
        """Every producer id is seen with its next epoch. No batch of it is stored."""
        for replica in self.replicas.values():
            for one in replica.log:
                self.epochs[one.producer_id] = max(self.epochs.get(one.producer_id, 0), one.epoch + 1)

    def forget_producers(self) -> None:
        """The state of every producer has expired."""
        self.epochs.clear()
        for replica in self.replicas.values():
            self.expired |= {one.producer_id: max(r.end for r in self.replicas.values()) for one in replica.log}

    def make_anew(self) -> None:
        """The topic was deleted and created again: what waits is answered 3, and nothing is left."""
        for replica in self.replicas.values():
            replica.fail_waiting(UNKNOWN_TOPIC)
            replica.log.clear()
            replica.fetched.clear()
            replica.high_water = 0
        self.expired.clear()
        self.epochs.clear()

    def stored(self) -> list[bytes]:
        """The values of all records that a reader gets, in order. Fault-free: the log of the leader."""
        assert self.view.leader is not None
        return [value for batch in self.replicas[self.view.leader].log for value in batch.values]
