"""What waits for a destination that the pipe file no longer has, and what the file says becomes of it (`Removed`).

The removed destination's group goes on reading `<pipe>.retry` and `<pipe>.parked` in its place: each event is written to the
other destination's retry topic, to the dead letters or, dropped, into the audit, and then committed. A crash in between does it
again. What the global retrier still holds comes to `<pipe>.retry` when it is due.
"""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import backoff
import structlog

from services.core import metrics
from services.core.audit import DROP, ActedUpon, write_entries
from services.core.broker.contract import Broker, Consumer
from services.core.broker.errors import BrokerError, DataDamaged, NotOwner, OffsetOutOfRange, RecordTooLarge
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.watermark import LowWater
from services.core.group_watch import GroupWatch
from services.core.lifecycle import wait_for_stop
from services.core.pipes import Removed, dead_letter_topic, delivery_group, parked_topic, retry_topic
from services.core.rejoin import Rejoin
from services.core.retry_state import unwrap, wrap
from services.expel.body import render_damaged
from services.expel.delivery import Unreadable
from services.expel.letters import Letter, LetterWriter, shorten
from services.expel.returned import Returned

log = structlog.get_logger()

REASON = "destination_removed"
_POLL_RECORDS = 500
_POLL_WAIT = 1.0
_NO_TOPIC_WAIT = 30.0
_BASE_WAIT, _MAX_WAIT = 0.25, 10.0


