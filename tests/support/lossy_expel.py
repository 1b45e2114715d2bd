"""Expel that loses events, for tests of those who must notice: what it reads has gaps that nobody told of.

`python -m tests.support.lossy_expel`, with the arguments of `python -m services.expel`.
"""

import os
import sys
from typing import Any

import msgspec

from services.core.broker.kafka.consumer import KafkaConsumer
from services.core.broker.log.consumer import LogConsumer
from services.core.broker.record import Batch
from services.core.lifecycle import run_service
from services.expel.app import start
from services.expel.settings import ExpelSettings

MARK = b'"lost":true'


def _without_lost(batch: Batch) -> Batch | None:
    kept = [
        (offset, record)
        for offset, record in zip(batch.offsets, batch.records, strict=True)
        if record.value is None or MARK not in record.value
    ]
    if not kept:
        return None
    return msgspec.structs.replace(
        batch, offsets=[offset for offset, _ in kept], records=[record for _, record in kept]
    )


def _make_lossy(consumer: type[KafkaConsumer] | type[LogConsumer]) -> None:
    poll = consumer.poll

    async def lossy(self: Any, *, max_records: int, max_wait: float) -> list[Batch]:
        batches = await poll(self, max_records=max_records, max_wait=max_wait)
        return [kept for batch in batches if (kept := _without_lost(batch)) is not None]

    consumer.poll = lossy  # type: ignore[method-assign]


if __name__ == "__main__":
    _make_lossy(KafkaConsumer)
    _make_lossy(LogConsumer)
    sys.exit(run_service(ExpelSettings, start, sys.argv[1:], dict(os.environ)))
