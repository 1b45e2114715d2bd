"""The metrics of a lane (Prometheus), and its reports to the observer (the ledger)."""

import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from prometheus_client import Counter

from services.core import metrics
from services.core.broker.contract import Broker, Lag, PartitionRange, Reader
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.group_lag import GroupLag, follow_group
from services.core.http.failure import Failure
from services.core.lag import LagHistogram
from services.core.ledger.age import Age, Place
from services.core.ledger.fields import FieldSample
from services.core.ledger.first_reader import FirstReader, LateStart
from services.core.ledger.report import Backlog, Breaker, Node, Span
from services.core.ledger.report import Outcome as ReportedOutcome
from services.core.ledger.reporter import Reporter, close_reporters
from services.core.pipe_file.topic_names import delivery_group
from services.expel.delivery import Delivery
from services.expel.retry_policy import Outcome

log = structlog.get_logger()

NODE: Node = "expel"
_FLUSH_AT = 5000
_MAX_LOGGED = 100
"""The most unknown destinations that are logged by name."""
_MAX_WORDS = 8
"""The most values of a destination's label `reason` or `outcome` in one metric: each is a series. Further ones count as OTHER."""
OTHER = "other"


class WordCounter:
    """A counter of a destination by one more label, `reason` or `outcome`. A receiver may answer with any status, so the first
    `_MAX_WORDS` words get a series each, and further ones share OTHER. usual: words that alerts look for. They have a series from
    the start: Prometheus sees no increase in one that begins with 1, and OTHER would hide it."""

    def __init__(self, counter: Counter, pipe: str, destination: str, usual: Collection[str] = ()) -> None:
        self._counter, self._names = counter, (pipe, destination)
        self._words = set(usual)
        for word in usual:
            counter.labels(pipe, destination, word)

    def add(self, word: str, events: int = 1) -> None:
        """Count under this word, or under OTHER."""
        if word not in self._words and len(self._words) >= _MAX_WORDS:
            word = OTHER
        else:
            self._words.add(word)
        self._counter.labels(*self._names, word).inc(events)


class LaneMetrics:
    """The metrics of one destination. Values are gathered in lists and observed by `flush`, because one event may only cost an
    append. ledger: its reports to the observer.
    """

    def __init__(self, pipe: str, destination: str, ledger: "LaneLedger | None" = None) -> None:
        self._names = (pipe, destination)
        self.ledger = ledger or LaneLedger()
        self._lag_in = metrics.LAG_IN.labels(pipe, NODE)
        self._lag_out = metrics.LAG_OUT.labels(pipe, NODE)
        self._transit = metrics.TRANSIT_TIME.labels(pipe, destination)
        self._expel_time = metrics.EXPEL_TIME.labels(pipe, destination)
        self._e2e = metrics.E2E_LAG.labels(pipe, destination)
        self._event_lag = metrics.EVENT_LAG.labels(pipe, destination)
        self._delivered = metrics.EXPEL_DELIVERED.labels(pipe, destination)
        self._succeeded = metrics.EXPEL_ATTEMPTS.labels(pipe, destination, "delivered")
        self.in_flight = metrics.EXPEL_LANE_EVENTS.labels(pipe, destination)
        self.paused = metrics.EXPEL_PAUSED.labels(pipe, destination)
        self.up = metrics.EXPEL_LANE_UP.labels(pipe, destination)
        self._event_lags_in: list[int] = []
        self._transits: list[int] = []
        self._event_lags: list[int] = []
        self._e2es: list[int] = []
        self._expel_times: Tally[int] = Tally()
        self._delivered_events = self._delivered_requests = 0
        self._logged_unclaimed: set[str] = set()
        self._counts: dict[Counter, WordCounter] = {}

    def now_ms(self) -> int:
        """Wall clock, ms since the epoch."""
        return int(time.time() * 1000)

    def record_polled(self, records: Sequence[Record], arrivals: Sequence[int], now_ms: int) -> None:
        """A polled batch is in flight."""
        self._event_lags_in += [now_ms - record.timestamp for record in records]
        self._transits += [now_ms - arrival for arrival in arrivals if arrival]
        if len(self._event_lags_in) > _FLUSH_AT:
            self.flush()

    def record_delivered(self, delivery: Delivery) -> None:
        """The destination acknowledged all of these."""
        now_ms = self.now_ms()
        self._event_lags += [now_ms - record.timestamp for record in delivery.records]
        self._e2es += [now_ms - arrival for arrival in delivery.arrivals if arrival]
        for _, offsets, polled_ms in delivery.runs:
            self._expel_times[now_ms - polled_ms] += len(offsets)
        self._delivered_events += len(delivery.parts)
        self.ledger.add("delivered", delivery.records)
        if delivery.failures:
            self.ledger.add_failures(delivery)
        if len(self._event_lags) > _FLUSH_AT:
            self.flush()

    def count_attempt(self, outcome: Outcome) -> None:
        if outcome is None:
            self._delivered_requests += 1
        else:
            word = outcome.reason if isinstance(outcome, Failure) else "partial"
            self.count(metrics.EXPEL_ATTEMPTS, 1, word)

    def count(self, counter: Counter, events: int, word: str | None = None) -> None:
        """Add events to a counter with the labels pipe and destination; with a word, by a `WordCounter`."""
        if word is None:
            counter.labels(*self._names).inc(events)
            return
        if counter not in self._counts:
            self._counts[counter] = WordCounter(counter, *self._names)
        self._counts[counter].add(word, events)

    def count_unclaimed(self, events: Mapping[str, int], topic: str) -> None:
        """Count skipped events (by destination) that no lane will deliver."""
        for destination, count in events.items():
            metrics.EXPEL_UNCLAIMED.labels(self._names[0], "unknown_destination").inc(count)
            if destination not in self._logged_unclaimed and len(self._logged_unclaimed) < _MAX_LOGGED:
                self._logged_unclaimed.add(destination)
                log.error(
                    "unclaimed_events",
                    topic=topic,
                    destination=destination,
                    events=count,
                    hint="these events stay where they are until the topic's retention ends. Try: penstock check",
                )

    def flush(self) -> None:
        """Observe all gathered values."""
        if self._event_lags_in:
            lags_in = Tally(self._event_lags_in)
            self._lag_in.observe_counts(lags_in)
            self.ledger.record_arrived(lags_in)
        if self._event_lags:
            lags_out = Tally(self._event_lags)
            self._event_lag.observe_counts(lags_out)
            self._lag_out.observe_counts(lags_out)
        self._transit.observe(self._transits)
        self._e2e.observe(self._e2es)
        self._expel_time.observe_counts(self._expel_times)
        for values in (self._event_lags_in, self._transits, self._event_lags, self._e2es, self._expel_times):
            values.clear()
        self._delivered.inc(self._delivered_events)
        self._succeeded.inc(self._delivered_requests)
        self._delivered_events = self._delivered_requests = 0


