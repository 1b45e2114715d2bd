"""An open connection to a Kafka cluster."""

import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from services.core.broker.contract import Broker, Consumer, Features, OnRevoke, Start
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.existing import NO_EXISTING, ExistingTopics
from services.core.broker.kafka.access import access_by
from services.core.broker.kafka.admin import KafkaAdmin
from services.core.broker.kafka.aiokafka_internals import FetchBudget
from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.kafka.cluster import Cluster, Timing
from services.core.broker.kafka.consumer import SharedResources, join
from services.core.broker.kafka.prefixed import PrefixedBroker
from services.core.broker.kafka.record_batch import MAX_RECORD_BYTES
from services.core.broker.kafka.topic_settings import TopicLimits
from services.core.broker.record import Record, estimate_size
from services.core.broker.retry import AppendPolicy, append_with_retry

_FEATURES = Features(contiguous_offsets=True, dates_by_storing=True, max_record_bytes=MAX_RECORD_BYTES)
_PROBE_AGE = 300.0


class KafkaBroker:
    """The contract's `Broker`. Appends have connections of their own: they never wait for administration or lag."""

    def __init__(
        self,
        bootstrap: str,
        timing: Timing,
        prefix: str = "",
        security: Path | None = None,
        existing: ExistingTopics = NO_EXISTING,
    ) -> None:
        """`prefix`: of this fleet's names. All names here have it: the cluster's names. security: as in `kafka_security`."""
        self._timing, access = timing, access_by(security)
        self._sending = Cluster(bootstrap, f"{prefix}penstock-send", timing, access, metadata_age=timing.metadata)
        self._asking = Cluster(bootstrap, f"{prefix}penstock-admin", timing, access)
        self._limits = TopicLimits(self._sending)
        self.features = _FEATURES
        self.appender = KafkaAppender(self._sending, self._limits, existing.names.values())
        self.admin = self.reader = KafkaAdmin(self._asking, self._append, prefix, existing)
        self.resharding = None
        self._shared = SharedResources(self._asking, self.admin.begun, FetchBudget(), prefix, existing)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        bootstrap: str,
        *,
        timing: Timing | None = None,
        prefix: str = "",
        security: Path | None = None,
        existing: ExistingTopics = NO_EXISTING,
    ) -> "AsyncIterator[KafkaBroker]":
        """`bootstrap`: host:port[,host:port…]. Entering raises Unavailable when no node answers or accepts us. Leaving drains."""
        broker = cls(bootstrap, timing or Timing(), prefix, security, existing)
        async with AsyncExitStack() as closing:
            for close in (broker._asking.close, broker._sending.close, broker.appender.close):
                closing.push_async_callback(close)
            await broker._sending.client()
            yield broker

    def is_contiguous(self, topic: str) -> bool:
        return self.features.contiguous_offsets

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager[Consumer]:
        """As in the contract. Entering does not wait for an assignment: a rebalance may take as long as others drain."""
        return join(self._shared, group, topics, start, on_revoke)

    async def _append(self, topic: str, records: Sequence[Record]) -> None:
        """Store the records, or raise. Repeated within the time of a request: not every node knows a leader of a new topic."""
        deadline, policy = time.monotonic() + self._timing.request, AppendPolicy(append_timeout=self._timing.request)
        size, deadlines = estimate_size(records), [deadline] * len(records)
        sent = await append_with_retry(self.appender, topic, 0, records, policy, size=size, deadlines=lambda: deadlines)
        if sent.failed:
            raise sent.failed[0][1]

    async def probe(self, topic: str, *, timeout: float) -> None:
        """Every partition has a leader and enough replicas in sync for acks=all. Raises UnknownTopic, Unavailable."""
        async with self._sending.bounded(f"probe {topic}", timeout):
            needed = (await self._limits.find(topic, max_age=_PROBE_AGE)).min_in_sync
            state = (await self._sending.describe([topic])).get(topic)
        if state is None:
            raise UnknownTopic(f"Kafka has no topic {topic!r}")
        for number, partition in state.partitions.items():
            if partition.leader < 0:
                raise Unavailable(f"{topic}[{number}] has no leader now")
            if partition.in_sync < needed:
                raise Unavailable(f"{topic}[{number}]: {partition.in_sync} replicas in sync, acks=all needs {needed}")


@asynccontextmanager
async def open_kafka(
    bootstrap: str,
    *,
    timing: Timing | None = None,
    prefix: str = "",
    security: Path | None = None,
    existing: ExistingTopics = NO_EXISTING,
) -> AsyncIterator[Broker]:
    """As `KafkaBroker.open`, for the names of a fleet with this prefix ("": the cluster's names) and these topics of others."""
    opening = KafkaBroker.open(bootstrap, timing=timing, prefix=prefix, security=security, existing=existing)
    async with opening as broker:
        yield PrefixedBroker(broker, prefix, existing) if prefix or existing else broker
