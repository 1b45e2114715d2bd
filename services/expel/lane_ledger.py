"""What a lane tells of its events, before it commits them."""

import time
from collections.abc import Callable, Mapping, Sequence

from services.core import metrics
from services.core.broker.contract import Admin, Lag, PartitionRange
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.group_lag import GroupLag, follow_group
from services.core.lag import LagHistogram
from services.core.ledger.age import Age, Place
from services.core.ledger.due import Span
from services.core.ledger.fields import FieldSample
from services.core.ledger.report import Breaker, Node, Outcome
from services.core.ledger.reporter import Reporter, say_goodbye
from services.core.pipes import delivery_group

NODE: Node = "expel"


class _Backlog:
    """What is not done of some topics, and since when."""

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics
        self._age = Age()
        self._held: dict[Place, PartitionRange] = {}

    async def look(self, admin: Admin) -> None:
        """Where the topics end."""
        held = {topic: await admin.describe(topic) for topic in self._topics}
        self._held = {(topic, partition): one for topic, found in held.items() for partition, one in found.items()}

    def age(self, looked_at: int, lags: Mapping[TopicPartition, Lag]) -> int | None:
        """Of the oldest record that is not done, in ms; looked_at: when `look` began, ms. None: not known."""
        starts = {place: one.start for place, one in self._held.items()}
        ends = {place: one.end for place, one in self._held.items()}
        done = {
            place: end - lags[TopicPartition(*place)].records for place, end in ends.items() if place in lags
        }  # of which no lag is known, nothing is known to be done
        known = self._age.done_up_to(looked_at, starts, ends, done)
        return None if known is None else looked_at - known


class _TimedBacklog:
    """As `_Backlog`, where the lag says when the oldest record was stored: no end needs to be known."""

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics

    async def look(self, admin: Admin) -> None:
        """There is nothing to ask."""

    def age(self, looked_at: int, lags: Mapping[TopicPartition, Lag]) -> int | None:
        """As there."""
        waiting = [lag.stored for source, lag in lags.items() if source.topic in self._topics and lag.records]
        known = [stored for stored in waiting if stored is not None]
        return None if len(known) < len(waiting) else max(0, looked_at - min(known, default=looked_at))


class LaneLedger:
    """One destination's, over all its memberships. Without a reporter nothing is told.

    sources: the topics that events come from first. What comes back from the global retrier (by `returned`), or by any of the
    topics `held`, was told as retrying, parked or dead: it is outstanding, and no minute waits for it. timed: the broker's lag
    says when the oldest record was stored.
    """

    def __init__(
        self,
        reporter: Reporter | None = None,
        sources: Sequence[str] = (),
        returned: str | None = None,
        held: Sequence[str] = (),
        lag_in: LagHistogram | None = None,
        admin: Admin | None = None,
        group: GroupLag | None = None,
        *,
        timed: bool = False,
    ) -> None:
        self._reporter, self._lag_in, self._admin, self._group = reporter, lag_in, admin, group
        backlog = _TimedBacklog if timed else _Backlog
        self._sources = backlog(sources)
        self._returned = None if returned is None else backlog([returned])
        self._held = backlog(held) if held else None
        self._looked_at = 0
        self._sample = FieldSample()
        if reporter is not None:
            reporter.sample = self._sample

    @classmethod
    def open(
        cls,
        producer: Producer,
        admin: Admin,
        instance: str,
        pipe: str,
        destination: str,
        sources: Sequence[str],
        returned: str | None = None,
        held: Sequence[str] = (),
        *,
        timed: bool = False,
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
        reporter = Reporter(producer, instance, NODE, pipe, destination, lags=lags)
        topics = {*sources, *held, *([returned] if returned is not None else [])}
        group = follow_group(admin, delivery_group(pipe, destination), topics, reads=timed)
        return cls(reporter, sources, returned, held, lag_in, admin, group, timed=timed)

    def add(self, outcome: Outcome, records: Sequence[Record], due: Span | None = None) -> None:
        """These are with the destination, or durable elsewhere. due: as in `OriginSet`."""
        if self._reporter is not None:
            self._reporter.settled.add(outcome, records, due)
            if outcome == "delivered":
                self._sample.offer(records[0].value)

    def watch(self, breaker: Callable[[], Breaker]) -> None:
        """Tell the state of the destination's breaker, too."""
        if self._reporter is not None:
            self._reporter.breaker = breaker

    def arrived(self, events: Mapping[int, int]) -> None:
        """How many events came here, by their lag in ms from event time."""
        if self._lag_in is not None:
            self._lag_in.observe_counts(events)

    async def look(self) -> None:
        """Where the topics end. To be called before the lag is measured. Raises BrokerError kinds."""
        if self._reporter is not None and self._admin is not None:
            self._looked_at = int(time.time() * 1000)
            await self._sources.look(self._admin)
            for backlog in (self._returned, self._held):
                if backlog is not None:
                    await backlog.look(self._admin)

    async def behind(self, own: Mapping[TopicPartition, Lag]) -> None:
        """The group's lag in the partitions that are ours, measured just after `look`; the broker is asked for the others'.

        Raises BrokerError kinds.
        """
        if self._reporter is None:
            return
        lags = own if self._group is None else await self._group.complete(own)
        if lags is None:
            return
        self._reporter.behind(self._sources.age(self._looked_at, lags))
        if self._returned is not None:
            self._reporter.returned_behind(self._returned.age(self._looked_at, lags))
        if self._held is not None:
            self._reporter.held_behind(self._held.age(self._looked_at, lags))

    async def report(self) -> None:
        """Returns when everything that was added is durably told. Raises Unavailable."""
        if self._reporter is not None:
            await self._reporter.report()

    async def close(self) -> None:
        """The last report."""
        if self._reporter is not None:
            await say_goodbye([self._reporter])
