"""Follows the telemetry topic, applies its reports to the table, and lets time pass.

One task reads pages; twice a second it ticks and raises alarms, and every five minutes it stores a snapshot. Another task
recovers the missing reports of ingest processes that ended: it reads streams, which may take minutes.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NoReturn

import msgspec
import structlog

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.ledger.report import (
    MAX_REPORT_BYTES,
    TELEMETRY,
    BadReport,
    NewerReport,
    Report,
    decode_known,
)
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Step, Turns, WatchedReader
from services.observer.alarms import AlarmQueue, has_doubled
from services.observer.lags import LagTable
from services.observer.ledger.finality import Finding
from services.observer.ledger.flow import Flow
from services.observer.ledger.liveness import GAP_MS, STORED_WITHIN_MS
from services.observer.ledger.table import Ages, Table, TickResult
from services.observer.newer import EVERY_PIPE, NewerParts
from services.observer.payload_fields import DriftKey, FieldTable
from services.observer.planned import PlannedWindows, Window
from services.observer.recovery import recover
from services.observer.snapshot import FollowerState, make_parts
from services.observer.snapshot_log import Replaced, SnapshotLog
from services.observer.standby import SpeakerLock
from services.observer.transforms import TransformTable

log = structlog.get_logger()

PAGE = 200
TURN_S = 0.5
RECOVER_EVERY_S = 10.0
SNAPSHOT_EVERY_S = 300.0
SNAPSHOT_BYTES = 16 << 20
"""After a larger snapshot the next one waits longer: so many bytes per SNAPSHOT_EVERY_S, on average."""
LOSS_AFTER = 1 / 30
"""A snapshot for a loss comes at the earliest after this share of the time between two others: ten seconds."""
_DECIDED_S = 0.1
RETRY_S = 10.0
"""After a snapshot that could not be stored."""
REPLACED_S = 60.0
"""A process that was frozen knows after less time that it lost the lock."""
FIELDS_S = 0.02
"""The approximate time for payload fields in a turn."""
AHEAD_MS = 120_000
"""The most that a reporter's clock may be ahead of ours: beyond it, everything that others report would look old."""
SKEW_MS = 5_000
"""The error of a clock that is not logged."""
ASK_AFTER_MS = 5_000
"""A follower of a busy topic may never reach its end: after so long it asks where the end is."""
OURS = b"observer/"
"""The beginning of the key of reports that the observer makes on behalf of instances."""
_MOST_SKEWED = 1_000
_LAGS_BACK = timedelta(hours=1)
"""Read again at a start, so that the last hour's lags are known. Repeated sets change nothing."""


class StandsBy(Exception):
    """Another observer of this fleet speaks: it has to be asked."""


OnFinal = Callable[[TickResult], None]


def _is_loss(verdict: Finding) -> bool:
    row, part, before = verdict
    lost = row.missing_by_part().get(part, 0)
    return lost > 0 if before is None else has_doubled(before.missing_by_part().get(part, 0), lost)


