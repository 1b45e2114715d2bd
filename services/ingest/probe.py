"""Asks the broker, again and again, whether it could store events: what /readyz says, and how many partitions streams have."""

import asyncio
import time
from collections.abc import Collection

import structlog

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.ledger.report import TELEMETRY
from services.core.lifecycle import wait_for_stop
from services.core.provision import require_safe_topics
from services.ingest.intake import Intake

log = structlog.get_logger()

READY_EVERY_S = 5.0
UNREADY_EVERY_S = 0.5
FLUSH_EVERY_S = 0.5
TIMEOUT_S = 3.0
TROUBLE_S = 10.0
"""How long a failed request keeps us unready; then traffic may come and try again."""


class Probe:
    """What the broker says of itself, and what became of the last requests: it may believe that it could and yet not store."""

    def __init__(self, broker: Broker, producer: Producer, intakes: Collection[Intake]) -> None:
        self._broker, self._producer, self._intakes = broker, producer, intakes
        self._said: str | None = "the broker has not been asked yet"

    @property
    def reason(self) -> str | None:
        """None when ready, else why not, for a person."""
        if self._said is not None:
            return self._said
        recent = time.monotonic() - TROUBLE_S
        for intake in self._intakes:
            if intake.broker_failure is not None and intake.broker_failure[0] > recent:
                return f"the last events of {intake.name} could not be stored: {intake.broker_failure[1]}"
        return None

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set. Logs each change once. Raises BadConfiguration for a stream that could lose events."""
        while not stopping.is_set():
            reason = await self._ask_all()
            if reason != self._said:
                log.info("ready") if reason is None else log.warning("not ready", reason=reason)
            self._said = reason
            await wait_for_stop(stopping, UNREADY_EVERY_S if reason is not None else READY_EVERY_S)
        self._said = "stopping"

    async def _ask_all(self) -> str | None:
        reasons = await asyncio.gather(*(self._ask(intake) for intake in self._intakes))
        found = [reason for reason in reasons if reason is not None]
        return "; ".join(sorted(set(found))) or None

    async def _ask(self, intake: Intake) -> str | None:
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                if not intake.partitions:  # seen for the first time
                    await self._meet(intake)
                intake.partitions = await self._producer.partition_count(intake.name)
                await self._broker.probe(intake.name, timeout=TIMEOUT_S)
        except UnknownTopic:
            intake.partitions = 0
            return f"the stream {intake.name} does not exist in the broker. Try: penstock up, which creates it"
        except (BrokerError, TimeoutError) as error:
            return f"the broker cannot store events of {intake.name}: {type(error).__name__}: {error}"
        return None

    async def _meet(self, intake: Intake) -> None:
        """Before the first event of this incarnation is let in."""
        await require_safe_topics(self._broker.admin, [intake.name, TELEMETRY])
        if intake.ledger is not None and not intake.ledger.is_introduced:
            ends = await self._broker.reader.next_at_least(intake.name)
            intake.ledger.introduce(intake.origins.incarnation, ends)


async def flush_tallies(intakes: Collection[Intake], producer: Producer, stopping: asyncio.Event) -> None:
    """Hand what was counted to the metrics, twice a second, until `stopping` is set."""
    while not stopping.is_set():
        await wait_for_stop(stopping, FLUSH_EVERY_S)
        metrics.INGEST_PENDING.set(producer.pending_bytes)
        for intake in intakes:
            intake.tally.flush()
