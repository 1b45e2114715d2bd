"""A stream's incarnation, and the service's clock.

A stream that is deleted and created again has other records, so leases name the incarnation. Arrival times are the
service's, and the local clock may be wrong, so they are compared with the Date of the service's answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.kinesis.aws import Timing, bounded
from services.core.broker.kinesis.streams import Shard
from services.core.clock import boot_seconds

_ASK_AGAIN_SECONDS = 0.25
"""An account may ask twenty times a second in all, and a fleet starts many groups at once."""

_PATIENCE_SECONDS = 10.0
_HOSTS_APART_SECONDS = 0.1
"""Clocks of the service's hosts may differ by this much."""


class ServiceClock:
    """The service's wall clock: never ahead, and at most a second and one answer's latency behind."""

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        """clock: seconds, never set, running during a suspend."""
        self._clock = clock
        self._ahead_ms: int | None = None

    def observe(self, answer: Mapping[str, Any]) -> int | None:
        """Record an answer that came just now. Returns its Date in ms, a whole second; None when it has none."""
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date is None:
            return None
        millis = int(parsedate_to_datetime(date).timestamp() * 1000)
        self._ahead_ms = millis - int(self._clock() * 1000)
        return millis

    def now_ms(self) -> int:
        """The local wall clock until an answer came."""
        return time.time_ns() // 1_000_000 if self._ahead_ms is None else int(self._clock() * 1000) + self._ahead_ms

    async def next_second(self, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> int:
        """The start (ms) of a second that begins during this call.

        Records stored before the call have earlier arrival times; records stored after it have this one or later.
        Asks until an answer has another Date than the first. Raises Unavailable.
        """
        deadline, first = self._clock() + _PATIENCE_SECONDS, None
        while self._clock() < deadline:
            try:
                date = self.observe(await ask())
            except Throttled:
                date = first
            if first is not None and date is not None and date > first:
                await asyncio.sleep(_HOSTS_APART_SECONDS)
                return date
            first = date if first is None else first
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        raise Unavailable("Kinesis' answers have no Date header. Try: an endpoint or a proxy that keeps it")


_HOUR_MS = 3_600_000
_AGES = 6.0
"""In units of `Timing.sync`. An account may make twenty such requests a second in all."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """name: account, stream and creation time, in the KCL's format."""

    name: str
    retention_ms: int
    made_ms: int


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream at one moment. name: of its incarnation. made_ms: when it was created."""

    name: str
    shards: tuple[Shard, ...]
    retention_ms: int
    made_ms: int = 0


class Incarnations:
    """A cache over DescribeStreamSummary."""

    def __init__(self, kinesis: Any, timing: Timing) -> None:
        self._kinesis, self._timing = kinesis, timing
        self._known: dict[str, tuple[float, Incarnation]] = {}
        self.clock = ServiceClock()

    async def find(self, topic: str, *, max_age: float | None = None) -> Incarnation:
        """At most `max_age` seconds old. Raises UnknownTopic, Unavailable."""
        now = time.monotonic()
        limit = _AGES * self._timing.sync if max_age is None else max_age
        fetched, known = self._known.get(topic, (0.0, None))
        if known is not None and now - fetched < limit:
            return known
        self.forget(topic)
        answer = await self._ask(topic)
        self.clock.observe(answer)
        incarnation = _parse_summary(answer["StreamDescriptionSummary"])
        self._known[topic] = (now, incarnation)
        return incarnation

    async def next_second(self, topic: str) -> int:
        """See `ServiceClock.next_second`. Raises UnknownTopic, Unavailable."""
        return await self.clock.next_second(lambda: self._ask(topic))

    async def _ask(self, topic: str) -> Mapping[str, Any]:
        async with bounded(f"describe {topic}", self._timing.request):
            answer: Mapping[str, Any] = await self._kinesis.describe_stream_summary(StreamName=topic)
        return answer

    def forget(self, topic: str) -> None:
        """Ask again next time."""
        self._known.pop(topic, None)


def _parse_summary(summary: Mapping[str, Any]) -> Incarnation:
    account = summary["StreamARN"].split(":")[4]
    made = summary["StreamCreationTimestamp"].timestamp()
    # The KCL writes whole seconds, and so does the service. An emulator may create a stream twice within one.
    epoch = int(made) if made == int(made) else int(made * 1000)
    name = f"{account}:{summary['StreamName']}:{epoch}"
    return Incarnation(name, int(summary["RetentionPeriodHours"]) * _HOUR_MS, int(made * 1000))
