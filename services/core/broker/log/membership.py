"""One member of a group: its leases in groups.db, and the position at which it begins to read each partition.

Members of all processes share `groups.bell`. When its bytes change, they send a heartbeat at once.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.core.broker.contract import OnRevoke, Start, start_in
from services.core.broker.errors import BrokerError
from services.core.broker.lease_member import LeaseMember
from services.core.broker.log.clock import boot_ms
from services.core.broker.log.groups import CommittedOffsets, GroupPosition
from services.core.broker.log.leases import HeartbeatResult, Leases
from services.core.broker.log.topic_reader import Readers
from services.core.broker.record import Record, TopicPartition

T = TypeVar("T")

_CHECK_SECONDS = 0.05
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. lease: a silent member keeps its partitions for this long. drain: limit of on_revoke."""

    lease: float = 10.0
    drain: float = 30.0

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.lease / 4, 0.5)


@dataclass(frozen=True, slots=True)
class SharedResources:
    """The parts that all members of this process share."""

    leases: Leases
    offsets: CommittedOffsets
    wakeup: "WakeupFile"
    readers: Readers
    on_thread: Callable[..., Awaitable[object]]
    timing: Timing


class LogMembership(LeaseMember["OwnedPartition"]):
    """until: the end of the leases without another heartbeat, boot milliseconds."""

    def __init__(
        self, shared: SharedResources, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke
    ) -> None:
        super().__init__(group, topics, start, on_revoke, shared.timing.drain)
        self._shared = shared
        self.until = 0
        self._unreleased: dict[TopicPartition, int] = {}
        """Drained, by epoch, but not yet released in groups.db."""
        self._registered: set[tuple[str, bytes]] = set()
        """Topics, with incarnation, in which this group is registered."""
        self._wakeups = WakeupWatch(shared.wakeup)

    @property
    def is_alive(self) -> bool:
        return boot_ms() < self.until

    async def join(self) -> None:
        for topic in self._topics:
            await self._shared.readers.partition_count(topic)
        await super().join()

    async def _wait(self) -> None:
        """Less when members came or partitions became free."""
        waited = 0.0
        while waited < self._shared.timing.heartbeat:
            await asyncio.sleep(_CHECK_SECONDS)
            waited += _CHECK_SECONDS
            if self._wakeups.has_changed():
                return

    async def heartbeat(self) -> None:
        shared = self._shared
        counts: dict[str, int] = {}
        for topic in self._topics:
            try:
                counts[topic] = await shared.readers.partition_count(topic)
            except BrokerError as error:  # the others go on
                self._background.record(error)
        if self._unreleased and not self._leaving:
            await self._release(frozenset())
        epochs = {source: owned.epoch for source, owned in self.held.items()}
        beat = await shared.on_thread(shared.leases.heartbeat, self.group, self.member, counts, epochs, self._leaving)
        assert isinstance(beat, HeartbeatResult)
        self.until = beat.until
        for source in beat.lost:
            self.held.pop(source, None)
        if beat.joined:
            await shared.on_thread(shared.wakeup.notify)
        self._lost |= beat.lost
        self._start_drain(beat.surplus)
        # Partitions that on_revoke is still draining are not read again: a later heartbeat acquires them, with a higher epoch.
        acquired = {s: epoch for s, epoch in beat.acquired.items() if s not in self._lost and s not in self._draining}
        for topic in sorted({source.topic for source in acquired}):
            try:
                await self._acquire({source: epoch for source, epoch in acquired.items() if source.topic == topic})
            except BrokerError as error:  # the next heartbeat tries again
                self._background.record(error)

    async def _acquire(self, acquired: dict[TopicPartition, int]) -> None:
        """Start reading partitions of one topic at the group's position."""
        (topic,) = {source.topic for source in acquired}
        progress = await self._progress(topic, {source.partition for source in acquired})
        for source, epoch in acquired.items():
            incarnation, position = progress[source.partition].incarnation, progress[source.partition].next
            self.held[source] = OwnedPartition(source, epoch, incarnation, position)

    async def _progress(self, topic: str, partitions: set[int]) -> dict[int, GroupPosition]:
        """The group's positions in these partitions; where it has not begun, it begins now."""
        progress = await self._shared.offsets.use(lambda file: file.progress(self.group, topic))
        if not partitions <= progress.keys():
            progress = await self._enter(topic)
        begun = {(topic, progress[partition].incarnation) for partition in partitions}
        if not begun <= self._registered:
            await self._shared.readers.register_group(
                topic, self.group
            )  # a registered group without offsets has lost them
            self._registered |= begun
        return progress

    async def _enter(self, topic: str) -> dict[int, GroupPosition]:
        incarnation, starts, earliest, groups = await self._shared.readers.use(
            topic,
            lambda r: (
                r.store.meta.incarnation,
                r.offsets_at(start_in(topic, self._start)),
                r.offsets_at("earliest"),
                r.store.groups(),
            ),
        )
        has_begun = self.group in groups
        return await self._shared.offsets.use(
            lambda file: file.enter(self.group, topic, incarnation, starts, earliest, has_begun=has_begun)
        )

    async def _release(self, sources: frozenset[TopicPartition], *, leave: bool = False) -> None:
        self._unreleased |= {source: self.held.pop(source).epoch for source in sources if source in self.held}
        released = dict(self._unreleased)
        await self._shared.on_thread(self._shared.leases.release, self.group, self.member, released, leave)
        for source in released:
            self._unreleased.pop(source, None)
        await self._shared.on_thread(self._shared.wakeup.notify)

    async def _release_all(self) -> None:
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await asyncio.shield(self._release(frozenset(self.held), leave=True))


