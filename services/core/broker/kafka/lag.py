"""How far behind a group is, in records and in milliseconds."""

import asyncio
import time
from collections.abc import Mapping

from services.core.broker.contract import Lag
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.offsets import EARLIEST, ends, leaders_of, list_offsets, time_of
from services.core.broker.record import TopicPartition

_NO_LAG = Lag(0, 0)


class LagMeter:
    """Measures lag. One small read per lagging partition finds its oldest record's time; kept until the position moves."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._times: dict[TopicPartition, tuple[int, int | None]] = {}

    async def measure(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Lag]:
        """Lag by partition, counted from the next offset to process. Raises UnknownTopic, Unavailable."""
        if not positions:
            return {}
        end = await ends(self._cluster, positions)
        behind = {source: offset for source, offset in positions.items() if offset < end[source]}
        if unknown := {source: offset for source, offset in behind.items() if not self._is_known(source, offset)}:
            await self._find_times(unknown)
        now = time.time_ns() // 1_000_000
        lags = dict.fromkeys(positions, _NO_LAG)
        for source, offset in behind.items():
            oldest = self._times[source][1]
            if oldest is not None:  # else only marks of transactions lie there, or what was rolled back
                lags[source] = Lag(end[source] - offset, max(0, now - oldest))
        return lags

    def _is_known(self, source: TopicPartition, offset: int) -> bool:
        at, time_of_it = self._times.get(source, (-1, None))
        return at == offset and time_of_it is not None

    async def _find_times(self, positions: Mapping[TopicPartition, int]) -> None:
        """The oldest record that is still stored counts when the position itself has expired."""
        leaders = await leaders_of(self._cluster, positions)
        kept = await list_offsets(self._cluster, dict.fromkeys(positions, EARLIEST))
        reads = [
            time_of(self._cluster, source, leaders[source], max(offset, kept[source]))
            for source, offset in positions.items()
        ]
        for (source, offset), found in zip(positions.items(), await asyncio.gather(*reads), strict=True):
            self._times[source] = (offset, found)
