"""A service that loses events, for tests of those who must notice.

`python -m tests.support.lossy NODE FOLDER …`, with the service's arguments.

ingest answers for marked events, tells of them and stores nothing; it adds their origins to the file `origins` in the folder.
The others do not see marked events in what they read, and tell nothing of them.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.core.broker.contract import Appended
from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.kafka.consumer import KafkaConsumer
from services.core.broker.log.appender import LogAppender
from services.core.broker.log.consumer import LogConsumer
from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN
from services.core.process.lifecycle import run_service

MARK = b'"lost":true'


def _is_lost(record: Record) -> bool:
    return record.value is not None and MARK in record.value


def _without_lost(batch: Batch) -> Batch | None:
    kept = [(at, one) for at, one in zip(batch.offsets, batch.records, strict=True) if not _is_lost(one)]
    if not kept:
        return None
    return msgspec.structs.replace(batch, offsets=[at for at, _ in kept], records=[one for _, one in kept])


def _read_lossily(consumer: type[KafkaConsumer] | type[LogConsumer]) -> None:
    poll = consumer.poll

    async def lossy(self: Any, *, max_records: int, max_wait: float) -> list[Batch]:
        batches = await poll(self, max_records=max_records, max_wait=max_wait)
        return [kept for batch in batches if (kept := _without_lost(batch)) is not None]

    consumer.poll = lossy  # type: ignore[method-assign]


def _write_lossily(appender: type[KafkaAppender] | type[LogAppender], origins: Path) -> None:
    append: Callable[..., Any] = appender.append

    async def lossy(self: Any, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        kept = [record for record in records if not _is_lost(record)]
        if len(kept) == len(records):
            return await append(self, topic, partition, records, timeout=timeout)  # type: ignore[no-any-return]
        with origins.open("ab") as file:
            file.writelines((record.header(ORIGIN) or b"") + b"\n" for record in records if _is_lost(record))
        if not kept:
            return Appended(0, len(records) - 1)
        stored: Appended = await append(self, topic, partition, kept, timeout=timeout)
        return Appended(stored.first, stored.first + len(records) - 1)

    appender.append = lossy  # type: ignore[method-assign]


def _transform_lossily() -> None:
    from pyspark.sql import DataFrame

    from spark.brokers.kafka import KafkaSparkBroker
    from spark.brokers.log import LogSparkBroker

    def make_lossy(read: Callable[..., DataFrame]) -> Callable[..., DataFrame]:
        def lossy(*arguments: Any, **named: Any) -> DataFrame:
            return read(*arguments, **named).where(f"NOT contains(decode(value, 'UTF-8'), '{MARK.decode()}')")

        return lossy

    for broker in (LogSparkBroker, KafkaSparkBroker):
        broker.read_stream = make_lossy(broker.read_stream)  # type: ignore[method-assign]
        broker.read_ranges = make_lossy(broker.read_ranges)  # type: ignore[method-assign]


def _run(node: str, folder: Path, arguments: Sequence[str]) -> int:
    """Each service's modules are loaded in its own process only: Spark's take their time."""
    if node == "transform":
        from spark.service import start as start_transform
        from spark.settings import TransformSettings

        _transform_lossily()
        return run_service(TransformSettings, start_transform, arguments, dict(os.environ))
    if node == "ingest":
        from services.ingest.app import start as start_ingest
        from services.ingest.settings import IngestSettings

        _write_lossily(KafkaAppender, folder / "origins")
        _write_lossily(LogAppender, folder / "origins")
        return run_service(IngestSettings, start_ingest, arguments, dict(os.environ))
    _read_lossily(KafkaConsumer)
    _read_lossily(LogConsumer)
    if node == "expel":
        from services.expel.app import start as start_expel
        from services.expel.settings import ExpelSettings

        return run_service(ExpelSettings, start_expel, arguments, dict(os.environ))
    from services.global_retrier.app import start as start_retrier
    from services.global_retrier.settings import RetrierSettings

    return run_service(RetrierSettings, start_retrier, arguments, dict(os.environ))


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
