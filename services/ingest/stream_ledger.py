"""The report of ingest for one stream: the numbers accepted and refused, by minute, and the offset up to which that is complete.

A request costs an entry in a list. The entries are folded together once for each report: numbers that follow one another
become one range, however many requests they came in.
"""

from collections.abc import Mapping, Sequence

from services.core.broker.errors import BrokerError, OutcomeUnknown
from services.core.broker.producer import PartResult, SendResult
from services.core.ledger.accumulator import SetKey
from services.core.ledger.fields import FieldSample
from services.core.ledger.minute import common_minute, group_by_minute
from services.core.ledger.report import Outcome
from services.core.ledger.reporter import Reporter
from services.ingest.records import Numbers

_FOLD_AT = 4_000
"""Events of settled requests that wait to be folded at most: a fold of so many takes some milliseconds."""
_NOT_KNOWN = OutcomeUnknown("not known to be stored")

_Entry = tuple[Mapping[int, Numbers], Mapping[int, Sequence[int]], list[int], int, SendResult | BrokerError | None]
"""As the parameters of `StreamLedger.settle`."""
_Where = tuple[str, int]
"""Incarnation and partition."""
_NumberRange = tuple[int, int, int, int]
"""(first number, one behind the last, minute, offset up to which all is stored that was numbered before and in it). No
minute: its numbers are reported already. No offset: -1."""
_NO_MINUTE = -1


class StreamLedger:
    """One stream. Every number that was reserved must be passed to `settle` once, in any order."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.sample = reporter.sample = FieldSample()
        """To be offered one payload of each request that is stored."""
        self.is_introduced = False
        self._entries: list[_Entry] = []
        self._events = 0
        self._settled: dict[_Where, _Settled] = {}

    def introduce(self, incarnation: str, ends: Mapping[int, int]) -> None:
        """An incarnation that has sent nothing yet. ends: no record of it gets a lower offset, by partition as it is read.

        If it dies before its first report of events, the observer knows where to search for them.
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
        """The producer answered a request. An error: it queued nothing. None: nobody waited for its answer; nothing is known to
        be stored. numbers, rows: by partition. times: by row; these and arrival in ms."""
        self._entries.append((numbers, rows, times, arrival, result))
        self._events += len(times)
        if self._events >= _FOLD_AT:
            self._fold()

    async def report(self, *, closed: bool = False) -> None:
        """As `Reporter.report`, of everything that is settled."""
        self._fold()
        await self.reporter.report(closed=closed)

    def _fold(self) -> None:
        entries, self._entries, self._events = self._entries, [], 0
        found: dict[_Where, list[_NumberRange]] = {}
        for numbers, rows, times, arrival, result in entries:
            minute = common_minute(times, arrival)
            for part in result.parts if isinstance(result, SendResult) else _all_failed(rows, result or _NOT_KNOWN):
                own = numbers[part.partition]
                where = (own.incarnation, part.partition)
                known_minute = minute if minute is not None and not part.failed else _NO_MINUTE
                run = (own.first, own.first + part.count, known_minute, _stored_up_to(part))
                if where in found:
                    found[where].append(run)
                else:
                    found[where] = [run]
                if known_minute == _NO_MINUTE:
                    self._report_each(where, part, own.first, [times[row] for row in rows[part.partition]], arrival)
        for where, runs in found.items():
            runs.sort()
            self._report_ranges(where, runs)
            settled = self._settled.setdefault(where, _Settled())
            if settled.add(runs):
                self.reporter.reached(*where, settled.reach)

    def _report_ranges(self, where: _Where, runs: list[_NumberRange]) -> None:
        begin = last = 0
        current = _NO_MINUTE
        for first, end, minute, _ in [*runs, (-1, -1, _NO_MINUTE, -1)]:
            if minute != current or first != last:
                if current != _NO_MINUTE:
                    self.reporter.sets.add_range(SetKey("accepted", *where, current), begin, last - begin)
                begin, current = first, minute
            last = end

    def _report_each(self, where: _Where, part: PartResult, first: int, times: list[int], arrival: int) -> None:
        """Of a part that fell into several minutes, or of which something failed. times: of this part."""
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
    """Up to which number everything of one incarnation and partition is settled, and how far that reaches.

    What comes behind a gap is not reached, even if it is stored: the order of numbers is that of offsets.
    """

    __slots__ = ("_ahead", "_next", "reach")

    def __init__(self) -> None:
        self._next, self.reach = 0, -1
        self._ahead: list[_NumberRange] = []

    def add(self, runs: list[_NumberRange]) -> bool:
        """Runs in the order of their numbers; whether it reaches farther by them."""
        before, taken = self.reach, 0
        if self._ahead:
            runs = sorted(self._ahead + runs)
        for first, end, _, reach in runs:
            if first != self._next:
                break
            taken += 1
            self._next = end
            if reach > self.reach:
                self.reach = reach
        self._ahead = runs[taken:]
        return self.reach > before


def _is_refused(error: Exception) -> bool:
    """Whether the event is certainly not stored, which is what the client is told: see `answer.explain`."""
    return isinstance(error, BrokerError) and not isinstance(error, OutcomeUnknown)


def _all_failed(rows: Mapping[int, Sequence[int]], error: BrokerError) -> list[PartResult]:
    return [
        PartResult(partition, len(own), -1, -1, tuple((index, error) for index in range(len(own))))
        for partition, own in rows.items()
    ]


def _stored_up_to(part: PartResult) -> int:
    """Where offsets have gaps, or something of a shared append failed, `last` may lie behind other requests' records."""
    return part.last if part.last - part.first + 1 == part.count else part.first - 1
