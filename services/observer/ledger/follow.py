"""The telemetry topic, followed for ever: reports into the table, and what is due as time passes.

One task does it all, in turns: read a page, and about once a second tick, recover, alarm, keep a snapshot.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import structlog

from services.core import metrics
from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.ledger.report import MAX_REPORT_BYTES, SNAPSHOTS, TELEMETRY, BadReport, Report, decode_report
from services.observer.ledger.fields import FieldBook
from services.observer.ledger.flow import Flow
from services.observer.ledger.lags import LagBook
from services.observer.ledger.planned import Planned, Window
from services.observer.ledger.recovery import recover
from services.observer.ledger.row import Row
from services.observer.ledger.snapshot import cut, dump, find_snapshot, restore
from services.observer.ledger.table import Ages, Table

log = structlog.get_logger()

PAGE = 200
TURN_S = 0.5
RECOVER_EVERY_S = 10.0
SNAPSHOT_EVERY_S = 300.0
_LAGS_BACK = timedelta(hours=1)
"""Read again at a start, so that the last hour's lags are known: sets that come twice change nothing."""

OnFinal = Callable[[Sequence[Row]], None]


class Follower:
    """The ledger of a fleet. `table`, `lags`, `fields` and `planned` may be read at any time between two turns of the event loop.

    on_final: gets the rows that became final, each once, but for the minutes before a crash. now_ms: wall clock.
    """

    def __init__(
        self,
        flow: Flow,
        admin: Admin,
        producer: Producer,
        on_final: OnFinal,
        *,
        ages: Ages | None = None,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self.table = Table(flow, ages)
        self.lags = LagBook()
        self.fields = FieldBook()
        self.planned = Planned()
        self.catching_up = True
        self.problem: str | None = None
        """Why the topic cannot be read now, for a person."""
        self._admin, self._producer, self._on_final = admin, producer, on_final
        self.now_ms = now_ms
        self._next: int | None = None
        self._ticked_at = self._recovered_at = self._kept_at = 0.0

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then keeps a snapshot. Raises nothing of the broker: it is asked again."""
        started = False
        while not stopping.is_set():
            try:
                if not started:
                    await self._start()
                    started = True
                moved = await self._turn()
                self.problem = None
            except BrokerError as error:
                if self.problem is None:
                    log.warning("telemetry_unreadable", error=str(error), hint="it is tried again")
                self.problem, moved = str(error), False
            if not moved:
                with suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S):
                        await stopping.wait()
        if started:
            with suppress(BrokerError):
                await self.keep()

    async def announce(self, window: Window) -> None:
        """Durable when this returns. Raises TooMany, BrokerError kinds (it may hold until a restart then)."""
        self.planned.announce(window, self.now_ms())
        await self.keep()

    async def keep(self) -> None:
        """Append a snapshot. Raises BrokerError kinds."""
        self._kept_at = time.monotonic()
        data = dump(self.table, self.planned, self._next or 0)
        name = f"{self.now_ms()}-{id(self):x}"
        for record in cut(data, name):
            (await self._producer.send_to(SNAPSHOTS, {0: [record]})).raise_first()

    async def _start(self) -> None:
        begin = (await self._admin.describe(TELEMETRY))[0].start
        data = await find_snapshot(self._admin)
        if data is not None:
            try:
                self.planned, kept = restore(data, self.table)
                begin = max(begin, min(kept, await self._an_hour_back()))
            except ValueError as error:
                log.warning(
                    "snapshot_unreadable", error=str(error), hint="the table begins with the reports that are kept"
                )
        self._next = begin
        self._kept_at = time.monotonic()

    async def _an_hour_back(self) -> int:
        now = datetime.fromtimestamp(self.now_ms() / 1000, UTC)
        return (await self._admin.offsets_at(TELEMETRY, now - _LAGS_BACK))[0]

    async def _turn(self) -> bool:
        """One page, or what is due at the end of the topic; whether there was a page."""
        assert self._next is not None
        batch = await self._read(self._next)
        if batch is not None:
            self._next = batch.offsets[-1] + 1
            if batch.damage is None:
                self._take(batch)
            if self.catching_up:
                return True
        self.catching_up = False
        await self._pass_time()
        return batch is not None

    async def _read(self, at: int) -> Batch | None:
        try:
            return await self._admin.read(TELEMETRY, 0, at, max_records=PAGE)
        except OffsetOutOfRange as error:
            log.warning("reports_gone", wanted=at, start=error.start, hint="their minutes may show loss that was none")
            self._next = error.start
        except DataDamaged as error:
            log.warning("reports_damaged", ranges=error.ranges, hint="their minutes may show loss that was none")
            self._next = max(last for _, _, last in error.ranges) + 1
        except UnknownTopic:  # a fleet that was never provisioned with a ledger
            self._next = 0
        return None

    def _take(self, batch: Batch) -> None:
        for record in batch.records:
            try:
                report = decode_report(record.value)
            except BadReport as error:
                metrics.LEDGER_BAD_REPORTS.inc()
                log.warning("bad_report", error=str(error))
                continue
            self.table.apply(report)
            self.lags.hear(report)
            self.fields.hear(report)

    async def _pass_time(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at < TURN_S:
            return
        self._ticked_at = now
        final = self.table.tick(self.now_ms())
        if final:
            self._on_final(final)
        if any(row.missing for row in final):
            await self.keep()  # so that a restart does not raise the same alarm
        if now - self._recovered_at >= RECOVER_EVERY_S:
            self._recovered_at = now
            async for report in recover(self.table, self._admin, self.now_ms()):
                await self._speak(report)
        if now - self._kept_at >= SNAPSHOT_EVERY_S:
            await self.keep()

    async def _speak(self, report: Report) -> None:
        value = report.encode()
        if len(value) > MAX_REPORT_BYTES:
            log.error("report_too_large", bytes=len(value))
            return
        key = f"observer/{report.pipe}/{report.instance}".encode()
        (await self._producer.send_to(TELEMETRY, {0: [Record(key, value, self.now_ms())]})).raise_first()
        self.table.apply(report)
