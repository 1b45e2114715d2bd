"""A destination in memory that answers as it is told, and what a lane test needs around it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.core.broker.record import Batch, Record
from services.core.http.failure import Failure
from services.expel.delivery import Delivery, Rendered
from services.expel.dispatcher import LaneConfig
from services.expel.retry_policy import Outcome, RetryLimits
from services.expel.send_queue import RequestLimits
from services.expel.webhook.body import make_format, render

Answer = Callable[[Delivery], Outcome | Awaitable[Outcome]]

BUSY = Failure("http_503", "busy", recoverable=True)
WRONG = Failure("http_404", "wrong", recoverable=False)
GONE = Failure("http_410", "gone", recoverable=False, gone=True)


def make_record(number: int, key: bytes | None = None, value: bytes | None = b"{}") -> Record:
    return Record(key, value, 0, (("ce_id", b"e%d" % number),))


def make_shape(**changes: object) -> LaneConfig:
    """A small quick lane."""
    values: dict[str, object] = {
        "pipe": "late",
        "destination": "hook",
        "request": RequestLimits(10, 100_000),
        "retry": RetryLimits(3, 0.01, 0.02),
        "concurrency": 2,
        "max_wait": 0.0,
        "max_events": 1000,
        "max_bytes": 10_000_000,
    }
    return LaneConfig(**(values | changes))  # type: ignore[arg-type]


@dataclass
class FakeSender:
    """`answer` decides; `sent` notes every attempt, `taken` what was delivered."""

    answer: Answer = lambda _delivery: None
    sent: list[list[str]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    def render(self, batch: Batch) -> Rendered:
        return render(batch, make_format("json", "late").renderer_for(batch.topic), 1000)

    async def send(self, delivery: Delivery) -> Outcome:
        names = [event_id.decode() for event_id in delivery.ids]
        self.sent.append(names)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            answer = self.answer(delivery)
            outcome: Outcome = await answer if isinstance(answer, Awaitable) else answer
        finally:
            self.under_way -= 1
        failed = range(len(names)) if isinstance(outcome, Failure) else (outcome or {})
        self.taken += [name for index, name in enumerate(names) if index not in failed]
        return outcome
