"""Connecting and disconnecting the AIOKafkaConsumer behind a member.

Heartbeats run in the background whatever the caller does, and `max_poll_interval_ms` is out of reach, so that a paused
member that nobody polls stays one. A worker that hangs with a living event loop is found by its lag, not by Kafka; one
that is frozen or dead misses its heartbeats.
"""

import asyncio

import structlog
from aiokafka import AIOKafkaConsumer

from services.core.broker.kafka.eviction import client_id, name_process
from services.core.broker.kafka.faults import bounded
from services.core.broker.kafka.fetcher import BoundedFetcher, FetchBudget
from services.core.broker.kafka.timing import Timing

log = structlog.get_logger()

_NEVER_MS = 2**31 - 1
_FETCH_BYTES = 256 << 10
_PARTITION_FETCH_BYTES = 64 << 10
"""Of one answer. A larger batch comes all the same, alone (KIP-74); see `fetcher` for what is kept."""
_STOP_SECONDS = 10.0


async def connect(bootstrap: str, timing: Timing, group: str, budget: FetchBudget) -> AIOKafkaConsumer:
    """A started consumer without a subscription. What it keeps unpolled counts in `budget`. Raises Unavailable."""
    client = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        client_id=client_id(group, await asyncio.to_thread(name_process)),
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="none",
        session_timeout_ms=round(timing.session * 1000),
        heartbeat_interval_ms=round(timing.heartbeat * 1000),
        rebalance_timeout_ms=round(timing.rebalance * 1000),
        max_poll_interval_ms=_NEVER_MS,
        # A join is answered only when every member has drained.
        request_timeout_ms=round((timing.rebalance + timing.request) * 1000),
        metadata_max_age_ms=round(timing.metadata * 1000),
        max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
        fetch_max_bytes=_FETCH_BYTES,
        isolation_level="read_committed",
    )
    try:
        async with bounded(f"connect to Kafka at {bootstrap}", timing.request * 2):
            await client.start()
            await _bound(client, budget)
    except BaseException:
        await disconnect(client)
        raise
    return client


async def _bound(client: AIOKafkaConsumer, budget: FetchBudget) -> None:
    """Put our fetcher in the place of aiokafka's, which has nothing to do yet."""
    theirs = client._fetcher
    await theirs.close()
    client._fetcher = BoundedFetcher(
        client._client,
        client._subscription,
        budget,
        fetch_max_bytes=_FETCH_BYTES,
        max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
        fetcher_timeout=theirs._fetcher_timeout,
        auto_offset_reset="none",
        isolation_level="read_committed",
    )


async def disconnect(client: AIOKafkaConsumer) -> None:
    """Leave the group and close the connections, within seconds: a group that rebalances, or a broker that is away, is
    left without a word then, and notices by the missing heartbeats."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await client.stop()
    except TimeoutError:
        log.warning("kafka_leave_timed_out", seconds=_STOP_SECONDS)
        if client._fetcher is not None:
            await client._fetcher.close()
        await client._client.close()