class Follower:
    """The ledger of a fleet. `table`, `lags`, `fields`, `transforms` and `planned` may be read at any time between two turns of
    the event loop.

    by_partition: see `ReportedOffsets`. on_final: called when parts became final, got worse or were given up; each once, except
    in the minutes before a crash. now_ms: wall clock.
    """

    def __init__(
        self,
        flow: Flow,
        reader: Reader,
        producer: Producer,
        on_final: OnFinal,
        *,
        ages: Ages | None = None,
        by_partition: bool = True,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._make_table = partial(Table, flow, ages, by_partition=by_partition)
        self.table = self._make_table()
        self.lags = LagTable()
        self.fields = FieldTable()
        self.transforms = TransformTable()
        self.planned = PlannedWindows(current=flow.current_pipe)
        self.untold = AlarmQueue()
        self.newer = NewerParts()
        self.drifting: dict[DriftKey, int] = {}
        """When each drift was last seen, in ms."""
        self.lock: SpeakerLock | None = None
        """None: there is no other observer."""
        self.speaks = True
        """Whether it raises alarms and stores snapshots. If not, it only reads, and begins again with each snapshot."""
        self.catching_up = True
        self.read_all_ms = 0
        """Everything that was stored before this time has been read, so the next records were stored later."""
        self.problem: str | None = None
        """Why the topic cannot be read now."""
        self._turns, self._recoveries = Turns("reading reports"), Turns("reading streams for missing reports")
        self._reader, self._recovery_reader = (
            WatchedReader(reader, self._turns),
            WatchedReader(reader, self._recoveries),
        )
        self._producer, self._on_final = producer, on_final
        self.now_ms = now_ms
        self._snapshots = SnapshotLog(self._reader, producer, now_ms)
        self._next: int | None = None
        self._known_up_to = 0
        """Reports before this offset are in the snapshot: they are no sign of life."""
        self._lags_from = 0
        """Lags in reports before this offset are known, or too old."""
        self._newer_from: int | None = None
        """The first report that this version cannot read. A later version reads again from there."""
        self._newer_ms = 0
        """Of the snapshot: until when such reports came."""
        self._end: tuple[int, int] | None = None
        """The end of the topic, and when that was read (ms)."""
        self._skewed: set[str] = set()
        self._ticked_at = self._keep_at = 0.0
        self._kept_at = float("-inf")
        self._replaced_at: float | None = None
        """Since when another observer has stored snapshots of a later term."""
        self._wait_s = SNAPSHOT_EVERY_S
        """Until the next snapshot, after the last one."""
        self._caught_up = asyncio.Event()

    def steps(self) -> Iterator[Step]:
        """For the `ProgressWatch`."""
        yield self._turns.step()
        if self._caught_up.is_set():
            yield self._recoveries.step()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then stores a snapshot. Raises no BrokerError: requests are repeated."""
        async with asyncio.TaskGroup() as group:
            recovering = group.create_task(self._keep_recovering())
            await self._follow(stopping)
            recovering.cancel()

    async def _follow(self, stopping: asyncio.Event) -> None:
        started = False
        while self.lock is not None and not self.lock.decided.is_set() and not stopping.is_set():
            await wait_for_stop(stopping, _DECIDED_S)
            self._turns.next()  # the lock has a time limit of its own
        while not stopping.is_set():
            try:
                if not started or self._must_start_again():
                    await self._start()
                    started = True
                moved = await self._turn()
                self.problem = None
            except BrokerError as error:
                if self.problem is None:
                    log.warning("telemetry_unreadable", error=str(error), hint="the reports are read again")
                self.problem, moved = str(error), False
            if not moved:
                await wait_for_stop(stopping, TURN_S)
        if started and self.speaks:
            with suppress(BrokerError, StandsBy):
                await self.keep()

    def _must_start_again(self) -> bool:
        """Whether to begin with the newest snapshot: to speak from now on, or to know what the speaker knows."""
        if self.speaks:
            return False
        return self._may_speak() or time.monotonic() >= self._keep_at

    def _may_speak(self) -> bool:
        return self.lock is None or self.lock.is_held

    def share(self, lock: SpeakerLock) -> None:
        """There may be other observers: speak only with this lock. To be called before `run`."""
        self.lock, self.speaks = lock, False

    async def step_down(self) -> None:
        """Stop speaking; the last state is stored for the next speaker."""
        if self.speaks:
            self.speaks = False
            try:
                with suppress(BrokerError, StandsBy):
                    await self.keep()
            finally:
                self.untold.clear()

    async def announce(self, window: Window) -> None:
        """Durable when this returns. Raises StandsBy, TooManyWindows, and BrokerError kinds: then it may be valid until a
        restart."""
        self._check_speaks()
        self.planned.announce(window, self.now_ms())
        await self.keep()

    async def cancel(self, name: str, by: str, asked_with: str) -> Window:
        """End a window now; gives it. Durable when this returns. Raises as `announce`, and NoSuchWindow."""
        self._check_speaks()
        window = self.planned.cancel(name, self.now_ms(), by, asked_with)
        await self.keep()
        return window

    def _check_speaks(self) -> None:
        if not self.speaks:
            raise StandsBy("another observer of this fleet speaks")

    async def keep(self) -> None:
        """Store a snapshot. Raises StandsBy when a successor has stored one, and BrokerError kinds."""
        self._kept_at = time.monotonic()
        self._keep_at = self._kept_at + RETRY_S
        try:
            written = await self._snapshots.store(lambda: make_parts(self.table, self._state()))
        except Replaced as error:
            self._replaced_at = self._kept_at if self._replaced_at is None else self._replaced_at
            if (
                self._kept_at - self._replaced_at >= REPLACED_S
            ):  # the lock is ours nevertheless: begin again, with a later term
                self.speaks, self._replaced_at = False, None
            raise StandsBy(str(error)) from error
        self._replaced_at = None
        self._wait_s = SNAPSHOT_EVERY_S * max(1.0, written / SNAPSHOT_BYTES)
        self._keep_at = time.monotonic() + self._wait_s

    def _state(self) -> FollowerState:
        offset = max(self._next or 0, self._known_up_to)  # what is read again, for the lags, is in the table
        newer = self._newer_from, self.table.finality.newer_ms
        return FollowerState(self.planned, offset, self.untold.all(), self.read_all_ms, self.drifting, *newer)

    async def _start(self) -> None:
        """Begin with the newest snapshot, and the reports since."""
        speaks, begins = self._may_speak(), self._next is None
        now, stored = self.now_ms(), (await self._reader.describe(TELEMETRY))[0]
        begin, self._end = stored.start, (stored.end, now)
        found = await self._snapshots.load(self._make_table)
        if found is not None:
            self.table, restored = found
            self.planned = PlannedWindows(restored.planned.all(), self.table.flow.current_pipe)
            self.drifting = dict(restored.drifting)
            self.untold.clear()
            for alarm in restored.untold if speaks else ():
                self.untold.add(alarm)
            if restored.offset <= stored.end:
                self._known_up_to, self.read_all_ms = restored.offset, restored.read_all_ms
            self._count_gone(restored.offset, begin)
            since = datetime.fromtimestamp(now / 1000, UTC) - _LAGS_BACK
            lags = (await self._reader.offsets_at(TELEMETRY, since))[0] if begins else restored.offset
            self._lags_from = min(restored.offset, lags)
            wanted = (self._lags_from, restored.newer_from if restored.newer_from is not None else restored.offset)
            begin, self._newer_from, self._newer_ms = max(begin, min(wanted)), None, restored.newer_ms
        self._next = begin
        self._caught_up.clear()
        self.catching_up = True
        self._keep_at = time.monotonic() + (0 if speaks and self.lock is not None else SNAPSHOT_EVERY_S)
        if speaks and self._may_speak():
            self._snapshots.begin_term()
            self.speaks = True

    async def _turn(self) -> bool:
        """Read one page, and let time pass at the end of the topic. False: there was no page."""
        assert self._next is not None
        now, at = self.now_ms(), self._next
        if self._end is None and not 0 <= now - self.read_all_ms < ASK_AFTER_MS:
            self._end = (await self._reader.describe(TELEMETRY))[0].end, now
        batch = await self._read(at)
        if batch is not None:
            self._next = batch.offsets[-1] + 1
            if batch.damage is None:
                self._apply(batch)
        if batch is None and self._next == at:
            self._set_read_all(now)
        elif self._end is not None and self._next >= self._end[0]:
            self._set_read_all(self._end[1])
        self.catching_up = not self._caught_up.is_set() or self.now_ms() - self.read_all_ms > GAP_MS
        if not self.catching_up:
            await self._pass_time()
        return batch is not None

    def _set_read_all(self, at_ms: int) -> None:
        self.table.liveness.listened(self.read_all_ms, at_ms)
        self.read_all_ms, self._end = at_ms, None
        self._caught_up.set()

    async def _read(self, at: int) -> Batch | None:
        try:
            return await self._reader.read(TELEMETRY, 0, at, max_records=PAGE)
        except OffsetOutOfRange as error:
            self._count_gone(at, error.start)
            self._next = error.start
            if error.start < at:  # the topic was created again
                self._known_up_to, self._newer_from = 0, None
        except DataDamaged as error:
            log.warning(
                "reports_damaged", ranges=error.ranges, hint="the minutes of these reports may show a false loss"
            )
            self._next = max(last for _, _, last in error.ranges) + 1
            metrics.LEDGER_REPORTS_GONE.inc(self._next - at)
        except UnknownTopic:  # the fleet has no ledger
            self._next = self._known_up_to = 0
        return None

    def _count_gone(self, wanted: int, start: int) -> None:
        """Retention deleted reports before we read them."""
        if start > wanted:
            metrics.LEDGER_REPORTS_GONE.inc(start - wanted)
            log.warning(
                "reports_gone", wanted=wanted, start=start, hint="the minutes of these reports may show a false loss"
            )

    def _apply(self, batch: Batch) -> None:
        now = self.now_ms()
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            report = self._decode(offset, record)
            if report is None:
                continue
            received_ms = self.read_all_ms if offset >= self._known_up_to else 0
            if record.key is not None and record.key.startswith(OURS):
                self._apply_ours(report, received_ms)
                continue
            self.table.apply(report, received_ms)
            if offset < self._lags_from:
                continue
            self._check_clock(report, received_ms, now)
            if report.at_ms > now + AHEAD_MS:
                metrics.LEDGER_AHEAD.labels(report.node).inc()
                continue
            self.lags.record(report)
            self.fields.record(report)
            self.transforms.record(report)

    def _decode(self, offset: int, record: Record) -> Report | None:
        """The known parts of the report, by present names; the rest is counted. None: nothing is known."""
        try:
            report, unknown = decode_known(record.value)
        except NewerReport as error:
            self.newer.count(EVERY_PIPE, self.now_ms(), [error.reason], str(error))
            if error.reason == "version":
                self._keep_open(offset)
            return None
        except BadReport as error:
            metrics.LEDGER_BAD_REPORTS.inc()
            log.warning("bad_report", error=str(error))
            return None
        report = self._rename(report)
        if unknown:
            self.newer.count(report.pipe, self.now_ms(), unknown, f"in a report of {report.node} {report.instance}")
        return report

    def _keep_open(self, offset: int) -> None:
        """Nothing is known of the report at this offset, so what is missing until now may have been settled in it."""
        self._newer_from = offset if self._newer_from is None else min(offset, self._newer_from)
        until = self._newer_ms if offset < self._known_up_to else self.now_ms()
        self.table.finality.newer_ms = max(self.table.finality.newer_ms, until)

    def _rename(self, report: Report) -> Report:
        step = self.table.flow.current(report.node, report.pipe, report.destination)
        if (step.pipe, step.destination) == (report.pipe, report.destination):
            return report
        return msgspec.structs.replace(report, pipe=step.pipe, destination=step.destination)

    def _apply_ours(self, report: Report, received_ms: int) -> None:
        """A report on behalf of a silent instance. The instance stays silent, until such a report is closed."""
        self.table.apply(report, received_ms if report.closed else min(received_ms, report.at_ms))

    def _check_clock(self, report: Report, received_ms: int, now: int) -> None:
        """Log each instance once whose clock is certainly wrong: a report is made before it is stored, and not long before."""
        ahead_ms, late_ms = report.at_ms - now, received_ms - report.at_ms
        if max(ahead_ms, late_ms - STORED_WITHIN_MS) <= SKEW_MS or report.instance in self._skewed:
            return
        if len(self._skewed) >= _MOST_SKEWED:
            self._skewed.clear()
        self._skewed.add(report.instance)
        log.warning(
            "clock_skewed",
            node=report.node,
            instance=report.instance,
            pipe=report.pipe,
            seconds=round((ahead_ms if ahead_ms > 0 else -late_ms) / 1000),
            hint="the lags of this instance are wrong. If it is an ingest, the minutes of its events are wrong, too. "
            "Try: chronyc tracking, there and here",
        )

    async def _pass_time(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at < TURN_S:
            return
        self._ticked_at = now
        self.fields.refresh(FIELDS_S)
        turn = self.table.tick(self.now_ms())
        if not self.speaks:
            return
        if turn.verdicts or turn.given_up:
            self._on_final(turn)
        if any(_is_loss(verdict) for verdict in turn.verdicts):  # so that a restart does not raise the alarm again
            self._keep_at = min(self._keep_at, self._kept_at + LOSS_AFTER * self._wait_s)
        if now >= self._keep_at:
            with suppress(StandsBy):  # the lock says so soon
                await self.keep()

    async def _keep_recovering(self) -> NoReturn:
        await self._caught_up.wait()
        while True:
            self._recoveries.next()
            try:
                if self.catching_up or not self.speaks:
                    await asyncio.sleep(TURN_S)
                    continue
                async for report in recover(self.table, self._recovery_reader, self.now_ms()):
                    await self._report_for(report)
            except BrokerError as error:
                log.warning(
                    "recovery_failed",
                    error=str(error),
                    hint="the minutes of the silent ingest stay open. The stream is read again",
                )
            await asyncio.sleep(RECOVER_EVERY_S)

    async def _report_for(self, report: Report) -> None:
        value = report.encode()
        if len(value) > MAX_REPORT_BYTES:
            log.error("report_too_large", bytes=len(value))
            return
        key = OURS + f"{report.pipe}/{report.instance}".encode()
        (await self._producer.send_to(TELEMETRY, {0: [Record(key, value, self.now_ms())]})).raise_first()
        self._apply_ours(report, self.read_all_ms)
