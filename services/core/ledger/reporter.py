"""Reports the events that a node settled to the telemetry topic, and keeps them until they are stored."""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec
import structlog

from services.core import metrics
from services.core.broker.errors import BrokerError, Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.lag import LagHistogram
from services.core.ledger.accumulator import Accumulator, Sets
from services.core.ledger.failures import Failures
from services.core.ledger.fields import FieldSample, FieldSet
from services.core.ledger.report import (
    MAX_REPORT_BYTES,
    TELEMETRY,
    Backlog,
    Breaker,
    LagSet,
    Node,
    OriginSet,
    Reach,
    Report,
    pack_numbers,
    pack_offset,
    unpack_numbers,
)
from services.core.process.lifecycle import wait_for_stop


class LagTap:
    """The lags that are added to one histogram from now on."""

    def __init__(self, kind: str, histogram: LagHistogram) -> None:
        self._kind, self._histogram = kind, histogram
        self._buckets: Mapping[int, int] = histogram.buckets()
        self._count, self._total_ms = histogram.count, histogram.total_ms

    def drain(self, minute: int) -> LagSet | None:
        """The lags since the last call, as measured in this minute; None without any."""
        count, total_ms = self._histogram.count - self._count, self._histogram.total_ms - self._total_ms
        if not count:
            return None
        before, self._buckets = self._buckets, self._histogram.buckets()
        self._count, self._total_ms = self._histogram.count, self._histogram.total_ms
        added = {bucket: more for bucket, known in self._buckets.items() if (more := known - before.get(bucket, 0))}
        return LagSet(self._kind, minute, count, total_ms, added)


def join_lags(lags: list[LagSet]) -> list[LagSet]:
    """One set per kind and minute."""
    joined: dict[tuple[str, int], LagSet] = {}
    for lag in lags:
        key = lag.kind, lag.minute
        if (other := joined.get(key)) is not None:
            buckets = dict(Counter(other.buckets) + Counter(lag.buckets))
            lag = LagSet(*key, other.count + lag.count, other.total_ms + lag.total_ms, buckets)
        joined[key] = lag
    return list(joined.values())


log = structlog.get_logger()

HEARTBEAT_S = 10.0
"""A report is made at least this often, if `report` is called at least this often."""
EVERY_S = 1.0
CLOSE_S = 3.0
LAGS_EVERY_S = 5.0
_MAX_LAGS = 100
"""Lag sets that are kept while no report can be stored. Further lags stay in the histograms, and count in a later minute."""
_MAX_FIELD_SETS = 10
"""Minutes of field statistics that are kept while no report can be stored; older ones are dropped."""
_BEHIND_VALID_S = 30.0
"""An older measurement does not count."""
_Measured = tuple[float, int] | None
"""When a backlog was measured (s), and the age of its oldest record (ms)."""


def new_instance() -> str:
    """The name of this run of this process in its reports."""
    return secrets.token_hex(8)