class LaneLedger:
    """The reports of one destination's events, over all its memberships. Without a reporter it reports nothing.

    backlogs: by their name in the report.
    """

    def __init__(
        self,
        reporter: Reporter | None = None,
        lag_in: LagHistogram | None = None,
        reader: Reader | None = None,
        group: GroupLag | None = None,
        backlogs: "Mapping[Backlog, _Backlog] | None" = None,
        first_reader: FirstReader | None = None,
        late_start: LateStart | None = None,
    ) -> None:
        self._reporter, self._lag_in, self._reader, self._group = reporter, lag_in, reader, group
        self._first_reader, self._late_start = first_reader, late_start
        self._backlogs = backlogs or {}
        self._measured_at = 0
        self._sample = FieldSample()
        if reporter is not None:
            reporter.sample = self._sample

    @classmethod
    def open(
        cls,
        producer: Producer,
        broker: Broker,
        instance: str,
        pipe: str,
        destination: str,
        sources: Sequence[str],
        returned: str | None = None,
        kept: Sequence[str] = (),
        *,
        topics_of_others: Collection[str] = (),
        late: bool = False,
    ) -> "LaneLedger":
        """One with a reporter.

        sources: the topics from which events come first. Events from the retry topic (`returned`) or from the topics in `kept`
        were reported as retrying, parked or dead: they are outstanding, and no minute waits for them. topics_of_others: the
        sources that are. late: the destination begins at the newest event.
        """
        lag_in = LagHistogram()
        lags = {
            "lag_in": lag_in,
            "lag_out": metrics.EVENT_LAG.labels(pipe, destination),
            "e2e": metrics.E2E_LAG.labels(pipe, destination),
            "transit_time": metrics.TRANSIT_TIME.labels(pipe, destination),
            "expel_time": metrics.EXPEL_TIME.labels(pipe, destination),
        }
        reporter = Reporter(producer, instance, NODE, pipe, destination, lags=lags)
        topics_by_name: dict[Backlog, Sequence[str]] = {
            "sources": sources,
            "returned": () if returned is None else (returned,),
            "held": kept,
        }
        backlogs = {name: _Backlog(topics, broker.is_contiguous) for name, topics in topics_by_name.items() if topics}
        group = follow_group(broker, delivery_group(pipe, destination), set().union(*topics_by_name.values()))
        first = FirstReader(producer, topics_of_others) if topics_of_others else None
        is_late = bool(topics_of_others) and late
        begins = LateStart(broker, delivery_group(pipe, destination), topics_of_others) if is_late else None
        return cls(reporter, lag_in, broker.reader, group, backlogs, first, begins)

    async def before_join(self) -> None:
        """Call it before the first join, until it succeeds. Raises BrokerError kinds."""
        if self._late_start is not None and self._reporter is not None:
            await self._late_start.find_skipped(self._reporter.sets)
            await self._reporter.report()
            await self._late_start.begin()

    def record_read(self, batch: Batch) -> None:
        """A batch was polled: its events are accepted where no ingest has accepted them."""
        if self._first_reader is not None:
            self._first_reader.add(batch)

    def add(self, outcome: ReportedOutcome, records: Sequence[Record], due: Span | None = None) -> None:
        """The destination received these, or they are durable in a side topic. due: as in `OriginSet`."""
        if self._reporter is not None:
            self._reporter.settled.add(outcome, records, due)
            if outcome == "delivered":
                self._sample.offer(records[0].value)

    def add_failures(self, delivery: Delivery) -> None:
        """These were delivered, after failed attempts. Call it in the same turn as `add`, so that one report has both."""
        if self._reporter is not None and self._reporter.failures is not None:
            self._reporter.failures.add(delivery.failures, delivery.records)

    def set_breaker(self, breaker: Callable[[], Breaker]) -> None:
        """Report the state of the destination's circuit breaker as well."""
        if self._reporter is not None:
            self._reporter.breaker = breaker

    def record_arrived(self, events: Mapping[int, int]) -> None:
        """How many events arrived, by their lag in ms from event time."""
        if self._lag_in is not None:
            self._lag_in.observe_counts(events)

    async def measure_ends(self) -> None:
        """Read the ends of the topics, before the lag is measured. Raises BrokerError kinds."""
        if self._reporter is not None and self._reader is not None:
            self._measured_at = int(time.time() * 1000)
            for backlog in self._backlogs.values():
                await backlog.measure(self._reader)

    async def set_lags(self, own: Mapping[TopicPartition, Lag]) -> None:
        """The lag of the group's own partitions, measured just after `measure_ends`; the broker is asked for the others.

        Raises BrokerError kinds.
        """
        if self._reporter is None:
            return
        if self._late_start is not None:
            await self._late_start.skip_rest(self._reporter.sets)
        lags = own if self._group is None else await self._group.complete(own)
        if lags is not None:
            for name, backlog in self._backlogs.items():
                self._reporter.record_behind(backlog.age(self._measured_at, lags), name)

    async def report(self) -> None:
        """Returns when everything that was added is reported durably. Raises Unavailable."""
        if self._reporter is not None:
            await self._reporter.report()
        if self._first_reader is not None:  # afterwards: an event that is accepted and not settled yet would be missing
            await self._first_reader.report()

    async def close(self) -> None:
        """Send the last report."""
        if self._reporter is not None:
            first = [] if self._first_reader is None else [self._first_reader]
            await close_reporters([self._reporter, *first])


