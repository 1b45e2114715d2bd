"""What every reader of a group shows and counts: how far it is behind, and what is missing where it wanted to read."""

from collections.abc import Collection, Iterable, Mapping

import structlog

from services.core import metrics
from services.core.broker.contract import Lag
from services.core.broker.errors import DataDamaged, OffsetOutOfRange
from services.core.broker.record import Batch, Damage, TopicPartition

log = structlog.get_logger()


class GroupWatch:
    """The gauges of one member of a group."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._shown: set[TopicPartition] = set()

    def show_lags(self, lags: Mapping[TopicPartition, Lag]) -> None:
        """Set the lag of these partitions."""
        for source, lag in lags.items():
            labels = (self._group, source.topic, str(source.partition))
            metrics.BROKER_LAG_RECORDS.labels(*labels).set(lag.records)
            metrics.BROKER_LAG_SECONDS.labels(*labels).set(lag.millis / 1000)
        self._shown |= lags.keys()

    def hide_lags(self, partitions: Iterable[TopicPartition]) -> None:
        """Another member shows these from now on."""
        for source in self._shown.intersection(partitions):
            labels = (self._group, source.topic, str(source.partition))
            metrics.BROKER_LAG_RECORDS.remove(*labels)
            metrics.BROKER_LAG_SECONDS.remove(*labels)
            self._shown.discard(source)

    def note_missing(
        self, error: OffsetOutOfRange | DataDamaged, known: Collection[TopicPartition]
    ) -> set[TopicPartition]:
        """The partitions in which records are missing. What is not `known` yet is counted, and an operator is told."""
        missing = _count_missing(error)
        for source, count in missing.items():
            if source not in known:
                metrics.BROKER_GAP_RECORDS.labels(self._group, source.topic).inc(count)
                log.error(
                    "records_missing",
                    group=self._group,
                    topic=source.topic,
                    partition=source.partition,
                    missing=count,
                    error=str(error),
                    hint="this partition waits, the others go on. Try: stop the service, repair or move the group on, start it",
                )
        return set(missing)

    def note_damage(self, batch: Batch, damage: Damage) -> None:
        """Count and tell an operator of records that cannot be read although what is behind them can."""
        metrics.BROKER_DAMAGED_RECORDS.labels(self._group, batch.topic).inc(damage.last - damage.first + 1)
        log.error(
            "records_damaged",
            group=self._group,
            topic=batch.topic,
            partition=batch.partition,
            first=damage.first,
            last=damage.last,
            error=damage.detail,
            hint="their stored bytes go to the dead letters, the rest goes on. Try: check the disks of the brokers",
        )


def _count_missing(error: OffsetOutOfRange | DataDamaged) -> dict[TopicPartition, int]:
    if isinstance(error, OffsetOutOfRange):
        return {TopicPartition(error.topic, error.partition): error.missing}
    missing: dict[TopicPartition, int] = {}
    for partition, first, last in error.ranges:
        source = TopicPartition(error.topic, partition)
        missing[source] = missing.get(source, 0) + last - first + 1
    return missing
