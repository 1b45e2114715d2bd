"""Moves records to their next topic, by the time left until each is due: a delay topic, its retry topic or the dead letters."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from services.core import metrics
from services.core.backoff import Backoff
from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError, RecordTooLarge, UnknownTopic
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Record, TopicPartition
from services.core.pipe_file.topic_names import RETRIER_DEAD, retry_topic
from services.core.undelivered.dead_letter import PREFIX, make_dead_letter
from services.core.undelivered.retry_state import unwrap
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, Clock, DelayedRecord, choose_delay
from services.global_retrier.metrics import NODE, RetrierLedger, RetrierMetrics

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.1, 5.0


class Mover:
    """Shared by all delay queues; keeps no records between two moves. Safe for concurrent use."""

    def __init__(
        self,
        producer: Producer,
        admin: Admin,
        retrier_metrics: RetrierMetrics,
        clock: Clock,
        ledger: RetrierLedger | None = None,
    ) -> None:
        self._producer, self._admin, self._metrics, self._clock = producer, admin, retrier_metrics, clock
        self.ledger = ledger or RetrierLedger(None)
        self.tries = Counter[TopicPartition]()
        """Appends that ended, well or not, by where the records came from."""

    async def move(self, source: TopicPartition, items: Sequence[DelayedRecord]) -> None:
        """Returns when all are durable in their next topic.

        Repeated until it succeeds; the topic is chosen anew each time. After a crash or a cancellation some records may be moved
        again.
        """
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while items:
            now = self._clock.now_ms()
            by_topic: dict[str, list[DelayedRecord]] = {}
            for item in items:
                by_topic.setdefault(_choose_topic(item, now), []).append(item)
            async with asyncio.TaskGroup() as group:
                appending = [
                    group.create_task(self._append(source, topic, part, now, is_first=not retry.failures))
                    for topic, part in by_topic.items()
                ]
            items = [item for task in appending for item in task.result()]
            if items:
                retry.fail()
                await retry.wait()
        if retry.failures:
            log.info("moved_again", source=source.topic, tries=retry.failures + 1)

    def record_moved(self, items: Sequence[DelayedRecord]) -> None:
        """Report records that the previous owner moved: it may have died before it reported those that were due."""
        now = self._clock.now_ms()
        self.ledger.add("released", [item for item in items if item.due <= now])

    async def _append(
        self, source: TopicPartition, topic: str, items: list[DelayedRecord], now: int, *, is_first: bool
    ) -> list[DelayedRecord]:
        """One try. Returns the items that are not stored, changed where another try needs it."""
        failed = await send_by_key(self._producer, topic, [_make_record(source, topic, item, now) for item in items])
        self.tries[source] += 1
        self._count(topic, [item for index, item in enumerate(items) if index not in failed], now)
        if not failed:
            return []
        error = next(iter(failed.values()))
        if not isinstance(error, BrokerError):
            raise error
        metrics.RETRIER_MOVE_FAILURES.labels(topic, type(error).__name__).inc(len(failed))
        if isinstance(error, UnknownTopic) and await self._is_gone(topic):
            log.error(
                "unknown_pipe",
                topic=topic,
                events=len(failed),
                hint="the pipe file lacks the pipe of these events. Try: penstock up with this pipe, then penstock dead redrive",
            )
            return [
                items[index]._replace(problem="unknown_pipe", detail=str(reason)) for index, reason in failed.items()
            ]
        if is_first and not isinstance(error, RecordTooLarge):
            log.error(
                "move_failed",
                topic=topic,
                events=len(failed),
                error=str(error),
                hint="nothing is lost: the move is repeated. Try: check the broker and the topic",
            )
        return [_change(items[index], topic, reason) for index, reason in failed.items()]

    async def _is_gone(self, topic: str) -> bool:
        """Whether a pipe's topic certainly does not exist. The retrier waits for its own topics."""
        if topic in DELAY_BY_TOPIC or topic == RETRIER_DEAD:
            return False
        try:
            return not await self._admin.present([topic])
        except BrokerError:
            return False

    def _count(self, topic: str, items: list[DelayedRecord], now: int) -> None:
        if not items:
            return
        if topic in DELAY_BY_TOPIC:
            metrics.RETRIER_MOVED.labels(topic).inc(len(items))
        elif topic == RETRIER_DEAD:
            for item in items:
                metrics.RETRIER_DEAD.labels(item.problem).inc()
            self.ledger.add("dead", items)
        else:
            self._metrics.count_released(items, now)
            self.ledger.add("released", items)


def _choose_topic(item: DelayedRecord, now: int) -> str:
    if item.problem:
        return RETRIER_DEAD
    return choose_delay(item.due - now) or retry_topic(item.pipe)


def _make_record(source: TopicPartition, topic: str, item: DelayedRecord, now: int) -> Record:
    if topic != RETRIER_DEAD:
        return Record(item.record.key, item.record.value, now, item.record.headers)
    letter = _make_dead_letter(source, item, now)
    if not item.without_value:
        return letter
    # Its headers still say where the whole record is stored.
    headers = tuple(header for header in letter.headers if header[0].startswith(PREFIX))
    return Record(None, None, letter.timestamp, headers)


def _make_dead_letter(source: TopicPartition, item: DelayedRecord, now: int) -> Record:
    """Of the event without its retry state; of the record itself when it is not a retry record."""
    if not item.pipe:
        return make_dead_letter(
            item.record,
            reason=item.problem,
            detail=item.detail,
            node=NODE,
            pipe="",
            first_failure=now,
            source=source,
            offset=item.offset,
            now_ms=now,
        )
    original, state = unwrap(item.record)
    origin, offset = state.position()
    return make_dead_letter(
        original,
        reason=item.problem,
        detail=f"{item.detail}; last failure: {state.reason}: {state.detail}",
        node=NODE,
        pipe=state.pipe,
        destination=state.destination,
        attempts=state.attempts,
        first_failure=state.first_failure,
        source=origin,
        offset=offset,
        now_ms=now,
    )


def _change(item: DelayedRecord, topic: str, error: Exception) -> DelayedRecord:
    """A record that is too large becomes a dead letter, and a dead letter that is too large loses its value."""
    if not isinstance(error, RecordTooLarge):
        return item
    if topic == RETRIER_DEAD:
        return item._replace(without_value=True)
    return item._replace(problem="too_large", detail=str(error))
