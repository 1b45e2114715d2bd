"""The retrier around its memberships: it waits for what it needs, and writes what fits nowhere without its value."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from services.core.broker.contract import Appended, Appender
from services.core.broker.errors import RecordTooLarge
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.provision import ensure_topics
from services.core.undelivered.dead_letter import PREFIX
from services.core.undelivered.retry_state import unwrap
from services.global_retrier.delay_queue import SteadyClock
from services.global_retrier.metrics import RetrierLedger
from services.global_retrier.retrier import make_retrier
from tests.unit.global_retrier.river import PIPES, River, make_record, make_state, open_river


async def test_topics_that_come_later(tmp_path: Path) -> None:
    """Broken: a retrier that was started before `penstock up` made its topics has to be started again by hand."""
    async with LogBroker.open(str(tmp_path / "log")) as broker, Producer(broker.appender) as producer:
        clock, stopping = SteadyClock(), asyncio.Event()
        retrier = make_retrier(broker, producer, clock, RetrierLedger(None))
        running = asyncio.create_task(retrier.run(stopping, 5.0))
        async with River.patience():
            while "no topic" not in (retrier.waits_for or ""):
                await River.pause()
        await ensure_topics(broker.admin, PIPES)
        river = River(broker, clock, broker.appender)  # type: ignore[arg-type]  # nothing here asks for the fake one
        await river.put([make_record(make_state(clock.now_ms() + 100), clock.now_ms())])
        found: list[Record] = []
        async with River.patience():
            while not found:
                await River.pause()
                found += await river.out()
        assert retrier.waits_for is None
        assert unwrap(found[0])[1].due <= clock.now_ms()
        stopping.set()
        await running


class Narrow:
    """An appender whose topics take values of at most `limit` bytes."""

    def __init__(self, appender: Appender, limit: int) -> None:
        self._appender, self._limit = appender, limit

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        large = [index for index, record in enumerate(records) if len(record.value or b"") > self._limit]
        small = [record for index, record in enumerate(records) if index not in large]
        errors = tuple((index, RecordTooLarge("too large")) for index in large)
        if not small:
            return Appended(-1, -1, errors)
        done = await self._appender.append(topic, partition, small, timeout=timeout)
        return Appended(done.first, done.last, errors)


async def test_what_fits_nowhere(tmp_path: Path) -> None:
    """Broken: one record that is too large for its next topic blocks its line for ever, or goes without a trace."""
    async with open_river(tmp_path, lambda appender: Narrow(appender, 1000)) as river, river.running():
        now = river.clock.now_ms()
        await river.put([make_record(make_state(now, n), now, b"x" * (2000 if n == 1 else 10)) for n in range(3)])
        letters: list[Record] = []

        async def look() -> None:
            letters.extend(await river.dead())

        await river.drive(lambda: bool(letters), look)
        await river.rest()
        assert [unwrap(record)[1].source for record in await river.out()] == ["flights:0:0", "flights:0:2"]
        (letter,) = letters
        assert (letter.value, letter.header(PREFIX + "reason")) == (None, b"too_large")
        assert letter.header(PREFIX + "source") == b"flights:0:1"
