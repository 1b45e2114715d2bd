"""The owners of a group's partitions: members, heartbeats, leases with fencing epochs. Blocking, not synced.

Each member acts for itself, in one transaction per heartbeat: it renews its leases, gives up those above its share, acquires
free ones below its share. A share is partitions / members per topic, the remainder going to members chosen by a hash,
so nothing moves while no member joins or leaves. The partitions of a dead member are free at once (`MemberLocks`), those of
a silent one when its lease ends. The next owner raises the epoch; commits under the old epoch are refused from then on.
Times are milliseconds of CLOCK_BOOTTIME; a lease of another boot is void.
"""

import fcntl
import os
import struct
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import apsw
import msgspec

from services.core.broker.log.clock import boot_id, boot_ms
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.sqlite_file import classified, fetch, opened
from services.core.broker.record import TopicPartition


class HeartbeatResult(NamedTuple):
    """The result of one heartbeat. until: the end of the member's leases (boot milliseconds).

    acquired: new partitions by epoch. lost: now owned by others, or by nobody. surplus: to drain and release.
    joined: it was not a member before.
    """

    until: int
    acquired: dict[TopicPartition, int]
    lost: frozenset[TopicPartition]
    surplus: frozenset[TopicPartition]
    joined: bool


class _Lease(NamedTuple):
    owner: str | None
    epoch: int


