"""One member of a group: it keeps its leases alive, acquires and drains partitions, whether or not somebody polls.

Members of all processes share `groups.bell`: a change of its bytes tells them to look at the group at once.
"""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.core.broker.background_error import BackgroundError, end_tasks
from services.core.broker.contract import OnRevoke, Start, start_in
from services.core.broker.errors import BrokerError
from services.core.broker.log.clock import boot_ms
from services.core.broker.log.groups import CommittedOffsets, GroupPosition
from services.core.broker.log.leases import Heartbeat, Leases
from services.core.broker.log.topic_reader import Readers
from services.core.broker.record import Record, TopicPartition

T = TypeVar("T")

_CHECK_SECONDS = 0.05
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. lease: how long a silent member keeps its partitions. drain: how long on_revoke may take."""

    lease: float = 10.0
    drain: float = 30.0

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.lease / 4, 0.5)


@dataclass(frozen=True, slots=True)
class GroupSide:
    """The parts that all members of this process share."""

    leases: Leases
    offsets: CommittedOffsets
    wakeup: "WakeupFile"
    readers: Readers
    on_thread: Callable[..., Awaitable[object]]
    timing: Timing


class Membership:
    """owned: the partitions that may be polled. until: the end of the leases without another heartbeat, boot milliseconds."""

    def __init__(self, side: GroupSide, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke) -> None:
        self._side, self.group, self._topics = side, group, tuple(sorted(set(topics)))
        self._start, self._on_revoke = start, on_revoke
        self.member = uuid.uuid4().hex
        self.owned: dict[TopicPartition, OwnedPartition] = {}
        self.until = 0
        self._background = BackgroundError(group)
        self._leaving = False
        self._drain: asyncio.Task[None] | None = None
        self._draining: frozenset[TopicPartition] = frozenset()
        self._lost: frozenset[TopicPartition] = frozenset()
        """Lost without a drain; on_revoke is still to be called for them."""
        self._unreleased: dict[TopicPartition, int] = {}
        """Drained, by epoch, but not yet released in groups.db."""
        self._registered: set[tuple[str, bytes]] = set()
        """Topics, with incarnation, in which this group is registered."""
        self._heartbeats: asyncio.Task[None] | None = None
        self._wakeups = WakeupWatch(side.wakeup)

    @property
    def is_alive(self) -> bool:
        """Whether the leases still hold; they do not after this process was frozen for longer than they last."""
        return boot_ms() < self.until

    async def join(self) -> None:
        """Become a member, acquire free partitions, stay a member until `leave`. Raises UnknownTopic."""
        for topic in self._topics:
            await self._side.readers.partition_count(topic)
        await self._send_heartbeat()
        if (failure := self._background.next(is_alive=False)) is not None:
            raise failure
        self._heartbeats = asyncio.create_task(self._run(), name=f"log-group-{self.group}")

    def next_error(self) -> BaseException | None:
        """The error that poll should raise, see `BackgroundError`."""
        return self._background.next(is_alive=self.is_alive)

    async def leave(self) -> None:
        """Drain all partitions while the leases stay alive; then release them and end the membership."""
        self._leaving = True
        try:
            if self._drain is not None:
                await self._drain
            rest, self._lost = frozenset(self.owned) | self._lost, frozenset()
            if rest:
                await self._revoke(rest)
        finally:
            await end_tasks(self._drain, self._heartbeats)  # a heartbeat after the release would join again
            with suppress(BrokerError, TimeoutError):  # the leases run out by themselves
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.shield(self._release(frozenset(self.owned), leave=True))
        self._background.raise_fatal()

    async def _run(self) -> None:
        """Send heartbeats until cancelled. An error is kept for poll to raise; the next heartbeat tries again."""
        while True:
            await self._wait_for_wakeup()
            try:
                await self._send_heartbeat()
            except BrokerError as error:
                self._background.record(error)
            except Exception as error:
                self._background.record_fatal(error)
                return

    async def _wait_for_wakeup(self) -> None:
        """Wait for the next heartbeat; less when members came or partitions became free."""
        waited = 0.0
        while waited < self._side.timing.heartbeat:
            await asyncio.sleep(_CHECK_SECONDS)
            waited += _CHECK_SECONDS
            if self._wakeups.has_changed():
                return

    async def _send_heartbeat(self) -> None:
        side = self._side
        counts: dict[str, int] = {}
        for topic in self._topics:
            try:
                counts[topic] = await side.readers.partition_count(topic)
            except BrokerError as error:  # the others go on
                self._background.record(error)
        if self._unreleased and not self._leaving:
            await self._release(frozenset())
        held = {source: owned.epoch for source, owned in self.owned.items()}
        beat = await side.on_thread(side.leases.heartbeat, self.group, self.member, counts, held, self._leaving)
        assert isinstance(beat, Heartbeat)
        self.until = beat.until
        for source in beat.lost:
            self.owned.pop(source, None)
        if beat.joined:
            await side.on_thread(side.wakeup.notify)
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
            self.owned[source] = OwnedPartition(source, epoch, incarnation, position)

    async def _progress(self, topic: str, partitions: set[int]) -> dict[int, GroupPosition]:
        """The group's positions in these partitions; where it has not begun, it begins now."""
        progress = await self._side.offsets.use(lambda file: file.progress(self.group, topic))
        if not partitions <= progress.keys():
            progress = await self._enter(topic)
        begun = {(topic, progress[partition].incarnation) for partition in partitions}
        if not begun <= self._registered:
            await self._side.readers.register_group(
                topic, self.group
            )  # a registered group without offsets has lost them
            self._registered |= begun
        return progress

    async def _enter(self, topic: str) -> dict[int, GroupPosition]:
        incarnation, starts, earliest, groups = await self._side.readers.use(
            topic,
            lambda r: (
                r.store.meta.incarnation,
                r.offsets_at(start_in(topic, self._start)),
                r.offsets_at("earliest"),
                r.store.groups(),
            ),
        )
        has_begun = self.group in groups
        return await self._side.offsets.use(
            lambda file: file.enter(self.group, topic, incarnation, starts, earliest, has_begun=has_begun)
        )

    def _start_drain(self, above_share: frozenset[TopicPartition]) -> None:
        """Call on_revoke for lost partitions and drain those above this member's share. One drain at a time; others wait."""
        if self._drain is not None and not self._drain.done():
            return
        kept = self._leaving
        surplus = frozenset(s for s in above_share if not kept and s in self.owned and not self.owned[s].revoking)
        if self._lost or surplus:
            self._draining, self._lost, lost = self._lost | surplus, frozenset(), self._lost
            self._drain = asyncio.create_task(self._give_up(lost, surplus))

    async def _give_up(self, lost: frozenset[TopicPartition], surplus: frozenset[TopicPartition]) -> None:
        try:
            await self._revoke(lost | surplus)
            if surplus:
                with suppress(BrokerError):  # the next heartbeat tries again
                    await self._release(surplus)
        finally:
            self._draining = frozenset()

    async def _revoke(self, sources: frozenset[TopicPartition]) -> None:
        for source in sources:
            if source in self.owned:
                self.owned[source].revoking = True
        await self._background.revoke(self._on_revoke, sources, self._side.timing.drain)

    async def _release(self, sources: frozenset[TopicPartition], *, leave: bool = False) -> None:
        self._unreleased |= {source: self.owned.pop(source).epoch for source in sources if source in self.owned}
        released = dict(self._unreleased)
        await self._side.on_thread(self._side.leases.release, self.group, self.member, released, leave)
        for source in released:
            self._unreleased.pop(source, None)
        await self._side.on_thread(self._side.wakeup.notify)


class OwnedPartition:
    """A partition that a member owns. position: the next offset to return. rest: records that were read but not returned.

    epoch: of the lease. incarnation: of the topic when it was acquired. processed_next: the offset behind the committed one.
    revoking: it is drained, nothing more is returned. retry_at: the time of the next read after an error (boot ms).
    """

    __slots__ = (
        "epoch",
        "incarnation",
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
        self.position = self.processed_next = position
        self.rest: list[Record] = []
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
        """Change the bytes. When that fails, because the disk is full say, members still look at every heartbeat."""
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