class Reporter:
    """One per process, node, pipe and destination. `settled` and `sets` receive the origins to report.

    lags: histograms by kind; new lags in them are reported. has_backlog: whether the node reads a stream and may be behind.
    clock: seconds since the epoch. Memory does not grow with the events that wait for a report. Not thread-safe.
    """

    def __init__(
        self,
        producer: Producer,
        instance: str,
        node: Node,
        pipe: str,
        destination: str | None = None,
        *,
        lags: Mapping[str, LagHistogram] | None = None,
        has_backlog: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._producer, self._clock = producer, clock
        self._head = Report(node=node, instance=instance, pipe=pipe, destination=destination, at_ms=0)
        self._key = "/".join(filter(None, (node, pipe, destination, instance))).encode()
        self.settled = Accumulator(node, pipe)
        self.sets = Sets()
        self.failures = Failures() if node == "expel" else None
        """Of the delivered events in `settled`."""
        self._reaches: dict[tuple[str, int], int] = {}
        self._taps = [LagTap(kind, histogram) for kind, histogram in (lags or {}).items()]
        self._lags: list[LagSet] = []
        self._lags_at = clock()
        self._measured: dict[Backlog, _Measured] = {"sources": None if has_backlog else (math.inf, 0)}
        self._reported_at = 0.0
        self._failing = False
        self._reporting = asyncio.Lock()
        self._fields: list[FieldSet] = []
        self.sample: FieldSample | None = None
        """The statistics of payloads, where the node reads payloads."""
        self.breaker: Callable[[], Breaker] | None = None
        """The state of the circuit breaker, where there is one; called for every report."""

    def reached(self, incarnation: str, partition: int, offset: int) -> None:
        """As in `Report.reaches`; call it when everything up to there is in `sets`."""
        self._reaches[incarnation, partition] = offset

    def record_behind(self, millis: int | None, backlog: Backlog = "sources") -> None:
        """The age in ms of the oldest unprocessed record, measured just now; 0: there is none; None: unknown."""
        self._measured[backlog] = None if millis is None else (self._clock(), millis)

    async def report(self, *, closed: bool = False) -> None:
        """Report everything that was added before this call; returns when it is durable. Without news it does nothing, except
        for a heartbeat every HEARTBEAT_S.

        Raises Unavailable when it may not be durable; then the next report repeats it. Concurrent calls wait for each other.
        closed: no report follows.
        """
        async with self._reporting:
            now = self._clock()
            sets = self._drain(now, last=closed)
            if (
                not (sets or self._reaches or self._lags or self._fields or closed)
                and 0 <= now - self._reported_at < HEARTBEAT_S  # a clock may be set back
            ):
                return
            reaches, self._reaches = self._reaches, {}
            lags, self._lags = self._lags, []
            fields, self._fields = self._fields, []
            failures = self.failures
            if failures is not None:
                self.failures = Failures()
            packed = sets.pack()
            report = msgspec.structs.replace(
                self._head,
                at_ms=int(now * 1000),
                behind_ms=self._age("sources", now),
                sets=tuple(one for one in packed if one.outcome != "unknown"),
                lags=tuple(lags),
                reaches=tuple(Reach(*key, pack_offset(offset)) for key, offset in reaches.items()),
                closed=closed,
                breaker=self.breaker() if self.breaker is not None else None,
                fields=tuple(fields),
                returned_ms=self._age("returned", now),
                held_ms=self._age("held", now),
                in_doubt=tuple(one for one in packed if one.outcome == "unknown"),
                failures=None if failures is None else failures.pack(),
            )
            try:
                await self._send([part.encode() for part in cut(report)], report.at_ms)
            except BaseException as error:
                sets.merge(self.sets)
                self.sets = sets
                self._reaches = reaches | self._reaches
                self._lags = lags + self._lags
                if failures is not None and self.failures is not None:
                    failures.merge(self.failures)
                    self.failures = failures
                self._fields = (fields + self._fields)[-_MAX_FIELD_SETS:]
                self._record_failure(error)
                if isinstance(error, BrokerError):
                    raise Unavailable(f"{TELEMETRY}: {error}") from error
                raise
            self._reported_at, self._failing = now, False

    def _drain(self, now: float, *, last: bool) -> Sets:
        sets, self.sets = self.sets, Sets()
        sets.merge(self.settled.drain())
        if (last or not 0 <= now - self._lags_at < LAGS_EVERY_S) and len(self._lags) < _MAX_LAGS:
            self._lags_at = now
            drained = [tap.drain(int(now // 60)) for tap in self._taps]
            self._lags = join_lags([*self._lags, *(lag for lag in drained if lag is not None)])
        if self.sample is not None and (fields := self.sample.drain(last=last)) is not None:
            self._fields.append(fields)
        return sets

    def _age(self, backlog: Backlog, now: float) -> int | None:
        """A backlog has grown older since it was measured. An empty one counts as empty for some seconds."""
        measured = self._measured.get(backlog)
        if measured is None or now - measured[0] > _BEHIND_VALID_S:
            return None
        at, millis = measured
        return millis and millis + max(0, int((now - at) * 1000))

    async def _send(self, values: list[bytes], now_ms: int) -> None:
        records = [Record(self._key, value, now_ms) for value in values]
        (await self._producer.send_to(TELEMETRY, {0: records})).raise_first()
        metrics.LEDGER_REPORTS.labels(self._head.node).inc(len(values))
        metrics.LEDGER_BYTES.labels(self._head.node).inc(sum(map(len, values)))

    def _record_failure(self, error: BaseException) -> None:
        metrics.LEDGER_FAILURES.labels(self._head.node, type(error).__name__).inc()
        if not self._failing and isinstance(error, BrokerError):
            log.warning(
                "report_failed",
                topic=TELEMETRY,
                reporter=self._key.decode(),
                error=str(error),
                hint="the report is kept and sent later. No offset is committed until then. If the topic is missing, try: "
                "penstock apply",
            )
        self._failing = True


class Reports(Protocol):
    """A `Reporter`, or an object that adds to one before it reports."""

    async def report(self, *, closed: bool = False) -> None:
        """As `Reporter.report`."""


async def keep_reporting(reporters: Collection[Reports], stopping: asyncio.Event) -> None:
    """Let these report every second until `stopping`. For nodes whose work does not wait for the reports."""
    while not stopping.is_set():
        await wait_for_stop(stopping, EVERY_S)
        await asyncio.gather(*(_try(reporter) for reporter in reporters))


async def close_reporters(reporters: Collection[Reports]) -> None:
    """Send the last reports. Gives up after `CLOSE_S`: then the observer finds these reporters silent."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await asyncio.gather(*(_try(reporter, closed=True) for reporter in reporters))


async def _try(reporter: Reports, *, closed: bool = False) -> None:
    with suppress(Unavailable):  # it is logged, and repeated with the next report
        await reporter.report(closed=closed)


def cut(report: Report) -> Iterator[Report]:
    """Reports with the same content, none longer than MAX_REPORT_BYTES. Reaches, fields, failures and `closed` come last."""
    sets, lags = (*report.sets, *report.in_doubt), report.lags
    if len(report.encode()) <= MAX_REPORT_BYTES or not (sets or lags):
        yield report
        return
    if len(sets) + len(lags) == 1:
        sets = sum(map(_cut_set, sets), ())
        if len(sets) != 2:
            yield report
            return
    items: list[OriginSet | LagSet] = [*sets, *lags]
    middle = len(items) // 2
    rest = None if report.failures is None else ()
    yield from cut(
        _with(msgspec.structs.replace(report, reaches=(), fields=(), failures=rest, closed=False), items[:middle])
    )
    yield from cut(_with(report, items[middle:]))


def _with(report: Report, items: list[OriginSet | LagSet]) -> Report:
    return msgspec.structs.replace(
        report,
        sets=tuple(item for item in items if isinstance(item, OriginSet) and item.outcome != "unknown"),
        in_doubt=tuple(item for item in items if isinstance(item, OriginSet) and item.outcome == "unknown"),
        lags=tuple(item for item in items if isinstance(item, LagSet)),
    )


def _cut_set(one: OriginSet) -> tuple[OriginSet, ...]:
    """Two sets with half of its numbers each; the set itself if it has one number."""
    numbers = unpack_numbers(one.numbers)
    if len(numbers) < 2:
        return (one,)
    middle = len(numbers) // 2
    return tuple(
        msgspec.structs.replace(one, numbers=pack_numbers(half)) for half in (numbers[:middle], numbers[middle:])
    )
