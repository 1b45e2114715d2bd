"""How far a whole group is behind, as one of its members tells it: its own partitions are only a part of that."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from services.core.broker.contract import Admin, Lag
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition

ASK_EVERY_S = 10.0
LEARN_EVERY_S = 60.0
"""Partitions that are added are known of after so long."""
SETTLING_S = 60.0
"""A new member has its share of the leases by then."""
_WITHIN_S = 5.0


class GroupLag(Protocol):
    """Of one group. A member that owns nothing, as each does during a rebalance, is not "behind by 0"."""

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> Mapping[TopicPartition, Lag] | None:
        """What can be said of the group by whoever just measured `own`; None: nothing. Raises BrokerError kinds."""


class OwnLag:
    """Where a question for other members' lag reads what they have not read: each speaks for its own, once it has a share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun = clock, clock()

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> Mapping[TopicPartition, Lag] | None:
        """As in `GroupLag`."""
        return own if own or self._clock() - self._begun >= SETTLING_S else None


class WholeLag:
    """Of one group in these topics, all members together."""

    def __init__(
        self, admin: Admin, group: str, topics: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admin, self._group, self._topics, self._clock = admin, group, tuple(topics), clock
        self._partitions: dict[str, frozenset[int]] = {}
        self._learned = self._asked = float("-inf")

    async def complete(self, own: Mapping[TopicPartition, Lag]) -> dict[TopicPartition, Lag] | None:
        """`own`, and of the other partitions what the broker knows.

        None: somebody else's are missing, and the broker was asked less than ASK_EVERY_S ago. Raises BrokerError kinds.
        """
        now = self._clock()
        if now - self._learned >= LEARN_EVERY_S:
            self._partitions = {}
        missing = [topic for topic in self._topics if not self._is_own(topic, own)]
        if not missing:
            return dict(own)
        if now - self._asked < ASK_EVERY_S:
            return None
        self._asked = now
        try:
            async with asyncio.timeout(_WITHIN_S):
                found = {topic: await self._admin.group_lag(self._group, topic) for topic in missing}
        except TimeoutError as error:
            raise Unavailable(f"group {self._group}: its lag was not told within {_WITHIN_S:g} s") from error
        if not self._partitions:
            self._learned = now
        self._partitions |= {topic: frozenset(lags) for topic, lags in found.items()}
        others = {TopicPartition(topic, number): lag for topic, lags in found.items() for number, lag in lags.items()}
        return others | dict(own)

    def _is_own(self, topic: str, own: Mapping[TopicPartition, Lag]) -> bool:
        known = self._partitions.get(topic)
        return known is not None and all(TopicPartition(topic, number) in own for number in known)


def follow_group(admin: Admin, group: str, topics: Collection[str], *, reads: bool) -> GroupLag:
    """reads: whether the broker has to read what is not processed to know how much it is, as Kinesis."""
    return OwnLag() if reads else WholeLag(admin, group, topics)
