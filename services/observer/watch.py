"""Metrics, alarms and health from the loss table."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from services.core import metrics
from services.core.ledger.minute import MINUTE_MS
from services.core.process.lifecycle import run_until
from services.observer import health
from services.observer.alarms import Alarm, AlarmWebhook, drift_alarm, find_alarms, loss_alarm, unjudged_alarm
from services.observer.follower import Follower
from services.observer.ledger.finality import Finding
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Part, Row
from services.observer.ledger.table import TickResult
from services.observer.ledger_api import format_minute
from services.observer.payload_fields import Drift

log = structlog.get_logger()

MEASURE_S = 5.0
_PAUSE_S = 15.0
"""After an alarm that its receiver refused in all of its attempts."""
_DRIFT_ENDS_MS = 3_600_000
"""A drift that was not seen for so long is a new one when it comes again."""

OtherReasons = Callable[[str], Sequence[health.Reason]]
"""The reasons for a pipe's health that are not in the ledger."""


class Watch:
    """`follower` is set before any method is called, and calls `on_final`."""

    follower: Follower

    def __init__(self, threshold: float, webhook: AlarmWebhook | None, other_reasons: OtherReasons) -> None:
        self.threshold = threshold
        self._webhook, self._other_reasons = webhook, other_reasons
        self._newest: dict[str, int] = {}
        """The newest minute of each pipe of which any part is final."""
        self._unjudged: dict[tuple[str, Part], str] = {}
        """The id of the last alarm of each part that was given up."""

    def find_health(self, pipe: str, now: int) -> health.Health:
        more = list(self._other_reasons(pipe))
        more += [("degraded", f"{drift.step.label}: {drift.text}") for drift in self.find_drifts(pipe)]
        return health.find_health(self.follower.table, self.follower.planned, pipe, now, self.threshold, more)

    def find_drifts(self, pipe: str) -> list[Drift]:
        steps = self.follower.table.flow.steps(pipe)
        return [drift for step in steps for drift in self.follower.fields.drifts(step)]

    def on_final(self, turn: TickResult) -> None:
        """Count lost events, and raise the alarms that are due."""
        for row in turn.final:
            metrics.LEDGER_FINAL.labels(row.pipe).inc(row.accepted)
        for verdict in turn.verdicts:
            row = verdict.row
            _count_missing(verdict)
            if row.minute >= self._newest.get(row.pipe, 0):
                self._newest[row.pipe] = row.minute
                metrics.LEDGER_LOSS.labels(row.pipe).set(row.final_loss)
        for verdict in find_alarms(turn.verdicts, self.follower.planned, self.threshold, self.follower.now_ms()):
            row, alarm = verdict.row, loss_alarm(verdict)
            metrics.LEDGER_ALARMS.labels(row.pipe).inc()
            log.error(
                "loss",
                pipe=row.pipe,
                minute=format_minute(row.minute),
                destination=verdict.part,
                missing=alarm.body["missing"],
                accepted=row.accepted,
                hint=f"Try: penstock loss explain {row.pipe} {format_minute(row.minute)}",
            )
            self._raise(alarm)
        for verdict in turn.given_up:
            self._report_unjudged(verdict)

    def _report_unjudged(self, verdict: Finding) -> None:
        """Count and log each. The webhook gets one per hour and destination: one that is behind leaves many."""
        row, part, _ = verdict
        missing = row.missing_for(part)
        metrics.LEDGER_UNJUDGED.labels(row.pipe, part or "").inc()
        metrics.LEDGER_UNJUDGED_EVENTS.labels(row.pipe, part or "").inc(missing)
        log.error(
            "minute_unjudged",
            pipe=row.pipe,
            minute=format_minute(row.minute),
            destination=part,
            missing=missing,
            accepted=row.accepted,
            hint="the minute was open for a day and was given up: it is unknown whether these events are lost. "
            f"Try: penstock status, and GET /v1/pipes/{row.pipe}/health for the reason",
        )
        alarm = unjudged_alarm(verdict)
        if self._unjudged.get((row.pipe, part)) != alarm.id:
            self._unjudged[row.pipe, part] = alarm.id
            self._raise(alarm)

    def _raise(self, alarm: Alarm) -> None:
        if self._webhook is not None and not self.follower.untold.add(alarm):
            metrics.LEDGER_ALARMS_UNTOLD.labels("queue_full").inc()
            log.error(
                "alarm_not_sent",
                alarm=alarm.id,
                error="too many alarms wait",
                hint="Try: check alarm_url and its receiver",
            )

    def on_drifts(self, pipe: str, drifts: Iterable[Drift], now: int) -> None:
        """Raise an alarm for each drift that was not seen for an hour, except in a planned window."""
        drifting = self.follower.drifting
        quiet = self.follower.planned.covers(pipe, now - health.WATCHED_MINUTES * MINUTE_MS, now + 1) is not None
        for drift in drifts:
            key = (pipe, drift.step, drift.field, drift.what)
            is_known = now - drifting.get(key, -_DRIFT_ENDS_MS) < _DRIFT_ENDS_MS
            if quiet and not is_known:
                continue  # a lasting change by a deploy is reported when the window is over
            drifting[key] = now
            if not is_known:
                metrics.LEDGER_DRIFTS.labels(pipe).inc()
                log.warning(
                    "drift", pipe=pipe, node=drift.step.node, field=drift.field, what=drift.what, text=drift.text
                )
                self._raise(drift_alarm(pipe, drift, now // MINUTE_MS))
        for key in [key for key, seen in drifting.items() if now - seen >= _DRIFT_ENDS_MS]:
            del drifting[key]

    async def run(self, stopping: asyncio.Event) -> None:
        """Send alarms and set metrics until `stopping`; alarms that were not sent by then are in the follower's snapshot."""
        sending = [self._send(self._webhook)] if self._webhook is not None else []
        await run_until(stopping, self._measure(), *sending)

    async def _send(self, webhook: AlarmWebhook) -> None:
        untold = self.follower.untold
        while True:
            alarm = await untold.first()
            if await webhook.send(alarm):
                untold.remove(alarm)
                continue
            metrics.LEDGER_ALARMS_UNTOLD.labels("refused").inc()
            untold.put_last(alarm)
            await asyncio.sleep(_PAUSE_S)

    async def _measure(self) -> None:
        while True:
            self.measure(self.follower.now_ms())
            await asyncio.sleep(MEASURE_S)

    def measure(self, now: int) -> None:
        """Set the gauges, and find drifts."""
        table = self.follower.table
        for pipe in table.flow.pipes:
            rows = health.recent_rows(table, pipe, now, health.WATCHED_MINUTES)
            for destination in table.flow.pipes[pipe].destinations:
                metrics.LEDGER_OPEN.labels(pipe, destination).set(_count_open(rows, destination))
                metrics.LEDGER_WAITING.labels(pipe, destination).set(
                    table.count_waiting(Step("expel", pipe, destination))
                )
            found = max((row.final_loss for row in table.found_lately(pipe, now)), default=0.0)
            metrics.LEDGER_LOSS_FOUND.labels(pipe).set(found)
            if self.follower.speaks and not self.follower.catching_up:
                self.on_drifts(pipe, self.find_drifts(pipe), now)
            metrics.PIPE_HEALTH.labels(pipe).set(health.STATES.index(self.find_health(pipe, now).state))


def _count_missing(verdict: Finding) -> None:
    row, part, before = verdict
    counted = (
        {step.node: step.missing for step in before.steps if step.destination == part} if before is not None else {}
    )
    for step in row.steps:
        if step.destination == part:
            more = step.missing - counted.get(step.node, 0)
            metrics.LEDGER_MISSING.labels(row.pipe, step.node, part or "").inc(max(0, more))


def _count_open(rows: Sequence[Row], destination: str) -> int:
    steps = (step for row in rows for step in row.steps if step.node == "expel")
    return sum(step.why_open is not None for step in steps if step.destination == destination)
