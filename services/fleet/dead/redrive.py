"""Writes dead letters to the topics in which they are retried: durably, paced, with an audit entry per batch.

One batch is in flight at a time. After a crash between a batch and its audit entry the next redrive writes the batch
again, so its events may be sent twice.
"""

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from services.core.audit import REDRIVE
from services.core.broker.errors import RecordTooLarge, Unavailable
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Record, estimate_size
from services.core.event import FAULT, REDRIVEN
from services.core.ledger.report import since_span
from services.core.ledger.reporter import Reporter, new_instance
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import lane_name, removed_lanes, retry_topic
from services.core.undelivered.dead_letter import DeadLetter, Position, event_time, strip
from services.core.undelivered.retry_state import BadRetryRecord, RetryState, read_state, read_wait, wrap
from services.fleet.console import print_note
from services.fleet.dead.audit import Auditor
from services.fleet.sending.pace import Pace

REMEDIES = {
    "no_payload": "it was too large to be kept with its payload, and the event is gone from its source",
    "damaged_batch": "its value is damaged bytes, not an event",
    "no_destination": "a transform failed on it, or it was late. With schema_mismatch or transform_error, it fails again unless "
    "`columns` or the transform are corrected first; or send a corrected event, then penstock dead discard this one. Try: "
    "--to-stream, which sends it to its stream again, to all of its pipes",
    "bad_record": "a rule of its stream in the pipe file does not fit it; penstock dead show says which. Try: the same command "
    "when the rule is corrected, or penstock dead discard",
    "unknown_destination": "the pipe file no longer has this destination. Try: --to PIPE/DESTINATION; or renamed_from there, if "
    "it has another name now; or penstock dead discard",
    "no_retries": "the destination is a stream, which reads no retries. Try: --to PIPE/DESTINATION with a webhook",
    "unknown_stream": "no pipe of the pipe file reads its stream. Try: put the pipe back into the file, or penstock dead discard",
    "read_only": "its stream is a topic of others, to which Penstock writes nothing. Try: penstock group reset PIPE "
    "--to-earliest, which transforms all events again; or a corrected event from the topic's owner, and penstock dead discard",
    "too_old": "Kafka would delete it at once: its event time is older than the stream's retention",
    "bad_source": "its header names no source; it is no dead letter of Penstock",
    "too_large": "the broker accepts no record of this size",
}
"""Explanations of the reasons, for a person."""


LATE = "late"
"""The reason of events behind a transform's watermark."""
LATE_WARNING = "{count} of these dead letters are `late`: results of the transform may already contain them"


class RedriveRecord(NamedTuple):
    """The record to write for a dead letter, and its topic."""

    letter: DeadLetter
    topic: str
    record: Record


class RedriveTargets:
    """Finds the topic for each dead letter by the pipe file. to_stream: those of transforms go to their source stream.

    by_event_time: the streams whose retention counts from event times. to: the lane that gets all others, if given.
    """

    def __init__(
        self, pipes: PipeFile, *, to_stream: bool, by_event_time: Collection[str] = (), to: str | None = None
    ) -> None:
        self._pipes, self._to_stream, self._by_event_time, self._to = pipes, to_stream, by_event_time, to
        self._removed = removed_lanes(pipes)

    def resolve(self, letter: DeadLetter, now_ms: int) -> RedriveRecord | str:
        """The record to write, or a reason of REMEDIES."""
        if letter.reason == "damaged_batch":
            return "damaged_batch"
        if not letter.record.value:
            return "no_payload"
        return self._to_source(letter, now_ms) if not letter.destination else self._to_destination(letter, now_ms)

    def _to_destination(self, letter: DeadLetter, now_ms: int) -> RedriveRecord | str:
        """A retry record for this destination's lane; the other lanes skip it. Its counts of rounds and attempts start at 0.

        For a former name, or a destination in `removed`: a record for the destination that gets its events now.
        """
        choice = self._removed.get(lane_name(letter.pipe, letter.destination))
        lane = lane_name(letter.pipe, letter.destination) if choice is None else (choice.deliver_to or "")
        lane = self._to or lane
        pipe_name, _, name = lane.partition("/")
        pipe = self._pipes.pipes.get(pipe_name)
        named = [] if pipe is None else [one for one in pipe.destinations if one.name == name]
        if not named:
            return "unknown_destination"
        if named[0].webhook is None:
            return "no_retries"
        original = strip(letter.record)
        if original.header(FAULT) is not None:
            original = self._translate(original, letter)
            if original.header(FAULT) is not None:
                return "bad_record"
        state = RetryState(
            pipe=pipe_name,
            destination=name,
            attempts=0,
            rounds=0,
            first_failure=letter.first_failure,
            due=now_ms,
            reason=letter.reason,
            detail=letter.detail,
            source=letter.source,
            time=original.timestamp,
        )
        record = wrap(original, state, now_ms)
        try:
            read_state(record)
        except BadRetryRecord:
            return "bad_source"
        return RedriveRecord(letter, retry_topic(pipe_name), record)

    def _translate(self, record: Record, letter: DeadLetter) -> Record:
        """A record of a topic of others as the event that the rules make of it now; unchanged where its stream is not known."""
        stream = self._pipes.streams.get(letter.source.partition(":")[0])
        return record if stream is None or stream.topic is None else Translation(stream).repeat(record)

    def _to_source(self, letter: DeadLetter, now_ms: int) -> RedriveRecord | str:
        if not self._to_stream:
            return "no_destination"
        try:
            topic = Position.parse(letter.source).topic
        except ValueError:
            return "bad_source"
        pipe = self._pipes.pipes.get(letter.pipe)
        readers = self._pipes.pipes.values() if pipe is None else [pipe]  # of a pipe that is gone, any other will do
        if not any(topic in reader.sources for reader in readers):
            return "unknown_stream"
        if self._pipes.streams[topic].topic is not None:
            return "read_only"
        if (
            topic in self._by_event_time
            and event_time(letter.record) < now_ms - self._pipes.streams[topic].retention * 1000
        ):
            return "too_old"
        original = strip(letter.record)
        # The transform has seen its id: without the mark, `deduplicate_within` would drop it without a word.
        kept = (header for header in original.headers if header[0] != REDRIVEN)
        mark = (REDRIVEN, str(letter.position).encode())
        return RedriveRecord(letter, topic, msgspec.structs.replace(original, headers=(*kept, mark)))


