"""What ingest tells of one stream: which numbers were accepted for which minute, which refused, and how far that goes.

Numbers are told as ranges: a request whose events fall in one minute costs the same whatever it holds.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.core.broker.producer import PartResult, SendResult
from services.core.ledger.minute import common_minute, minute_of
from services.core.ledger.report import Outcome, Reach
from services.core.ledger.reporter import Reporter
from services.core.ledger.sets import SetKey
from services.ingest.records import Numbers


@dataclass(slots=True, eq=False)
class Piece:
    """What one request sent to one partition. reach: once it is settled, the offset up to which all is stored that was sent
    before and with it; -1: none."""

    partition: int
    numbers: Numbers
    rows: Sequence[int]
    reach: int | None = None


@dataclass(frozen=True, slots=True)
class Sending:
    """A request under way. times in ms by row; minute: that of all its events, if it is one."""

    pieces: dict[int, Piece]
    times: list[int]
    arrival: int
    minute: int | None


class StreamLedger:
    """One stream's. `begin` in the order in which the producer gets the requests; each is followed by one `end`, in any order."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.is_introduced = False
        self._under_way: dict[tuple[str, int], deque[Piece]] = {}

    def introduce(self, incarnation: str, ends: Mapping[int, int]) -> None:
        """An incarnation that has sent nothing yet. ends: per partition, the first offset that its records may get.

        If it dies before its first report of events, the observer knows where to look for them.
        """
        self.is_introduced = True
        for partition, end in ends.items():
            self.reporter.reached(Reach(incarnation, partition, end - 1))

    def begin(
        self, numbers: Mapping[int, Numbers], rows: Mapping[int, Sequence[int]], times: list[int], arrival: int
    ) -> Sending:
        """A request is about to be sent. numbers, rows: by partition. times by row; these and arrival in ms."""
        pieces = {}
        for partition, own in numbers.items():
            piece = pieces[partition] = Piece(partition, own, rows[partition])
            self._under_way.setdefault((own.incarnation, partition), deque()).append(piece)
        return Sending(pieces, times, arrival, common_minute(times, arrival))

    def end(self, sending: Sending, result: SendResult | None) -> None:
        """The producer answered; None: it took nothing, or its answer was not waited for, and nothing is known to be stored."""
        if result is None:
            for piece in sending.pieces.values():
                self._tell(sending, piece, "refused", range(len(piece.rows)))
                self._settle(piece, -1)
            return
        for part in result.parts:
            piece = sending.pieces[part.partition]
            if part.failed:
                failed = {index for index, _ in part.failed}
                self._tell(sending, piece, "refused", sorted(failed))
                self._tell(sending, piece, "accepted", [at for at in range(part.count) if at not in failed])
            else:
                self._tell(sending, piece, "accepted", range(part.count))
            self._settle(piece, _find_reach(part))

    def _tell(self, sending: Sending, piece: Piece, outcome: Outcome, indexes: Sequence[int]) -> None:
        """`indexes` within the piece."""
        first, sets = piece.numbers.first, self.reporter.sets
        where = piece.numbers.incarnation, piece.partition
        if sending.minute is not None:
            key = SetKey(outcome, *where, sending.minute)
            if isinstance(indexes, range):
                sets.add_range(key, first, len(indexes))
            elif indexes:
                sets.add(key, [first + index for index in indexes])
            return
        for minute, numbers in _by_minute(sending, piece, indexes).items():
            sets.add(SetKey(outcome, *where, minute), numbers)

    def _settle(self, piece: Piece, reach: int) -> None:
        """What comes after an unsettled piece is not reached, even if it is stored: the order of numbers is that of offsets."""
        piece.reach = reach
        where = piece.numbers.incarnation, piece.partition
        pieces = self._under_way[where]
        reached = -1
        while pieces and (told := pieces[0].reach) is not None:
            reached = max(reached, told)
            pieces.popleft()
        if reached >= 0:
            self.reporter.reached(Reach(*where, reached))
        if not pieces:
            del self._under_way[where]


def _find_reach(part: PartResult) -> int:
    """Where offsets have gaps, or something of a shared append failed, `last` may lie behind other requests' records."""
    return part.last if part.last - part.first + 1 == part.count else part.first - 1


def _by_minute(sending: Sending, piece: Piece, indexes: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index in indexes:
        minute = minute_of(sending.times[piece.rows[index]], sending.arrival)
        found.setdefault(minute, []).append(piece.numbers.first + index)
    return found
