"""The heart of a lane: cuts requests out of what was taken, sends a bounded number at once, and settles what came of them.

Nothing here is done per event but slicing lists; per request there is one turn of a worker.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import backoff

from services.core.broker.producer import Producer
from services.core.broker.record import Batch, TopicPartition
from services.core.broker.watermark import LowWater
from services.core.ledger.due import Span
from services.core.pipes import parked_topic
from services.expel.agenda import Agenda
from services.expel.delivery import Delivery
from services.expel.elsewhere import Elsewhere
from services.expel.gate import Gate
from services.expel.intake import Intake
from services.expel.lane_bounds import LaneBounds, LaneShape
from services.expel.letters import Letter
from services.expel.meter import LaneMeter
from services.expel.outcome import Failure, Outcome
from services.expel.sender import Sender
from services.expel.verdict import judge

_NO_OFFSETS: Mapping[int, Span] = {}
_BREAKER_OPEN = "breaker_open"
_NOT_TRIED = "not tried: the destination's last requests failed"


class Dispatcher:
    """Lives as long as one membership of the lane's group; its tasks belong to the group given to `open`. Not thread-safe.

    `gone` is set when the receiver answered 410: nothing is started any more, what it refused is kept for `park`.
    """

    def __init__(
        self,
        shape: LaneShape,
        sender: Sender,
        producer: Producer,
        meter: LaneMeter,
        gate: Gate,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float], float] = backoff.full_jitter,
    ) -> None:
        self._shape, self._sender, self._meter, self._gate = shape, sender, meter, gate
        self._clock, self._jitter = clock, jitter
        self._agenda = Agenda(shape, self._pump, clock)
        self._parked = parked_topic(shape.pipe)
        self._elsewhere = Elsewhere(shape, producer, meter, self._settle_letters)
        self.low_water = LowWater()
        self.gone = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self._sending: set[Delivery] = set()
        self._bounds = LaneBounds(shape.max_events, shape.max_bytes)
        places = (self.low_water, self._bounds, self._agenda, self._elsewhere)
        self._intake = Intake(shape, sender, meter, *places, clock)
        self._stopped = self._replaying = self._held = False
        self._park_reason: str | None = None
        self._hold_until = 0.0
        self._progress = asyncio.Event()

    def open(self, group: asyncio.TaskGroup) -> None:
        """Tasks run in this group from now on."""
        self._group = group
        self._elsewhere.open(group)

    def park(self, reason: str) -> None:
        """The destination is paused: from now on everything goes to the parked topic, what is held here, too.

        That topic is not read any more: what was taken of it and not sent comes again after the resume.
        """
        parked = frozenset(source for source in self.low_water.sources() if source.topic == self._parked)
        self._drop(parked)
        self.low_water.end(parked)
        self._park_reason = reason
        self.go_on()

    def replay(self) -> None:
        """Take nothing but parked events."""
        self._replaying = True

    def hold(self) -> None:
        """Start nothing more in this membership, not even a retry: what was not sent stays uncommitted and comes again."""
        self._held = True

    def ease_in(self) -> None:
        """The destination was resumed: its backlog is sent at a rate that rises step by step."""
        self._gate.ease_in()

    def reads(self, topic: str) -> bool:
        """Whether batches of this topic are taken. What is not taken now is never taken in this membership."""
        if self._park_reason is not None:
            return topic != self._parked
        return topic == self._parked or not self._replaying

    @property
    def reach(self) -> int:
        """As in LaneShape."""
        return self._shape.reach

    @property
    def unsettled(self) -> int:
        """Events taken and neither delivered nor durable elsewhere."""
        return self._bounds.events

    def show(self) -> None:
        """Bring the lane's gauges up to date."""
        self._meter.in_flight(self._bounds.events)
        self._gate.show()

    def room(self) -> int:
        """How many more events may be taken now; 0 until a fair part of the lane is free."""
        return self._bounds.room(self.low_water.held())

    async def wait_for_room(self) -> None:
        """Until more may be taken."""
        while not self.room():
            self._progress.clear()
            await self._progress.wait()

    def take(self, batch: Batch, inherited: Mapping[int, Span] = _NO_OFFSETS) -> None:
        """A polled batch: in flight from now on, unless its topic is not to be read. Does not wait.

        inherited: what the retrier has already, by offset, and when it is due: settled, and passed over.
        """
        if not self.reads(batch.topic):
            return
        if self._intake.take(batch, inherited):
            self._pump()
        else:
            self._progress.set()

    def _pump(self) -> None:
        """Start workers while there is a free slot and something to send."""
        assert self._group is not None
        if self._park_reason is not None and not self._stopped:
            self._park_held(self._park_reason)  # also while all slots are taken by requests that hang
        while len(self._workers) < self._shape.concurrency and (delivery := self._next()) is not None:
            self._workers.add(self._group.create_task(self._work(delivery)))

    async def _work(self, delivery: Delivery) -> None:
        """Send one delivery after the other until there is nothing to send."""
        worker = asyncio.current_task()
        assert worker is not None
        following: Delivery | None = delivery
        try:
            while following is not None:
                await self._send(following)
                following = self._next()
                if following is not None and len(self._workers) < self._shape.concurrency:
                    self._pump()
        finally:
            self._workers.discard(worker)  # in the same turn as `_next`, or the timer it set would find the slot taken

    async def _send(self, delivery: Delivery) -> None:
        try:
            outcome = await self._sender.send(delivery)
        except BaseException:
            self._gate.cut_off(delivery)
            raise
        finally:
            self._sending.discard(delivery)
        self._gate.ended(delivery, outcome)
        self._conclude(delivery, outcome)
        self._progress.set()

    def _next(self) -> Delivery | None:
        """What to send now, retries first. When there is nothing yet, a timer is set for when to look again."""
        while not self._stopped:
            if self._park_reason is not None:
                self._park_held(self._park_reason)
                return None
            if self._held or self.gone.is_set():
                return None
            now = self._clock()
            due = self._agenda.when_due(now, is_sending=bool(self._sending))
            if due is None:
                return None
            if not self._gate.is_shut:
                due = max(due, self._hold_until)
            if due <= now:
                due = now + self._gate.wait()
            if due > now:
                self._agenda.look_again(due)
                return None
            if self._gate.is_shut:
                self._turn_away(now)
                continue
            delivery = self._agenda.take(now)
            self._gate.take(delivery)
            self._sending.add(delivery)  # from now on, not from the worker's first turn: a revoke may come in between
            return delivery
        return None

    def _park_held(self, reason: str) -> None:
        """What is held here and not being sent."""
        for delivery in self._agenda.take_all():
            self._elsewhere.park(delivery, reason)

    def _turn_away(self, now: float) -> None:
        """The breaker is open: some of what is due to the global retrier, without an attempt.

        It does not come back before the breaker may close: that would only cost a round.
        """
        limit, shut_for, was_full = self._gate.diversion.limit(), self._gate.shut_for(), not self.room()
        left = limit
        while left > 0 and self._is_due(now):
            delivery = self._agenda.take(now)
            least = shut_for + self._jitter(shut_for / 2)
            failure = Failure(_BREAKER_OPEN, _NOT_TRIED, recoverable=True, retry_after=least)
            self._elsewhere.hand_over(delivery, dict.fromkeys(range(len(delivery)), failure))
            left -= len(delivery)
        self._gate.diversion.end_turn(limit - left, is_more=left <= 0 or was_full)

    def _is_due(self, now: float) -> bool:
        due = self._agenda.when_due(now, is_sending=bool(self._sending))
        return due is not None and due <= now

    def _conclude(self, delivery: Delivery, outcome: Outcome) -> None:
        """An attempt ended: settle what was delivered; the verdict says what becomes of the rest."""
        self._meter.attempted(outcome)
        if outcome is None:
            self._settle(delivery)
            return
        if not (isinstance(outcome, Failure) and outcome.ours):
            delivery.attempts += 1
        delivery.first_failure = delivery.first_failure or self._meter.now_ms()
        failures = dict.fromkeys(range(len(delivery)), outcome) if isinstance(outcome, Failure) else outcome
        now_ms = self._meter.now_ms()
        verdict = judge(delivery, failures, self._shape.retry, self._jitter, now_ms, keyed=self._shape.keyed)
        if verdict.gone is not None:
            if (kept := self._keep(delivery)) is not None:
                self._agenda.again(kept)
            self.gone.set()
            return
        self._hold_until = max(self._hold_until, self._clock() + verdict.hold)
        if verdict.delivered:
            self._settle(delivery.subset(verdict.delivered))
        if verdict.hand_over:
            self._elsewhere.hand_over(delivery, verdict.hand_over)
        if verdict.bury:
            self._elsewhere.bury(delivery, verdict.bury)
        if verdict.again:
            whole = len(verdict.again) == len(delivery)
            self._retry(delivery if whole else delivery.subset(verdict.again), verdict.wait, verdict.reason)

    def _retry(self, delivery: Delivery, wait: float, reason: str) -> None:
        if (kept := self._keep(delivery)) is not None:
            self._meter.retried(len(kept), reason)
            self._agenda.again(kept, wait)

    def _keep(self, delivery: Delivery) -> Delivery | None:
        """What of it is still ours to try; the rest is forgotten."""
        kept, lapsed = delivery.split(delivery.lapsed)
        if lapsed is not None:
            self._forget(lapsed)
        return kept

    def _settle(self, delivery: Delivery) -> None:
        """The destination has these."""
        self._meter.delivered(delivery)
        for source, offsets, _ in delivery.runs:
            if source not in delivery.disowned:
                self.low_water.settle(source, offsets)
        self._forget(delivery)

    def _settle_letters(self, letters: Sequence[Letter]) -> None:
        """These are durable elsewhere."""
        for letter in letters:
            if not letter.disowned:
                self.low_water.settle(letter.source, (letter.offset,))
        self._agenda.finish([letter.original for letter in letters if letter.tried])
        self._bounds.release(len(letters), sum(letter.weight for letter in letters))
        self._progress.set()
        self._pump()

    def _forget(self, delivery: Delivery) -> None:
        """These are no longer in flight here: settled, or another member's."""
        self._agenda.finish(delivery.records)
        self._bounds.release(len(delivery.parts), delivery.weight)

    async def give_up(self, sources: frozenset[TopicPartition], limit: float) -> None:
        """These partitions leave: forget what was not sent, wait at most `limit` seconds for what is being sent.

        What is settled by then may be committed; the next owner does the rest again.
        """
        self._drop(sources)

        def is_sent() -> bool:
            sending = any(run.source in sources for delivery in self._sending for run in delivery.runs)
            return self._stopped or not (sending or self._elsewhere.holds(sources))

        await self._wait_until(is_sent, limit)

    def _drop(self, sources: frozenset[TopicPartition]) -> None:
        """Forget what of these is not being sent, and do not try again what is."""
        waiting, retries = self._agenda.drop(sources)
        self._bounds.release(*waiting)
        for delivery in retries:
            self._forget(delivery)
        for delivery in self._sending:
            delivery.lapsed |= sources

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """These partitions are another member's now; what is still under way of them settles nothing any more."""
        self.low_water.forget(sources)
        for delivery in self._sending:
            delivery.disowned |= frozenset(sources)
        self._elsewhere.disown(sources)

    def go_on(self) -> None:
        """Room came free, or keys did, by something else than a settled event."""
        self._progress.set()
        if self._group is not None and not self._stopped:
            self._pump()

    async def drain(self, limit: float) -> bool:
        """Start nothing new; finish within `limit` seconds what was begun, retries and dead letters too; then end all work.

        Returns whether the time was enough.
        """
        self._agenda.closing = True

        def is_drained() -> bool:
            if self._park_reason is not None:
                return not self._bounds.events
            retries = 0 if self._held or self.gone.is_set() else self._agenda.retries
            return not (self._sending or len(self._elsewhere) or retries)

        await self._wait_until(is_drained, limit)
        in_time = is_drained()
        self.stop()
        return in_time

    def stop(self) -> None:
        """End all work now; what is not settled stays so."""
        self._stopped = True
        self._agenda.stop()
        for worker in self._workers:
            worker.cancel()
        for delivery in self._sending:  # a worker that never began says nothing of its probe
            self._gate.cut_off(delivery)
        self._elsewhere.stop()

    async def _wait_until(self, condition: Callable[[], bool], limit: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not condition():
                    self._progress.clear()
                    await self._progress.wait()
