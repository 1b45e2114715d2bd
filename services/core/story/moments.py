"""The moments of a story that records, reports and operators' acts show, each with what it means if nothing follows."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from services.core.audit import DISCARD, REDRIVE, Entry, covers, digest_of
from services.core.event import REDRIVEN, read_arrival
from services.core.pipe_file.topic_names import retry_topic
from services.core.security.masking import mask_text
from services.core.story.facts import source_of
from services.core.story.model import Moment, State
from services.core.story.search import EARLY_MS, Found
from services.core.times import format_time
from services.core.undelivered.dead_letter import DeadLetter
from services.core.undelivered.failed_attempts import PARTIAL, FailedAttempt
from services.core.undelivered.retry_state import state_of
from services.core.units import format_count

_RETRY = retry_topic("")


class DatedMoment(NamedTuple):
    """A moment, and what it means if nothing follows. at_ms: for the order. order: of moments with the same time."""

    at_ms: int
    order: int
    moment: Moment
    state: State
    now: str
    position: str | None


def when(dated: DatedMoment) -> tuple[int, int]:
    """The order of a story."""
    return dated.at_ms, dated.order


def mask_reason(reason: str, detail: str) -> str:
    return mask_text(f"{reason} ({detail})" if detail else reason)


def count_attempts(count: int) -> str:
    return format_count(count, "attempt")


def acts_on(found: Found, acts: Iterable[Entry]) -> Iterator[Entry]:
    """The entries that have this record, oldest first. Older ones are about a topic of the same name that was deleted."""
    (topic, partition, offset), first_ms = found.position, (read_arrival(found.record) or 0) - EARLY_MS
    for entry in acts:
        is_there = (entry.topic, entry.partition) == (topic, partition) and entry.at >= first_ms
        if is_there and covers(entry, offset, digest_of(found.record) if entry.digests else b""):
            yield entry


def _redriven_from(letter: Found, side: Iterable[Found]) -> list[int]:
    """The times of the first records that redrives of this dead letter caused, ms, oldest first. A redrive to the stream: of the
    dead letters of the event that it wrote there."""
    place, source, first_ms = str(letter.position).encode(), source_of(letter), letter.record.timestamp
    caused = []
    for found in side:
        state = state_of(found.record) if found.position.topic.endswith(_RETRY) else None
        is_retry = state is not None and not state.rounds and state.source == source
        if found.record.timestamp >= first_ms and (is_retry or found.record.header(REDRIVEN) == place):
            caused.append(found.record.timestamp)
    return sorted(caused)


def dead_letter_moments(found: Found, acts: Iterable[Entry], side: Iterable[Found]) -> Iterator[DatedMoment]:
    """A dead letter, and what operators did with it. side: with the records that redrives caused.

    A redrive is in the audit after its batch. So it may be noted after what it caused, and is told before that.
    """
    letter, at_ms, position = DeadLetter.of(found.position, found.record), found.record.timestamp, str(found.position)
    tried = (
        f" after {count_attempts(letter.attempts)}{' in all' if letter.attempts > 1 else ''}" if letter.attempts else ""
    )
    text = f"dead letter{tried}: {mask_reason(letter.reason, letter.detail)}"
    moment = Moment(
        at=format_time(at_ms),
        what="dead",
        text=text,
        position=position,
        attempts=letter.attempts or None,
        reason=letter.reason,
        detail=mask_text(letter.detail),
    )
    yield DatedMoment(at_ms, 3, moment, "dead", f"in the dead letters: {position}", position)
    caused = iter(_redriven_from(found, side))
    for entry in acts_on(found, acts):
        by, at = mask_text(entry.who), format_time(entry.at)
        if entry.action == REDRIVE:
            before_ms = min(entry.at, next(caused, entry.at))
            noted = ", noted after its batch" if before_ms < entry.at else ""
            done = Moment(at=at, what="redriven", text=f"redriven by {by}{noted}", position=position, by=by)
            yield DatedMoment(before_ms, 0, done, "redriven", f"redriven by {by}; what follows is not recorded", None)
        elif entry.action == DISCARD:
            done = Moment(at=at, what="discarded", text=f"discarded by {by}", position=position, by=by)
            yield DatedMoment(
                entry.at, 5, done, "discarded", f"a dead letter that {by} discarded: {position}", position
            )


def failed_attempt_moment(failed: FailedAttempt) -> DatedMoment:
    """A failed attempt. It says nothing about where the event is now."""
    at = format_time(failed.at_ms)
    if not failed.at_ms % 1000:  # of a busy destination only the second is known
        at = at.replace(".000Z", "Z")
    said = "the receiver's answer named several failures" if failed.reason == PARTIAL else failed.reason
    moment = Moment(at=at, what="attempt", text=f"attempt failed: {mask_text(said)}", reason=failed.reason)
    return DatedMoment(failed.at_ms, -1, moment, "unknown", "", None)
