"""Where a dead letter goes in a redrive, and as which record; or why it cannot."""

from typing import NamedTuple

from services.core.broker.record import Record
from services.core.dead_letter import event_time, strip
from services.core.letter import DeadLetter, Position
from services.core.pipes import PipeFile, lane_name, retry_topic
from services.core.retry_state import BadRetryRecord, RetryState, read_state, wrap

REMEDIES = {
    "no_payload": "it was too large to be kept with its payload, and its source has the event no more",
    "damaged_batch": "these are damaged bytes and no event",
    "no_destination": "a transform gave it up; --to-stream sends it to its stream again, to all pipes of that stream",
    "unknown_destination": "the pipe file has no such destination any more; discard it, or say `removed: {PIPE/DESTINATION: "
    "{deliver_to: …}}` there",
    "no_retries": "the destination is a stream, which reads no retries",
    "unknown_stream": "its source is none of the pipe's streams",
    "too_old": "Kafka would delete it at once: its event time is older than the stream's retention",
    "bad_source": "its header says no source; it is no letter of ours",
    "too_large": "the broker takes no record of this size",
}
"""By reason, for a person."""


class Aimed(NamedTuple):
    """The record to write, and to which topic."""

    topic: str
    record: Record


class Aim:
    """By the pipe file. to_stream: letters of transforms go to the stream that they came from.

    by_event_time: the backend's retention counts from event times.
    """

    def __init__(self, pipes: PipeFile, *, to_stream: bool, by_event_time: bool) -> None:
        self._pipes, self._to_stream, self._by_event_time = pipes, to_stream, by_event_time

    def aim(self, letter: DeadLetter, now_ms: int) -> Aimed | str:
        """The aim, or a reason of REMEDIES."""
        if letter.reason == "damaged_batch":
            return "damaged_batch"
        if not letter.record.value:
            return "no_payload"
        return self._to_source(letter, now_ms) if not letter.destination else self._to_destination(letter, now_ms)

    def _to_destination(self, letter: DeadLetter, now_ms: int) -> Aimed | str:
        """For this destination's lane alone: the others pass it over. It begins anew: no round and no attempt was made.

        A destination that the file has removed is the one that gets its events now.
        """
        choice = self._pipes.removed.get(lane_name(letter.pipe, letter.destination))
        lane = lane_name(letter.pipe, letter.destination) if choice is None else (choice.deliver_to or "")
        pipe_name, _, name = lane.partition("/")
        pipe = self._pipes.pipes.get(pipe_name)
        named = [] if pipe is None else [one for one in pipe.destinations if one.name == name]
        if not named:
            return "unknown_destination"
        if named[0].webhook is None:
            return "no_retries"
        original = strip(letter.record)
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
        return Aimed(retry_topic(pipe_name), record)

    def _to_source(self, letter: DeadLetter, now_ms: int) -> Aimed | str:
        if not self._to_stream:
            return "no_destination"
        try:
            topic = Position.parse(letter.source).topic
        except ValueError:
            return "bad_source"
        pipe = self._pipes.pipes.get(letter.pipe)
        if pipe is None or topic not in pipe.sources:
            return "unknown_stream"
        if self._by_event_time and event_time(letter.record) < now_ms - self._pipes.streams[topic].retention * 1000:
            return "too_old"
        return Aimed(topic, strip(letter.record))
