"""What goes wrong in a member's background work, kept until poll raises it; and its on_revoke, called within bounds."""

import asyncio

import structlog

from services.core.broker.contract import OnRevoke
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition

log = structlog.get_logger()


class Trouble:
    """One member's. A fatal one is a fault of ours, or of the caller's on_revoke: it stays, and nothing replaces it."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._fatal: BaseException | None = None
        self._passing: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """It may pass: the work goes on."""
        self._passing = error

    def end(self, error: BaseException) -> None:
        """It does not pass: nobody may wait for records that never come."""
        self._fatal = self._fatal or error

    def take(self, *, is_alive: bool) -> BaseException | None:
        """What failed since the last call. That something was unavailable does not count while the leases hold."""
        if self._fatal is not None:
            return self._fatal
        passing, self._passing = self._passing, None
        return None if isinstance(passing, Unavailable) and is_alive else passing

    def raise_fatal(self) -> None:
        """If there is one."""
        if self._fatal is not None:
            raise self._fatal

    async def revoke(self, on_revoke: OnRevoke, sources: frozenset[TopicPartition], seconds: float) -> None:
        """Let the caller drain these partitions, for so long. Raises CancelledError only; what on_revoke raises is fatal."""
        try:
            async with asyncio.timeout(seconds):
                await on_revoke(sources)
        except TimeoutError:
            log.warning("drain_timed_out", group=self._group, partitions=sorted(sources))
        except Exception as error:
            self.end(error)


async def end_tasks(*tasks: "asyncio.Task[None] | None") -> None:
    """Cancel these tasks and wait until they are over."""
    running = [task for task in tasks if task is not None and not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
