"""A follower on a real log with a clock of the test's own, and what it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.ledger.report import TELEMETRY, Report
from services.observer.follower import Follower
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Ages
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, tell

DEADLINE_S = 600.0
OPS = Step("expel", "late", "ops")
FINAL_MS = START_MS + MINUTE_MS + Ages().final


class Observer:
    """A follower with a clock of the test's own. final: what it told."""

    def __init__(self, broker: Broker, producer: Producer, now: int = START_MS) -> None:
        self.now = now
        self.final: list[Row] = []
        self.follower = Follower(
            PLAIN, broker.reader, producer, lambda turn: self.final.extend(turn.final), now_ms=lambda: self.now
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Observer"]:
        stopping = asyncio.Event()
        task = asyncio.create_task(self.follower.run(stopping))
        try:
            yield self
        finally:
            stopping.set()
            await task

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)

    async def caught_up(self) -> None:
        await self.until(lambda: not self.follower.catching_up)

    async def listen_for(self, millis: int) -> None:
        """Let time pass, and read all there is again and again."""
        for _ in range(millis // 10_000):
            self.now += 10_000
            await self.until(lambda: self.follower.read_all_ms == self.now)

    def row(self) -> Row:
        return self.follower.table.row("late", MINUTE, self.now)


async def report(broker: Broker, *reports: Report) -> None:
    records = [Record(b"k", one.encode(), one.at_ms) for one in reports]
    await broker.appender.append(TELEMETRY, 0, records, timeout=600)


def losing(missing: int) -> list[Report]:
    """A minute of ten events of which so many are not delivered."""
    return [
        accept(range(10)),
        tell("transform", "late", "passed", range(10)),
        tell("expel", "late", "delivered", range(10 - missing), destination="ops"),
    ]


def alive(at_ms: int) -> list[Report]:
    return [
        beat("ingest", "flights", at_ms=at_ms),
        beat("transform", "late", at_ms=at_ms),
        beat("expel", "late", "ops", at_ms=at_ms),
    ]
