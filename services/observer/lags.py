"""Lags by pipe, step, kind and minute, merged from the reports of all instances."""

import zlib

import msgspec

from services.core.lag import LagHistogram
from services.core.ledger.report import LagSet, Report
from services.observer.ledger.flow import Step

KEEP_MINUTES = 60
_KNOWN_MS = 10 * 60_000
"""A repeated report comes within this time. Sets may be united twice, counts must not be added twice."""


class LagTable:
    """A report that comes twice counts once. Grows with pipes, steps, kinds and minutes of an hour."""

    def __init__(self) -> None:
        self._by_minute: dict[int, dict[tuple[Step, str], LagHistogram]] = {}
        self._known: dict[tuple[str, Step, int, int], None] = {}
        """In the order of arrival."""
        self._newest_ms = 0

    def record(self, report: Report) -> None:
        """Add its lags. Those that were measured more than an hour before the newest report are ignored."""
        if not report.lags:
            return
        step = Step(report.node, report.pipe, report.destination)
        identity = (report.instance, step, report.at_ms, zlib.crc32(_ENCODER.encode(report.lags)))
        if identity in self._known:
            return
        self._known[identity] = None
        self._newest_ms = max(self._newest_ms, report.at_ms)
        for reported in report.lags:
            if reported.minute > self._newest_ms // 60_000 - KEEP_MINUTES:
                known = self._by_minute.setdefault(reported.minute, {})
                known.setdefault((step, reported.kind), LagHistogram()).merge(_load(reported))
        self._forget()

    def _forget(self) -> None:
        while self._known and next(iter(self._known))[2] < self._newest_ms - _KNOWN_MS:
            del self._known[next(iter(self._known))]
        for minute in [one for one in self._by_minute if one <= self._newest_ms // 60_000 - KEEP_MINUTES]:
            del self._by_minute[minute]

    def minutes(self) -> list[int]:
        return sorted(self._by_minute)

    def kinds(self, minute: int) -> dict[tuple[Step, str], LagHistogram]:
        """All of a minute; not to be changed."""
        return self._by_minute.get(minute, {})


def _load(reported: LagSet) -> LagHistogram:
    return LagHistogram.load({"count": reported.count, "total_ms": reported.total_ms, "buckets": reported.buckets})


_ENCODER = msgspec.msgpack.Encoder()
