"""What became of one append's records so far; settled in order."""

from collections.abc import Sequence

from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerError, OutcomeUnknown, Unavailable
from services.core.broker.record import Record


class Progress:
    """`done` records are settled. Of the others the first `in_doubt` may be stored: they were sent, now or in an earlier
    append, and Kafka did not say what became of them."""

    def __init__(self, records: Sequence[Record], in_doubt: int = 0) -> None:
        self.records, self.in_doubt = records, in_doubt
        self.done = 0
        self._first = self._last = -1
        self._failed: list[tuple[int, Exception]] = []

    def take(self, count: int) -> Sequence[Record]:
        """The next `count` unsettled records."""
        if count == len(self.records):
            return self.records
        return self.records[self.done : self.done + count]

    def store(self, stop: int, offset: int) -> None:
        """Everything up to index `stop` is durable, the first of it at `offset` (-1: the broker did not say where)."""
        if offset >= 0:
            self._first = offset if self._first < 0 else self._first
            self._last = offset + stop - self.done - 1
        self.in_doubt = max(0, self.in_doubt - (stop - self.done))
        self.done = stop

    def refuse(self, index: int, error: BrokerError) -> None:
        """The next record alone is not stored."""
        self._failed.append((index, error))
        self.done = index + 1

    def fail(self, error: BrokerError) -> None:
        """Nothing more is stored. The fate of those in doubt is unknown, whatever the error; the others were not tried."""
        is_unknown = isinstance(error, OutcomeUnknown)
        unknown = error if is_unknown else OutcomeUnknown(f"sent before, without an answer; now: {error}")
        known = Unavailable(f"not tried: {error}") if is_unknown else error
        sent = self.done + self.in_doubt
        self._failed += [(index, unknown) for index in range(self.done, sent)]
        self._failed += [(index, known) for index in range(sent, len(self.records))]
        self.done = len(self.records)

    def time_out(self, text: str) -> None:
        """As `fail`, with the error that is true: unknown for what was sent, unavailable for what was not."""
        self.fail(OutcomeUnknown(text) if self.in_doubt else Unavailable(text))

    def appended(self) -> Appended:
        """The answer. Raises the reason when all failed for the same kind of it."""
        failed = self._failed
        if len(failed) == len(self.records) and failed and len({type(error) for _, error in failed}) == 1:
            raise failed[0][1]
        return Appended(self._first, self._last, tuple(failed))
