"""What ingest counts of one stream (Prometheus), and what it reports of the stream's events to the observer (the ledger).

The report has the numbers accepted and refused, by minute, and the offset up to which that is complete. A request costs an
entry in a list. The entries are joined once for each report: consecutive numbers become one range, also across requests.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from services.core import metrics
from services.core.broker.errors import BrokerError, OutcomeUnknown
from services.core.broker.producer import PartResult, SendResult
from services.core.ledger.accumulator import SetKey
from services.core.ledger.fields import FieldSample
from services.core.ledger.minute import common_minute, group_by_minute
from services.core.ledger.report import Node, Outcome
from services.core.ledger.reporter import Reporter
from services.ingest.event_fields import Numbers

NODE: Node = "ingest"
_FLUSH_AT = 20_000
_JOIN_AT = 4_000
"""The most events of settled requests that wait to be joined. To join so many costs some milliseconds."""
_NOT_KNOWN = OutcomeUnknown("not known to be stored")


class Tally:
    """Counts of one stream. Call `flush` at least once a second."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._accepted = self._payload_bytes = 0
        self._statuses: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()
        self._absent: Counter[str] = Counter()
        self._lags_in: list[int] = []
        self._lags_out: list[int] = []
        self._durations: list[int] = []
        self._accepted_total = metrics.INGEST_ACCEPTED.labels(stream)
        self._bytes_total = metrics.INGEST_BYTES.labels(stream)
        self.lags = {
            "lag_in": metrics.LAG_IN.labels(stream, NODE),
            "lag_out": metrics.LAG_OUT.labels(stream, NODE),
            "ingest_time": metrics.INGEST_TIME.labels(stream),
        }
        """The stream's histograms, by their name in a report."""

    def accepted(self, times: Sequence[int], payload_bytes: int, arrival: int, now: int) -> None:
        """Events with these event times were stored. All times in ms."""
        duration = now - arrival
        lags = [arrival - time for time in times]
        self._accepted += len(lags)
        self._payload_bytes += payload_bytes
        self._lags_in += lags
        self._lags_out += [lag + duration for lag in lags]
        self._durations.append(duration)
        if len(self._lags_in) > _FLUSH_AT:
            self.flush()

    def refused(self, reasons: Sequence[str]) -> None:
        """Events were refused for these reasons."""
        self._refused.update(reasons)

    def absent(self, use: str, events: int) -> None:
        """Events lack the field that the stream names for their id, key or time."""
        self._absent[use] += events

    def answered(self, status: int) -> None:
        """A request was answered."""
        self._statuses[status] += 1

    def flush(self) -> None:
        """Add everything to the metrics."""
        self._accepted_total.inc(self._accepted)
        self._bytes_total.inc(self._payload_bytes)
        for status, count in self._statuses.items():
            metrics.INGEST_REQUESTS.labels(self._stream, str(status)).inc(count)
        for reason, count in self._refused.items():
            metrics.INGEST_REFUSED.labels(self._stream, reason).inc(count)
        for use, count in self._absent.items():
            metrics.INGEST_ABSENT.labels(self._stream, use).inc(count)
        self.lags["lag_in"].observe(self._lags_in)
        self.lags["lag_out"].observe(self._lags_out)
        self.lags["ingest_time"].observe(self._durations)
        self._accepted = self._payload_bytes = 0
        for gathered in (self._statuses, self._refused, self._absent, self._lags_in, self._lags_out, self._durations):
            gathered.clear()


_Entry = tuple[Mapping[int, Numbers], Mapping[int, Sequence[int]], list[int], int, SendResult | BrokerError | None]
"""As the parameters of `StreamLedger.settle`."""
_Where = tuple[str, int]
"""Incarnation and partition."""
_NumberRange = tuple[int, int, int, int]
"""(first number, one behind the last, minute, reach). reach: the offset up to which everything up to this range is stored; -1 for
none. minute: _NO_MINUTE when the numbers are reported already."""
_NO_MINUTE = -1


