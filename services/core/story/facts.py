"""The facts about the events with one id: their records, the reports, the groups' positions, the pauses and the audit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.core.audit import Entry
from services.core.control.pauses import Pause
from services.core.event import ORIGIN, Origin
from services.core.ledger.report import MAX_NUMBER
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import dead_letter_topic
from services.core.story.reports import Reports, present_lane
from services.core.story.search import Found
from services.core.undelivered import dead_letter, retry_state
from services.core.undelivered.dead_letter import DeadLetter
from services.core.undelivered.failed_attempts import FailedAttempt, parse_attempts
from services.core.undelivered.retry_state import state_of

DEAD = dead_letter_topic("")


@dataclass(slots=True)
class Facts:
    """Of all events with one id.

    committed: by group and topic, the last processed offset of each partition; of streams and outputs, read before the reports.
    renames: `pipes.renames_of`. contiguous: `Broker.is_contiguous`. has_all: the topics of retries, parked
    events and dead letters were read in full.
    """

    pipes: PipeFile
    reports: Reports
    committed: Mapping[tuple[str, str], Mapping[int, int]]
    renames: Mapping[str, str]
    paused: Mapping[str, Pause] = field(default_factory=dict)
    acts: Sequence[Entry] = ()
    contiguous: Callable[[str], bool] = lambda _topic: True
    has_all: bool = True

    def joins_events(self, pipe: str) -> bool:
        """Whether the results of the pipe's transform may be made of several events: that needs a watermark."""
        found = self.pipes.pipes.get(pipe)
        return found is not None and found.transform is not None and found.transform.watermark is not None


@dataclass(slots=True)
class Event:
    """One event. record: in a stream; or, made_by set, in the output of that pipe's transform. outputs: by pipe.

    side: its records in the topics of retries, parked events and dead letters.
    """

    record: Found | None
    origin: bytes | None
    made_by: str | None = None
    outputs: dict[str, list[Found]] = field(default_factory=dict)
    side: list[Found] = field(default_factory=list)

    @property
    def run(self) -> Origin | None:
        """None without an origin, or where another program wrote something else."""
        origin = Origin.read(self.origin)
        return origin if origin is not None and 0 <= origin.sequence < MAX_NUMBER else None

    def owns(self, found: Found) -> bool:
        """Whether a record of a side topic is of this event: by origin, else by the place of the record that it names."""
        origin = found.record.header(ORIGIN)
        if origin is not None or self.origin is not None:
            return origin == self.origin
        places = [self.record, *(one for outputs in self.outputs.values() for one in outputs)]
        return source_of(found) in {str(one.position) for one in places if one is not None}


def source_of(found: Found) -> str:
    """The place of the original record that a record of a side topic names; "" without one."""
    if found.position.topic.endswith(DEAD):
        return DeadLetter.of(found.position, found.record).source
    state = state_of(found.record)
    return "" if state is None else state.source


def failed_attempts_of(found: Found) -> list[FailedAttempt]:
    """Of a record of a side topic; at most the newest `failed_attempts.MAX_KEPT`."""
    is_dead = found.position.topic.endswith(DEAD)
    return parse_attempts(found.record.header(dead_letter.FAILURES if is_dead else retry_state.FAILURES))


def lane_of(found: Found, renames: Mapping[str, str]) -> tuple[str, str]:
    """The pipe and the destination that a record of a side topic names, by their present names."""
    if found.position.topic.endswith(DEAD):
        letter = DeadLetter.of(found.position, found.record)
        return present_lane(letter.pipe, letter.destination, renames)
    state = state_of(found.record)
    return ("", "") if state is None else present_lane(state.pipe, state.destination, renames)
