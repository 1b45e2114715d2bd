"""Alarms: a minute that became final with more loss than the threshold, a field that is not as it was. Each is told once."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import aiohttp
import backoff
import msgspec
import structlog

from services.core.ledger.minute import MINUTE_MS
from services.core.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, SigningKey, sign
from services.observer.ledger.fields import Drift
from services.observer.ledger.planned import Planned
from services.observer.ledger.row import Row

log = structlog.get_logger()

ATTEMPTS = 6
TIMEOUT_S = 10.0
_MAX_WAIT_S = 30.0
MAX_UNTOLD = 100
"""Alarms that wait to be told; more are in the log and the metrics only."""


def find_alarms(
    rows: Sequence[Row], planned: Planned, threshold: float, lost: tuple[int, int] | None = None
) -> list[Row]:
    """Those of the rows for which an alarm is due: above the threshold, and nothing announced excuses it.

    lost: from when to when (ms) the events were lost; None: in their minute.
    """
    lossy = [row for row in rows if row.loss > threshold]
    return [row for row in lossy if planned.covers(row.pipe, *(lost or _span(row)), loss=True) is None]


def _span(row: Row) -> tuple[int, int]:
    return row.minute * MINUTE_MS, (row.minute + 1) * MINUTE_MS


class Alarm(NamedTuple):
    """id: the same in every attempt and after a restart, so a receiver can pass over one that comes twice. body: as JSON."""

    id: str
    body: dict[str, object]


def loss_alarm(row: Row) -> Alarm:
    """Of a minute that became final. When its loss has doubled it is another alarm, and its receiver takes it."""
    counts = {
        "loss": row.loss,
        "accepted": row.accepted,
        "missing": row.missing,
        "pipe": row.pipe,
        "minute": row.minute,
    }
    steps = [step for step in row.steps if step.missing]
    return Alarm(
        f"loss-{row.pipe}-{row.minute}-{row.missing.bit_length()}", {"type": "penstock.loss", **counts, "steps": steps}
    )


def drift_alarm(pipe: str, drift: Drift, minute: int) -> Alarm:
    """Of a field that is not as it was, first seen in this minute."""
    step = drift.step
    name = "-".join(filter(None, ("drift", pipe, step.node, step.destination, drift.field, drift.what)))
    said = {"pipe": pipe, "minute": minute, "node": step.node, "destination": step.destination}
    number = crc32(name.encode())
    return Alarm(
        f"drift-{pipe}-{number:08x}-{minute // 60}",
        {"type": "penstock.drift", **said, "field": drift.field, "what": drift.what, "text": drift.text},
    )


def has_doubled(before: Row, after: Row) -> bool:
    """Whether so much more is missing of a final minute that it is told again: once in each power of two."""
    return after.missing.bit_length() > before.missing.bit_length()


class Untold:
    """Alarms that wait to be told, oldest first; those of a snapshot, too, so that a restart forgets none."""

    def __init__(self) -> None:
        self._waiting: dict[str, Alarm] = {}
        self._came = asyncio.Event()

    def add(self, alarm: Alarm) -> bool:
        """Whether there was room. One that waits already is replaced."""
        if len(self._waiting) >= MAX_UNTOLD and alarm.id not in self._waiting:
            return False
        self._waiting[alarm.id] = alarm
        self._came.set()
        return True

    async def first(self) -> Alarm:
        """The oldest; waits for one."""
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        return next(iter(self._waiting.values()))

    def remove(self, alarm: Alarm) -> None:
        """It was told."""
        if self._waiting.get(alarm.id) is alarm:
            del self._waiting[alarm.id]

    def put_last(self, alarm: Alarm) -> None:
        """It was not taken; the others first, then again."""
        if self._waiting.get(alarm.id) is alarm:
            self._waiting[alarm.id] = self._waiting.pop(alarm.id)

    def all(self) -> tuple[Alarm, ...]:
        """In their order."""
        return tuple(self._waiting.values())


class AlarmWebhook:
    """Tells alarms to one URL, signed as the events' webhooks are."""

    def __init__(self, url: str, keys: Sequence[SigningKey]) -> None:
        self._url, self._keys = url, keys

    async def tell(self, alarm: Alarm) -> bool:
        """Whether the receiver took it. Up to `ATTEMPTS` requests with growing waits; who calls tries again later."""
        body = msgspec.json.encode(alarm.body)
        error = "none"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False) as session:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT_S, 2.0**attempt)))
                try:
                    async with session.post(
                        self._url, data=body, headers=self._head(alarm.id, body), allow_redirects=False
                    ) as answer:
                        if 200 <= answer.status < 300:
                            return True
                        error = f"status {answer.status}"
                except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
        log.error("alarm_not_told", alarm=alarm.id, error=error, hint="Try: is alarm_url right?")
        return False

    def _head(self, message_id: str, body: bytes) -> dict[str, str]:
        now = int(time.time())
        head = {"Content-Type": "application/json", ID_HEADER: message_id, TIMESTAMP_HEADER: str(now)}
        if self._keys:
            head[SIGNATURE_HEADER] = sign(self._keys, message_id, now, body)
        return head
