"""A lane that runs over a broker in memory, for tests of what it does."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from prometheus_client import REGISTRY

from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.broker.retry import AppendPolicy
from services.core.control.pauses import Pause, Pauses, write_pause
from services.core.pipe_file.topic_names import CONTROL
from services.expel.delivery import Delivery
from services.expel.dispatcher import Dispatcher
from services.expel.lane import Lane
from services.expel.metrics import LaneMetrics
from services.expel.pause import PauseState
from services.expel.retry_policy import Outcome
from services.expel.throttle import SendThrottle
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import Answer, FakeSender, make_shape
from tests.unit.expel.receiver import wait_until

P0, P1 = TopicPartition("s", 0), TopicPartition("s", 1)
DEAD, PARKED = TopicPartition("late.dead", 0), TopicPartition("late.parked", 0)
PATIENT = AppendPolicy(deadline=10.0, append_timeout=10.0)


def names(numbers: Sequence[int]) -> list[str]:
    return [f"e{number}" for number in numbers]


def hold(released: asyncio.Event) -> Answer:
    async def answer(_delivery: Delivery) -> Outcome:
        await released.wait()
        return None

    return answer


class Running:
    """A lane, what it stands on, and the dispatchers that it made."""

    def __init__(
        self,
        broker: FakeBroker,
        sender: FakeSender,
        lane: Lane,
        dispatchers: list[Dispatcher],
        pauses: Pauses,
        producer: Producer,
    ) -> None:
        self.broker, self.sender, self.lane, self.dispatchers = broker, sender, lane, dispatchers
        self._pauses, self._producer = pauses, producer

    async def decide(self, state: Literal["paused", "resumed"]) -> None:
        """As an operator; returns when the lane that runs has heard of a pause: what comes before that is still sent."""
        await write_pause(self._producer, "late/hook", Pause(state, "operator", "ann@desk", 1))
        await self._pauses.refresh()
        if state == "paused":
            await wait_until(lambda: self.metric("penstock_expel_paused", pipe="late", destination="hook") == 1)

    def committed(self, source: TopicPartition = P0) -> int:
        return self.broker.committed.get(("late.hook", source), -1)

    def dead_letters(self) -> list[Record]:
        return self.broker.stored[DEAD]

    def metric(self, name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def run_lane(
    records: Sequence[Record] = (),
    answer: Answer | None = None,
    *,
    broker: FakeBroker | None = None,
    sender: FakeSender | None = None,
    drain: float = 5.0,
    commit_interval: float = 0.01,
    topics: Sequence[str] = ("s",),
    **shape: object,
) -> AsyncIterator[Running]:
    """The lane runs in the block and is drained at its end."""
    broker = broker or FakeBroker({"s": 2, "late.dead": 1})
    broker.stored[P0] += records
    sender = sender or FakeSender()
    if answer is not None:
        sender.answer = answer
    dispatchers: list[Dispatcher] = []
    async with Producer(broker.appender, policy=PATIENT) as producer:
        meter, made = LaneMetrics("late", "hook"), make_shape(**shape)
        throttle = SendThrottle("late", "hook", made.rate, sheds=made.retry.uses_retry_topic)
        for topic in (CONTROL, PARKED.topic):
            broker.stored.setdefault(TopicPartition(topic, 0), [])
        pauses = Pauses(broker.reader)  # type: ignore[arg-type]
        await pauses.refresh()
        pause = PauseState(pauses, broker, producer, "late", "hook", keyed=made.keyed)  # type: ignore[arg-type]

        def make_dispatcher() -> Dispatcher:
            dispatchers.append(Dispatcher(made, sender, broker, producer, meter, throttle, pause))  # type: ignore[arg-type]
            return dispatchers[-1]

        lane = Lane(broker, "late", "hook", list(topics), "earliest", meter, make_dispatcher, commit_interval, pause)  # type: ignore[arg-type]
        stopping = asyncio.Event()
        task = asyncio.create_task(lane.run(stopping, drain))
        try:
            yield Running(broker, sender, lane, dispatchers, pauses, producer)
        finally:
            stopping.set()
            await task
