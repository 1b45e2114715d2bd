"""Checks that partitions still have the log that a member has read: not cut off since, and not of a topic made anew."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import structlog
from aiokafka import TopicPartition as KafkaPartition

from services.core.broker.errors import BrokerError
from services.core.broker.kafka.assignment import Assignment
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.log_truncation import find_truncations
from services.core.broker.record import TopicPartition

log = structlog.get_logger()

Epochs = Mapping[KafkaPartition, list[tuple[int, int]]]
"""The leader epochs of fetched records, each with its first offset."""
_NEW_LEADER_S = 2.0
"""Seconds in which a new leader has to say where its log was cut off; meanwhile no record is returned."""


class LogCheck:
    """Of one member. own: its partitions, and what it has read of them."""

    def __init__(self, cluster: Cluster, own: Assignment, group: str) -> None:
        self._cluster, self._own, self._group = cluster, own, group

    def find_suspects(self, epochs: Epochs) -> tuple[dict[TopicPartition, tuple[int, int]], dict[TopicPartition, int]]:
        """Partitions whose fetched records have another leader epoch than those before: (next offset, the epoch before), and
        the newest epoch of those records."""
        suspects: dict[TopicPartition, tuple[int, int]] = {}
        newer: dict[TopicPartition, int] = {}
        for kafka_source, now in epochs.items():
            source = TopicPartition(*kafka_source)
            before = self._own.last_read(source)
            if before is not None and now and now[0][1] != before[1]:
                suspects[source], newer[source] = before, now[-1][1]
        return suspects, newer

    async def find_changed(
        self, suspects: Mapping[TopicPartition, tuple[int, int]], fetched: Mapping[TopicPartition, int] | None = None
    ) -> set[TopicPartition]:
        """Owned partitions of topics that were created again; if there are none, those whose log was cut off below the next
        offset, of the suspects and of partitions with a new leader: nothing may be stored behind that offset for long.
        fetched: as in `find_truncations`."""
        own = self._own
        lives = {source: own.metadata[source].topic for source in own.owned - own.unpositioned}
        topics = await self._cluster.describe_agreed(sorted({source.topic for source in lives})) if lives else {}
        anew = {source for source, read in lives.items() if source.topic in topics and topics[source.topic].id != read}
        if anew:
            return anew  # not lost if a suspect's leader cannot be asked; suspects are read again, and asked about then
        newest = {source: topics[source.topic].epoch_of(source.partition) for source in lives if source.topic in topics}
        led_anew = own.find_led_anew(newest)
        newer = {source: epoch for source, epoch in (fetched or {}).items() if source in suspects}
        newer |= {source: max(newest[source], newer.get(source, -1)) for source in led_anew.keys() & suspects.keys()}
        cuts = await find_truncations(self._cluster, suspects, {s.topic: lives[s] for s in suspects}, fetched=newer)
        own.validated |= {s: (suspects[s][0], newest[s]) for s in led_anew.keys() & suspects.keys() - cuts.keys()}
        nodes: defaultdict[int, dict[TopicPartition, tuple[int, int]]] = defaultdict(dict)
        for source in led_anew.keys() - suspects.keys():
            nodes[topics[source.topic].partitions[source.partition].leader][source] = led_anew[source]
        found = await asyncio.gather(*(self._find_truncated(asked, lives, newest) for asked in nodes.values()))
        return set(cuts).union(*found)

    async def _find_truncated(
        self,
        read: Mapping[TopicPartition, tuple[int, int]],
        lives: Mapping[TopicPartition, str],
        newest: Mapping[TopicPartition, int],
    ) -> set[TopicPartition]:
        """Those of one new leader that were cut off. A leader that cannot be asked holds up nobody, because none of its records
        was fetched yet: it is asked again at the next check."""
        ids = {source.topic: lives[source] for source in read}
        try:
            async with asyncio.timeout(_NEW_LEADER_S):
                cuts = await find_truncations(
                    self._cluster, read, ids, fetched={source: newest[source] for source in read}
                )
        except (BrokerError, TimeoutError) as error:
            log.info("kafka_log_unknown", group=self._group, error=str(error) or "no answer")
            return set()
        self._own.validated |= {source: (at, newest[source]) for source, (at, _) in read.items() if source not in cuts}
        return set(cuts)
