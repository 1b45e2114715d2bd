"""The story as the API and `--json` give it. Times are RFC 3339 in UTC, positions `topic:partition:offset`, offsets text."""

from typing import Literal

import msgspec

What = Literal[
    "attempt", "handed_over", "due", "parked", "dead", "redriven", "discarded", "dropped", "skipped", "filtered", "reset",
    "delivered", "reported",
]  # fmt: skip
"""attempt: a failed one. handed_over: to the retrier, after failed attempts. due: back in the retry topic of the pipe. skipped,
reset: an operator moved the group. filtered: the event is in other outputs of the transform than the destination's. reported: an
outcome whose record was not found."""

State = Literal[
    "delivered", "waiting", "parked", "dead", "redriven", "discarded", "dropped", "skipped", "filtered", "not_read",
    "not_passed", "unknown",
]  # fmt: skip
"""not_read: expel has not settled it yet. not_passed: the transform did not pass it on. unknown: nothing that is stored says."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """at: of `delivered` and `reported` the time of the report; of an attempt, when the receiver answered; of `redriven` that of
    the audit entry, which may be later than that of the next moment. text: for a person, with secrets masked. attempts: failed
    ones so far. detail: of the last failure. by: an operator."""

    at: str
    what: What
    text: str
    position: str | None = None
    attempts: int | None = None
    reason: str | None = None
    detail: str | None = None
    due: str | None = None
    by: str | None = None


class Lane(msgspec.Struct, frozen=True):
    """One destination. now: where the event is, for a person; position: the same as a place, where there is one."""

    destination: str
    state: State
    now: str
    position: str | None
    history: tuple[Moment, ...]


class Passage(msgspec.Struct, frozen=True):
    """The transform of one pipe. outcome: None: it is not known. at: of the report; with dead letters, of the newest moment.

    outputs: places in the output, 20 at most.
    """

    outcome: Literal["passed", "filtered", "dead"] | None
    now: str
    at: str | None
    outputs: tuple[str, ...]
    history: tuple[Moment, ...]


class PipeStory(msgspec.Struct, frozen=True):
    """transform: None: the pipe has none."""

    pipe: str
    transform: Passage | None
    destinations: tuple[Lane, ...]


class EventStory(msgspec.Struct, frozen=True, kw_only=True):
    """One event. Several may have the same id.

    stream, partition, offset: of its record; None: it is not stored any more, or outside of the searched range. made_by: the pipe
    whose transform made it; then `stream` is the output. copied_by: `pipe/destination` that may have written it to this stream.
    copy: 2 and more: a further record of the event above in this stream; redriven: when a redrive wrote it, if it is known.
    Reports do not tell copies apart: an outcome of one is in the story of each.
    origin: None: another program wrote it, and no report can name it. bytes: of the payload, which is not shown.
    """

    stream: str | None
    partition: int | None
    offset: str | None
    accepted: str | None
    event_time: str | None
    origin: str | None
    bytes: int | None
    made_by: str | None
    copied_by: tuple[str, ...]
    pipes: tuple[PipeStory, ...]
    copy: int = 1
    redriven: str | None = None


class SearchedTopic(msgspec.Struct, frozen=True):
    """complete: the whole range was read. back_to: else, everything that arrived after this was read; None: unknown."""

    topic: str
    complete: bool
    back_to: str | None


class Searched(msgspec.Struct, frozen=True, rename={"first": "from", "last": "until"}):
    """The search for the event's record by its id. records: that were read for the whole answer.

    reports_complete: whether the nodes' reports were read from before the event's acceptance on. They are kept for a day.
    """

    first: str
    last: str
    records: int
    complete: bool
    reports_complete: bool
    topics: tuple[SearchedTopic, ...]


class Story(msgspec.Struct, frozen=True):
    """Everything that is known about an id. events: in the order of their arrival; empty: none was found."""

    id: str
    events: tuple[EventStory, ...]
    searched: Searched
