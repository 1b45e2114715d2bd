"""Reports the events that a pipe's queries settled to the telemetry topic: durably, before the batch is done. See ADR 0009."""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from services.core import metrics
from services.core.broker.errors import BrokerError
from services.core.broker.record import Record
from services.core.event import is_of_topic
from services.core.lag import LagHistogram
from services.core.ledger.minute import MINUTE_MS
from services.core.ledger.report import TELEMETRY, LagSet, OriginSet, Report, SparkFigures
from services.core.ledger.reporter import HEARTBEAT_S, LAGS_EVERY_S, LagTap, cut, join_lags, new_instance
from spark.batch_report import NODE, BatchReport

log = structlog.get_logger()


class PipeReporter:
    """One run of one pipe. Thread-safe: its queries and the thread of its backlog share it. `clock`: seconds since the epoch."""

    def __init__(
        self,
        pipe: str,
        append: Callable[[list[Record]], None],
        clock: Callable[[], float] = time.time,
        stream_of: Callable[[str], str | None] = lambda _incarnation: None,
    ) -> None:
        """append: stores records in the telemetry topic, durably. Raises BrokerError kinds. stream_of: as of a `SparkBroker`."""
        self._pipe, self._append, self._clock, self._stream_of = pipe, append, clock, stream_of
        self.figures: Callable[[float, int], SparkFigures] | None = None
        """Makes the figures of some seconds with so many events."""
        self._figures_at, self._read = clock(), 0
        self._instance = new_instance()
        self._key = f"{NODE}/{pipe}/{self._instance}".encode()
        self._lock = threading.Lock()
        self._histograms = {kind: LagHistogram() for kind in ("lag_in", "lag_out", "process_time")}
        self._taps = [LagTap(kind, histogram) for kind, histogram in self._histograms.items()]
        self._lags: list[LagSet] = []
        self._lags_at = self._reported_at = 0.0
        self._settled_up_to: int | None = None
        self._counted: BatchReport | None = None

    def report(self, done: BatchReport) -> None:
        """Report the outcomes of a batch's events; returns when the report is durable. Blocking.

        Raises BrokerError kinds: then the batch is not done, and the caller reports it again.
        """
        with self._lock:
            if done is not self._counted:  # the lags of a batch that is reported again are counted already
                self._counted = done
                self._read += done.read
                self._count(done)
            if sets := done.sets.pack():
                self._write(sets)

    def _count(self, done: BatchReport) -> None:
        pairs = [
            (self._histograms["lag_in"], done.lag_in, done.earlier.lag_in),
            (self._histograms["lag_out"], done.lag_out, done.earlier.lag_out),
            (self._histograms["process_time"], done.took, done.earlier.took),
        ]
        if done.minute is not None:
            for histogram, _, earlier in pairs:
                histogram.observe_counts(earlier)
            self._take_lags(done.minute - 1)
        for histogram, every, earlier in pairs:
            histogram.observe_counts(every - earlier)
        if done.minute is not None:
            self._take_lags(done.minute)

    def _take_lags(self, minute: int) -> None:
        """Put those that were counted since the last time into this minute."""
        taken = [tap.drain(minute) for tap in self._taps]
        self._lags = join_lags([*self._lags, *(lag for lag in taken if lag is not None)])

    def record_settled_up_to(self, millis: int | None) -> None:
        """Every record that was stored before this time (ms) is reported. None: not known."""
        with self._lock:
            self._settled_up_to = millis

    def report_heartbeat(self) -> None:
        """Report that the pipe lives and how far it is behind, unless a report was sent lately. Call it often. Blocking."""
        with self._lock:
            if 0 <= self._clock() - self._reported_at < HEARTBEAT_S:  # a clock may be set back
                return
            try:
                self._write(())
            except BrokerError as error:
                log.warning("heartbeat_not_stored", topic=TELEMETRY, pipe=self._pipe, error=str(error))

    def close(self) -> None:
        """Report the end of this run. Blocking."""
        with self._lock:
            try:
                self._write((), closed=True)
            except BrokerError as error:
                log.warning("end_not_reported", topic=TELEMETRY, pipe=self._pipe, error=str(error))

    def _write(self, sets: Sequence[OriginSet], *, closed: bool = False) -> None:
        now = self._clock()
        if closed or not 0 <= now - self._lags_at < LAGS_EVERY_S:
            self._lags_at = now
            self._take_lags(int(now // 60))
        at_ms = int(now * 1000)
        report = Report(
            node=NODE,
            instance=self._instance,
            pipe=self._pipe,
            at_ms=at_ms,
            behind_ms=None if self._settled_up_to is None else max(0, at_ms - self._settled_up_to),
            sets=tuple(sets),
            lags=tuple(self._lags),
            closed=closed,
            spark=self._take_figures(now),
        )
        values = [part.encode() for part in cut(report)]
        records = [Record(self._key, value, at_ms) for value in values]
        accepted = self._accepted(sets, at_ms)
        try:
            self._append(records + accepted)
        except BrokerError as error:
            metrics.LEDGER_FAILURES.labels(NODE, type(error).__name__).inc()
            raise
        self._lags, self._reported_at = [], now
        metrics.LEDGER_REPORTS.labels(NODE).inc(len(values))
        metrics.LEDGER_BYTES.labels(NODE).inc(sum(map(len, values)))

    def _accepted(self, sets: Sequence[OriginSet], at_ms: int) -> list[Record]:
        """The reports of events of topics of others: there is no ingest, so the transform accepts what it settles
        (`services.core.ledger.first_reader`). In the same write, so an event is not missing in between."""
        found: dict[str, list[OriginSet]] = {}
        for one in sets:
            if is_of_topic(one.incarnation) and (stream := self._stream_of(one.incarnation)) is not None:
                accepted = msgspec.structs.replace(one, outcome="accepted", minute=at_ms // MINUTE_MS)
                found.setdefault(stream, []).append(accepted)
        records = []
        for stream, several in found.items():
            report = Report(node="ingest", instance=self._instance, pipe=stream, at_ms=at_ms, sets=tuple(several))
            key = f"ingest/{stream}/{self._instance}".encode()
            records += [Record(key, part.encode(), at_ms) for part in cut(report)]
        return records

    def _take_figures(self, now: float) -> SparkFigures | None:
        """Once in HEARTBEAT_S. What a report had that could not be stored is missing in the next one: it only shows."""
        lasted = now - self._figures_at
        if self.figures is None or 0 <= lasted < HEARTBEAT_S:
            return None
        read, self._read, self._figures_at = self._read, 0, now
        return self.figures(max(0.0, lasted), read)
