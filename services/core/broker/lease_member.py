"""One member of a group whose partitions are held by leases, on the log and on Kinesis."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

import structlog

from services.core.broker.contract import OnRevoke, Start
from services.core.broker.errors import BrokerError, Unavailable
from services.core.broker.record import TopicPartition

log = structlog.get_logger()


class BackgroundError:
    """An error of a member's background tasks, kept until `poll` raises it.

    A fatal one is a bug of ours, or of the caller's on_revoke. It stays and is not replaced: nobody may wait for records
    that never come.
    """

    def __init__(self) -> None:
        self._fatal: BaseException | None = None
        self._passing: BaseException | None = None

    def record(self, error: BaseException) -> None:
        """Keep an error that may pass; the work goes on."""
        self._passing = error

    def record_fatal(self, error: BaseException) -> None:
        """Keep an error that does not pass."""
        self._fatal = self._fatal or error

    def next(self, *, is_alive: bool) -> BaseException | None:
        """The error since the last call, or None. Unavailable does not count while the leases hold."""
        if self._fatal is not None:
            return self._fatal
        passing, self._passing = self._passing, None
        return None if isinstance(passing, Unavailable) and is_alive else passing

    def raise_fatal(self) -> None:
        """Raise the fatal error, if there is one."""
        if self._fatal is not None:
            raise self._fatal


async def end_tasks(*tasks: "asyncio.Task[None] | None") -> None:
    """Cancel these tasks and wait for their end."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


class _Held(Protocol):
    revoking: bool


Held = TypeVar("Held", bound=_Held)
"""A partition that a member holds. revoking: it is being drained, and returns nothing more."""


class LeaseMember(ABC, Generic[Held]):
    """Sends heartbeats in the background, whether or not somebody polls. Drains partitions (on_revoke) before it releases them.

    held: the partitions that the consumer may poll and commit. A subclass adds what it acquires. It removes what it lost, and
    adds that to `_lost`.
    """

    def __init__(self, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke, drain: float) -> None:
        """drain: the limit of on_revoke, in seconds."""
        self.group, self._topics, self._start = group, tuple(sorted(set(topics))), start
        self._on_revoke, self._drain_seconds = on_revoke, drain
        self.member = uuid.uuid4().hex
        self.held: dict[TopicPartition, Held] = {}
        self._background = BackgroundError()
        self._leaving = False
        self._lost: frozenset[TopicPartition] = frozenset()
        """Lost without a drain; on_revoke is not called yet."""
        self._draining: frozenset[TopicPartition] = frozenset()
        self._drain: asyncio.Task[None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the leases still hold; they do not after this process was frozen for longer than they last."""

    @abstractmethod
    async def heartbeat(self) -> None:
        """Renew the leases, acquire free ones up to this member's share, `_start_drain` those to release. One at a time."""

    @abstractmethod
    async def _wait(self) -> None:
        """Wait until the next heartbeat is due."""

    @abstractmethod
    async def _release(self, sources: frozenset[TopicPartition]) -> None:
        """Release these drained partitions. After a BrokerError a later heartbeat tries again."""

    @abstractmethod
    async def _release_all(self) -> None:
        """Release everything and end the membership. Raises no BrokerError: leases that are not released run out."""

    def _wake(self) -> None:
        """Poll should check again now."""

    async def join(self) -> None:
        """Become a member, acquire free partitions, stay a member until `leave`. Raises UnknownTopic, Unavailable."""
        await self.heartbeat()
        if (failure := self._background.next(is_alive=False)) is not None:
            raise failure
        self._heartbeats = asyncio.create_task(self._run(), name=f"heartbeats of {self.group}")

    async def leave(self) -> None:
        """Drain all partitions while the leases stay alive; then release them. Raises an error of on_revoke."""
        self._leaving = True
        try:
            if self._drain is not None:
                await self._drain
            leaving, self._lost = frozenset(self.held) | self._lost, frozenset()
            if leaving:
                await self._revoke(leaving)
        finally:
            await end_tasks(self._drain, self._heartbeats)  # a heartbeat after the release would join again
            await self._release_all()
        self._background.raise_fatal()

    def next_error(self) -> BaseException | None:
        """The error that poll should raise, see `BackgroundError`."""
        return self._background.next(is_alive=self.is_alive)

    async def _run(self) -> None:
        """Send heartbeats until cancelled. After an error the next heartbeat tries again."""
        while True:
            await self._wait()
            try:
                await self.heartbeat()
            except BrokerError as error:
                self._background.record(error)
            except Exception as error:
                self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        self._background.record_fatal(error)
        self._wake()

    def _start_drain(self, leaving: Collection[TopicPartition]) -> None:
        """Call on_revoke for lost partitions and drain those that leave. One drain at a time: later ones wait for a heartbeat."""
        if self._drain is not None and not self._drain.done():
            return
        leaving = frozenset() if self._leaving else self.held.keys() & leaving
        if self._lost or leaving:
            self._draining, self._lost = self._lost | leaving, frozenset()
            self._drain = asyncio.create_task(
                self._drain_and_release(frozenset(leaving)), name=f"drain of {self.group}"
            )

    async def _drain_and_release(self, leaving: frozenset[TopicPartition]) -> None:
        try:
            await self._revoke(self._draining)
            if leaving:
                await self._release(leaving)
        except BrokerError as error:
            self._background.record(error)
        except Exception as error:
            self._fail(error)
        finally:
            self._draining = frozenset()

    async def _revoke(self, sources: frozenset[TopicPartition]) -> None:
        """Await on_revoke, within its limit. Raises CancelledError only; an error of on_revoke is fatal."""
        for source in sources:
            if source in self.held:
                self.held[source].revoking = True
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._on_revoke(sources)
        except TimeoutError:
            log.warning("drain_timed_out", group=self.group, partitions=sorted(sources))
        except Exception as error:
            self._background.record_fatal(error)
        self._wake()  # poll raises the error of on_revoke
