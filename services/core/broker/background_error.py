"""Errors of a member's background tasks, kept until `poll` raises them; and its on_revoke, called with a time limit."""

import asyncio

import structlog

from services.core.broker.contract import OnRevoke
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition

log = structlog.get_logger()


class BackgroundError:
    """The error of one member. A fatal one is a bug of ours, or of the caller's on_revoke: it stays and is not replaced."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._fatal: BaseException | None = None
        self._passing: BaseException | None = None

    def record(self, error: BaseException) -> None:
        """Keep an error that may pass; the work goes on."""
        self._passing = error

    def record_fatal(self, error: BaseException) -> None:
        """Keep an error that does not pass: nobody may wait for records that never come."""
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

    async def revoke(self, on_revoke: OnRevoke, sources: frozenset[TopicPartition], seconds: float) -> None:
        """Await on_revoke, at most `seconds`. Raises CancelledError only; an error of on_revoke is fatal."""
        try:
            async with asyncio.timeout(seconds):
                await on_revoke(sources)
        except TimeoutError:
            log.warning("drain_timed_out", group=self._group, partitions=sorted(sources))
        except Exception as error:
            self.record_fatal(error)


async def end_tasks(*tasks: "asyncio.Task[None] | None") -> None:
    """Cancel these tasks and wait for their end."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
