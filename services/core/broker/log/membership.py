"""One member of a group: keeps its leases alive, takes and drains partitions. Independent of who polls when."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from services.core.broker.contract import OnRevoke, Start, start_in
from services.core.broker.errors import BrokerError
from services.core.broker.log.bell import Bell, Listener
from services.core.broker.log.clock import boot_ms
from services.core.broker.log.groups import Progress as GroupProgress
from services.core.broker.log.leases import Beat, Leases
from services.core.broker.log.owned import Owned
from services.core.broker.log.progress import Progress
from services.core.broker.log.readers import Readers
from services.core.broker.record import TopicPartition
from services.core.broker.trouble import Trouble, end_tasks

T = TypeVar("T")

_LISTEN_SECONDS = 0.05
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. lease: how long a silent member keeps its partitions. drain: how long on_revoke may take."""

    lease: float = 10.0
    drain: float = 30.0

    @property
    def beat(self) -> float:
        """Between two heartbeats."""
        return min(self.lease / 4, 0.5)


@dataclass(frozen=True, slots=True)
class GroupSide:
    """What all members of this process share: the two halves of groups.db, the bell, readers, the lease thread."""

    leases: Leases
    progress: Progress
    bell: Bell
    readers: Readers
    on_thread: Callable[..., Awaitable[object]]
    timing: Timing


class Membership:
    """`owned` is what may be polled; `until` (boot milliseconds) is how long without another beat."""

    def __init__(self, side: GroupSide, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke) -> None:
        self._side, self.group, self._topics = side, group, tuple(sorted(set(topics)))
        self._start, self._on_revoke = start, on_revoke
        self.member = uuid.uuid4().hex
        self.owned: dict[TopicPartition, Owned] = {}
        self.until = 0
        self._trouble = Trouble(group)
        self._leaving = False
        self._drain: asyncio.Task[None] | None = None
        self._draining: frozenset[TopicPartition] = frozenset()
        self._lost: frozenset[TopicPartition] = frozenset()
        """Gone without a drain, and on_revoke does not know yet."""
        self._unreleased: dict[TopicPartition, int] = {}
        """Drained, with epochs, but groups.db could not be told so yet."""
        self._registered: set[tuple[str, bytes]] = set()
        """Topics, with incarnation, that know of this group."""
        self._beats: asyncio.Task[None] | None = None
        self._listener = Listener(side.bell)

    @property
    def is_alive(self) -> bool:
        """Whether the leases still hold: false after this process was frozen for longer than they last."""
        return boot_ms() < self.until

    async def join(self) -> None:
        """Become a member, take what is free, stay one until `leave`. Raises UnknownTopic."""
        for topic in self._topics:
            await self._side.readers.partition_count(topic)
        await self._beat()
        if (failure := self._trouble.take(is_alive=False)) is not None:
            raise failure
        self._beats = asyncio.create_task(self._run(), name=f"log-group-{self.group}")

    def take_failure(self) -> BaseException | None:
        """What poll should raise, see `Trouble`."""
        return self._trouble.take(is_alive=self.is_alive)

    async def leave(self) -> None:
        """Drain everything, keeping the leases alive; then stop, free it, end the membership."""
        self._leaving = True
        try:
            if self._drain is not None:
                await self._drain
            rest, self._lost = frozenset(self.owned) | self._lost, frozenset()
            if rest:
                await self._revoke(rest)
        finally:
            await end_tasks(self._drain, self._beats)  # a beat after the release would make us a member again
            with suppress(BrokerError, TimeoutError):  # the leases run out by themselves
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await asyncio.shield(self._release(frozenset(self.owned), leave=True))
        self._trouble.raise_fatal()

    async def _run(self) -> None:
        """Beat until cancelled. What fails is kept for poll to raise, and tried again."""
        while True:
            await self._listen()
            try:
                await self._beat()
            except BrokerError as error:
                self._trouble.note(error)
            except Exception as error:
                self._trouble.end(error)
                return

    async def _listen(self) -> None:
        """Wait for the next beat: sooner when the bell tells that members came or partitions became free."""
        waited = 0.0
        while waited < self._side.timing.beat:
            await asyncio.sleep(_LISTEN_SECONDS)
            waited += _LISTEN_SECONDS
            if self._listener.heard():
                return

    async def _beat(self) -> None:
        side = self._side
        counts: dict[str, int] = {}
        for topic in self._topics:
            try:
                counts[topic] = await side.readers.partition_count(topic)
            except BrokerError as error:  # the others go on
                self._trouble.note(error)
        if self._unreleased and not self._leaving:
            await self._release(frozenset())
        held = {source: owned.epoch for source, owned in self.owned.items()}
        beat = await side.on_thread(side.leases.beat, self.group, self.member, counts, held, self._leaving)
        assert isinstance(beat, Beat)
        self.until = beat.until
        for source in beat.lost:
            self.owned.pop(source, None)
        if beat.joined:
            await side.on_thread(side.bell.ring)
        self._lost |= beat.lost
        self._start_drain(beat.surplus)
        # What on_revoke has yet to finish is not read again before: a later beat takes it, with a higher epoch.
        taken = {s: epoch for s, epoch in beat.taken.items() if s not in self._lost and s not in self._draining}
        for topic in sorted({source.topic for source in taken}):
            try:
                await self._take({source: epoch for source, epoch in taken.items() if source.topic == topic})
            except BrokerError as error:  # the next beat takes them again
                self._trouble.note(error)

    async def _take(self, taken: dict[TopicPartition, int]) -> None:
        """Start reading partitions of one topic where the group is."""
        (topic,) = {source.topic for source in taken}
        progress = await self._progress(topic, {source.partition for source in taken})
        for source, epoch in taken.items():
            incarnation, position = progress[source.partition].incarnation, progress[source.partition].next
            self.owned[source] = Owned(source, epoch, incarnation, position)

    async def _progress(self, topic: str, partitions: set[int]) -> dict[int, GroupProgress]:
        """How far the group is in these partitions; where it has not begun, it begins now."""
        progress = await self._side.progress.use(lambda file: file.progress(self.group, topic))
        if not partitions <= progress.keys():
            progress = await self._enter(topic)
        begun = {(topic, progress[partition].incarnation) for partition in partitions}
        if not begun <= self._registered:
            await self._side.readers.register_group(topic, self.group)  # what is not here later was lost
            self._registered |= begun
        return progress

    async def _enter(self, topic: str) -> dict[int, GroupProgress]:
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
        return await self._side.progress.use(
            lambda file: file.enter(self.group, topic, incarnation, starts, earliest, has_begun=has_begun)
        )

    def _start_drain(self, above_share: frozenset[TopicPartition]) -> None:
        """Tell on_revoke of what is lost, drain what is above this member's share. One at a time; what comes meanwhile waits."""
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
                with suppress(BrokerError):  # the next beat tries again
                    await self._release(surplus)
        finally:
            self._draining = frozenset()

    async def _revoke(self, sources: frozenset[TopicPartition]) -> None:
        for source in sources:
            if source in self.owned:
                self.owned[source].revoking = True
        await self._trouble.revoke(self._on_revoke, sources, self._side.timing.drain)

    async def _release(self, sources: frozenset[TopicPartition], *, leave: bool = False) -> None:
        self._unreleased |= {source: self.owned.pop(source).epoch for source in sources if source in self.owned}
        released = dict(self._unreleased)
        await self._side.on_thread(self._side.leases.release, self.group, self.member, released, leave)
        for source in released:
            self._unreleased.pop(source, None)
        await self._side.on_thread(self._side.bell.ring)
