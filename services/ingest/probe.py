"""Asks the broker repeatedly whether it can store events, for /readyz, and for the number of partitions of each stream."""

import asyncio
import time
from collections.abc import Collection
from typing import NoReturn

import structlog

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.ledger.report import TELEMETRY
from services.core.offset_token import mark_of
from services.core.process.lifecycle import run_until, wait_for_stop
from services.core.provision import require_safe_topics
from services.ingest.intake import Intake

log = structlog.get_logger()

READY_EVERY_S = 5.0
UNREADY_EVERY_S = 0.5
FLUSH_EVERY_S = 0.5
TIMEOUT_S = 3.0
FIRST_S = 30.0
"""Limit of a stream's first check, which makes many requests, on Kinesis some for each shard. With less, a slow service would
never get through: each attempt begins anew."""
FAILURE_S = 10.0
"""How long a failed request makes this process unready. Then clients may try again."""


class Probe:
    """Whether this process can store events: by the broker's own answer, and by the results of the last requests."""

    def __init__(self, broker: Broker, producer: Producer, intakes: Collection[Intake]) -> None:
        self._broker, self._producer, self._intakes = broker, producer, intakes
        self._reason: str | None = "the broker has not been asked yet"

    @property
    def reason(self) -> str | None:
        """Why this process is not ready, for a person; None when it is."""
        if self._reason is not None:
            return self._reason
        recent = time.monotonic() - FAILURE_S
        for intake in self._intakes:
            if intake.broker_failure is not None and intake.broker_failure[0] > recent:
                return f"the last events of {intake.name} could not be stored: {intake.broker_failure[1]}"
        return None

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; a check under way is abandoned, because a first one may take longer than the drain. Logs each
        change once. Raises BadConfiguration, in a group, for a stream that could lose events."""
        await run_until(stopping, self._keep_checking())
        self._reason = "stopping"

    async def _keep_checking(self) -> NoReturn:
        while True:
            reason = await self._check_all()
            if reason != self._reason:
                log.info("ready") if reason is None else log.warning("not_ready", reason=reason)
            self._reason = reason
            await asyncio.sleep(UNREADY_EVERY_S if reason is not None else READY_EVERY_S)

    async def _check_all(self) -> str | None:
        reasons = await asyncio.gather(*(self._check(intake) for intake in self._intakes))
        found = [reason for reason in reasons if reason is not None]
        return "; ".join(sorted(set(found))) or None

    async def _check(self, intake: Intake) -> str | None:
        try:
            async with asyncio.timeout(2 * TIMEOUT_S if intake.partitions else FIRST_S):
                if not intake.partitions:
                    await self._prepare(intake)
                if intake.compact:
                    intake.topic = mark_of(await self._broker.admin.incarnation(intake.name))
                intake.partitions = await self._producer.partition_count(intake.name)
                await self._broker.probe(intake.name, timeout=TIMEOUT_S)
        except UnknownTopic:
            intake.partitions = 0
            return f"the stream {intake.name} does not exist in the broker. Try: penstock up, which creates it"
        except (BrokerError, TimeoutError) as error:
            return f"the broker cannot store events of {intake.name}: {type(error).__name__}: {error}"
        return None

    async def _prepare(self, intake: Intake) -> None:
        """Before the first event of this incarnation is accepted."""
        await require_safe_topics(self._broker.admin, [intake.name, TELEMETRY])
        intake.limit_age(by_event_time=bool(await self._broker.admin.kept_by_event_time([intake.name])))
        if intake.ledger is not None and not intake.ledger.is_introduced:
            ends = await self._broker.reader.next_at_least(intake.name)
            intake.ledger.introduce(intake.origins.incarnation, ends)


async def flush_tallies(intakes: Collection[Intake], producer: Producer, stopping: asyncio.Event) -> None:
    """Add the counts to the metrics, twice a second, until `stopping` is set."""
    while not stopping.is_set():
        await wait_for_stop(stopping, FLUSH_EVERY_S)
        metrics.INGEST_PENDING.set(producer.pending_bytes)
        for intake in intakes:
            intake.tally.flush()