class _Backlog:
    """The age of the unprocessed records of some topics.

    Where offsets are contiguous it is found from the ends that the topics had before; elsewhere the broker's lag says when the
    oldest record was stored. is_contiguous: as in `Broker`; a stream may move.
    """

    def __init__(self, topics: Sequence[str], is_contiguous: Callable[[str], bool]) -> None:
        self._topics, self._is_contiguous = topics, is_contiguous
        self._age = Age()
        self._ranges: dict[Place, PartitionRange] = {}
        self._timed: frozenset[str] = frozenset()

    async def measure(self, reader: Reader) -> None:
        """Read the ends of the topics, where offsets are contiguous."""
        self._timed = frozenset(topic for topic in self._topics if not self._is_contiguous(topic))
        found = {topic: await reader.describe(topic) for topic in self._topics if topic not in self._timed}
        self._ranges = {(topic, partition): one for topic, parts in found.items() for partition, one in parts.items()}

    def age(self, measured_at: int, lags: Mapping[TopicPartition, Lag]) -> int | None:
        """Of the oldest unprocessed record, in ms; measured_at: when `measure` began, ms. None: unknown."""
        waiting = [lag.stored for source, lag in lags.items() if source.topic in self._timed and lag.records]
        known = [stored for stored in waiting if stored is not None]
        if len(known) < len(waiting):
            return None
        timed = max(0, measured_at - min(known, default=measured_at))
        if len(self._timed) == len(self._topics):
            return timed
        starts = {place: one.start for place, one in self._ranges.items()}
        ends = {place: one.end for place, one in self._ranges.items()}
        done = {
            place: end - lags[TopicPartition(*place)].records for place, end in ends.items() if place in lags
        }  # a partition without a known lag counts as not processed
        done_up_to = self._age.done_up_to(measured_at, starts, ends, done)
        return None if done_up_to is None else max(timed, measured_at - done_up_to)