class OwnedPartition:
    """A partition that a member owns. position: the next offset to return. rest: records that were read but not returned,
    with their offsets; behind_rest: where the next read goes on.

    epoch: of the lease. incarnation: of the topic when it was acquired. processed_next: the offset behind the committed one.
    revoking: it is drained, nothing more is returned. retry_at: the time of the next read after an error (boot ms).
    """

    __slots__ = (
        "behind_rest",
        "epoch",
        "incarnation",
        "offsets",
        "paused",
        "position",
        "processed_next",
        "rest",
        "retry_at",
        "revoking",
        "source",
    )

    def __init__(self, source: TopicPartition, epoch: int, incarnation: bytes, position: int) -> None:
        self.source, self.epoch, self.incarnation = source, epoch, incarnation
        self.position = self.processed_next = self.behind_rest = position
        self.rest: list[Record] = []
        self.offsets: Sequence[int] = ()
        self.revoking = self.paused = False
        self.retry_at = 0

    @property
    def is_readable(self) -> bool:
        """Whether poll may return its records."""
        return not (self.revoking or self.paused)


class WakeupFile:
    """Eight bytes that any process may change. `notify` may wait for the disk; a `WakeupWatch` never does."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def notify(self) -> None:
        """Change the bytes. If that fails, on a full disk for example, members notice at their next heartbeat."""
        with suppress(OSError):
            os.pwrite(self._fd, os.urandom(8), 0)

    def read(self) -> bytes:
        """The bytes, without waiting for a disk; empty when that is not possible."""
        found = bytearray(8)
        try:
            size = os.preadv(self._fd, [found], 0, os.RWF_NOWAIT)
        except OSError:
            return b""
        return bytes(found[:size])

    def close(self) -> None:
        """Close the file. Later calls fail: another file may get this descriptor."""
        fd, self._fd = self._fd, -1
        os.close(fd)


class WakeupWatch:
    """Notices that the file has changed."""

    def __init__(self, file: WakeupFile) -> None:
        self._file = file
        self._last = file.read()

    def has_changed(self) -> bool:
        """Whether the bytes changed since the last call."""
        last, self._last = self._last, self._file.read()
        return last != self._last
