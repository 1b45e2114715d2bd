"""What is done about the table: metrics of what became final, alarms, health."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from services.core import metrics
from services.observer import health
from services.observer.ledger.alarm import AlarmWebhook, find_alarms
from services.observer.ledger.follow import Follower
from services.observer.ledger.row import Row

log = structlog.get_logger()

MEASURE_S = 5.0
_WAITING = 100
"""Alarms that wait to be told; more are in the log and the metrics only."""

Elsewhere = Callable[[str], Sequence[tuple[health.State, str]]]
"""What is known of a pipe's health beside the ledger."""


class Watch:
    """`on_final` is the follower's; `follower` is set before either is run."""

    def __init__(self, threshold: float, webhook: AlarmWebhook | None, elsewhere: Elsewhere) -> None:
        self.threshold = threshold
        self.follower: Follower | None = None
        self._webhook, self._elsewhere = webhook, elsewhere
        self._alarms: asyncio.Queue[Row] = asyncio.Queue(_WAITING)

    def judge(self, pipe: str, now: int) -> health.Health:
        """The health of a pipe."""
        assert self.follower is not None
        follower = self.follower
        return health.judge(follower.table, follower.planned, pipe, now, self.threshold, self._elsewhere(pipe))

    def on_final(self, rows: Sequence[Row]) -> None:
        """Count them, and raise the alarms that are due."""
        assert self.follower is not None
        for row in rows:
            metrics.LEDGER_FINAL.labels(row.pipe).inc(row.accepted)
            metrics.LEDGER_LOSS.labels(row.pipe).set(row.loss)
            for step in row.steps:
                metrics.LEDGER_MISSING.labels(row.pipe, step.node, step.destination or "").inc(step.missing)
        for row in find_alarms(rows, self.follower.planned, self.threshold):
            metrics.LEDGER_ALARMS.labels(row.pipe).inc()
            hint = f"Try: penstock loss explain {row.pipe} MINUTE"
            log.error("loss", pipe=row.pipe, minute=row.minute, missing=row.missing, accepted=row.accepted, hint=hint)
            if self._webhook is not None:
                with suppress(asyncio.QueueFull):
                    self._alarms.put_nowait(row)

    async def run(self, stopping: asyncio.Event) -> None:
        """Tell alarms and measure until `stopping`; what is not told by then is in the log."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._tell()), group.create_task(self._measure())]
            await stopping.wait()
            for task in tasks:
                task.cancel()

    async def _tell(self) -> None:
        while True:
            row = await self._alarms.get()
            assert self._webhook is not None
            await self._webhook.tell(row)

    async def _measure(self) -> None:
        assert self.follower is not None
        table, clock = self.follower.table, self.follower.now_ms
        while True:
            now = clock()
            for pipe in table.flow.pipes:
                rows = health.recent_rows(table, pipe, now, health.WATCHED_MINUTES)
                metrics.LEDGER_OPEN.labels(pipe).set(sum(row.why_open is not None for row in rows))
                metrics.PIPE_HEALTH.labels(pipe).set(health.STATES.index(self.judge(pipe, now).state))
            await asyncio.sleep(MEASURE_S)
