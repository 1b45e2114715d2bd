"""The core of a lane: renders polled events, cuts requests from them, sends a bounded number at once and settles the outcomes.

For each event only lists are sliced. For each request a worker runs once.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import backoff

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, TopicPartition
from services.core.clock import boot_seconds
from services.core.consuming import Membership
from services.core.http.failure import Failure
from services.core.pipe_file.topic_names import parked_topic
from services.core.process.progress import LIMIT_S, Step
from services.core.undelivered.retry_state import BREAKER_OPEN
from services.expel.batch_filter import BatchFilter
from services.expel.delivery import Delivery, Rendered, Unreadable
from services.expel.metrics import LaneMetrics
from services.expel.output_filter import OutputFilter
from services.expel.pause import PauseFollower, PauseState
from services.expel.retry_policy import Outcome, RetryLimits, RetryPolicy, RetrySchedule
from services.expel.send_queue import COMMIT_PARTS, WINDOW, InFlightLimit, RequestLimits, SendQueue
from services.expel.side_topics import SideRecord, SideTopicWriter
from services.expel.throttle import SendThrottle
from services.expel.webhook.body import render_damaged

_NOT_TRIED = "not tried: the destination's last requests failed"
FROZEN_S = 5.0
"""Half of the time for which a silent member keeps its partitions, on every broker."""
ASK_GROUP_S = 3.0
"""A member that was frozen learns within this time whether it lost its partitions."""


class Sender(Protocol):
    """Sends to one destination. Never retries; it may replace a refused token once."""

    def render(self, batch: Batch) -> Rendered:
        """Prepare polled records. Those that cannot be delivered are unreadable. Does not wait."""

    async def send(self, delivery: Delivery) -> Outcome:
        """One attempt, bounded in time. Raises only CancelledError (the outcome is then unknown)."""


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """The configuration of a lane. max_events, max_bytes: bounds of the events in flight.

    The bytes of an event are those of its record's key, value and headers and of its part of a body. concurrency: requests at
    once. max_wait: seconds that an event waits for its request to fill up. rate: events per second. keyed: later events of a
    key wait for earlier ones. schedule: seconds before each round of the retry topic; empty: no rounds. serial: one request at
    a time, including its retries. timeout: seconds of one request; 0 for a stream. version: of the pipe's definition. siblings:
    the pipe's destinations, including this one; the lane counts events of other destinations in its retry and parked topics.
    None: another lane counts them. outputs: None where the pipe has one output only. topics_of_others: the sources that
    are. takes_tombstones: its stream is compacted.
    """

    pipe: str
    destination: str
    request: RequestLimits
    retry: RetryLimits
    concurrency: int
    max_wait: float
    max_events: int
    max_bytes: int
    rate: int | None = None
    keyed: bool = False
    schedule: tuple[float, ...] = ()
    serial: bool = False
    timeout: float = 0.0
    version: str = ""
    siblings: frozenset[str] | None = None
    outputs: OutputFilter | None = None
    topics_of_others: frozenset[str] = frozenset()
    takes_tombstones: bool = False

    @property
    def reach(self) -> int:
        """How many records of a partition can be in the retry topic and not committed."""
        return self.max_events * WINDOW if self.retry.uses_retry_topic else 0


class Dispatcher:
    """`consuming.Processor` of a lane: lives as long as one membership of the lane's group. Not thread-safe.

    pause: of a destination that can be paused. `gone` is set when the receiver answered 410: no request is started any more,
    and the refused events are kept for `park`.
    """

    def __init__(
        self,
        config: LaneConfig,
        sender: Sender,
        broker: Broker,
        producer: Producer,
        lane_metrics: LaneMetrics,
        throttle: SendThrottle,
        pause: PauseState | None = None,
    ) -> None:
        self._config, self._sender, self._metrics, self._throttle = config, sender, lane_metrics, throttle
        self._pause = pause
        self._policy = RetryPolicy(config.retry, config.keyed)
        self._queue = SendQueue(
            config.request, self._pump, keyed=config.keyed, serial=config.serial, max_wait=config.max_wait
        )
        pipe, destination = config.pipe, config.destination
        self._parked = parked_topic(pipe)
        schedule = RetrySchedule(config.schedule)
        self._side_topics = SideTopicWriter(
            producer, pipe, destination, config.version, schedule, lane_metrics, self._settle_side_records
        )
        self.tracker, self.ledger = OffsetTracker(), lane_metrics.ledger
        self._filter = BatchFilter(config, broker, self.tracker, lane_metrics)
        self.gone = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._commit_soon: Callable[[], None]
        self._workers: set[asyncio.Task[None]] = set()
        self._sending: set[Delivery] = set()
        self._limit = InFlightLimit(config.max_events, config.max_bytes)
        self._stopped = self._replaying = self._suspended = False
        self._park_reason: str | None = None
        self._retry_after_until = self._alive_at = self._send_again_at = 0.0
        self._ended = self._waits = 0
        """Attempts that ended; waits for room that began."""
        self._is_waiting = False
        self._progress = asyncio.Event()

    def open(self, membership: Membership, tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        self._group, self._commit_soon = tasks, membership.commit_soon
        self._alive_at = boot_seconds()
        self._side_topics.open(tasks)
        pause = () if self._pause is None else PauseFollower(self._pause, self, membership, self._metrics).start()
        return (self._keep_alive(), *pause)

    def park(self, reason: str) -> None:
        """The destination is paused: from now on all events go to the parked topic, including those in flight.

        That topic is not read any more. Its polled events that were not sent are polled again after the resume.
        """
        parked = frozenset(source for source in self.tracker.sources() if source.topic == self._parked)
        self._drop(parked)
        self.tracker.stop(parked)
        self._park_reason = reason
        self._continue()

    def replay(self) -> None:
        """Accept only parked events."""
        self._replaying = True

    def suspend(self) -> None:
        """Start no request in this membership, not even a retry. Events that were not sent are polled again."""
        self._suspended = True
        self._progress.set()

    def start_slowly(self) -> None:
        """The destination was resumed: its backlog is sent with a slow start."""
        self._throttle.start_slowly()

    def reads(self, topic: str) -> bool:
        """A topic that is not read now is not read again in this membership."""
        if self._park_reason is not None:
            return topic != self._parked
        return topic == self._parked or not self._replaying

    @property
    def in_flight(self) -> int:
        """Events accepted and neither delivered nor durable in a side topic."""
        return self._limit.events

    def committed(self) -> None:
        self._progress.set()

    def update_metrics(self) -> None:
        self._metrics.in_flight.set(self._limit.events)
        self._throttle.update_gauge()
        self._metrics.flush()

    def steps(self) -> Iterator[Step]:
        """None of them is stuck while the receiver is down or slow: an attempt ends in time, and waits have a timer."""
        if self._sending:
            # Twice: the request is repeated with a new token when the receiver refuses the first one.
            yield Step("no request has ended", self._ended, LIMIT_S + 2 * self._config.timeout)
        if len(self._side_topics):
            yield Step("no write to a side topic has ended", self._side_topics.tries)
        if self._is_waiting and self.room():
            yield Step("the lane has room, and does not poll", self._waits)
        is_idle = not (self._sending or len(self._side_topics) or self._queue.is_timed)
        if is_idle and self._limit.events and not (self._stopped or self._suspended or self.gone.is_set()):
            yield Step("events are due and are not sent", self._ended)

    def room(self) -> int:
        """How many more events may be accepted now; 0 until a fair part of the lane is free."""
        return self._limit.room(self.tracker.held(), self.tracker.uncommitted())

    async def wait_for_room(self) -> int:
        self._waits += 1
        self._is_waiting = True
        try:
            while not (room := self.room()):
                self._progress.clear()
                await self._progress.wait()
        finally:
            self._is_waiting = False
        return room

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        await self._filter.prepare(polled, assigned)

    def accept(self, batch: Batch) -> None:
        self.ledger.record_read(batch)
        wanted = self._filter.choose(batch)
        for mine in wanted.batches:
            rendered = self._sender.render(mine) if mine.damage is None else render_damaged(mine, mine.damage)
            self._add(batch.source, mine, rendered)
        self._write_unreadable(batch.source, wanted.unreadable)
        if not wanted.batches:
            self._progress.set()
        self._check_uncommitted()  # what the filter has settled at once fills the lane too
        self._pump()

    def _add(self, source: TopicPartition, batch: Batch, rendered: Rendered) -> None:
        """Queue rendered events for their request. source: the polled partition."""
        now_ms, delivery = self._metrics.now_ms(), rendered.delivery
        self._metrics.record_polled(batch.records, delivery.arrivals, now_ms)
        if delivery.parts:
            delivery.set_polled(source, now_ms, time.monotonic())
            self._limit.add(len(delivery.parts), delivery.weight)
            self._queue.add(delivery)
        self._write_unreadable(source, rendered.unreadable)

    def _write_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable]) -> None:
        if unreadable:
            self._limit.add(len(unreadable), self._side_topics.write_unreadable(source, unreadable))

    def _pump(self) -> None:
        """Start workers while a slot is free and a request is due."""
        assert self._group is not None
        if self._park_reason is not None and not self._stopped:
            self._park_queued(self._park_reason)  # also while hanging requests use all slots
        while len(self._workers) < self._config.concurrency and (delivery := self._next()) is not None:
            self._workers.add(self._group.create_task(self._work(delivery)))

    async def _work(self, delivery: Delivery) -> None:
        """Send one request after the other until none is due."""
        worker = asyncio.current_task()
        assert worker is not None
        following: Delivery | None = delivery
        try:
            while following is not None:
                await self._send(following)
                following = self._next()
                if following is not None and len(self._workers) < self._config.concurrency:
                    self._pump()
        finally:
            self._workers.discard(worker)  # in the same turn as `_next`: the timer that it set needs the slot

    async def _send(self, delivery: Delivery) -> None:
        try:
            outcome = await self._sender.send(delivery)
        except BaseException:
            self._throttle.abandon(delivery)
            raise
        finally:
            self._sending.discard(delivery)
            self._ended += 1
        self._throttle.end(delivery, outcome)
        self._conclude(delivery, outcome)
        self._progress.set()

    def _next(self) -> Delivery | None:
        """The request to send now, retries first. When none is due yet, a timer is set."""
        while not self._stopped:
            if self._park_reason is not None:
                self._park_queued(self._park_reason)
                return None
            if self._suspended or self.gone.is_set():
                return None
            now = self._record_alive()
            due = self._queue.next_due(now, is_sending=bool(self._sending))
            if due is None:
                return None
            if now < self._send_again_at:
                self._queue.wake_at(max(due, self._send_again_at))
                return None
            if not self._throttle.is_blocked:
                due = max(due, self._retry_after_until)
            if due <= now:
                due = now + self._throttle.wait()
            if due > now:
                self._queue.wake_at(due)
                return None
            if self._throttle.is_blocked:
                self._shed(now)
                continue
            delivery = self._queue.pop(now)
            self._throttle.begin(delivery)
            self._sending.add(delivery)  # not in the worker's first turn: a revoke may come before it
            return delivery
        return None

    async def _keep_alive(self) -> NoReturn:
        while True:
            await asyncio.sleep(FROZEN_S / 5)
            self._record_alive()

    def _record_alive(self) -> float:
        """The time (monotonic). After a freeze (stopped, suspended, swapped out) no request starts for ASK_GROUP_S: other members
        may have delivered what is queued here. If so, the queue is emptied meanwhile.
        """
        now, alive_at = time.monotonic(), boot_seconds()
        if alive_at - self._alive_at > FROZEN_S:
            self._send_again_at = now + ASK_GROUP_S
        self._alive_at = alive_at
        return now

    def _park_queued(self, reason: str) -> None:
        """Park everything that is queued and not being sent."""
        for delivery in self._queue.pop_all():
            self._side_topics.write_parked(delivery, reason)

    def _shed(self, now: float) -> None:
        """While the breaker is open, and the outage is not short, move some due events to the retry topic without an attempt.

        They are due there when the breaker may have closed, and not before: that would only use up a round.
        """
        shedder, blocked_for, was_full = self._throttle.shedder, self._throttle.blocked_for(), not self.room()
        limit = left = shedder.limit()
        while left > 0 and self._is_due(now):
            delivery = self._queue.pop(now)
            least = blocked_for + backoff.full_jitter(blocked_for / 2)
            failure = Failure(BREAKER_OPEN, _NOT_TRIED, recoverable=True, retry_after=least)
            self._side_topics.write_retries(delivery, dict.fromkeys(range(len(delivery)), failure))
            left -= len(delivery)
        shedder.end_turn(limit - left, is_more=left <= 0 or was_full)

    def _is_due(self, now: float) -> bool:
        due = self._queue.next_due(now, is_sending=bool(self._sending))
        return due is not None and due <= now

    def _conclude(self, delivery: Delivery, outcome: Outcome) -> None:
        """An attempt ended: settle the delivered events. The retry policy decides about the others."""
        self._metrics.count_attempt(outcome)
        if outcome is None:
            self._settle(delivery)
            return
        now_ms = self._metrics.now_ms()
        failures = dict.fromkeys(range(len(delivery)), outcome) if isinstance(outcome, Failure) else outcome
        earlier = delivery.failures
        if not (isinstance(outcome, Failure) and outcome.ours):
            delivery.add_attempt(now_ms, {failure.reason for failure in failures.values()})
        delivery.first_failure = delivery.first_failure or now_ms
        decision = self._policy.decide(delivery, failures, now_ms)
        if decision.pause is not None:
            if (kept := self._keep(delivery)) is not None:
                self._queue.retry(kept)
            self.gone.set()
            return
        self._retry_after_until = max(self._retry_after_until, time.monotonic() + decision.retry_after)
        if decision.delivered:
            delivered = delivery.subset(decision.delivered)
            delivered.failures = earlier  # of these, this attempt did not fail
            self._settle(delivered)
        if decision.retry_topic:
            self._side_topics.write_retries(delivery, decision.retry_topic)
        if decision.dead_letter:
            self._side_topics.write_dead_letters(delivery, decision.dead_letter)
        if decision.retry:
            is_whole = len(decision.retry) == len(delivery)
            kept = self._keep(delivery if is_whole else delivery.subset(decision.retry))
            if kept is not None:
                self._metrics.count(metrics.EXPEL_RETRIED, len(kept), decision.reason)
                self._queue.retry(kept, decision.wait)

    def _keep(self, delivery: Delivery) -> Delivery | None:
        """The events that this process may try again. The others are removed."""
        kept, lapsed = delivery.split(delivery.lapsed)
        if lapsed is not None:
            self._forget(lapsed)
        return kept

    def _settle(self, delivery: Delivery) -> None:
        """The destination received these."""
        self._metrics.record_delivered(delivery)
        for source, offsets, _ in delivery.runs:
            if source not in delivery.disowned:
                self.tracker.settle(source, offsets)
        self._forget(delivery)
        self._check_uncommitted()

    def _check_uncommitted(self) -> None:
        if self.tracker.uncommitted() >= self._config.max_events // COMMIT_PARTS:
            self._commit_soon()

    def _settle_side_records(self, records: Sequence[SideRecord]) -> None:
        """These are durable in a side topic."""
        for record in records:
            if not record.disowned:
                self.tracker.settle(record.source, (record.offset,))
        self._queue.finish([record.original for record in records if record.attempted])
        self._limit.release(len(records), sum(record.weight for record in records))
        self._check_uncommitted()
        self._progress.set()
        self._pump()

    def _forget(self, delivery: Delivery) -> None:
        """These are no longer in flight here: settled, or of another member."""
        self._queue.finish(delivery.records)
        self._limit.release(len(delivery.parts), delivery.weight)

    async def drain_partitions(self, sources: frozenset[TopicPartition], limit: float) -> None:
        self._drop(sources)

        def is_sent() -> bool:
            sending = any(run.source in sources for delivery in self._sending for run in delivery.runs)
            return self._stopped or not (sending or self._side_topics.holds(sources))

        await self._wait_until(is_sent, limit)

    def _drop(self, sources: frozenset[TopicPartition]) -> None:
        """Forget the events of these that are not being sent, and do not retry the others."""
        waiting, retries = self._queue.drop(sources)
        self._limit.release(*waiting)
        for delivery in retries:
            self._forget(delivery)
        for delivery in self._sending:
            delivery.lapsed |= sources

    def disown(self, sources: Collection[TopicPartition]) -> None:
        self._filter.remove(sources)
        for delivery in self._sending:
            delivery.disowned |= frozenset(sources)
        self._side_topics.disown(sources)
        self._continue()

    def _continue(self) -> None:
        """Room, slots or keys became free, and not by a settled event."""
        self._progress.set()
        if self._group is not None and not self._stopped:
            self._pump()

    async def drain(self, limit: float) -> bool:
        """Start no new request; finish the started ones, with retries and side topics; then end all work."""
        self._queue.closing = True

        def is_drained() -> bool:
            if self._park_reason is not None:
                return not self._limit.events
            retries = 0 if self._suspended or self.gone.is_set() else self._queue.retries
            return not (self._sending or len(self._side_topics) or retries)

        await self._wait_until(is_drained, limit)
        in_time = is_drained()
        self.stop()
        return in_time

    def stop(self) -> None:
        self._stopped = True
        self._queue.stop()
        for worker in self._workers:
            worker.cancel()
        for delivery in self._sending:  # a worker that never ran does not abandon its probe
            self._throttle.abandon(delivery)
        self._side_topics.stop()

    async def _wait_until(self, condition: Callable[[], bool], limit: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not condition():
                    self._progress.clear()
                    await self._progress.wait()
