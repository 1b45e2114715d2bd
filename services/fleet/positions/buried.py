"""Writes the waiting events that an operator skips to the dead letters.

An event that waits for another attempt or for a resume has been reported as waiting, and the loss table would call it missing
if its group just passed it. So it becomes a dead letter: it is counted, and can be redriven or discarded.
"""

import time
from collections.abc import Iterator

from services.core.broker.contract import Broker
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.ledger.report import since_span
from services.core.ledger.reporter import Reporter, new_instance
from services.core.pipe_file.topic_names import RETRIER_DEAD, dead_letter_topic
from services.core.undelivered.dead_letter import make_dead_letter
from services.core.undelivered.retry_state import BadRetryRecord, RetryState, read_state, unwrap
from services.fleet.positions.lanes import RETRIER, Lane

SKIPPED = "skipped"
"""The reason of these dead letters. Their detail is the operator's reason."""


def events_of(batch: Batch, lane: Lane) -> Iterator[tuple[int, Record, RetryState | None]]:
    """The records that the group would process, with their offsets; without those of the pipe's other destinations.

    The state of a record that is none of ours is None: each group that reads it makes a dead letter of it.
    """
    for offset, record in zip(batch.offsets, batch.records, strict=True):
        try:
            state = read_state(record)
        except BadRetryRecord:
            yield offset, record, None
            continue
        if lane == RETRIER or (state.pipe, state.destination) == (lane.pipe, lane.destination):
            yield offset, record, state


class Burial:
    """The dead letters of one skip. `close` reports them: before it nothing may be passed.

    After a failure, the same again writes the letters again.
    """

    def __init__(self, broker: Broker, producer: Producer, lane: Lane, because: str) -> None:
        self._broker, self._producer, self._lane, self._because = broker, producer, lane, because
        self._instance = f"skip-{new_instance()}"
        self._reporters: dict[tuple[str, str], Reporter] = {}
        self._topics: set[str] = set()

    async def bury(self, batch: Batch) -> int:
        """Returns the number of dead letters, which are durable. Raises BrokerError kinds."""
        self._topics = self._topics or set(await self._broker.admin.topics())
        letters: dict[str, list[Record]] = {}
        waited: list[tuple[Record, RetryState]] = []
        now = time.time_ns() // 1_000_000
        for offset, record, state in events_of(batch, self._lane):
            pipe = self._lane.pipe if state is None else state.pipe
            topic = dead_letter_topic(pipe)
            topic = topic if topic in self._topics else RETRIER_DEAD  # of a pipe that is gone
            letters.setdefault(topic, []).append(self._make_letter(batch.source, offset, record, state, now))
            if state is not None:
                waited.append((record, state))
        for topic, records in letters.items():
            for error in (await send_by_key(self._producer, topic, records)).values():
                raise error
        for record, state in waited:
            reporter = self._find_reporter(state.pipe, state.destination)
            reporter.settled.add("dead", [record], since_span(now, state.due))
        return sum(map(len, letters.values()))

    async def close(self) -> None:
        """Raises Unavailable when the reports are not durable."""
        for reporter in self._reporters.values():
            await reporter.report(closed=True)

    def _make_letter(
        self, source: TopicPartition, offset: int, record: Record, state: RetryState | None, now: int
    ) -> Record:
        pipe, destination, attempts, since = self._lane.pipe, self._lane.destination, 0, now
        if state is not None:
            pipe, destination, attempts, since = state.pipe, state.destination, state.attempts, state.first_failure
            record, _ = unwrap(record)
            source, offset = state.position()
        elif self._lane == RETRIER:
            pipe = destination = ""
        return make_dead_letter(
            record,
            reason=SKIPPED,
            detail=self._because,
            node="expel",
            pipe=pipe,
            destination=destination,
            attempts=attempts,
            first_failure=since,
            source=source,
            offset=offset,
            now_ms=now,
        )

    def _find_reporter(self, pipe: str, destination: str) -> Reporter:
        found = self._reporters.get((pipe, destination))
        if found is None:
            found = Reporter(self._producer, self._instance, "expel", pipe, destination)
            self._reporters[pipe, destination] = found
        return found
