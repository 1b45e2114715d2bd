"""Chooses what a lane sends of a polled batch, and settles the rest at once.

Not sent are tombstones (unless the destination takes them), events of other outputs or other destinations, duplicates, and
events that the previous owner of the partition has written to the retry topic.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import Counter

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.record import Batch, TopicPartition
from services.core.ledger.report import Span
from services.core.pipe_file.topic_names import parked_topic, retry_topic
from services.expel.dedup import RetryTakeover, RetryTopicFilter
from services.expel.delivery import Unreadable
from services.expel.metrics import LaneMetrics
from services.expel.output_filter import Chosen, split_tombstones

if TYPE_CHECKING:
    from services.expel.dispatcher import LaneConfig


class Wanted(NamedTuple):
    """Of a polled batch. batches: the events to send, by their stream of origin. unreadable: records that become dead letters."""

    batches: Sequence[Batch] = ()
    unreadable: Sequence[Unreadable] = ()


class BatchFilter:
    """Of one lane, during one membership."""

    def __init__(self, config: "LaneConfig", broker: Broker, tracker: OffsetTracker, lane_metrics: LaneMetrics) -> None:
        pipe, destination = config.pipe, config.destination
        self._config, self._tracker, self._metrics = config, tracker, lane_metrics
        self._ledger = lane_metrics.ledger
        self._parked = parked_topic(pipe)
        self._waiting = {
            topic: RetryTopicFilter(pipe, destination, config.siblings) for topic in (retry_topic(pipe), self._parked)
        }
        """By the topic of waiting events that it sorts."""
        self._takeover = RetryTakeover(broker, pipe, destination, config.reach)

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """As `RetryTakeover.prepare`."""
        await self._takeover.prepare(polled, assigned)

    def remove(self, sources: Collection[TopicPartition]) -> None:
        """These partitions were revoked."""
        self._takeover.remove(sources)

    def choose(self, batch: Batch) -> Wanted:
        """Each batch once, in order. One with damage is sent as it is."""
        # Before the search for retries of the previous owner, whose records have no header of outputs.
        mine = self._without_filtered(batch)
        if mine is not None and (retrying := self._takeover.find(mine)):
            mine = self._settle_retrying(mine, retrying)
        if mine is None:
            return Wanted()
        if mine.topic in self._waiting and mine.damage is None:
            return self._sort_waiting(mine)
        return Wanted([mine])

    def _without_filtered(self, batch: Batch) -> Batch | None:
        """Settle the tombstones, and the events that are in other outputs than the destination's. Returns the others."""
        if batch.damage is not None or batch.topic in self._waiting:
            return batch
        mine: Batch | None = batch
        of_others = batch.topic in self._config.topics_of_others
        taken = self._config.takes_tombstones
        if of_others or not taken:
            chosen = split_tombstones(batch, of_others=of_others, taken=taken)
            mine = self._settle_filtered(chosen, metrics.EXPEL_TOMBSTONES)
        if mine is not None and self._config.outputs is not None:
            mine = self._settle_filtered(self._config.outputs.choose(mine), metrics.EXPEL_FILTERED)
        return mine

    def _settle_filtered(self, chosen: Chosen, counter: Counter) -> Batch | None:
        mine, filtered = chosen
        if filtered is not None:
            self._metrics.count(counter, len(filtered.records))
            self._ledger.add("filtered", filtered.records)
            self._tracker.settle(filtered.source, filtered.offsets)
        return mine

    def _settle_retrying(self, batch: Batch, retrying: Mapping[int, Span]) -> Batch | None:
        """Settle events that the previous owner wrote to the retry topic (by offset: when they are due). Returns the others."""
        self._metrics.count(metrics.EXPEL_INHERITED, len(retrying))
        # The previous owner may have died before it reported them.
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            if (due := retrying.get(offset)) is not None:
                self._ledger.add("retrying", [record], due)
        self._tracker.settle(batch.source, list(retrying))
        return batch.without(list(retrying))

    def _sort_waiting(self, batch: Batch) -> Wanted:
        """A batch of the retry or parked topic, which has events of other destinations too."""
        found = self._waiting[batch.topic].sort(batch)
        self._tracker.settle(batch.source, [*found.others, *found.duplicates])
        self._metrics.count(metrics.EXPEL_TWINS, len(found.duplicates))
        self._metrics.count_unclaimed(found.unclaimed, batch.topic)
        if batch.topic == self._parked:
            self._metrics.count(metrics.EXPEL_REPLAYED, sum(len(mine.records) for mine in found.mine))
        return Wanted(found.mine, found.unreadable)
