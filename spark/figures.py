"""Spark's own figures as metrics: what its queries report of each batch, and what all its tasks did.

Queries are asked between two batches, tasks are counted inside Java; so this costs a batch nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from services.core.metrics import (
    SPARK_SPILLED,
    SPARK_TASK_SECONDS,
    SPARK_TASKS,
    TRANSFORM_BATCH_SECONDS,
    TRANSFORM_BATCHES,
    TRANSFORM_STATE_BYTES,
    TRANSFORM_STATE_ROWS,
)
from spark.java import progress_since, task_totals

PHASES: Final = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets")
"""Spark's words for the parts of a batch; all that Spark spends elsewhere is in `other`."""
_SST_BYTES: Final = "rocksdbSstFileSize"


@dataclass(slots=True)
class PipeFigures:
    """Of one pipe, since `QueryFigures.take`. state_rows, state_bytes: as they are now; the memory of state and its files."""

    batches: int = 0
    batch_ms: int = 0
    longest_ms: int = 0
    state_rows: int = 0
    state_bytes: int = 0


class QueryFigures:
    """Of one pipe. Not thread-safe: the job's thread uses it."""

    def __init__(self, pipe: str) -> None:
        self._pipe = pipe
        self._query: StreamingQuery | None = None
        self._last = -1
        self._sums = PipeFigures()

    def follow(self, query: StreamingQuery) -> None:
        """Record the batches of a query since the last call."""
        if self._query is not query:
            self._query, self._last = query, -1
        for progress in progress_since(query, self._last):
            self._last = int(progress["batchId"])
            self.record(progress)

    def record(self, progress: Mapping[str, Any]) -> None:
        """One progress of a query, as Spark reports it; those without a batch are ignored."""
        spent = progress["durationMs"]
        if "addBatch" not in spent:
            return
        whole = int(spent.get("triggerExecution", 0))
        phases = {phase: int(spent[phase]) for phase in PHASES if phase in spent}
        phases["other"] = max(0, whole - sum(phases.values()))
        for phase, millis in phases.items():
            TRANSFORM_BATCH_SECONDS.labels(self._pipe, phase).inc(millis / 1000)
        TRANSFORM_BATCHES.labels(self._pipe).inc()
        states = progress["stateOperators"]
        rows, memory = (sum(int(state[name]) for state in states) for name in ("numRowsTotal", "memoryUsedBytes"))
        disk = sum(int((state.get("customMetrics") or {}).get(_SST_BYTES, 0)) for state in states)
        if states:
            TRANSFORM_STATE_ROWS.labels(self._pipe).set(rows)
            TRANSFORM_STATE_BYTES.labels(self._pipe, "memory").set(memory)
            TRANSFORM_STATE_BYTES.labels(self._pipe, "disk").set(disk)
        sums = self._sums
        sums.batches += 1
        sums.batch_ms += whole
        sums.longest_ms = max(sums.longest_ms, whole)
        sums.state_rows, sums.state_bytes = rows, memory + disk

    def take(self) -> PipeFigures:
        """The figures since the last call."""
        taken = self._sums
        self._sums = PipeFigures(state_rows=taken.state_rows, state_bytes=taken.state_bytes)
        return taken


class TaskFigures:
    """Of all tasks of one Spark. Counts from its creation on."""

    _COUNTERS: Final = (
        (SPARK_TASKS.labels("succeeded"), 1),
        (SPARK_TASKS.labels("failed"), 1),
        (SPARK_TASK_SECONDS.labels("run"), 1e-3),
        (SPARK_TASK_SECONDS.labels("cpu"), 1e-3),
        (SPARK_TASK_SECONDS.labels("gc"), 1e-3),
        (SPARK_SPILLED.labels("memory"), 1),
        (SPARK_SPILLED.labels("disk"), 1),
    )

    def __init__(self, session: SparkSession) -> None:
        self._read = task_totals(session)
        self._known = [0] * len(self._COUNTERS)

    def follow(self) -> None:
        """Add what was done since the last call to the metrics. Raises what a call into Java raises."""
        totals = [int(figure) for figure in self._read().split()]
        for (counter, unit), now, before in zip(self._COUNTERS, totals, self._known, strict=True):
            counter.inc((now - before) * unit)
        self._known = totals
