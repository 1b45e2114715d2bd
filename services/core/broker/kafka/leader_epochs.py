"""Whether the log that a group reads was cut off below what the group has processed, and other records written there since.

Every batch carries the epoch of the leader that wrote it. A log that lost its end (an unclean election, a restored disk) goes on
at lower offsets under a higher epoch. A position alone does not show it: once enough new records are there it looks healthy,
and those between the cut and the position would be skipped. So a commit carries the epoch of its last record, and
whoever reads on asks the leader where that epoch ended (KIP-320).
"""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.faults import raise_for_leader
from services.core.broker.kafka.offsets import by_topic, leaders_of
from services.core.broker.kafka.protocol import EpochEndRequest
from services.core.broker.record import TopicPartition

_KEPT = 100


class EpochHistory:
    """From which offset on which epoch wrote, of one partition; in the order in which it was read."""

    def __init__(self, starts: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = list(starts)

    def note(self, first: int, epoch: int) -> None:
        """Records from offset `first` on were written under `epoch`. What was known of them before is forgotten."""
        while self._starts and self._starts[-1][0] >= first:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != epoch:
            self._starts.append((first, epoch))
            del self._starts[:-_KEPT]

    def of(self, offset: int) -> int | None:
        """The epoch of the record there; None when it is not known."""
        index = bisect_right(self._starts, offset, key=lambda start: start[0])
        return self._starts[index - 1][1] if index else None

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """(offset, epoch) where they begin, for the records from `first` to `last`."""
        epoch = self.of(first)
        known = [] if epoch is None else [(first, epoch)]
        return known + [start for start in self._starts if first < start[0] <= last]


async def find_cuts(
    cluster: Cluster, read: Mapping[TopicPartition, tuple[int, int]]
) -> dict[TopicPartition, int | None]:
    """Of those read up to (next offset, epoch of the last record): where the log was cut off below that, if it was.

    None: it was, and the leader cannot tell where, because it knows no epoch that high. Raises Unavailable, UnknownTopic.
    """
    if not read:
        return {}
    by_node: defaultdict[int, list[tuple[TopicPartition, tuple[int]]]] = defaultdict(list)
    for source, node in (await leaders_of(cluster, read)).items():
        by_node[node].append((source, (read[source][1],)))
    requests = [cluster.ask(node, EpochEndRequest(by_topic(rows))) for node, rows in by_node.items()]
    cuts: dict[TopicPartition, int | None] = {}
    for answer in await asyncio.gather(*requests):
        for topic, partitions in answer.topics:
            for code, partition, _, end in partitions:
                raise_for_leader(code, f"where a leader's epoch ended in {topic}[{partition}]")
                source = TopicPartition(topic, partition)
                if end < read[source][0]:
                    cuts[source] = end if end >= 0 else None
    return cuts