BATCH = 100
BATCH_BYTES = 1_000_000


@dataclass(slots=True)
class Redriven:
    """The outcome so far. late: how many of `done` were `late`. refused: counts by reason (REMEDIES); examples: one position
    per reason.
    """

    done: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Position] = field(default_factory=dict)

    def refuse(self, letter: DeadLetter, reason: str) -> None:
        """Count a dead letter that is not redriven."""
        self.refused[reason] += 1
        self.examples.setdefault(reason, letter.position)


class Redrive:
    """rate: events per second. `asked_to_stop` is called before each batch, `show` after it."""

    def __init__(
        self,
        targets: RedriveTargets,
        producer: Producer,
        auditor: Auditor,
        rate: float,
        *,
        asked_to_stop: Callable[[], bool] = lambda: False,
        show: Callable[[Redriven], None] = lambda _so_far: None,
    ) -> None:
        self._targets, self._producer, self._auditor = targets, producer, auditor
        self._pace, self._batch = Pace(rate), max(1, min(BATCH, int(rate)))
        self._asked_to_stop, self._show = asked_to_stop, show
        self.so_far = Redriven()
        self._instance, self._is_unreported = f"redrive-{new_instance()}", False

    async def run(self, pages: AsyncIterator[list[DeadLetter]]) -> None:
        """Redrive all of them, or until a stop is requested. Raises BrokerError kinds; stored batches are then in the audit."""
        async for page in pages:
            records: list[RedriveRecord] = []
            now = time.time_ns() // 1_000_000
            for letter in page:
                resolved = self._targets.resolve(letter, now)
                if isinstance(resolved, str):
                    self.so_far.refuse(letter, resolved)
                else:
                    records.append(resolved)
            for batch in _cut(records, self._batch):
                if self._asked_to_stop():
                    return
                await self._pace.wait(len(batch))
                await self._write(batch)
            self._show(self.so_far)

    async def _write(self, batch: Sequence[RedriveRecord]) -> None:
        by_topic: defaultdict[str, list[RedriveRecord]] = defaultdict(list)
        for one in batch:
            by_topic[one.topic].append(one)
        stored: list[RedriveRecord] = []
        failure: Exception | None = None
        for topic, of_topic in by_topic.items():
            failed = await send_by_key(self._producer, topic, [one.record for one in of_topic])
            stored += [one for index, one in enumerate(of_topic) if index not in failed]
            for index, error in failed.items():
                if isinstance(error, RecordTooLarge):
                    self.so_far.refuse(of_topic[index].letter, "too_large")
                else:
                    failure = error
        await self._report(stored)
        await self._auditor.write(REDRIVE, [one.letter for one in stored])
        self.so_far.done += len(stored)
        self.so_far.late += sum(one.letter.reason == LATE for one in stored)
        self._show(self.so_far)
        if failure is not None:
            raise failure

    async def _report(self, stored: Sequence[RedriveRecord]) -> None:
        """Report the events to the ledger, so that a later loss shows. When a report fails, they are dead in the ledger, and
        are redriven all the same."""
        if self._is_unreported:  # another report would also fail, after a long wait
            return
        lanes: defaultdict[tuple[str, str, int], list[Record]] = defaultdict(list)
        for letter, _topic, record in stored:
            if letter.destination:
                lanes[letter.pipe, letter.destination, read_wait(record)[2]].append(record)
        for (pipe, destination, at_ms), records in lanes.items():
            reporter = Reporter(self._producer, self._instance, "retrier", pipe, destination, has_backlog=False)
            reporter.settled.add("redriven", records, since_span(at_ms))
            try:
                await reporter.report(closed=True)
            except Unavailable as error:
                print_note(
                    f"the ledger gets no report of the events that are redriven now; their loss would not show: {error}",
                    "yellow",
                )
                self._is_unreported = True
                return


def _cut(records: Sequence[RedriveRecord], count: int) -> Iterator[list[RedriveRecord]]:
    """Batches of at most `count` dead letters and about BATCH_BYTES."""
    batch: list[RedriveRecord] = []
    size = 0
    for one in records:
        weight = estimate_size((one.record,))
        if batch and (len(batch) >= count or size + weight > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += weight
    if batch:
        yield batch
