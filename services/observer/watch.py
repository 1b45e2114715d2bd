"""What is done about the table: metrics of what became final, alarms, health."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import structlog

from services.core import metrics
from services.core.ledger.minute import MINUTE_MS
from services.observer import health
from services.observer.ledger.alarm import Alarm, AlarmWebhook, drift_alarm, find_alarms, loss_alarm
from services.observer.ledger.fields import Drift
from services.observer.ledger.flow import Step
from services.observer.ledger.follow import Follower
from services.observer.ledger.row import Row

log = structlog.get_logger()

MEASURE_S = 5.0
_WAITING = 100
"""Alarms that wait to be told; more are in the log and the metrics only."""

_DRIFT_ENDS_MS = 3_600_000
"""A drift that was not seen for so long is another one when it comes again."""

Elsewhere = Callable[[str], Sequence[tuple[health.State, str]]]
"""What is known of a pipe's health beside the ledger."""


class Watch:
    """`on_final` is the follower's; `follower` is set before either is run."""

    def __init__(self, threshold: float, webhook: AlarmWebhook | None, elsewhere: Elsewhere) -> None:
        self.threshold = threshold
        self.follower: Follower | None = None
        self._webhook, self._elsewhere = webhook, elsewhere
        self._alarms: asyncio.Queue[Alarm] = asyncio.Queue(_WAITING)
        self._drifting: dict[tuple[str, Step, str, str], int] = {}
        """When each drift was last seen, in ms."""

    def judge(self, pipe: str, now: int) -> health.Health:
        """The health of a pipe."""
        assert self.follower is not None
        follower = self.follower
        more = list(self._elsewhere(pipe))
        more += [("degraded", f"{_name(drift.step)}: {drift.text}") for drift in self.find_drifts(pipe)]
        return health.judge(follower.table, follower.planned, pipe, now, self.threshold, more)

    def find_drifts(self, pipe: str) -> list[Drift]:
        """Fields of the pipe's events that are not as they were."""
        assert self.follower is not None
        steps = self.follower.table.flow.steps(pipe)
        return [drift for step in steps for drift in self.follower.fields.drifts(step)]

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
            self._raise(loss_alarm(row))

    def _raise(self, alarm: Alarm) -> None:
        if self._webhook is not None:
            with suppress(asyncio.QueueFull):
                self._alarms.put_nowait(alarm)

    def on_drifts(self, pipe: str, drifts: Iterable[Drift], now: int) -> None:
        """Raise an alarm for each that was not there for an hour, unless something is planned."""
        assert self.follower is not None
        quiet = self.follower.planned.covers(pipe, now - health.WATCHED_MINUTES * MINUTE_MS, now + 1) is not None
        for drift in drifts:
            key = (pipe, drift.step, drift.field, drift.what)
            is_known = now - self._drifting.get(key, -_DRIFT_ENDS_MS) < _DRIFT_ENDS_MS
            self._drifting[key] = now
            if not (is_known or quiet):
                metrics.LEDGER_DRIFTS.labels(pipe).inc()
                log.warning(
                    "drift", pipe=pipe, node=drift.step.node, field=drift.field, what=drift.what, text=drift.text
                )
                self._raise(drift_alarm(pipe, drift, now // MINUTE_MS))
        self._drifting = {key: seen for key, seen in self._drifting.items() if now - seen < _DRIFT_ENDS_MS}

    async def run(self, stopping: asyncio.Event) -> None:
        """Tell alarms and measure until `stopping`; what is not told by then is in the log."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._tell()), group.create_task(self._measure())]
            await stopping.wait()
            for task in tasks:
                task.cancel()

    async def _tell(self) -> None:
        while True:
            alarm = await self._alarms.get()
            assert self._webhook is not None
            await self._webhook.tell(alarm)

    async def _measure(self) -> None:
        assert self.follower is not None
        table, clock = self.follower.table, self.follower.now_ms
        while True:
            now = clock()
            for pipe in table.flow.pipes:
                rows = health.recent_rows(table, pipe, now, health.WATCHED_MINUTES)
                metrics.LEDGER_OPEN.labels(pipe).set(sum(row.why_open is not None for row in rows))
                if not self.follower.catching_up:
                    self.on_drifts(pipe, self.find_drifts(pipe), now)
                metrics.PIPE_HEALTH.labels(pipe).set(health.STATES.index(self.judge(pipe, now).state))
            await asyncio.sleep(MEASURE_S)


def _name(step: Step) -> str:
    return step.node if step.destination is None else f"{step.node} to {step.destination}"
