"""The modelled broker itself: what survives all processes, and the network that loses, delays and refuses their requests.

A request that has left arrives, whatever becomes of who sent it. Where backends differ, `Kind` says how.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from services.core.broker.contract import Features
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition
from tests.simulation.groups import SESSION_S, Coordinator
from tests.simulation.kafka_nodes import KafkaNodes
from tests.simulation.kinesis_puts import KinesisStreams
from tests.simulation.machine import WORLD, Machine, Process
from tests.simulation.store import Store
from tests.simulation.weather import Weather
from tests.support.virtual_loop import EPOCH

if TYPE_CHECKING:
    from tests.simulation.consumer import ModelConsumer

Answer = TypeVar("Answer")
MAX_RECORD_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Kind:
    """How a backend differs from others.

    gaps: in its offsets. is_eager: its groups' rebalances take everything from all members. dates_by_storing: as in `Features`.
    refuses_unpolled: commits beyond what was read.
    """

    name: str
    gaps: bool = False
    dates_by_storing: bool = False
    refuses_unpolled: bool = False
    is_eager: bool = False

    @property
    def features(self) -> Features:
        """As in the contract."""
        return Features(
            contiguous_offsets=not self.gaps,
            dates_by_storing=self.dates_by_storing,
            max_record_bytes=MAX_RECORD_BYTES,
        )


KINDS = (
    Kind("log", refuses_unpolled=True),
    Kind("kafka", dates_by_storing=True, is_eager=True),
    Kind("kinesis", gaps=True),
)


class Cluster:
    """The broker itself: what survives all processes."""

    def __init__(self, machine: Machine, rng: random.Random, kind: Kind, weather: Weather) -> None:
        self.machine, self.rng, self.kind, self.weather = machine, rng, kind, weather
        self.store = Store(
            lambda: int((EPOCH + machine.time()) * 1000), gaps=kind.gaps, dates_by_storing=kind.dates_by_storing
        )
        self.coordinator = Coordinator(self.store, machine, machine.trace, is_eager=kind.is_eager)
        self.consumers: list[ModelConsumer] = []
        self.kafka = KafkaNodes(self, rng) if kind.name == "kafka" else None
        self.kinesis = KinesisStreams(self, rng) if kind.name == "kinesis" else None
        self.store.on_append.append(self._tell_news)

    def strike(self, fault: str) -> None:
        """Something happens to Kafka's nodes or Kinesis' shards."""
        assert self.kafka is not None or self.kinesis is not None
        (self.kafka or self.kinesis).strike(fault)  # type: ignore[union-attr]  # one of them is there

    def calm(self) -> None:
        """No fault from now on."""
        self.weather.calm()
        if self.kafka is not None:
            self.kafka.calm()

    def _tell_news(self, source: TopicPartition) -> None:
        for consumer in self.consumers:
            if source in consumer.owned:
                self.machine.call_later(self.weather.delay(), consumer.news.set, context=WORLD)

    def attach(self, process: Process) -> None:
        """The process dies: its memberships run out later."""

        def forget() -> None:
            mine = [one for one in self.consumers if one.process is process]
            self.consumers = [one for one in self.consumers if one.process is not process]
            for one in mine:
                self.run_out(one)

        process.on_death.append(forget)

    def run_out(self, consumer: "ModelConsumer") -> None:
        """Whether or not it could say that it left: it is not heard of any more."""
        self.machine.call_later(
            SESSION_S, lambda: self.coordinator.leave(consumer.group, consumer.number), context=WORLD
        )

    def record_freeze(self, process: Process) -> None:
        """Who stands still for too long is no member any more."""

        def expire() -> None:
            if process.frozen:
                for one in self.consumers:
                    if one.process is process:
                        self.coordinator.expire(one.group, one.number)

        self.machine.call_later(SESSION_S, expire, context=WORLD)

    async def call(self, operation: Callable[[], Answer], topic: str | None, *, writes: bool = False) -> Answer:
        """A request that may be repeated without harm: it fails as Unavailable, done or not."""
        kind = self.weather.draw(topic, writes=writes)
        answer: asyncio.Future[Answer] = self.machine.create_future()
        self.machine.call_later(self.weather.delay(kind), self._arrive, answer, operation, kind, context=WORLD)
        return await answer

    def _arrive(self, answer: "asyncio.Future[Answer]", operation: Callable[[], Answer], kind: str) -> None:
        error: Exception | None = None
        result: Any = None
        if kind in ("ok", "slow", "answer_lost", "late"):
            try:
                result = operation()
            except Exception as found:  # the caller's answer
                error = found
        if kind not in ("ok", "slow"):
            error = Unavailable("no answer from the broker")
        self.answer(answer, result, error, self.weather.delay(kind))

    def answer(self, answer: "asyncio.Future[Any]", result: Any, error: Exception | None, after: float) -> None:
        """Comes to the caller so many seconds later."""

        def arrive() -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.machine.call_later(after, arrive, context=WORLD)
