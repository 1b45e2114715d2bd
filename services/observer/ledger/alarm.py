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


def find_alarms(final: Sequence[Row], planned: Planned, threshold: float) -> list[Row]:
    """Those of the rows that became final for which an alarm is due: above the threshold, and nothing was announced."""
    lossy = [row for row in final if row.loss > threshold]
    return [row for row in lossy if planned.covers(row.pipe, *_span(row)) is None]


def _span(row: Row) -> tuple[int, int]:
    return row.minute * MINUTE_MS, (row.minute + 1) * MINUTE_MS


class Alarm(NamedTuple):
    """id: the same in every attempt and after a restart, so a receiver can pass over one that comes twice. body: as JSON."""

    id: str
    body: dict[str, object]


def loss_alarm(row: Row) -> Alarm:
    """Of a minute that became final."""
    counts = {
        "loss": row.loss,
        "accepted": row.accepted,
        "missing": row.missing,
        "pipe": row.pipe,
        "minute": row.minute,
    }
    steps = [step for step in row.steps if step.missing]
    return Alarm(f"loss-{row.pipe}-{row.minute}", {"type": "penstock.loss", **counts, "steps": steps})


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


class AlarmWebhook:
    """Tells alarms to one URL, signed as the events' webhooks are."""

    def __init__(self, url: str, keys: Sequence[SigningKey]) -> None:
        self._url, self._keys = url, keys

    async def tell(self, alarm: Alarm) -> bool:
        """Whether the receiver took it. Up to `ATTEMPTS` requests with growing waits, within about two minutes in all."""
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
