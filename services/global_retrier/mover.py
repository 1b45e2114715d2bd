"""Writing records on: each to where its remaining time sends it, for as long as that takes."""

import asyncio
from collections.abc import Sequence

import backoff
import structlog

from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError, RecordTooLarge, UnknownTopic
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.pipes import RETRIER_DEAD, retry_topic
from services.global_retrier.clock import Clock
from services.global_retrier.ledger import Ledger
from services.global_retrier.letters import make_letter, without_value
from services.global_retrier.line import Waiting
from services.global_retrier.meter import Meter
from services.global_retrier.route import DELAY_BY_TOPIC, choose_delay

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.1, 5.0


class Mover:
    """Shared by all lines; keeps nothing between two moves. Safe for concurrent use."""

    def __init__(
        self, producer: Producer, admin: Admin, meter: Meter, clock: Clock, ledger: Ledger | None = None
    ) -> None:
        self._producer, self._admin, self._meter, self._clock = producer, admin, meter, clock
        self.ledger = ledger or Ledger(None)

    async def move(self, source: TopicPartition, items: Sequence[Waiting]) -> None:
        """Returns when all are durable elsewhere: in a delay topic, in their pipe's retry topic, or among the dead letters.

        While the broker is away it tries for ever, with growing waits; where to is decided anew each time. A crash or a
        cancellation may leave records written that are read, and written, again.
        """
        failures = 0
        while items:
            now = self._clock.now_ms()
            by_topic: dict[str, list[Waiting]] = {}
            for item in items:
                by_topic.setdefault(_find_topic(item, now), []).append(item)
            async with asyncio.TaskGroup() as group:
                sending = [
                    group.create_task(self._send(source, topic, part, now, failures))
                    for topic, part in by_topic.items()
                ]
            items = [item for task in sending for item in task.result()]
            if items:
                failures += 1
                await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10))))
        if failures:
            log.info("moved_again", source=source.topic, tries=failures + 1)

    def note_moved(self, items: Sequence[Waiting]) -> None:
        """These were written on by a predecessor, who may not have told of those that were due."""
        now = self._clock.now_ms()
        self.ledger.left("released", [item for item in items if item.due <= now])

    async def _send(
        self, source: TopicPartition, topic: str, items: list[Waiting], now: int, failures: int
    ) -> list[Waiting]:
        """One try; returns what is not stored, with what was learnt about it."""
        failed = await send_by_key(self._producer, topic, [_make_record(source, topic, item, now) for item in items])
        self._count(topic, [item for index, item in enumerate(items) if index not in failed], now)
        if not failed:
            return []
        error = next(iter(failed.values()))
        if not isinstance(error, BrokerError):
            raise error
        self._meter.failed(topic, error, len(failed))
        if isinstance(error, UnknownTopic) and await self._is_gone(topic):
            log.error(
                "unknown_pipe", topic=topic, events=len(failed), hint="Try: penstock up with its pipe, then redrive"
            )
            return [_condemn(items[index], "unknown_pipe", str(reason)) for index, reason in failed.items()]
        if not failures and not isinstance(error, RecordTooLarge):
            log.error(
                "move_failed",
                topic=topic,
                events=len(failed),
                error=str(error),
                hint="nothing is lost, it goes on by itself. Try: check the broker and the topic",
            )
        return [_learn(items[index], topic, reason) for index, reason in failed.items()]

    async def _is_gone(self, topic: str) -> bool:
        """Whether a topic is certainly not there; of our own ones we wait until they are."""
        if topic in DELAY_BY_TOPIC or topic == RETRIER_DEAD:
            return False
        try:
            return topic not in await self._admin.topics()
        except BrokerError:
            return False

    def _count(self, topic: str, items: list[Waiting], now: int) -> None:
        if not items:
            return
        if topic in DELAY_BY_TOPIC:
            self._meter.moved(topic, len(items))
        elif topic == RETRIER_DEAD:
            self._meter.buried(items)
            self.ledger.left("dead", items)
        else:
            self._meter.released(items, now)
            self.ledger.left("released", items)


def _find_topic(item: Waiting, now: int) -> str:
    if item.problem:
        return RETRIER_DEAD
    return choose_delay(item.due - now) or retry_topic(item.pipe)


def _make_record(source: TopicPartition, topic: str, item: Waiting, now: int) -> Record:
    if topic == RETRIER_DEAD:
        letter = make_letter(source, item, now)
        return without_value(letter) if item.bare else letter
    return Record(item.record.key, item.record.value, now, item.record.headers)


def _learn(item: Waiting, topic: str, error: Exception) -> Waiting:
    if not isinstance(error, RecordTooLarge):
        return item
    if topic == RETRIER_DEAD:
        return item._replace(bare=True)
    return _condemn(item, "too_large", str(error))


def _condemn(item: Waiting, problem: str, detail: str) -> Waiting:
    return item._replace(problem=problem, detail=detail)
