"""The former topic of a stream that has moved, or of a copy that was given up: what came late to it, and its deletion."""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from services.core.broker.contract import Broker
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.several.broker import SeveralBrokers
from services.core.control.homes import Home, Homes
from services.fleet.migrate.stream_source import require_fresh

_PAGE = 500


async def incarnation_of(broker: Broker, stream: str) -> str | None:
    """That of its topic there; None when there is none. Raises BrokerError kinds."""
    try:
        return await broker.admin.incarnation(stream)
    except UnknownTopic:
        return None


class FormerTopic:
    """require: raises CommandFailed when somebody has moved the stream since this home. late: events that were stored in the
    stream. All methods raise BrokerError kinds and as `require`, and may be repeated."""

    def __init__(
        self, stream: str, fleet: SeveralBrokers, homes: Homes, require: Callable[[Home], Awaitable[None]]
    ) -> None:
        self._stream, self._fleet, self._homes, self._require = stream, fleet, homes, require
        self._stored: dict[tuple[str, int], int] = {}
        """By incarnation of a former topic and partition: the next offset of its late events."""
        self.late = 0

    async def store_late(self, home: Home, former: Broker, incarnation: str | None) -> None:
        """Send what was written to the former topic after the stream was handed over to the stream.

        Nobody has answered for these events: their writers were frozen, and have repeated them. Or a writer does not follow the
        homes, because it runs with a pipe file without `brokers`. So they are stored, maybe twice. The topic is deleted
        behind this, so its end is a fence.
        """
        if incarnation is None:
            return
        fences, fenced = await former.reader.fence(self._stream), time.monotonic()
        stored = await former.reader.describe(self._stream)
        async with Producer(self._fleet.appender) as producer:
            for partition, held in stored.items():
                end = max(held.end, fences.get(partition, 0))
                base = self._homes.base(home.former, self._stream, partition)
                # A shard that was made since the hand-over has only late events.
                new = held.start if home.former in self._fleet.brokers.noncontiguous else end
                beginning = home.ends.get(partition, new + base) - base
                offset = max(held.start, self._stored.get((incarnation, partition), beginning))
                while offset < end:
                    await self._require(home)
                    batch = await former.reader.read(self._stream, partition, offset, max_records=_PAGE)
                    if batch is None:
                        name = f"{self._stream}[{partition}] on {home.former}"
                        require_fresh(fenced, name, is_contiguous=former.features.contiguous_offsets)
                        break
                    if partition in home.ends:
                        (await producer.send_to(self._stream, {partition: batch.records})).raise_first()
                    else:
                        (await producer.send(self._stream, batch.records)).raise_first()
                    offset = self._stored[incarnation, partition] = batch.offsets[-1] + 1
                    self.late += len(batch.records)

    async def delete(self, home: Home, broker: Broker, incarnation: str | None) -> None:
        """Delete this one, and no other of its name, and never the stream itself."""
        names = (home.readers, home.writers)
        live = {await incarnation_of(await self._fleet.brokers.named(name), self._stream) for name in names}
        await self._require(home)
        if incarnation and incarnation not in live:
            with suppress(UnknownTopic):  # or a later topic, which somebody has made while this command was frozen
                await broker.admin.delete_topic(self._stream, incarnation)
