"""Finds logs that were cut off (truncated): they lost their end, and records that a group has read are gone.

Every batch carries the epoch of the leader that wrote it. A log that lost its end (an unclean election, a restored disk)
goes on at lower offsets under a higher epoch. The position alone does not show this: once there are enough new records, the
position is valid again, and the records between the cut and the position would be skipped. So a commit carries the epoch of
its last record, and the next owner asks the leader where that epoch ended (KIP-320).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.core.broker.errors import Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import raise_for_leader
from services.core.broker.kafka.leaders import Ids, ask_nodes, leaders_of
from services.core.broker.kafka.protocol import EpochEndRequest
from services.core.broker.record import TopicPartition

_KEPT = 100


class EpochHistory:
    """The epochs that wrote one partition's records, each with its first offset, in the order of reading."""

    def __init__(self, starts: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = list(starts)

    def record(self, first: int, epoch: int) -> None:
        """Records from offset `first` on were written under `epoch`. This replaces earlier entries about them."""
        while self._starts and self._starts[-1][0] >= first:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != epoch:
            self._starts.append((first, epoch))
            del self._starts[:-_KEPT]

    def find(self, offset: int) -> int | None:
        """The epoch of the record at this offset; None when it is not known."""
        index = bisect_right(self._starts, offset, key=lambda start: start[0])
        return self._starts[index - 1][1] if index else None

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The epochs of the records from `first` to `last`, each as (first offset, epoch)."""
        epoch = self.find(first)
        known = [] if epoch is None else [(first, epoch)]
        return known + [start for start in self._starts if first < start[0] <= last]


class Truncation(NamedTuple):
    """Where a log was cut off. epoch: of the last record below that offset, by which a second cut is found; None: not known."""

    offset: int
    epoch: int | None


async def find_truncations(
    cluster: Cluster,
    read: Mapping[TopicPartition, tuple[int, int]],
    ids: Ids | None = None,
    *,
    fetched: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, Truncation | None]:
    """The partitions whose log was cut off below `read` (next offset, epoch of the last record), with the cut.

    None: the offset is unknown, because no node knows an epoch that high. fetched: epochs of records that were fetched since.
    Raises UnknownTopic, and Unavailable, also when a leader is asked that knows less than others: it hears no news, and its log
    is as it was before another one became leader.
    """
    if not read:
        return {}
    epochs = {source: epoch for source, (_, epoch) in read.items()}
    leaders = await leaders_of(cluster, epochs, ids)
    for asked in (fetched or {}, epochs):
        found = await _epoch_ends(cluster, leaders, asked)
        await _refuse_newer(cluster, {source: asked[source] for source, (_, end) in found.items() if end < 0})
    return {
        source: Truncation(end, epoch if epoch >= 0 else None) if end >= 0 else None
        for source, (epoch, end) in found.items()
        if end < read[source][0]
    }


async def _epoch_ends(
    cluster: Cluster, leaders: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, int]]:
    """(the newest epoch that is not newer, where it ended), as these nodes know it; -1 where they know none that high."""
    found = {}
    for answer in await ask_nodes(cluster, leaders, epochs, EpochEndRequest):
        for topic, partitions in answer.topics:
            for code, partition, epoch, end in partitions:
                raise_for_leader(
                    code, f"where a leader's epoch ended in {topic}[{partition}]", f"Describe on topic {topic}"
                )
                found[TopicPartition(topic, partition)] = (epoch, end)
    return found


async def _refuse_newer(cluster: Cluster, epochs: Mapping[TopicPartition, int]) -> None:
    """Raise Unavailable when any node knows an epoch that high: the leader that was asked, which does not, is none any more.

    It would say that nothing was cut off, and what the newer leader stored in place of the lost records would be skipped.
    """
    if not epochs:
        return
    async for states in cluster.describe_by_node(sorted({source.topic for source in epochs})):
        for source, epoch in epochs.items():
            state = states.get(source.topic)
            known = None if state is None else state.partitions.get(source.partition)
            if known is not None and known.epoch >= epoch:
                raise Unavailable(
                    f"{source.topic}[{source.partition}]: a former leader was asked, not that of epoch {epoch}"
                )
