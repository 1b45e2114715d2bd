"""Alarms, each sent once: a minute is final with more loss than the threshold, or never will be final; a field has drifted."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import aiohttp
import msgspec
import structlog

from services.core.backoff import Backoff
from services.core.ledger.minute import MINUTE_MS
from services.core.security.signing import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, SigningKeys, sign
from services.observer.ledger.finality import FOUND_FOR_MS, Finding
from services.observer.ledger.settlement import Row
from services.observer.payload_fields import Drift
from services.observer.planned import PlannedWindows

log = structlog.get_logger()

ATTEMPTS = 6
TIMEOUT_S = 10.0
_MAX_WAIT_S = 30.0
MAX_UNSENT = 100
"""The most alarms that wait to be sent; further ones are only in the log and the metrics."""


def find_alarms(verdicts: Sequence[Finding], planned: PlannedWindows, threshold: float, now: int) -> list[Finding]:
    """The findings of a tick for which an alarm is due, except in a planned window that excuses them.

    One for each destination that lost events itself, when more than the threshold is missing on the whole way to it. If there
    is none, one for the final parts of the minute (part None): the transform lost them, or several destinations did.
    """
    by_minute: dict[tuple[str, int], list[Finding]] = {}
    for verdict in verdicts:
        by_minute.setdefault((verdict.row.pipe, verdict.row.minute), []).append(verdict)
    due: list[Finding] = []
    for mine in by_minute.values():
        due += [verdict for verdict in mine if _is_due(verdict, threshold)] or _find_together(mine, threshold)
    return [one for one in due if planned.covers(one.row.pipe, *_span(one, now), loss=True) is None]


def _span(verdict: Finding, now: int) -> tuple[int, int]:
    """The time (ms) in which it was lost: its minute; or, if it was lost while it waited, the time before it was found."""
    minute = verdict.row.minute
    if verdict.before is not None:
        return now - FOUND_FOR_MS, now + 1
    return minute * MINUTE_MS, (minute + 1) * MINUTE_MS


def _is_due(verdict: Finding, threshold: float) -> bool:
    row, part, before = verdict
    if part is None or not row.missing_by_part().get(part):
        return False
    return _is_news(before.missing_for(part) if before is not None else 0, row.missing_for(part), row, threshold)


def _find_together(mine: Sequence[Finding], threshold: float) -> list[Finding]:
    row, _, before = mine[-1]
    final = {step.destination for step in row.steps if step.why_open is None}
    if any(verdict.part is None for verdict in mine):
        is_due = _is_news(0, row.lost, row, threshold)
    elif any(row.missing_for(part) > threshold * row.accepted for part in final):
        is_due = False  # it has its own alarm
    elif before is not None:
        is_due = _is_news(before.lost, row.lost, row, threshold)
    else:
        is_due = row.why_open is None and row.final_loss > threshold
    return [Finding(row, None, before)] if is_due else []


def _is_news(before: int, now: int, row: Row, threshold: float) -> bool:
    """Whether the loss is above the threshold, and was not before or has doubled."""
    is_above = now > threshold * row.accepted
    return is_above and (before <= threshold * row.accepted or has_doubled(before, now))


class Alarm(NamedTuple):
    """id: the same in every attempt and after a restart, so a receiver can ignore a repeated one. body: as JSON."""

    id: str
    body: dict[str, object]


def loss_alarm(verdict: Finding) -> Alarm:
    """Of a destination's minute that became final, or of the whole minute. A doubled loss gives another id."""
    row, part, _ = verdict
    missing = row.lost if part is None else row.missing_for(part)
    parts = {step.destination for step in row.steps} if part is None else {None, part}
    steps = [step for step in row.steps if step.missing and step.why_open is None and step.destination in parts]
    counts = {
        "loss": missing / row.accepted,
        "accepted": row.accepted,
        "missing": missing,
        "pipe": row.pipe,
        "minute": row.minute,
        "destination": part,
    }
    name = "-".join(filter(None, ("loss", row.pipe, str(row.minute), part, str(missing.bit_length()))))
    shown = [{name: value for name, value in msgspec.to_builtins(step).items() if name != "why_open"} for step in steps]
    return Alarm(name, {"type": "penstock.loss", **counts, "steps": shown})