class RemovedLane:
    """One removed destination's, in one process; several share its topics. lane: `pipe/destination`."""

    def __init__(self, broker: Broker, producer: Producer, lane: str, choice: Removed) -> None:
        self.name, self._choice = lane, choice
        self._pipe, _, self._destination = lane.partition("/")
        self._broker, self._producer = broker, producer
        self._group = delivery_group(self._pipe, self._destination)
        self._topics = (retry_topic(self._pipe), parked_topic(self._pipe))
        self._letters = LetterWriter(self._pipe, self._destination)
        self._rejoin = Rejoin(self._group, "removed_waits", "it joins again by itself; nothing is lost")
        self._watch = GroupWatch(self._group)
        self._low_water = LowWater()
        self._stuck: set[TopicPartition] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; what is being written then is finished or done again. Broker failures are waited out."""
        while not stopping.is_set():
            try:
                await self._work(stopping)
            except* Exception as errors:  # a fault of ours, too: what is uncommitted is read again
                self._rejoin.failed(errors)
            if not stopping.is_set():
                await self._rejoin.wait(stopping)

    async def _work(self, stopping: asyncio.Event) -> None:
        existing = await self._broker.admin.topics()
        topics = [topic for topic in self._topics if topic in existing]
        if not topics:  # nothing can wait there, and whoever makes the pipe again makes them
            await wait_for_stop(stopping, _NO_TOPIC_WAIT)
            return
        self._low_water, self._stuck = LowWater(), set()
        returned = {topic: Returned(topic, self._pipe, self._destination) for topic in topics}
        joining = self._broker.consumer(self._group, topics, start="earliest", on_revoke=self._revoke)
        async with joining as consumer:
            log.info("removed_joined", lane=self.name, topics=topics)
            self._rejoin.joined()
            while not stopping.is_set():
                batches = await self._poll(consumer)
                # All in the same turn of the loop: what leaves from now on is forgotten, and not committed.
                for batch in batches:
                    self._low_water.take(batch)
                for batch in batches:
                    if not await self._settle(batch, returned[batch.topic], stopping):
                        return
                    self._low_water.settle(batch.source, batch.offsets)
                    await self._commit(consumer)

    async def _poll(self, consumer: Consumer) -> Sequence[Batch]:
        try:
            return await consumer.poll(max_records=_POLL_RECORDS, max_wait=_POLL_WAIT)
        except (OffsetOutOfRange, DataDamaged) as error:  # that partition waits for a person, the other goes on
            missing = self._watch.note_missing(error, self._stuck)
            if missing <= self._stuck:
                raise
            self._stuck |= missing
            consumer.pause(missing)
            return ()

    async def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """`contract.OnRevoke`: what is being written of these is done again by the next owner."""
        self._low_water.forget(partitions)
        self._stuck -= partitions

    async def _commit(self, consumer: Consumer) -> None:
        marks = self._low_water.committable()
        try:
            if marks:
                await consumer.commit(marks)
        except NotOwner as error:
            metrics.BROKER_COMMITS_REFUSED.labels(self._group).inc(len(error.partitions))
        else:
            self._low_water.committed(marks)

    async def _settle(self, batch: Batch, returned: Returned, stopping: asyncio.Event) -> bool:
        """Write what is ours where it goes; False when the stop came first."""
        now = time.time_ns() // 1_000_000
        if batch.damage is not None:
            self._watch.note_damage(batch, batch.damage)
            return await self._bury(
                self._unreadable(batch, render_damaged(batch, batch.damage).unreadable, now), stopping
            )
        found = returned.sort(batch)
        mine = [
            (offset, record) for part in found.mine for offset, record in zip(part.offsets, part.records, strict=True)
        ]
        if not await self._bury(self._unreadable(batch, found.unreadable, now), stopping):
            return False
        if not mine:
            return True
        if self._choice.deliver_to is not None:
            return await self._deliver(batch, mine, self._choice.deliver_to, now, stopping)
        if self._choice.bury is not None:
            bad = [Unreadable(offset, record, REASON, self._choice.bury) for offset, record in mine]
            return await self._bury(self._unreadable(batch, bad, now), stopping)
        return await self._drop([ActedUpon(*batch.source, offset) for offset, _ in mine], stopping)

    async def _deliver(
        self, batch: Batch, mine: Sequence[tuple[int, Record]], lane: str, now: int, stopping: asyncio.Event
    ) -> bool:
        """To the other destination alone, with all that is known of their attempts."""
        pipe, _, destination = lane.partition("/")
        topic, waiting = retry_topic(pipe), list(mine)
        tries = _Tries(self.name, topic, stopping)
        while waiting:
            failed = await send_by_key(
                self._producer, topic, [_readdress(record, pipe, destination, now) for _, record in waiting]
            )
            self._count("delivered_elsewhere", len(waiting) - len(failed))
            bad = [
                Unreadable(*waiting[index], "too_large", "the record is larger than the broker takes")
                for index, error in failed.items()
                if isinstance(error, RecordTooLarge)
            ]
            if not await self._bury(self._unreadable(batch, bad, now), stopping):
                return False
            again = {index: error for index, error in failed.items() if not isinstance(error, RecordTooLarge)}
            waiting = [waiting[index] for index in again]
            if waiting and not await tries.failed(next(iter(again.values()))):
                return False
        return True

    def _unreadable(self, batch: Batch, bad: Sequence[Unreadable], now: int) -> list[Letter]:
        return self._letters.from_unreadable(batch.source, bad, now)

    async def _bury(self, letters: Sequence[Letter], stopping: asyncio.Event) -> bool:
        topic, waiting = dead_letter_topic(self._pipe), list(letters)
        tries = _Tries(self.name, topic, stopping)
        while waiting:
            failed = await send_by_key(self._producer, topic, [letter.letter for letter in waiting])
            for index, letter in enumerate(waiting):
                if index not in failed:
                    metrics.EXPEL_DEAD.labels(self._pipe, self._destination, letter.reason).inc(letter.events)
            waiting = [
                shorten(waiting[index]) if isinstance(error, RecordTooLarge) else waiting[index]
                for index, error in failed.items()
            ]
            if waiting and not await tries.failed(next(iter(failed.values()))):
                return False
        self._count("buried", sum(letter.reason == REASON for letter in letters))
        return True

    async def _drop(self, places: Sequence[ActedUpon], stopping: asyncio.Event) -> bool:
        """On record, by their places, before they are passed over."""
        said = {"destination": self.name, "because": self._choice.drop or ""}
        tries = _Tries(self.name, "the audit", stopping)
        while True:
            try:
                await write_entries(self._producer, DROP, f"expel@{socket.gethostname()}", said, places)
            except BrokerError as error:
                if not await tries.failed(error):
                    return False
            else:
                break
        self._count("dropped", len(places))
        log.warning("events_dropped", lane=self.name, events=len(places), reason=self._choice.drop)
        return True

    def _count(self, action: str, events: int) -> None:
        metrics.EXPEL_REMOVED.labels(self._pipe, self._destination, action).inc(events)


class _Tries:
    """Writing to one place of ours again and again: told once, with growing waits, until the stop."""

    def __init__(self, lane: str, where: str, stopping: asyncio.Event) -> None:
        self._lane, self._where, self._stopping = lane, where, stopping
        self._failures = 0

    async def failed(self, error: Exception) -> bool:
        """Waits; whether to try again. Raises what is no broker's error."""
        if not isinstance(error, BrokerError):
            raise error
        if not self._failures:
            log.warning(
                "removed_unwritten", lane=self._lane, where=self._where, error=str(error), hint="it is tried again"
            )
        self._failures += 1
        wait = backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(self._failures, 10)))
        await wait_for_stop(self._stopping, wait)
        return not self._stopping.is_set()


def _readdress(record: Record, pipe: str, destination: str, now: int) -> Record:
    original, state = unwrap(record)
    return wrap(original, replace(state, pipe=pipe, destination=destination), now)