class Leases:
    """The lease half of groups.db, for one member or several, one thread at a time.

    While it is open, `repair` does not replace the file: leases that are renewed in the old file would be lost.
    """

    def __init__(self, folder: DataFolder, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._boot = boot_id()
        with classified("groups"), opened(folder.groups, durable=False) as (self._lock, self._connection):
            self._connection.wal_autocheckpoint(256)
            self._alive = MemberLocks(folder.alive)

    def close(self) -> None:
        """Close the files. Members that have not left count as dead."""
        self._alive.close()
        self._connection.close()
        os.close(self._lock)

    def heartbeat(
        self,
        group: str,
        member: str,
        topics: Mapping[str, int],
        held: Mapping[TopicPartition, int],
        leaving: bool = False,
    ) -> HeartbeatResult:
        """Renew this member and the leases that it holds (with epochs), decide what to acquire and release.

        topics: the partition count of each subscribed topic. leaving: acquire nothing more.
        """
        now = boot_ms()
        until = now + self._lease_ms
        with classified("groups"), _transaction(self._connection):
            run = self._connection.execute
            self._alive.acquire(member)
            known = run("SELECT 1 FROM members WHERE grp=? AND member=?", (group, member)).fetchone()
            names = msgspec.json.encode(sorted(topics)).decode()
            run("INSERT OR REPLACE INTO members VALUES(?,?,?,?,?)", (group, member, names, until, self._boot))
            living = self._living(group, now)
            leases = self._read(group, now, member, held, living)
            lost = frozenset(source for source, epoch in held.items() if leases.get(source) != (member, epoch))
            run("UPDATE leases SET expires=? WHERE grp=? AND owner=? AND boot=?", (until, group, member, self._boot))
            acquired: dict[TopicPartition, int] = {}
            surplus: set[TopicPartition] = set()
            for topic, subscribers in self._subscribers(group, topics).items():
                free, above = _balance(topic, topics[topic], subscribers, member, leases)
                surplus.update(above)
                for source in () if leaving else free:
                    acquired[source] = (leases[source].epoch if source in leases else 0) + 1
                    lease = (group, *source, member, acquired[source], until, self._boot)
                    run("INSERT OR REPLACE INTO leases VALUES(?,?,?,?,?,?,?)", lease)
        return HeartbeatResult(until, acquired, lost, frozenset(surplus), known is None)

    def release(self, group: str, member: str, held: Mapping[TopicPartition, int], leave: bool = False) -> None:
        """Release these partitions; with `leave` also end the membership, even when groups.db cannot be written."""
        try:
            with classified("groups"), _transaction(self._connection):
                self._connection.executemany(
                    "UPDATE leases SET owner=NULL WHERE grp=? AND topic=? AND partition=? AND owner=? AND epoch=?",
                    [(group, *source, member, epoch) for source, epoch in held.items()],
                )
                if leave:
                    self._connection.execute("DELETE FROM members WHERE grp=? AND member=?", (group, member))
        finally:
            if leave:
                self._alive.release(member)

    def _living(self, group: str, now: int) -> set[str]:
        """The group's members that are alive and not silent for too long; removes the others."""
        rows = fetch(self._connection, "SELECT member, deadline, boot FROM members WHERE grp=?", (group,))
        living = {m for m, deadline, boot in rows if deadline >= now and boot == self._boot and self._alive.is_alive(m)}
        gone = [(group, m) for m, *_ in rows if m not in living]
        self._connection.executemany("DELETE FROM members WHERE grp=? AND member=?", gone)
        return living

    def _read(
        self, group: str, now: int, member: str, held: Mapping[TopicPartition, int], living: Collection[str]
    ) -> dict[TopicPartition, _Lease]:
        """All leases. The owner is None when it is gone. This member owns the leases that it holds with the same epoch only."""
        leases = {}
        for topic, partition, owner, epoch, expires, boot in fetch(
            self._connection, "SELECT topic, partition, owner, epoch, expires, boot FROM leases WHERE grp=?", (group,)
        ):
            source = TopicPartition(topic, partition)
            alive = held.get(source) == epoch if owner == member else expires >= now and owner in living
            valid = boot == self._boot and alive
            leases[source] = _Lease(owner if valid else None, epoch)
        return leases

    def _subscribers(self, group: str, topics: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {topic: [] for topic in sorted(topics)}
        rows = fetch(self._connection, "SELECT member, topics FROM members WHERE grp=? ORDER BY member", (group,))
        for member, names in rows:
            for topic in msgspec.json.decode(names, type=list[str]):
                if topic in found:
                    found[topic].append(member)
        return found


def _balance(
    topic: str, partitions: int, subscribers: list[str], member: str, leases: Mapping[TopicPartition, _Lease]
) -> tuple[list[TopicPartition], list[TopicPartition]]:
    """The free partitions of a topic that this member should acquire, and its partitions above its share."""
    mine, free = [], []
    for partition in range(partitions):
        source = TopicPartition(topic, partition)
        lease = leases.get(source)
        if lease is None or lease.owner is None:
            free.append(source)
        elif lease.owner == member:
            mine.append(source)
    # The remainder goes by a hash of topic and member: small topics spread, and few partitions move when a member joins.
    order = sorted(subscribers, key=lambda name: crc32(f"{topic}/{name}".encode()))
    share = partitions // len(order) + (order.index(member) < partitions % len(order))
    return free[: max(0, share - len(mine))], mine[share:]


@contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    """One write transaction: committed at the end, rolled back on any error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# Whether a member is alive: it locks one byte of `groups.alive`. The kernel releases the lock when the last process that has the
# file description open ends. A frozen process keeps it. The byte follows from the member's name, which is never used again: there
# is nothing to clean up, and no process id is asked. Locks belong to the open file, not to the process (OFD locks): the members
# of one process see each other. A forked child closes its copy at once: else it would keep its dead parent alive.

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


class MemberLocks:
    """`groups.alive`, open. Calls do not wait; they raise OSError."""

    def __init__(self, path: Path) -> None:
        self._held, self._checked = -1, -1  # two descriptions: a lock does not show on the one that holds it
        self._held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._checked = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _OPEN.add(self)

    def acquire(self, member: str) -> None:
        """Hold the member's lock until `release`, `close` or the end of the process."""
        fcntl.fcntl(self._held, fcntl.F_OFD_SETLK, _byte(fcntl.F_WRLCK, member))

    def release(self, member: str) -> None:
        """Others may take over from this member now."""
        fcntl.fcntl(self._held, fcntl.F_OFD_SETLK, _byte(fcntl.F_UNLCK, member))

    def is_alive(self, member: str) -> bool:
        """Whether any process holds the member's lock."""
        found = fcntl.fcntl(self._checked, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, member))
        kind: int = _FLOCK.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Release the locks of all members of this file."""
        fds, self._held, self._checked = (self._held, self._checked), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _byte(kind: int, member: str) -> bytes:
    start = int.from_bytes(blake2b(member.encode(), digest_size=8).digest(), "big") >> 2
    return _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0)


_OPEN: "weakref.WeakSet[MemberLocks]" = weakref.WeakSet()


def _close_in_child() -> None:
    for alive in list(_OPEN):
        alive.close()


os.register_at_fork(after_in_child=_close_in_child)
