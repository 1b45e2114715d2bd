"""The retrier's session on a real embedded log, with a clock of the test's own: what goes in, and what comes out when."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.core.broker.contract import Appender, Broker
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.broker.retry import AppendPolicy
from services.core.consuming import Membership
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRIER_DEAD, RETRIER_GROUP, RETRY_IN, retry_topic
from services.core.provision import ensure_topics
from services.core.undelivered.retry_state import RetryState, wrap
from services.global_retrier.delay_queue import DELAY_BY_TOPIC
from services.global_retrier.metrics import RetrierMetrics
from services.global_retrier.mover import Mover
from services.global_retrier.retrier import RetrierProcessor
from tests.contract.traffic import ignore_revoke
from tests.unit.global_retrier.fake_clock import FakeClock

DEADLINE_S = 600.0
PIPES = PipeFile.model_validate(
    {
        "streams": {"flights": {}},
        "pipes": {
            name: {
                "sources": ["flights"],
                "destinations": [{"name": "ops", "webhook": {"url": "https://example.org/hook"}}],
            }
            for name in ("late", "early")
        },
    }
)


def make_state(due: int, number: int = 0, *, pipe: str = "late", attempts: int = 4, rounds: int = 1) -> RetryState:
    """As expel would have it for its `number`-th event."""
    return RetryState(
        pipe,
        "ops",
        attempts,
        rounds,
        1_799_999_999_000,
        due,
        "http_503",
        "away",
        f"flights:0:{number}",
        1_700_000_000_000,
    )


def make_record(state: RetryState, now: int, value: bytes = b'{"n":1}') -> Record:
    """An event handed over at `now`."""
    headers = (("ce_id", state.source.encode()), ("penstock_origin", b"a:0:0"))
    return wrap(Record(b"k", value, state.time, headers), state, now)


@dataclass
class River:
    """`pipe` puts in, `drive` lets time pass, `out` reads."""

    broker: Broker
    clock: FakeClock
    appender: Appender
    processor: RetrierProcessor | None = None
    _read: dict[str, int] = field(default_factory=dict)
    _put: bool = False

    async def put(self, records: Sequence[Record], topic: str = RETRY_IN) -> None:
        self._put = True
        async with Producer(self.broker.appender) as producer:
            (await producer.send(topic, records)).raise_first()

    async def hand_over(self, *states: RetryState) -> None:
        await self.put([make_record(state, self.clock.now_ms()) for state in states])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RetrierProcessor]:
        """A retrier for the time of the context."""
        stopping = asyncio.Event()
        quick = AppendPolicy(deadline=0.2, append_timeout=5.0)
        async with Producer(self.appender, policy=quick) as producer:
            metrics = RetrierMetrics()
            mover = Mover(producer, self.broker.admin, metrics, self.clock)
            self.processor = RetrierProcessor(self.broker, mover, metrics, self.clock)
            membership = Membership(RETRIER_GROUP, self.processor, 0.1, lambda _is_up: None)
            joining = self.broker.consumer(
                RETRIER_GROUP, list(DELAY_BY_TOPIC), start="earliest", on_revoke=membership.revoke
            )
            async with joining as consumer:
                running = asyncio.create_task(membership.run(consumer, stopping, 5.0))
                try:
                    yield self.processor
                finally:
                    stopping.set()
                    await running

    async def rest(self) -> None:
        """Until everything that can be done at this time is done: what is behind is read ahead, and wants to wait."""
        async with asyncio.timeout(DEADLINE_S):
            resting = 0
            while resting < 2:  # one look is not of one moment: a record may be between the topics it looks at
                resting = resting + 1 if await self._is_resting() else 0
                await asyncio.sleep(0 if resting else 0.005)

    @staticmethod
    def patience() -> asyncio.Timeout:
        """Bounds a loop that waits for a condition."""
        return asyncio.timeout(DEADLINE_S)

    @staticmethod
    async def pause() -> None:
        """Between two looks at a condition."""
        await asyncio.sleep(0.01)

    async def _is_resting(self) -> bool:
        assert self.processor is not None
        if any(queue.busy for queue in self.processor.queues.values()):
            return False
        lags = await asyncio.gather(*(self.broker.admin.group_lag(RETRIER_GROUP, topic) for topic in DELAY_BY_TOPIC))
        for topic, lag in zip(DELAY_BY_TOPIC, lags, strict=True):
            queue = self.processor.queues.get(TopicPartition(topic, 0))
            if lag[0].records != (len(queue) if queue is not None else 0) and (queue is None or queue.has_room):
                return False
        wake = self.clock.next_wake()
        return wake is None or wake > self.clock.now_ms()

    async def drive(self, until: Callable[[], bool], each: Callable[[], object] | None = None) -> None:
        """From one moment at which something happens to the next, with everything done in between; a minute at most."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await self.rest()
                if each is not None:
                    await self._call(each)
                if until():
                    return
                if self._put:
                    self._put = False
                    continue
                wake = self.clock.next_wake()
                assert wake is not None, "nothing waits any more"
                self.clock.jump(wake)

    @staticmethod
    async def _call(each: Callable[[], object]) -> None:
        done = each()
        if asyncio.iscoroutine(done):
            await done

    async def out(self, pipe: str = "late") -> list[Record]:
        """What came out for this pipe since the last call."""
        return await self.read_new(retry_topic(pipe))

    async def dead(self) -> list[Record]:
        """New dead letters of the retrier."""
        return await self.read_new(RETRIER_DEAD)

    async def read_new(self, topic: str) -> list[Record]:
        """What came into partition 0 of a topic since the last call."""
        end = (await self.broker.reader.describe(topic))[0].end
        found: list[Record] = []

        start = self._read.get(topic, 0)
        if end == start:
            return []
        async with self.broker.consumer(
            f"test-{topic}", [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            while len(found) < end - start:
                for batch in await consumer.poll(max_records=10_000, max_wait=1):
                    found += batch.records
                    await consumer.commit({batch.source: batch.offsets[-1]})
        self._read[topic] = end
        return found


@asynccontextmanager
async def open_river(
    folder: Path, wrap_appender: Callable[[Appender], Appender] = lambda appender: appender
) -> AsyncIterator[River]:
    """Topics of two pipes, `late` and `early`, and the retrier's own; wrap_appender: what the retrier writes through."""
    async with LogBroker.open(str(folder / "log")) as broker:
        await ensure_topics(broker.admin, PIPES)
        yield River(broker, FakeClock(), wrap_appender(broker.appender))