class StreamLedger:
    """One stream. Every number that was reserved must be passed to `settle` once, in any order."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.sample = reporter.sample = FieldSample()
        """Offer it one payload of each stored request."""
        self.is_introduced = False
        self._entries: list[_Entry] = []
        self._events = 0
        self._settled: dict[_Where, _Settled] = {}

    def introduce(self, incarnation: str, ends: Mapping[int, int]) -> None:
        """Report an incarnation before it sends anything. ends: the lowest offset that its records can get, by partition.

        If this process dies before its first report of events, the observer knows where to search for them.
        """
        self.is_introduced = True
        for partition, end in ends.items():
            self.reporter.reached(incarnation, partition, end - 1)

    def settle(
        self,
        numbers: Mapping[int, Numbers],
        rows: Mapping[int, Sequence[int]],
        times: list[int],
        arrival: int,
        result: SendResult | BrokerError | None,
    ) -> None:
        """The result of a request. An error: nothing was queued. None: the wait was cancelled, and the outcome is unknown.

        numbers, rows: by partition. times: by row; times and arrival in ms.
        """
        self._entries.append((numbers, rows, times, arrival, result))
        self._events += len(times)
        if self._events >= _JOIN_AT:
            self._join()

    async def report(self, *, closed: bool = False) -> None:
        """As `Reporter.report`, with everything that is settled."""
        self._join()
        await self.reporter.report(closed=closed)

    def _join(self) -> None:
        entries, self._entries, self._events = self._entries, [], 0
        found: dict[_Where, list[_NumberRange]] = {}
        for numbers, rows, times, arrival, result in entries:
            minute = common_minute(times, arrival)
            for part in result.parts if isinstance(result, SendResult) else _all_failed(rows, result or _NOT_KNOWN):
                own = numbers[part.partition]
                where = (own.incarnation, part.partition)
                known_minute = minute if minute is not None and not part.failed else _NO_MINUTE
                numbers_of_part = (own.first, own.first + part.count, known_minute, _stored_up_to(part))
                found.setdefault(where, []).append(numbers_of_part)
                if known_minute == _NO_MINUTE:
                    self._report_each(where, part, own.first, [times[row] for row in rows[part.partition]], arrival)
        for where, ranges in found.items():
            ranges.sort()
            self._report_ranges(where, ranges)
            settled = self._settled.setdefault(where, _Settled())
            if settled.add(ranges):
                self.reporter.reached(*where, settled.reach)

    def _report_ranges(self, where: _Where, ranges: list[_NumberRange]) -> None:
        begin = last = 0
        current = _NO_MINUTE
        for first, end, minute, _ in [*ranges, (-1, -1, _NO_MINUTE, -1)]:
            if minute != current or first != last:
                if current != _NO_MINUTE:
                    self.reporter.sets.add_range(SetKey("accepted", *where, current), begin, last - begin)
                begin, current = first, minute
            last = end

    def _report_each(self, where: _Where, part: PartResult, first: int, times: list[int], arrival: int) -> None:
        """For a part whose events are of several minutes, or of which some failed. times: of this part."""
        failed = dict(part.failed)
        numbers = range(first, first + part.count)
        for minute, indexes in group_by_minute(times, arrival).items():
            stored = [numbers[index] for index in indexes if index not in failed]
            if stored:
                self.reporter.sets.add(SetKey("accepted", *where, minute), stored)
            for index in indexes if len(stored) < len(indexes) else ():
                if index in failed:
                    outcome: Outcome = "refused" if _is_refused(failed[index]) else "unknown"
                    self.reporter.sets.add(SetKey(outcome, *where, minute), [numbers[index]])


class _Settled:
    """The numbers of one incarnation and partition below which everything is settled, and the offset that this reaches.

    The order of numbers is that of offsets. So a range behind a gap does not count, even if it is stored.
    """

    __slots__ = ("_ahead", "_next", "reach")

    def __init__(self) -> None:
        self._next, self.reach = 0, -1
        self._ahead: list[_NumberRange] = []

    def add(self, ranges: list[_NumberRange]) -> bool:
        """Ranges in the order of their numbers. Returns whether `reach` rose."""
        before, used = self.reach, 0
        if self._ahead:
            ranges = sorted(self._ahead + ranges)
        for first, end, _, reach in ranges:
            if first != self._next:
                break
            used += 1
            self._next = end
            self.reach = max(self.reach, reach)
        self._ahead = ranges[used:]
        return self.reach > before


def _is_refused(error: Exception) -> bool:
    """Whether the event is certainly not stored. `answer.explain` says the same to the client."""
    return isinstance(error, BrokerError) and not isinstance(error, OutcomeUnknown)


def _all_failed(rows: Mapping[int, Sequence[int]], error: BrokerError) -> list[PartResult]:
    return [
        PartResult(partition, len(own), -1, -1, tuple((index, error) for index in range(len(own))))
        for partition, own in rows.items()
    ]


def _stored_up_to(part: PartResult) -> int:
    """`part.last` may be behind other requests' records where offsets have gaps or a part of a shared append failed."""
    return part.last if part.last - part.first + 1 == part.count else part.first - 1
