"""Repeating an append: exponential waits with full jitter, only for the records that failed.

Source of the rule: "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): a uniformly random wait between 0 and
`min(cap, base * 2^n)` clears contention with the least work.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import backoff

from services.core.broker.contract import MAX_APPEND_BYTES, Appended, Appender
from services.core.broker.errors import BrokerError, OutcomeUnknown, RecordTooLarge, Throttled, Unavailable
from services.core.broker.record import Record, split_by_size
from services.core.metrics import BROKER_RETRIES


@dataclass(frozen=True, slots=True)
class AppendPolicy:
    """All in seconds. deadline: no attempt starts later than this after `send_to`. append_timeout: for each attempt.

    patience: when the broker's rate limits delay the waiting records for longer than this, new ones are refused at once.
    """

    deadline: float = 12.0
    patience: float = 5.0
    append_timeout: float = 8.0
    base_wait: float = 0.05
    max_wait: float = 1.0

    def waits(self) -> Iterator[float]:
        """The upper bounds of successive waits; the caller jitters them."""
        bounds = backoff.expo(base=2, factor=self.base_wait, max_value=self.max_wait)
        next(bounds)  # backoff's generators are primed once before their first value
        return cast("Iterator[float]", bounds)


async def append_with_retry(
    appender: Appender,
    topic: str,
    partition: int,
    records: Sequence[Record],
    policy: AppendPolicy,
    *,
    size: int,
    deadlines: Callable[[], Sequence[float]],
    settled: Callable[[int, Appended], None] = lambda _count, _appended: None,
) -> Appended:
    """Append all records in order, in chunks of one append each. The answer names the failed ones; nothing is raised for them.

    A record of which one attempt ended in OutcomeUnknown is stored by a later attempt, or its error is OutcomeUnknown.
    `size` is the records' `estimate_size`. `deadlines`: the time (monotonic seconds) until which each record may be tried;
    called only after a failure or between chunks. The first attempt is always made. `settled`: called before each further
    attempt with the number of first records that are finished, and their outcome. Errors that are not BrokerErrors
    (bugs) are raised.
    """
    outcome = _Outcome()
    for start, chunk in [(0, records)] if size <= MAX_APPEND_BYTES else split_by_size(records, MAX_APPEND_BYTES):
        # A later chunk must not overtake records that the caller will send again.
        if start and (outcome.is_interrupted or deadlines()[start] < time.monotonic()):
            untried = Unavailable("not tried: the records before it were not stored in time")
            outcome.failed.extend((start + index, untried) for index in range(len(chunk)))
            continue
        await _append_chunk(appender, topic, partition, start, chunk, policy, deadlines, settled, outcome)
    return outcome.appended()


async def _append_chunk(
    appender: Appender,
    topic: str,
    partition: int,
    start: int,
    chunk: Sequence[Record],
    policy: AppendPolicy,
    deadlines: Callable[[], Sequence[float]],
    settled: Callable[[int, Appended], None],
    outcome: "_Outcome",
) -> None:
    """One append, and the repeats for its failed records. Indexes in `outcome` count from the call's first record."""
    pending: Sequence[int] = range(start, start + len(chunk))
    in_doubt: dict[int, OutcomeUnknown] = {}
    waits = policy.waits()
    while True:
        try:
            appended = await appender.append(topic, partition, chunk, timeout=policy.append_timeout)
        except BrokerError as error:
            failed: Sequence[tuple[int, Exception]] = [(index, error) for index in range(len(chunk))]
        else:
            outcome.stored(appended, len(chunk))
            failed = appended.failed
        if not failed:
            return
        in_doubt |= {pending[index]: error for index, error in failed if isinstance(error, OutcomeUnknown)}
        asked = [e.retry_after for _, e in failed if isinstance(e, Throttled) and e.retry_after is not None]
        wait = max([backoff.full_jitter(next(waits)), *asked])
        until, next_try = deadlines(), time.monotonic() + wait
        again = [index for index, error in failed if _is_retriable(error) and until[pending[index]] >= next_try]
        given_up = {index for index, _ in failed}.difference(again)
        outcome.failed.extend(
            # A refusal of a later attempt says nothing about an earlier one that may have stored the record.
            (pending[index], in_doubt.get(pending[index], error))
            for index, error in failed
            if index in given_up
        )
        if not again:
            return
        BROKER_RETRIES.labels(topic, partition, type(failed[0][1]).__name__).inc()
        pending, chunk = [pending[index] for index in again], [chunk[index] for index in again]
        settled(pending[0], outcome.appended())
        await asyncio.sleep(wait)


def _is_retriable(error: Exception) -> bool:
    return isinstance(error, BrokerError) and error.retriable


class _Outcome:
    """Adds up the attempts of one call."""

    def __init__(self) -> None:
        self.first = self.last = -1
        self.is_known = True
        self.failed: list[tuple[int, Exception]] = []
        self.seconds_per_byte = 0.0

    def stored(self, appended: Appended, count: int) -> None:
        self.seconds_per_byte = appended.seconds_per_byte
        if appended.first >= 0:
            self.first = appended.first if self.first < 0 else min(self.first, appended.first)
            self.last = max(self.last, appended.last)
        elif len(appended.failed) < count:
            self.is_known = False

    @property
    def is_interrupted(self) -> bool:
        """Whether a record failed that the caller may send again: any error but RecordTooLarge."""
        return any(not isinstance(error, RecordTooLarge) for _, error in self.failed)

    def appended(self) -> Appended:
        failed = tuple(sorted(self.failed, key=lambda item: item[0]))
        first, last = (self.first, self.last) if self.is_known else (-1, -1)
        return Appended(first, last, failed, self.seconds_per_byte)
