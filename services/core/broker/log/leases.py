"""Who owns which partition of a group: members, heartbeats, leases with fencing epochs. Blocking, not synced.

Each member acts for itself, in one transaction per beat: it renews what it has, gives up what is above its share, takes
what is free below its share. A share is partitions / members per topic, the remainder going to members chosen by a hash,
so nothing moves while nobody comes or goes. What a dead member owned is free at once (`alive` tells), what a silent one
owned when its lease ran out. Whoever takes it raises its epoch; commits under the old epoch are refused from then on.
Times are milliseconds of CLOCK_BOOTTIME; a lease of another boot is void.
"""

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple
from zlib import crc32

import apsw
import msgspec

from services.core.broker.log import schema
from services.core.broker.log.alive import Alive
from services.core.broker.log.clock import boot_id, boot_ms
from services.core.broker.log.durable import opened
from services.core.broker.log.faults import classified
from services.core.broker.log.layout import DataFolder
from services.core.broker.record import TopicPartition


class Beat(NamedTuple):
    """What one heartbeat decided. until: the member's leases hold until then (boot milliseconds).

    taken: newly owned, with epoch. lost: owned by others, or by nobody, by now. surplus: to drain and release.
    joined: it was not a member before (or no longer).
    """

    until: int
    taken: dict[TopicPartition, int]
    lost: frozenset[TopicPartition]
    surplus: frozenset[TopicPartition]
    joined: bool


class _Lease(NamedTuple):
    owner: str | None
    epoch: int


class Leases:
    """The lease half of groups.db, for one member or several, one thread at a time.

    While it is open `repair` does not replace the file: leases that were renewed in the old one would be worth nothing.
    """

    def __init__(self, folder: DataFolder, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._boot = boot_id()
        with classified("groups"), opened(folder.groups, durable=False) as (self._lock, self._connection):
            self._connection.wal_autocheckpoint(256)
            self._alive = Alive(folder.alive)

    def close(self) -> None:
        """Close the files: members that are still there count as dead."""
        self._alive.close()
        self._connection.close()
        os.close(self._lock)

    def beat(
        self,
        group: str,
        member: str,
        topics: Mapping[str, int],
        held: Mapping[TopicPartition, int],
        leaving: bool = False,
    ) -> Beat:
        """Renew this member and what it holds (with epochs), decide what to take and give up.

        topics: partition count of each topic it subscribes to. leaving: take nothing more.
        """
        now = boot_ms()
        until = now + self._lease_ms
        with classified("groups"), _Immediate(self._connection):
            run = self._connection.execute
            self._alive.begin(member)
            known = run("SELECT 1 FROM members WHERE grp=? AND member=?", (group, member)).fetchone()
            names = msgspec.json.encode(sorted(topics)).decode()
            run("INSERT OR REPLACE INTO members VALUES(?,?,?,?,?)", (group, member, names, until, self._boot))
            living = self._living(group, now)
            leases = self._read(group, now, member, held, living)
            lost = frozenset(source for source, epoch in held.items() if leases.get(source) != (member, epoch))
            run("UPDATE leases SET expires=? WHERE grp=? AND owner=? AND boot=?", (until, group, member, self._boot))
            taken: dict[TopicPartition, int] = {}
            surplus: set[TopicPartition] = set()
            for topic, subscribers in self._subscribers(group, topics).items():
                take, give = _balance(topic, topics[topic], subscribers, member, leases)
                surplus.update(give)
                for source in () if leaving else take:
                    taken[source] = (leases[source].epoch if source in leases else 0) + 1
                    lease = (group, *source, member, taken[source], until, self._boot)
                    run("INSERT OR REPLACE INTO leases VALUES(?,?,?,?,?,?,?)", lease)
        return Beat(until, taken, lost, frozenset(surplus), known is None)

    def release(self, group: str, member: str, held: Mapping[TopicPartition, int], leave: bool = False) -> None:
        """Free these partitions for others; with `leave` also end the membership, even when groups.db cannot be written."""
        try:
            with classified("groups"), _Immediate(self._connection):
                self._connection.executemany(
                    "UPDATE leases SET owner=NULL WHERE grp=? AND topic=? AND partition=? AND owner=? AND epoch=?",
                    [(group, *source, member, epoch) for source, epoch in held.items()],
                )
                if leave:
                    self._connection.execute("DELETE FROM members WHERE grp=? AND member=?", (group, member))
        finally:
            if leave:
                self._alive.end(member)

    def _living(self, group: str, now: int) -> set[str]:
        """The group's members that are neither dead nor silent for too long; forgets the others."""
        rows = schema.fetch(self._connection, "SELECT member, deadline, boot FROM members WHERE grp=?", (group,))
        living = {m for m, deadline, boot in rows if deadline >= now and boot == self._boot and self._alive.is_alive(m)}
        gone = [(group, m) for m, *_ in rows if m not in living]
        self._connection.executemany("DELETE FROM members WHERE grp=? AND member=?", gone)
        return living

    def _read(
        self, group: str, now: int, member: str, held: Mapping[TopicPartition, int], living: Collection[str]
    ) -> dict[TopicPartition, _Lease]:
        """All leases. The owner is None where it is gone; this member owns what it holds with the same epoch, nothing else."""
        leases = {}
        for topic, partition, owner, epoch, expires, boot in schema.fetch(
            self._connection, "SELECT topic, partition, owner, epoch, expires, boot FROM leases WHERE grp=?", (group,)
        ):
            source = TopicPartition(topic, partition)
            alive = held.get(source) == epoch if owner == member else expires >= now and owner in living
            valid = boot == self._boot and alive
            leases[source] = _Lease(owner if valid else None, epoch)
        return leases

    def _subscribers(self, group: str, topics: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {topic: [] for topic in sorted(topics)}
        rows = schema.fetch(
            self._connection, "SELECT member, topics FROM members WHERE grp=? ORDER BY member", (group,)
        )
        for member, names in rows:
            for topic in msgspec.json.decode(names, type=list[str]):
                if topic in found:
                    found[topic].append(member)
        return found


def _balance(
    topic: str, partitions: int, subscribers: list[str], member: str, leases: Mapping[TopicPartition, _Lease]
) -> tuple[list[TopicPartition], list[TopicPartition]]:
    """What this member should take of a topic's free partitions, and what it has above its share."""
    mine, free = [], []
    for partition in range(partitions):
        source = TopicPartition(topic, partition)
        lease = leases.get(source)
        if lease is None or lease.owner is None:
            free.append(source)
        elif lease.owner == member:
            mine.append(source)
    # who gets the remainder: by a hash of topic and member, so that small topics spread, and few move with a newcomer
    order = sorted(subscribers, key=lambda name: crc32(f"{topic}/{name}".encode()))
    share = partitions // len(order) + (order.index(member) < partitions % len(order))
    return free[: max(0, share - len(mine))], mine[share:]


class _Immediate:
    """One write transaction: committed at the end, rolled back on any error."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
