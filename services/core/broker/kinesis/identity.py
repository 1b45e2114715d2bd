"""Which life of a stream this is: one that is deleted and made again has other records, and so other leases."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.service_clock import ServiceClock
from services.core.broker.kinesis.timing import Timing

_HOUR_MS = 3_600_000
_AGES = 6.0
"""In `Timing.sync`. An account may ask for summaries twenty times a second in all."""


@dataclass(frozen=True, slots=True)
class Identity:
    """name: account, stream and when it was made, as the KCL writes them. retention_ms: how long records are kept.

    made_ms: when it was made.
    """

    name: str
    retention_ms: int
    made_ms: int


class Identities:
    """A cache over DescribeStreamSummary."""

    def __init__(self, kinesis: Any, timing: Timing) -> None:
        self._kinesis, self._timing = kinesis, timing
        self._known: dict[str, tuple[float, Identity]] = {}
        self.clock = ServiceClock()

    async def of(self, topic: str, *, max_age: float | None = None) -> Identity:
        """At most `max_age` seconds old. Raises UnknownTopic, Unavailable."""
        now = time.monotonic()
        limit = _AGES * self._timing.sync if max_age is None else max_age
        asked, known = self._known.get(topic, (0.0, None))
        if known is not None and now - asked < limit:
            return known
        self.forget(topic)
        answer = await self._ask(topic)
        self.clock.saw(answer)
        identity = _parse(answer["StreamDescriptionSummary"])
        self._known[topic] = (now, identity)
        return identity

    async def next_second(self, topic: str) -> int:
        """See `ServiceClock.next_second`. Raises UnknownTopic, Unavailable."""
        return await self.clock.next_second(lambda: self._ask(topic))

    async def _ask(self, topic: str) -> Mapping[str, Any]:
        async with bounded(f"describe {topic}", self._timing.request):
            answer: Mapping[str, Any] = await self._kinesis.describe_stream_summary(StreamName=topic)
        return answer

    def forget(self, topic: str) -> None:
        """Ask anew next time."""
        self._known.pop(topic, None)


def _parse(summary: Mapping[str, Any]) -> Identity:
    account = summary["StreamARN"].split(":")[4]
    made = summary["StreamCreationTimestamp"].timestamp()
    # The KCL writes whole seconds, and so does the service. An emulator makes a stream twice within one.
    epoch = int(made) if made == int(made) else int(made * 1000)
    name = f"{account}:{summary['StreamName']}:{epoch}"
    return Identity(name, int(summary["RetentionPeriodHours"]) * _HOUR_MS, int(made * 1000))
