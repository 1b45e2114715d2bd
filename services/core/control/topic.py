"""Reads `penstock.control`: what people and services decided for the whole fleet, one record for each change, kept for ever.

The key of a record is `KIND:NAME`. Each kind has a file here, which says what its newest record of a name means.
"""

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

import msgspec
import structlog

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.record import Batch, Record
from services.core.pipe_file.topic_names import CONTROL
from services.core.version import newer_format

log = structlog.get_logger()

_PAGE = 500


class Versioned(Protocol):
    """version: of the format of this kind of change."""

    @property
    def version(self) -> int: ...


T = TypeVar("T", bound=Versioned)


class ControlTopic:
    """Reads the changes of one kind from the control topic's beginning, each once. Keys: `KIND:NAME`. Not thread-safe."""

    def __init__(self, reader: Reader, kind: str) -> None:
        self._reader, self._kind, self._next = reader, kind, 0

    async def read_new(self) -> AsyncIterator[tuple[int, str, Record]]:
        """Offset, name and record of those behind the last one, to the end of the topic. Raises BrokerError kinds.

        Damaged records, which Kafka passes over, are counted and logged: nobody knows of which kind they were.
        """
        while (batch := await self._read()) is not None:
            if batch.damage is not None:
                first, last, detail = batch.damage
                metrics.NOT_UNDERSTOOD.labels(self._kind, "unreadable").inc(last - first + 1)
                log.error("control_records_damaged", topic=CONTROL, first=first, last=last, error=detail)
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                kind, _, name = (record.key or b"").decode(errors="replace").partition(":")
                if kind == self._kind:
                    yield offset, name, record
            self._next = batch.offsets[-1] + 1

    def parse(self, type_: type[T], offset: int, record: Record, version: int) -> T | None:
        """None, counted and logged, for a change that cannot be read, or whose format is newer than this version."""
        try:
            change = msgspec.json.decode(record.value or b"", type=type_)
        except msgspec.DecodeError as error:
            metrics.NOT_UNDERSTOOD.labels(self._kind, "unreadable").inc()
            log.warning("control_record_unreadable", topic=CONTROL, offset=offset, error=str(error))
            return None
        if change.version > version:
            metrics.NOT_UNDERSTOOD.labels(self._kind, "version").inc()
            text = newer_format(f"the record {CONTROL}:0:{offset}", change.version, version)
            log.error("control_record_newer", topic=CONTROL, offset=offset, error=text)
            return None
        return change

    async def _read(self) -> Batch | None:
        try:
            return await self._reader.read(CONTROL, 0, self._next, max_records=_PAGE)
        except OffsetOutOfRange as error:  # created again, or its beginning is gone: the remaining records count
            log.warning("control_out_of_range", topic=CONTROL, wanted=self._next, start=error.start)
            self._next = error.start
            return await self._reader.read(CONTROL, 0, self._next, max_records=_PAGE)
