"""Whether a stream ever got an event with a key: marks in `penstock.control`, one record per change, kept for ever.

More partitions map keys to other partitions, and partitions cannot be removed. So the autoscaler must know whether a stream is
**keyed**: whether it ever got an event with a key. The mark `none` is written before a stream can have its first event, the mark
`seen` before its first event with a key is stored. `seen` counts for ever, also when a stream of this name is created again. A
stream without a mark is older than the marks: nobody knows, and it counts as keyed.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
import structlog

from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.reading import read_topic
from services.core.broker.record import Record
from services.core.pipes import CONTROL

log = structlog.get_logger()

_KEY = "keys:"
_LOAD_S = 5.0
_ASK_AGAIN_S = 5.0
"""How long a missing control topic counts as missing."""


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
        held = await reader.describe(CONTROL)
    except UnknownTopic:
        return found
    async for batch in read_topic(reader, CONTROL, 0, held[0]):
        for record in batch.records:
            name = (record.key or b"").decode(errors="replace")
            if not name.startswith(_KEY):
                continue
            stream = name.removeprefix(_KEY)
            known = found.get(stream)
            if known is None or known.state == "none":
                found[stream] = _parse(record)
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
    records = [Record(f"{_KEY}{stream}".encode(), value, mark.at) for stream in streams]
    if records:
        (await producer.send_to(CONTROL, {0: records})).raise_first()


class KeyMarker:
    """Marks streams as keyed, for a service that writes events to them. One record per stream, not per process or start."""

    def __init__(self, producer: Producer, reader: Reader, by: str) -> None:
        """by: the name of the service, for people."""
        self._producer, self._reader, self._by = producer, reader, by
        self._seen: set[str] = set()
        self._lock = asyncio.Lock()
        self._missing_until = 0.0

    async def load(self) -> None:
        """Read the marks, for seconds at most. Never fails: without them the first event with a key writes another mark."""
        try:
            async with asyncio.timeout(_LOAD_S):
                self._learn(await read_key_marks(self._reader))
        except (BrokerError, TimeoutError) as error:
            hint = f"a mark is written before the next event with a key. Without the right to write to {CONTROL} it is refused"
            log.warning("key_marks_unknown", error=str(error) or "no answer in time", hint=hint)

    def is_marked(self, stream: str) -> bool:
        """Whether events with keys may be stored in the stream without `mark`."""
        return stream in self._seen

    async def mark(self, stream: str) -> None:
        """To be awaited before the first event with a key is stored. Returns when the mark is durable.

        Without the control topic there is nothing to mark: then no stream has a mark, and all count as keyed. Raises BrokerError
        kinds; the event must not be stored then.
        """
        async with self._lock:
            if stream in self._seen or time.monotonic() < self._missing_until:
                return
            try:
                await write_key_marks(self._producer, [stream], "seen", self._by)
            except UnknownTopic:
                self._missing_until = time.monotonic() + _ASK_AGAIN_S
                return
            self._seen.add(stream)
            log.info("stream_keyed", stream=stream, hint="the autoscaler adds no partitions to it")

    def _learn(self, marks: Mapping[str, KeyMark]) -> None:
        self._seen |= {stream for stream, mark in marks.items() if mark.state == "seen"}
