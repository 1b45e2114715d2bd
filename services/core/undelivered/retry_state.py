"""The state of an event that waits for another round of attempts: headers in front of its own.

Expel wraps an event that it hands over, the global retrier moves it from topic to topic, expel unwraps it. The record's
timestamp is the time at which it was written to its topic, because Kafka's retention counts from it. The event time is a header.
"""

import re
from dataclasses import dataclass

from services.core.broker.record import Headers, Record, TopicPartition
from services.core.event import MAX_MILLIS_DIGITS
from services.core.pipe_file.pipes import NAME_PATTERN

PREFIX = "penstock_retry_"
BREAKER_OPEN = "breaker_open"
"""The reason of an event that was handed over without an attempt."""
FAILURES = PREFIX + "failures"
"""The failed attempts (`failed_attempts.pack_attempts`); missing without any, and in records of earlier versions."""
MAX_REASON, MAX_DETAIL = 100, 1024
"""Bytes. `wrap` cuts longer texts, `read_state` refuses them."""

_NAME = re.compile(NAME_PATTERN)
_COUNT = re.compile(r"\d{1,9}")
_MS = rf"-?\d{{1,{MAX_MILLIS_DIGITS}}}"
_MILLIS = re.compile(_MS)
_SOURCE = re.compile(r"([A-Za-z0-9._-]{1,249}):(\d{1,9}):(\d{1,64})")
"""64 digits: a Kinesis sequence number has 56."""

_TEXTS = ("reason", "detail")
_BEFORE_TEXTS = ("pipe", "destination", "attempts", "rounds", "first_failure", "due")
_PARTS = tuple(PREFIX + part for part in (*_BEFORE_TEXTS, *_TEXTS, "source", "time"))
"""The headers' names, in the order of `wrap`."""
_REASON, _DETAIL = (_PARTS.index(PREFIX + part) for part in _TEXTS)
_STATE = re.compile(
    r"({name})\0({name})\0\d{{1,9}}\0\d{{1,9}}\0{ms}\0({ms})\0\0\0[A-Za-z0-9._-]{{1,249}}:\d{{1,9}}:\d{{1,64}}\0{ms}".format(
        name=NAME_PATTERN.strip("^$"), ms=_MS
    ).encode()
)
"""The values of all headers, joined by NUL, with the two texts left empty."""


class BadRetryRecord(ValueError):
    """A header of a retry record is missing or wrong. Try: nothing but expel may write to penstock.retry-in."""

    def __init__(self, header: str, problem: str) -> None:
        super().__init__(f"header {header} {problem}")
        self.header = header


@dataclass(frozen=True, slots=True)
class RetryState:
    """attempts: requests made so far, in all rounds. rounds: how often the event was handed over.

    first_failure, due, time: ms since the epoch; due: of the next attempt; time: of the event (the record's timestamp before
    `wrap`). reason: a stable word as in dead letters; detail: for a person. source: `topic:partition:offset` of the original
    record.
    """

    pipe: str
    destination: str
    attempts: int
    rounds: int
    first_failure: int
    due: int
    reason: str
    detail: str
    source: str
    time: int

    def position(self) -> tuple[TopicPartition, int]:
        """The partition and the offset of `source`."""
        topic, partition, offset = self.source.rsplit(":", 2)
        return TopicPartition(topic, int(partition)), int(offset)


def wrap(record: Record, state: RetryState, now_ms: int, failures: bytes | None = None) -> Record:
    """The record to hand over at `now_ms`: the state is in front of its own headers and replaces an earlier state.

    failures: the value of FAILURES.
    """
    added = (
        (PREFIX + "pipe", state.pipe.encode()),
        (PREFIX + "destination", state.destination.encode()),
        (PREFIX + "attempts", b"%d" % state.attempts),
        (PREFIX + "rounds", b"%d" % state.rounds),
        (PREFIX + "first_failure", b"%d" % state.first_failure),
        (PREFIX + "due", b"%d" % state.due),
        (PREFIX + "reason", _cut(state.reason, MAX_REASON)),
        (PREFIX + "detail", _cut(state.detail, MAX_DETAIL)),
        (PREFIX + "source", state.source.encode()),
        (PREFIX + "time", b"%d" % state.time),
        *(((FAILURES, failures),) if failures else ()),
    )
    return Record(record.key, record.value, now_ms, added + own_headers(record))


