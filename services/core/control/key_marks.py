"""Whether a stream ever got an event with a key: marks in `penstock.control`, one record per change, kept for ever.

More partitions map keys to other partitions, and partitions cannot be removed. So the autoscaler must know whether a stream is
**keyed**: whether it ever got an event with a key. The mark `none` is written before a stream can have its first event, the mark
`seen` before its first event with a key is stored. `seen` counts for ever, also when a stream of this name is created again. A
stream without a mark is older than the marks: nobody knows, and it counts as keyed.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Literal

import msgspec
import structlog

from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.topic import ControlTopic
from services.core.pipe_file.topic_names import CONTROL
from services.core.process.lifecycle import wait_for_stop

log = structlog.get_logger()

_LOAD_S = 5.0
_ASK_AGAIN_S = 5.0
"""How long a missing control topic counts as missing."""
CHECK_EVERY_S = 60.0
"""How often the marks are read again: more often than the autoscaler can add partitions to a new stream."""


class KeyMark(msgspec.Struct, frozen=True):
    """state: `none`: no event yet has a key; `seen`: one may have. by: a user, or the service. at: ms since the epoch."""

    state: Literal["none", "seen"]
    by: str
    at: int


async def read_key_marks(reader: Reader) -> dict[str, KeyMark]:
    """The mark of each stream that has one; none without the control topic. Raises BrokerError kinds.

    A mark that cannot be parsed, perhaps of a later version, counts as `seen`.
    """
    found: dict[str, KeyMark] = {}
    try:
        async for _, stream, record in ControlTopic(reader, "keys").read_new():
            known = found.get(stream)
            if known is None or known.state == "none":
                found[stream] = _parse(record)
    except UnknownTopic:
        return {}
    return found


def _parse(record: Record) -> KeyMark:
    try:
        return msgspec.json.decode(record.value or b"", type=KeyMark)
    except msgspec.DecodeError:
        return KeyMark("seen", "an unreadable mark", record.timestamp)


async def write_key_marks(producer: Producer, streams: Iterable[str], state: Literal["none", "seen"], by: str) -> None:
    """Write a mark for each of these streams, durably. Raises BrokerError kinds; UnknownTopic without the control topic."""
    mark = KeyMark(state, by, time.time_ns() // 1_000_000)
    value = msgspec.json.encode(mark)
    records = [Record(f"keys:{stream}".encode(), value, mark.at) for stream in streams]
    if records:
        (await producer.send_to(CONTROL, {0: records})).raise_first()


class KeyMarker:
    """Marks streams as keyed, for a service that writes events to them. One record per stream, not per process or start."""

    def __init__(self, producer: Producer, reader: Reader, by: str) -> None:
        """by: the name of the service, for people."""
        self._producer, self._reader, self._by = producer, reader, by
        self._seen: set[str] = set()
        self._marking: dict[str, asyncio.Task[None]] = {}
        self._missing_until = 0.0

    async def load(self) -> None:
        """Read the marks, for seconds at most. Never fails: without them the first event with a key writes another mark.

        A stream whose mark is gone counts as unmarked.
        """
        before = frozenset(self._seen)
        try:
            async with asyncio.timeout(_LOAD_S):
                marks = await read_key_marks(self._reader)
        except (BrokerError, TimeoutError) as error:
            hint = f"before the next event with a key, a mark is written. If {CONTROL} cannot be written, that event is refused"
            log.warning("key_marks_unknown", error=str(error) or "no answer in time", hint=hint)
            return
        stored = {stream for stream, mark in marks.items() if mark.state == "seen"}
        lost = before - stored
        self._seen = (self._seen - lost) | stored
        if lost:
            hint = f"{CONTROL} was created again, or has lost records. The next event with a key writes a mark"
            log.warning("key_marks_lost", streams=sorted(lost), hint=hint)

    async def run(self, stopping: asyncio.Event) -> None:
        """Read the marks again each minute, until `stopping` is set: those of a broker that was set up anew are gone."""
        while not stopping.is_set():
            await wait_for_stop(stopping, CHECK_EVERY_S)
            if self._seen and not stopping.is_set():
                await self.load()

    def is_marked(self, stream: str) -> bool:
        """Whether events with keys may be stored in the stream without `mark`."""
        return stream in self._seen

    async def mark(self, stream: str) -> None:
        """To be awaited before the first event with a key is stored. Returns when the mark is durable.

        Without the control topic there is nothing to mark: then no stream has a mark, and all count as keyed. Raises BrokerError
        kinds; the event must not be stored then. All who wait for the mark of a stream wait for the same append and get its
        error: one after the other they would wait for a broker that does not answer as often as there are requests.
        """
        if stream in self._seen or time.monotonic() < self._missing_until:
            return
        marking = self._marking.get(stream)
        if marking is None:
            marking = self._marking[stream] = asyncio.create_task(self._write(stream), name=f"mark of {stream}")
            marking.add_done_callback(lambda done: self._forget(stream, done))
        await asyncio.shield(marking)

    async def _write(self, stream: str) -> None:
        try:
            await write_key_marks(self._producer, [stream], "seen", self._by)
        except UnknownTopic:
            self._missing_until = time.monotonic() + _ASK_AGAIN_S
            return
        except BrokerError as error:
            hint = f"the stream's events with keys are refused until {CONTROL} can be written. Other events are stored"
            log.warning("stream_not_marked", stream=stream, error=str(error), hint=hint)
            raise
        self._seen.add(stream)
        log.info("stream_keyed", stream=stream, hint="the autoscaler adds no partitions to it")

    def _forget(self, stream: str, done: asyncio.Task[None]) -> None:
        del self._marking[stream]
        if not done.cancelled():
            done.exception()  # when nobody waits any more
