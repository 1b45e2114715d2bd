"""Joining a group again after a membership broke: how long to wait, what to count, when to tell an operator."""

import asyncio

import backoff
import structlog

from services.core import metrics
from services.core.broker.errors import BrokerError
from services.core.lifecycle import wait_for_stop

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.2, 5.0


class Rejoin:
    """Of one member of `group`, over all its memberships. Not thread-safe.

    The waits grow, with full jitter, while joining fails, and begin again with each membership that was reached. event: the log
    line's; hint: for an operator.
    """

    def __init__(self, group: str, event: str, hint: str) -> None:
        self._group, self._event, self._hint = group, event, hint
        self._failures = 0

    def joined(self) -> None:
        """A membership was reached: whatever ends it is a new trouble."""
        self._failures = 0

    def failed(self, errors: BaseExceptionGroup[Exception]) -> BaseException:
        """Joining failed, or the membership broke. Counts it and returns the first cause.

        The first failure of a series is told, then the second, the fourth, the eighth and so on: a long one is not silent, and
        not a flood.
        """
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        reason = type(first).__name__
        metrics.BROKER_REJOINS.labels(self._group, reason).inc()
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            log.error(
                self._event,
                group=self._group,
                error=str(first),
                kind=reason,
                failures=self._failures,
                hint=self._hint,
                exc_info=None if isinstance(first, BrokerError) else first,
            )
        return first

    async def wait(self, stopping: asyncio.Event) -> None:
        """Until the next attempt may begin, or the stop."""
        await wait_for_stop(stopping, backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(self._failures, 10))))
