"""A retrier that hangs is found; one that waits for a time or for the broker is not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from services.core.broker.contract import Appended, Appender
from services.core.broker.errors import Unavailable
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.pipe_file.topic_names import DELAYS_S, delay_topic
from services.core.process.progress import CHECK_EVERY_S, LIMIT_S, ProgressWatch
from services.global_retrier.delay_queue import DelayQueue
from services.global_retrier.retrier import RetrierProcessor
from tests.unit.global_retrier.river import River, make_record, make_state, open_river

LOOKS = round(LIMIT_S / CHECK_EVERY_S)


class Troubled:
    """An appender that does as it is told."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender
        self.answers, self.trouble = 0, ""

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        if self.trouble == "down":
            self.answers += 1
            raise Unavailable("down")
        while self.trouble == "hangs":  # not even the time limit of the append ends it
            await asyncio.sleep(0.01)
        return await self._appender.append(topic, partition, records, timeout=timeout)


async def look(processor: RetrierProcessor) -> str | None:
    watch = ProgressWatch(processor.steps)
    for _ in range(LOOKS + 1):
        watch.check()
        await asyncio.sleep(0)
    return watch.why_not_alive()


async def until_answered(appender: Troubled, answers: int) -> None:
    async with River.patience():
        while appender.answers < answers:
            await River.pause()


async def test_a_retrier_that_hangs_is_found(tmp_path: Path) -> None:
    """Broken: events wait for ever in a retrier that looks alive; or an outage of the broker restarts it again and again."""
    troubled: list[Troubled] = []

    def wrap(appender: Appender) -> Appender:
        troubled.append(Troubled(appender))
        return troubled[-1]

    async with open_river(tmp_path, wrap) as river, river.running() as processor:
        (appender,) = troubled
        source = TopicPartition(delay_topic(DELAYS_S[0]), 0)
        due = river.clock.now_ms() + DELAYS_S[0] * 1000
        await river.hand_over(make_state(due))
        await river.drive(lambda: len(processor.queues.get(source) or ()) == 1)
        assert await look(processor) is None, "the event is not due"

        appender.trouble = "down"
        river.clock.jump(due)
        await until_answered(appender, 1)
        watch = ProgressWatch(processor.steps)
        for _ in range(LOOKS):
            watch.check()
        assert watch.why_not_alive() is None
        mover = processor._mover
        tries = mover.tries[source]
        async with River.patience():
            while mover.tries[source] == tries:
                await River.pause()
        watch.check()
        watch.check()
        assert watch.why_not_alive() is None, "the broker is down, and each try is a step"

        appender.trouble = "hangs"
        async with River.patience():
            while await look(processor) != f"{source.topic}[0]: a move has not ended (for {LIMIT_S:.0f} s)":
                await River.pause()
        appender.trouble = ""
        await river.drive(lambda: not processor.queues[source].busy)
        assert [record.key for record in await river.out()] == [b"k"]

        forgotten = processor.queues[source] = DelayQueue(source)  # nobody serves it
        now = river.clock.now_ms()
        forgotten.add(Batch(*source, [9], [make_record(make_state(now), now)]), now)
        found = await look(processor)
        assert found == f"{source.topic}[0]: events are due and are not moved (for {LIMIT_S:.0f} s)"
        del processor.queues[source]