def unjudged_alarm(verdict: Finding) -> Alarm:
    """Of a part that was given up. All of one hour have the same id."""
    row, part, _ = verdict
    where = {"pipe": row.pipe, "minute": row.minute, "destination": part, "missing": row.missing_for(part)}
    name = "-".join(filter(None, ("unjudged", row.pipe, part, str(row.minute // 60))))
    return Alarm(name, {"type": "penstock.unjudged", "accepted": row.accepted, **where})


def drift_alarm(pipe: str, drift: Drift, minute: int) -> Alarm:
    """Of a field that has drifted since this minute."""
    step = drift.step
    name = "-".join(filter(None, ("drift", pipe, step.node, step.destination, drift.field, drift.what)))
    where = {"pipe": pipe, "minute": minute, "node": step.node, "destination": step.destination}
    return Alarm(
        f"drift-{pipe}-{crc32(name.encode()):08x}-{minute // 60}",
        {"type": "penstock.drift", **where, "field": drift.field, "what": drift.what, "text": drift.text},
    )


def has_doubled(before: int, after: int) -> bool:
    """Whether the loss passed a power of two: then it is reported again."""
    return after.bit_length() > before.bit_length()


class AlarmQueue:
    """Alarms that wait to be sent, oldest first. They are in the snapshots, so a restart forgets none."""

    def __init__(self) -> None:
        self._waiting: dict[str, Alarm] = {}
        self._added = asyncio.Event()

    def add(self, alarm: Alarm) -> bool:
        """False: the queue is full. An alarm with the same id is replaced."""
        if len(self._waiting) >= MAX_UNSENT and alarm.id not in self._waiting:
            return False
        self._waiting[alarm.id] = alarm
        self._added.set()
        return True

    async def first(self) -> Alarm:
        """The oldest; waits for one."""
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        return next(iter(self._waiting.values()))

    def remove(self, alarm: Alarm) -> None:
        """It was sent."""
        if self._waiting.get(alarm.id) is alarm:
            del self._waiting[alarm.id]

    def clear(self) -> None:
        """Another observer sends them."""
        self._waiting.clear()

    def put_last(self, alarm: Alarm) -> None:
        """It was refused: send the others first."""
        if self._waiting.get(alarm.id) is alarm:
            self._waiting[alarm.id] = self._waiting.pop(alarm.id)

    def all(self) -> tuple[Alarm, ...]:
        """Oldest first."""
        return tuple(self._waiting.values())


class AlarmWebhook:
    """Sends alarms to one URL, signed as the events' webhooks are."""

    def __init__(self, url: str, keys: SigningKeys) -> None:
        self._url, self._keys = url, keys

    async def send(self, alarm: Alarm) -> bool:
        """Whether the receiver accepted it, in at most `ATTEMPTS` requests. If not, the caller tries again later."""
        body, error, retry = msgspec.json.encode(alarm.body), "", Backoff(1.0, _MAX_WAIT_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False) as session:
            while retry.failures < ATTEMPTS:
                if retry.failures:
                    await retry.wait()
                try:
                    async with session.post(
                        self._url, data=body, headers=self._head(alarm.id, body), allow_redirects=False
                    ) as answer:
                        if 200 <= answer.status < 300:
                            return True
                        error = f"status {answer.status}"
                except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
                retry.fail()
        log.error("alarm_not_sent", alarm=alarm.id, error=error, hint="Try: check alarm_url and its receiver")
        return False

    def _head(self, message_id: str, body: bytes) -> dict[str, str]:
        now = int(time.time())
        head = {"Content-Type": "application/json", ID_HEADER: message_id, TIMESTAMP_HEADER: str(now)}
        if keys := self._keys.current:
            head[SIGNATURE_HEADER] = sign(keys, message_id, now, body)
        return head
