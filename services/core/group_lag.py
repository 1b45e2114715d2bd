"""The lag of a whole group, as one of its members reports it. Its own partitions are only a part of the group's."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from services.core.broker.contract import Admin, Broker, Lag
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition
from services.core.pipe_file.topic_names import CONTROL

ASK_EVERY_S = 10.0
LEARN_EVERY_S = 60.0
"""Added partitions are found after so long."""
SETTLING_S = 60.0
"""A new member has its share of the leases by then."""
WITHIN_S = 5.0


class GroupLag(Protocol):
    """Of one group. A member without partitions, as during a rebalance, does not know that the lag is 0."""

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> Mapping[TopicPartition, Lag] | None:
        """The lag that a member reports which has just measured `own`; None: unknown. Raises BrokerError kinds."""


class OwnLag:
    """For brokers that must read the unprocessed records to know the lag: each member reports its own, once it has a share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun = clock, clock()

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> Mapping[TopicPartition, Lag] | None:
        return own if own or self._clock() - self._begun >= SETTLING_S else None


class WholeLag:
    """For the other brokers: the lag of all members together, in these topics."""

    def __init__(
        self, admin: Admin, group: str, topics: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admin, self._group, self._topics, self._clock = admin, group, tuple(topics), clock
        self._partitions: dict[str, frozenset[int]] = {}
        self._learned = self._asked = float("-inf")

    async def complete(
        self, own: Mapping[TopicPartition, Lag], topics: Collection[str] | None = None
    ) -> dict[TopicPartition, Lag] | None:
        """`own`, and the other members' lag from the broker, in these topics; absent: in all.

        None: theirs is needed, and the broker was asked less than ASK_EVERY_S ago. Raises BrokerError kinds.
        """
        now = self._clock()
        if now - self._learned >= LEARN_EVERY_S:
            self._partitions = {}
        missing = [topic for topic in (self._topics if topics is None else topics) if not self._is_own(topic, own)]
        if not missing:
            return dict(own)
        if now - self._asked < ASK_EVERY_S:
            return None
        self._asked = now
        try:
            async with asyncio.timeout(WITHIN_S):
                found = {topic: await self._admin.group_lag(self._group, topic) for topic in missing}
        except TimeoutError as error:
            raise Unavailable(
                f"group {self._group}: the broker did not report its lag within {WITHIN_S:g} s"
            ) from error
        if not self._partitions:
            self._learned = now
        self._partitions |= {topic: frozenset(lags) for topic, lags in found.items()}
        others = {TopicPartition(topic, number): lag for topic, lags in found.items() for number, lag in lags.items()}
        return others | dict(own)

    def _is_own(self, topic: str, own: Mapping[TopicPartition, Lag]) -> bool:
        known = self._partitions.get(topic)
        return known is not None and all(TopicPartition(topic, number) in own for number in known)


class MixedLag:
    """By topic as `OwnLag` or as `WholeLag`. A stream may move to a broker of the other kind."""

    def __init__(
        self,
        whole: WholeLag,
        topics: Collection[str],
        is_contiguous: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """whole: of these topics."""
        self._whole, self._topics, self._is_contiguous, self._clock = whole, tuple(topics), is_contiguous, clock
        self._since: dict[str, float] = {}
        """Since when offsets of these topics are not contiguous, as far as it is known."""

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> Mapping[TopicPartition, Lag] | None:
        """As `OwnLag` for the topics whose offsets are not contiguous, and as `WholeLag` for the others."""
        now = self._clock()
        self._since = {topic: self._since.get(topic, now) for topic in self._topics if not self._is_contiguous(topic)}
        there = {source.topic for source in own}
        if any(topic not in there and now - since < SETTLING_S for topic, since in self._since.items()):
            return None
        if len(self._since) == len(self._topics):
            return own
        return await self._whole.complete(own, [topic for topic in self._topics if topic not in self._since])


def follow_group(broker: Broker, group: str, topics: Collection[str]) -> GroupLag:
    """Where offsets are not contiguous, as on Kinesis, the broker must read the unprocessed records to know the lag."""
    whole = WholeLag(broker.admin, group, topics)
    if broker.features.contiguous_offsets:
        return whole
    if not broker.is_contiguous(CONTROL):  # it is on the fleet's own broker, and so Kinesis is the only one
        return OwnLag()
    return MixedLag(whole, topics, broker.is_contiguous)
