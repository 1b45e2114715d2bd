"""Alarms: a minute that became final with more loss than the threshold is told once."""

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import backoff
import msgspec
import structlog

from services.core.ledger.minute import MINUTE_MS
from services.core.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, SigningKey, sign
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


class AlarmWebhook:
    """Tells alarms to one URL, signed as the events' webhooks are. The id of an alarm is the same in every attempt and after
    a restart, so a receiver can pass over one that comes twice."""

    def __init__(self, url: str, keys: Sequence[SigningKey]) -> None:
        self._url, self._keys = url, keys

    async def tell(self, row: Row) -> bool:
        """Whether the receiver took it. Up to `ATTEMPTS` requests with growing waits, within about two minutes in all."""
        body = msgspec.json.encode(
            {"type": "penstock.loss", "loss": row.loss, "accepted": row.accepted, "missing": row.missing}
            | {"pipe": row.pipe, "minute": row.minute, "steps": [step for step in row.steps if step.missing]}
        )
        error = "none"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False) as session:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT_S, 2.0**attempt)))
                try:
                    async with session.post(
                        self._url, data=body, headers=self._head(row, body), allow_redirects=False
                    ) as answer:
                        if 200 <= answer.status < 300:
                            return True
                        error = f"status {answer.status}"
                except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
        log.error("alarm_not_told", pipe=row.pipe, minute=row.minute, error=error, hint="Try: is alarm_url right?")
        return False

    def _head(self, row: Row, body: bytes) -> dict[str, str]:
        message_id, now = f"loss-{row.pipe}-{row.minute}", int(time.time())
        head = {"Content-Type": "application/json", ID_HEADER: message_id, TIMESTAMP_HEADER: str(now)}
        if self._keys:
            head[SIGNATURE_HEADER] = sign(self._keys, message_id, now, body)
        return head
