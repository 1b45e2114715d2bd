"""How each pipe's transform works: the newest figures of the process that runs it, for the page."""

from collections.abc import Callable

import msgspec

from services.core.ledger.report import Report, SparkFigures

FRESH_MS = 60_000
"""Older figures are of a process that has ended, or of one that cannot report."""


class TransformView(msgspec.Struct, frozen=True):
    """Rates and times of some ten seconds. batch_ms: the mean. behind_ms: age of the oldest unprocessed record; None: unknown.

    lag_p95_ms: event time to output, of the last minute that has any; None: unknown. state_rows, state_bytes: kept over batches;
    0 without state. executors: of a cluster, else 0. ui: the address of Spark's own pages; empty: none. real_time: as in
    `SparkFigures`.
    """

    per_second: float
    batches_per_second: float
    batch_ms: float | None
    longest_ms: int
    lag_p95_ms: float | None
    behind_ms: int | None
    state_rows: int
    state_bytes: int
    executors: int
    ui: str
    real_time: bool


class TransformTable:
    """By pipe. A pipe runs in one process at a time."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, SparkFigures]] = {}

    def record(self, report: Report) -> None:
        """Keep the figures of a report, if it has any and they are the newest."""
        if report.spark is None:
            return
        known = self._newest.get(report.pipe)
        if known is None or known[0] <= report.at_ms:
            self._newest[report.pipe] = (report.at_ms, report.spark)

    def view(
        self, pipe: str, now: int, lag_p95: Callable[[], float | None], behind_ms: int | None
    ) -> TransformView | None:
        """None without fresh figures."""
        found = self._newest.get(pipe)
        if found is None or now - found[0] > FRESH_MS:
            return None
        one = found[1]
        seconds = max(one.seconds, 1.0)
        return TransformView(
            per_second=one.events / seconds,
            batches_per_second=one.batches / seconds,
            batch_ms=one.batch_ms / one.batches if one.batches else None,
            longest_ms=one.longest_ms,
            lag_p95_ms=lag_p95(),
            behind_ms=behind_ms,
            state_rows=one.state_rows,
            state_bytes=one.state_bytes,
            executors=one.executors,
            ui=one.ui,
            real_time=one.real_time,
        )
