"""What the scaler of groups reads from the broker: freezes, and the key that fills a hot partition."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from services.autoscaler.groups.backlog import Backlog
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.record import Record
from services.core.control.freezes import Freezes
from services.core.times import format_time

log = structlog.get_logger()

WITHIN_S = 5.0
SAMPLE = 500
"""Records of a hot partition that are read to find its key."""
SAMPLE_EVERY_S = 600.0
KEY_SHARE = 0.3
"""A key with this share of the sample is named."""
_KEY_LENGTH = 64
_ENDED_MS = 3_600_000
"""The end of a freeze is shown for so long."""


class Topics:
    """Reads nothing until `attach`. A failed request is logged, and tried again in the next round."""

    def __init__(self) -> None:
        self._broker: Broker | None = None
        self._freezes: Freezes | None = None
        self._unknown: str | None = "the broker has not answered yet"
        """Why the freezes are not known; None from the first read on, also when later reads fail."""
        self._is_failing = False
        self._over: set[tuple[str, int]] = set()
        """The freezes whose end was logged: group and time of the freeze."""
        self._keys: dict[tuple[str, str, int], tuple[float, str | None]] = {}

    def attach(self, broker: Broker) -> None:
        """Read from this broker from now on."""
        self._broker, self._freezes = broker, Freezes(broker.reader)

    async def refresh(self) -> None:
        """Read the new freezes, within WITHIN_S. Raises nothing."""
        if self._freezes is None:
            return
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._freezes.refresh()
        except (BrokerError, TimeoutError) as error:
            text = str(error) or f"no answer within {WITHIN_S:.0f} s"
            if self._unknown is not None:
                self._unknown = text
            if not self._is_failing:
                log.warning(
                    "freezes_unreadable", error=text, hint="the known freezes stay in force. The topic is read again"
                )
            self._is_failing = True
            return
        self._unknown, self._is_failing = None, False

    def frozen(self, group: str) -> str | None:
        """Who froze the group and why; None when nobody did. Before the first read every group counts as frozen."""
        if self._unknown is not None or self._freezes is None:
            return f"not changed, because it is not known whether a person has frozen it: {self._unknown}"
        found = self._freezes.all().get(group)
        return found.text if found is not None and found.holds(_now_ms()) else None

    def ended(self, group: str) -> str | None:
        """The freeze whose time ended in the last hour; logged once."""
        found = self._freezes.all().get(group) if self._freezes is not None else None
        now = _now_ms()
        if found is None or found.until is None or not found.has_ended(now) or now - found.until > _ENDED_MS:
            return None
        if (group, found.at) not in self._over:
            self._over.add((group, found.at))
            log.warning("freeze_ended", group=group, by=found.by, reason=found.reason, until=format_time(found.until))
        return f"the freeze by {found.by} ended at {format_time(found.until)}"

    async def find_key(self, place: Backlog) -> str | None:
        """The key of most of the next records in this partition, for a person; None without one. A partition is sampled
        once in SAMPLE_EVERY_S."""
        name, now = (place.group, place.topic, place.partition), time.monotonic()
        self._keys = {one: found for one, found in self._keys.items() if now - found[0] < SAMPLE_EVERY_S}
        if name not in self._keys:
            self._keys[name] = (now, await self._sample(place))
        return self._keys[name][1]

    async def _sample(self, place: Backlog) -> str | None:
        broker = self._broker
        if broker is None:
            return None
        try:
            async with asyncio.timeout(WITHIN_S):
                stored = (await broker.reader.describe(place.topic))[place.partition]
                settled = await broker.admin.committed(place.group, place.topic)
                start = max(stored.start, settled.get(place.partition, stored.start - 1) + 1)
                batch = await broker.reader.read(place.topic, place.partition, start, max_records=SAMPLE)
        except (BrokerError, TimeoutError, KeyError) as error:
            log.warning("hot_partition_unreadable", topic=place.topic, partition=place.partition, error=str(error))
            return None
        return most_frequent_key(batch.records) if batch is not None and batch.damage is None else None


def most_frequent_key(records: Sequence[Record]) -> str | None:
    """The key of at least KEY_SHARE of the records, with its share, for a person; None without one."""
    counts = Counter(record.key for record in records if record.key is not None)
    if not counts:
        return None
    key, count = counts.most_common(1)[0]
    if count < KEY_SHARE * len(records):
        return None
    text = key.decode(errors="replace")
    shown = text if len(text) <= _KEY_LENGTH else f"{text[:_KEY_LENGTH]}…"
    return f"key {shown!r} has {count / len(records):.0%} of the next {len(records)} records"


def _now_ms() -> int:
    return round(time.time() * 1000)
