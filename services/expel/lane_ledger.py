"""What a lane tells of its events, before it commits them."""

import time
from collections.abc import Callable, Mapping, Sequence

from services.core import metrics
from services.core.broker.contract import Admin, Lag, PartitionRange
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.lag import LagHistogram
from services.core.ledger.age import Age, Place
from services.core.ledger.fields import FieldSample
from services.core.ledger.report import Breaker, Node, Outcome
from services.core.ledger.reporter import Reporter, say_goodbye

NODE: Node = "expel"


class LaneLedger:
    """One destination's, over all its memberships. Without a reporter nothing is told.

    sources: the topics that events come from first. What comes back from the global retrier or from parking was told as
    retrying or parked: it is outstanding, and no minute waits for it.
    """

    def __init__(
        self,
        reporter: Reporter | None = None,
        sources: Sequence[str] = (),
        lag_in: LagHistogram | None = None,
        admin: Admin | None = None,
    ) -> None:
        self._reporter, self._sources, self._lag_in, self._admin = reporter, sources, lag_in, admin
        self._age = Age()
        self._looked_at = 0
        self._held: dict[Place, PartitionRange] = {}
        self._sample = FieldSample()
        if reporter is not None:
            reporter.sample = self._sample

    @classmethod
    def open(
        cls, producer: Producer, admin: Admin, instance: str, pipe: str, destination: str, sources: Sequence[str]
    ) -> "LaneLedger":
        """One that tells."""
        lag_in = LagHistogram()
        lags = {
            "lag_in": lag_in,
            "lag_out": metrics.EVENT_LAG.labels(pipe, destination),
            "e2e": metrics.E2E_LAG.labels(pipe, destination),
            "transit_time": metrics.TRANSIT_TIME.labels(pipe, destination),
            "expel_time": metrics.EXPEL_TIME.labels(pipe, destination),
        }
        return cls(Reporter(producer, instance, NODE, pipe, destination, lags=lags), sources, lag_in, admin)

    def add(self, outcome: Outcome, records: Sequence[Record]) -> None:
        """These are with the destination, or durable elsewhere."""
        if self._reporter is not None:
            self._reporter.settled.add(outcome, records)
            if outcome == "delivered":
                self._sample.offer(records[0].value)

    def watch(self, breaker: Callable[[], Breaker]) -> None:
        """Tell the state of the destination's breaker, too."""
        if self._reporter is not None:
            self._reporter.breaker = breaker

    def arrived(self, lags_ms: Sequence[int]) -> None:
        """Lags of events that came here, from their event time."""
        if self._lag_in is not None:
            self._lag_in.observe(lags_ms)

    async def look(self) -> None:
        """Where the sources end. To be called before the lag is measured. Raises BrokerError kinds."""
        if self._reporter is not None and self._admin is not None:
            self._looked_at = int(time.time() * 1000)
            held = {topic: await self._admin.describe(topic) for topic in self._sources}
            self._held = {(topic, partition): one for topic, found in held.items() for partition, one in found.items()}

    def behind(self, lags: Mapping[TopicPartition, Lag]) -> None:
        """The group's lag in the partitions that are ours, measured just after `look`. Others speak for the other ones."""
        if self._reporter is None:
            return
        starts = {place: one.start for place, one in self._held.items()}
        ends = {place: one.end for place, one in self._held.items()}
        done = {
            place: end - lags[TopicPartition(*place)].records if place in lags else end for place, end in ends.items()
        }
        known = self._age.done_up_to(self._looked_at, starts, ends, done)
        self._reporter.behind(None if known is None else self._looked_at - known)

    async def report(self) -> None:
        """Returns when everything that was added is durably told. Raises Unavailable."""
        if self._reporter is not None:
            await self._reporter.report()

    async def close(self) -> None:
        """The last report."""
        if self._reporter is not None:
            await say_goodbye([self._reporter])