def read_state(record: Record) -> RetryState:
    """The state of a wrapped record. Checks every header. Raises BadRetryRecord."""
    found = {name: value for name, value in reversed(record.headers) if name.startswith(PREFIX)}
    return RetryState(
        pipe=_match(found, "pipe", _NAME),
        destination=_match(found, "destination", _NAME),
        attempts=int(_match(found, "attempts", _COUNT)),
        rounds=int(_match(found, "rounds", _COUNT)),
        first_failure=int(_match(found, "first_failure", _MILLIS)),
        due=int(_match(found, "due", _MILLIS)),
        reason=_text(found, "reason", MAX_REASON),
        detail=_text(found, "detail", MAX_DETAIL),
        source=_match(found, "source", _SOURCE),
        time=int(_match(found, "time", _MILLIS)),
    )


def read_wait(record: Record) -> tuple[str, str, int]:
    """(pipe, destination, due) of a wrapped record. Checks as `read_state`, in a third of the time. Raises BadRetryRecord."""
    head = record.headers[: len(_PARTS)]
    values = [value for _, value in head]
    if tuple(name for name, _ in head) == _PARTS:
        reason, detail = values[_REASON], values[_DETAIL]
        values[_REASON] = values[_DETAIL] = b""
        form = _STATE.fullmatch(b"\0".join(values))
        if form and len(reason) <= MAX_REASON and len(detail) <= MAX_DETAIL and _is_text(reason) and _is_text(detail):
            return form[1].decode(), form[2].decode(), int(form[3])
    state = read_state(record)
    return state.pipe, state.destination, state.due


def unwrap(record: Record) -> tuple[Record, RetryState]:
    """The record before `wrap`, with its event time, and its state. Raises BadRetryRecord."""
    state = read_state(record)
    return Record(record.key, record.value, state.time, own_headers(record)), state


def state_of(record: Record) -> RetryState | None:
    """The state of a wrapped record; None when it has none or an invalid one."""
    if not record.headers or not record.headers[0][0].startswith(PREFIX):
        return None
    try:
        return read_state(record)
    except BadRetryRecord:
        return None


def state_for(record: Record, pipe: str, destination: str) -> RetryState | None:
    """As `state_of`, for records of this destination. None for others, after a quick check."""
    if record.header(PREFIX + "destination") != destination.encode():
        return None
    state = state_of(record)
    return state if state is not None and state.pipe == pipe else None


def own_headers(record: Record) -> Headers:
    """The headers that the record had before `wrap`."""
    return tuple(header for header in record.headers if not header[0].startswith(PREFIX))


def event_hash(record: Record) -> int:
    """A hash of the event, wrapped or not; the same within one process only.

    `RetryState.source` does not identify an event: a topic that was created again has other events at the same offsets.
    """
    return hash((record.key, record.value, own_headers(record)))


def _cut(text: str, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, with whole characters. Characters that cannot be encoded become question marks."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore").encode()


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(found: dict[str, bytes], name: str, limit: int) -> str:
    value = found.get(PREFIX + name)
    if value is None:
        raise BadRetryRecord(PREFIX + name, "is missing")
    if len(value) > limit:
        raise BadRetryRecord(PREFIX + name, f"has {len(value)} bytes; {limit} are allowed")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRetryRecord(PREFIX + name, "is not UTF-8") from None


def _match(found: dict[str, bytes], name: str, pattern: re.Pattern[str]) -> str:
    text = _text(found, name, 400)
    if not pattern.fullmatch(text) or not text.isascii():
        raise BadRetryRecord(PREFIX + name, "is not of the right form")
    return text
