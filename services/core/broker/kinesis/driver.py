"""The sending half: an append is one aggregated Kinesis record, or a few when it is larger than one may be."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerClosed, BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kinesis.frames import Entry, make_entries
from services.core.broker.kinesis.offsets import offset_of
from services.core.broker.kinesis.pace import MeteredPace
from services.core.broker.kinesis.put_lane import Parcel, PutLane, SendPuts
from services.core.broker.kinesis.put_records import Put
from services.core.broker.kinesis.slot_meter import SlotMeters
from services.core.broker.kinesis.slots import hash_key_of, shard_of
from services.core.broker.kinesis.streams import Streams, Topology
from services.core.broker.kinesis.timing import Timing
from services.core.broker.record import Record

_ANSWER_SHARE = 0.5
"""Of an append's time, kept for the answer: a shard's turn, or a request that is free, is waited for in the rest."""

_LATE_SECONDS = 0.25
"""A turn that was to come just in time comes a little later."""


class KinesisDriver:
    """Durable when PutRecords answered: three zones have it. Paced per shard; never retries.

    All of an append that fits one Kinesis record is stored, or none of it. Larger ones go entry by entry, each after the
    one before it, so order holds and what failed is a tail.
    """

    def __init__(self, send: SendPuts, streams: Streams, timing: Timing) -> None:
        self._send, self._streams, self._timing = send, streams, timing
        self._lanes: dict[str, PutLane] = {}
        self._paces: dict[tuple[str, str], MeteredPace] = {}
        self._meters = SlotMeters()
        self._closed = False

    async def partition_count(self, topic: str) -> int:
        """As in the contract; see `Streams.of`."""
        return (await self._streams.of(topic)).partitions

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract. Throttled, with the seconds to wait, when the shard's pace does not let it go in time."""
        if self._closed:
            raise BrokerClosed("the Kinesis connection was closed")
        deadline = asyncio.get_running_loop().time() + timeout
        leave_by = deadline - min(self._timing.request, _ANSWER_SHARE * timeout)
        progress = _Progress(len(records))
        try:
            async with asyncio.timeout_at(deadline):
                topology = await self._streams.of(topic)
                if not 0 <= partition < topology.partitions:
                    raise Unavailable(f"{topic}[{partition}]: the topic has {topology.partitions} partitions")
                hash_key = hash_key_of(partition, topology.partitions)
                entries, refused = make_entries(records, str(partition), hash_key)
                progress.failed.update(refused)
                for entry in entries:
                    progress.sending(entry)
                    sequence = await self._put(_Place(topic, partition, hash_key, topology), entry, progress, leave_by)
                    progress.store(entry, sequence)
                    self._meters.count(topic, partition, len(entry.data))
        except TimeoutError:
            what = f"append to {topic}[{partition}]: no answer within {timeout:g} s"
            progress.fail(OutcomeUnknown(what) if progress.sent else Unavailable(what))
        except BrokerError as error:
            progress.fail(error)
        return progress.appended()

    async def _put(self, place: "_Place", entry: Entry, progress: "_Progress", leave_by: float) -> str:
        """Store one entry when its shard's turn has come; its sequence number.

        Not when the turn comes too late for an answer: what is sent then is stored, and sent again.
        """
        topic, partition, hash_key, topology = place
        shard = shard_of(hash_key, topology.shards)
        pace = self._pace(topic, "none" if shard is None else str(shard.number), topology)
        progress.seconds_per_byte = await pace.turn(len(entry.data), leave_by - asyncio.get_running_loop().time())
        parcel = Parcel(Put(entry.data, str(partition), str(hash_key)), leave_by + _LATE_SECONDS)
        self._lane(topic).add(parcel)
        try:
            return await parcel.answer
        except Throttled as error:
            raise Throttled(str(error), retry_after=pace.throttle(len(entry.data))) from error
        finally:
            progress.sent = parcel.sent

    def _lane(self, topic: str) -> PutLane:
        lane = self._lanes.get(topic)
        if lane is None:
            lane = self._lanes[topic] = PutLane(self._send, topic)
        return lane

    def _pace(self, topic: str, shard: str, topology: Topology) -> MeteredPace:
        pace = self._paces.get((topic, shard))
        if pace is None:
            closed = {str(one.number) for one in topology.shards if not one.is_open}
            for key in [key for key in self._paces if key[0] == topic and key[1] in closed]:
                self._paces.pop(key).forget()
            pace = self._paces[topic, shard] = MeteredPace(topic, shard)
        return pace

    async def close(self) -> None:
        """Take nothing new and wait for what is under way; bounded by the request time-out."""
        self._closed = True
        running = [task for lane in self._lanes.values() for task in lane.running]
        if running:
            await asyncio.wait(running, timeout=self._timing.request + 1)


class _Place(NamedTuple):
    topic: str
    partition: int
    hash_key: int
    topology: Topology


class _Progress:
    """Adds up one append: what is stored, what failed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._first = self._last = -1
        self._stored: set[int] = set()
        self._under_way: Sequence[int] = ()
        self.sent = False
        self.seconds_per_byte = 0.0
        self.failed: dict[int, Exception] = {}

    def sending(self, entry: Entry) -> None:
        self._under_way, self.sent = entry.indexes, False

    def store(self, entry: Entry, sequence: str) -> None:
        """The entry lies under this sequence number now."""
        self._stored.update(entry.indexes)
        if self._first < 0:
            self._first = offset_of(sequence)
        self._last = offset_of(sequence, len(entry.indexes) - 1)

    def fail(self, error: BrokerError) -> None:
        """What is under way failed so; what should have followed was not tried, and is certainly not stored."""
        behind = Unavailable(f"not tried: {error}") if isinstance(error, OutcomeUnknown) else error
        for index in range(self._count):
            if index not in self._stored and index not in self.failed:
                self.failed[index] = error if index in self._under_way else behind

    def appended(self) -> Appended:
        """The answer; raises when nothing was stored, for one and the same reason."""
        if not self._stored and len({type(error) for error in self.failed.values()}) == 1:
            raise self.failed[min(self.failed)]
        return Appended(self._first, self._last, tuple(sorted(self.failed.items())), self.seconds_per_byte)
