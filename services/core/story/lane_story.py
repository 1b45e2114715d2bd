"""The story of one event at one destination: what happened in which order, and where the event is now."""

from collections import Counter
from collections.abc import Iterator, Sequence

from services.core.audit import DROP, RESET, SKIP
from services.core.event import OUTPUTS
from services.core.ledger.report import Outcome
from services.core.pipe_file.pipes import Destination, is_retried
from services.core.pipe_file.topic_names import (
    DELAYS_S,
    RETRY_IN,
    delay_topic,
    delivery_group,
    lane_name,
    parked_topic,
    retry_topic,
)
from services.core.security.masking import mask_text
from services.core.story.facts import DEAD, Event, Facts, failed_attempts_of, lane_of, source_of
from services.core.story.model import Lane, Moment, Passage, State
from services.core.story.moments import (
    DatedMoment,
    acts_on,
    count_attempts,
    dead_letter_moments,
    failed_attempt_moment,
    mask_reason,
    when,
)
from services.core.story.search import Found, time_of
from services.core.times import format_time
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.core.undelivered.retry_state import BREAKER_OPEN, RetryState, state_of

_ORDER = [RETRY_IN, *(delay_topic(seconds) for seconds in reversed(DELAYS_S))]
"""The direction in which the retrier moves events."""
SILENT = (
    "the {} has sent no report after that. It is starting, or does not run, or the ledger is off. Try: penstock status"
)
_WHY_NOTHING = {
    "filtered": "gets nothing of it: the transform dropped it",
    "dead": "gets nothing of it: the transform could not transform it",
}
"""By the outcome of the transform, for a destination."""
_PARKED = parked_topic("")
_RETRY = retry_topic("")


class LaneStory:
    """Of one destination. passage: through the transform of the pipe; None: it has none."""

    def __init__(
        self,
        pipe_name: str,
        destination: str,
        declared: Destination | None,
        event: Event,
        facts: Facts,
        passage: Passage | None,
    ) -> None:
        self._name, self._destination, self._declared = pipe_name, destination, declared
        self._event, self._facts, self._passage = event, facts, passage
        self._side = [found for found in event.side if lane_of(found, facts.renames) == (pipe_name, destination)]
        self._failed = {attempt for found in self._side for attempt in failed_attempts_of(found)}

    def make(self) -> Lane:
        """What happened, and where the event is now."""
        moments = [*self._waits(), *self._parked(), *self._deaths(), *self._drops(), *self._moves()]
        delivered = self._first("delivered", "expel")
        if delivered is not None:
            step = ("expel", self._name, self._destination)
            round_ = self._facts.reports.failed_before(self._event.run, step, delivered)
            failed = self._failed_until(delivered) + len(round_ or ())
            is_first = round_ is not None and not (round_ or self._side)
            text = self._delivered_text(failed, is_first=is_first)
            moment = Moment(at=format_time(delivered), what="delivered", text=text, attempts=failed or None)
            last = DatedMoment(delivered, 4, moment, "delivered", f"{text}, reported {moment.at}", None)
            self._failed.update(round_ or ())
            again = [one for one in moments if one.at_ms >= delivered and one.state in ("delivered", "not_read")]
            return self._lane(self._open_output(moments) or max([last, *again], key=when), [*moments, last])
        moments += self._reported(moments)
        if not moments:
            moments += self._filtered()
        if not moments:
            state, now, position = self._upstream()
            return Lane(self._destination, state, now, position, ())
        return self._lane(max(moments, key=when), moments)

    def _failed_until(self, at_ms: int) -> int:
        """The failed attempts that its records count, of all its inputs. After a dead letter a redrive begins to count again."""
        deaths: Counter[str] = Counter()
        failed: dict[tuple[str, int], int] = {}
        for found in sorted(self._side, key=lambda one: one.record.timestamp):
            if found.record.timestamp > at_ms:
                break
            source, state = source_of(found), state_of(found.record)
            attempts = 0 if state is None else state.attempts
            if is_dead := found.position.topic.endswith(DEAD):
                attempts = DeadLetter.of(found.position, found.record).attempts
            life = source, deaths[source]
            failed[life] = max(failed.get(life, 0), attempts)
            deaths[source] += is_dead
        return sum(failed.values())

    def _open_output(self, moments: Sequence[DatedMoment]) -> DatedMoment | None:
        """Of several outputs of the event, the newest that is not known to be delivered. Reports do not tell outputs apart."""
        if len(self._inputs()) < 2:
            return None
        reported = self._facts.reports.of(self._event.run, ("expel", self._name, self._destination))
        delivered = max(one.at_ms for one in reported if one.outcome == "delivered")
        ends = {one.moment.position: one for one in sorted(moments, key=when)}.values()
        return max((one for one in ends if one.state == "dead" or one.at_ms > delivered), key=when, default=None)

    def _lane(self, last: DatedMoment, moments: Sequence[DatedMoment]) -> Lane:
        history = tuple(one.moment for one in sorted([*moments, *map(failed_attempt_moment, self._failed)], key=when))
        return Lane(self._destination, last.state, last.now, last.position, history)

    def _first(self, outcome: Outcome, node: str) -> int | None:
        return self._facts.reports.first(self._event.run, (node, self._name, self._destination), outcome)

    def _delivered_text(self, failed: int, *, is_first: bool) -> str:
        stream = None if self._declared is None else self._declared.stream
        what = "delivered (2xx)" if stream is None else f"stored in {stream}"
        if (count := len(self._inputs())) > 1:
            what = f"one or more of its {count} outputs {what}"
        if failed:
            return f"{what}, after {count_attempts(failed)} that failed"
        return f"{what} at the first attempt" if is_first and stream is None and count < 2 else what

    def _waits(self) -> Iterator[DatedMoment]:
        """From the records of the retrier's topics and of `.retry`. The copies of one round are one moment."""
        before = 0
        rounds: dict[tuple[int, int], list[tuple[Found, RetryState]]] = {}
        for found in self._side:
            state = state_of(found.record)
            if state is not None and not found.position.topic.endswith((DEAD, _PARKED)):
                rounds.setdefault((state.rounds, state.due), []).append((found, state))
        for copies in rounds.values():
            copies.sort(key=lambda one: (one[0].record.timestamp, _rank(one[0].position.topic)))
        for copies in sorted(rounds.values(), key=lambda copies: copies[0][0].record.timestamp):
            first, state = copies[0]
            last = copies[-1][0]
            if state.attempts or first.position.topic == RETRY_IN:
                yield self._handed_over(first, last, state, before)
            before = state.attempts  # 0 in what a redrive wrote
            if last.position.topic.endswith(_RETRY):
                yield self._back(last, state)

    def _handed_over(self, first: Found, last: Found, state: RetryState, before: int) -> DatedMoment:
        """before: the failed attempts of earlier rounds, as far as they are known. A redrive begins to count again."""
        at_ms, due = first.record.timestamp, format_time(state.due)
        is_open = state.reason == BREAKER_OPEN
        reason = "the circuit breaker was open" if is_open else mask_reason(state.reason, state.detail)
        text = f"{_describe_attempts(state, before)} {reason}; next due {due}"
        moment = Moment(
            at=format_time(at_ms),
            what="handed_over",
            text=text,
            position=str(first.position),
            attempts=state.attempts or None,
            reason=state.reason,
            detail=mask_text(state.detail),
            due=due,
        )
        since = format_time(state.first_failure)
        why = reason if is_open else f"last failure {mask_text(state.reason)}"
        now = f"waits for another attempt since {since}, next due {due}; {why}"
        return DatedMoment(at_ms, 0, moment, "waiting", now, str(last.position))

    def _back(self, found: Found, state: RetryState) -> DatedMoment:
        at_ms, position = found.record.timestamp, str(found.position)
        text = "back in the retry topic"
        moment = Moment(at=format_time(at_ms), what="due", text=text, position=position, due=format_time(state.due))
        waiting, now = self._progress(found, f"due again since {format_time(at_ms)}")
        return DatedMoment(at_ms, 1, moment, "waiting" if waiting else "unknown", now, position)

    def _parked(self) -> Iterator[DatedMoment]:
        for found in self._side:
            if not found.position.topic.endswith(_PARKED):
                continue
            at_ms, state = found.record.timestamp, state_of(found.record)
            attempts, position = state.attempts if state is not None else 0, str(found.position)
            tried = f" after {count_attempts(attempts)}" if attempts else ""
            text = f"parked{tried}: the destination was paused"
            moment = Moment(
                at=format_time(at_ms), what="parked", text=text, position=position, attempts=attempts or None
            )
            if lane_name(self._name, self._destination) in self._facts.paused:
                lane = lane_name(self._name, self._destination)
                now = f"parked until the destination is resumed: penstock destination resume {lane}"
                yield DatedMoment(at_ms, 2, moment, "parked", now, position)
            else:
                waiting, now = self._progress(
                    found, f"parked since {format_time(at_ms)}, and the destination is resumed"
                )
                yield DatedMoment(at_ms, 2, moment, "parked" if waiting else "unknown", now, position)

    def _deaths(self) -> Iterator[DatedMoment]:
        for found in self._side:
            if found.position.topic.endswith(DEAD):
                yield from dead_letter_moments(found, self._facts.acts, self._side)

    def _drops(self) -> Iterator[DatedMoment]:
        for found in self._side:
            for entry in acts_on(found, self._facts.acts):
                if entry.action == DROP:
                    text = mask_text(f"dropped by the pipe file: {entry.filters.get('because', '')}")
                    by = mask_text(entry.who)
                    moment = Moment(
                        at=format_time(entry.at), what="dropped", text=text, position=str(found.position), by=by
                    )
                    yield DatedMoment(entry.at, 6, moment, "dropped", text, None)

    def _moves(self) -> Iterator[DatedMoment]:
        """Operators who moved the group over the event, forward or back."""
        for found in self._inputs():
            for entry in acts_on(found, self._facts.acts):
                lane = entry.filters.get("destination", "")
                if self._facts.renames.get(lane, lane) != lane_name(self._name, self._destination):
                    continue
                by, because, position = mask_text(entry.who), entry.filters.get("because", ""), str(found.position)
                if entry.action == SKIP:
                    text = mask_text(f"skipped by {by}: {because}")
                    moment = Moment(at=format_time(entry.at), what="skipped", text=text, position=position, by=by)
                    yield DatedMoment(entry.at, 7, moment, "skipped", text, position)
                elif entry.action == RESET:
                    text = f"to be delivered again: {by} moved the offsets back"
                    moment = Moment(at=format_time(entry.at), what="reset", text=text, position=position, by=by)
                    state, now, there = self._upstream()
                    yield DatedMoment(entry.at, 7, moment, state, f"after the reset: {now}", there)
                    yield from self._delivered_again(entry.at)

    def _delivered_again(self, since_ms: int) -> Iterator[DatedMoment]:
        """The first delivery after a reset. No member ran at its time, so everything from before it was reported before."""
        step = ("expel", self._name, self._destination)
        if (at_ms := self._facts.reports.first_since(self._event.run, step, "delivered", since_ms)) is not None:
            at, text = format_time(at_ms), "delivered again (2xx), after the reset"
            now = f"{text}, reported {at}"
            self._failed.update(self._facts.reports.failed_before(self._event.run, step, at_ms) or ())
            yield DatedMoment(at_ms, 8, Moment(at=at, what="delivered", text=text), "delivered", now, None)

    def _inputs(self) -> list[Found]:
        """The records that the lane reads."""
        if self._passage is not None:
            return self._event.outputs.get(self._name, [])
        return [] if self._event.record is None else [self._event.record]

    def _reported(self, moments: Sequence[DatedMoment]) -> Iterator[DatedMoment]:
        """Outcomes whose records were not found."""
        found = {one.moment.what for one in moments}
        lost: tuple[tuple[Outcome, str, str, State], ...] = (
            ("retrying", "expel", "handed_over", "waiting"),
            ("parked", "expel", "parked", "parked"),
            ("dead", "expel", "dead", "dead"),
            ("dead", "retrier", "dead", "dead"),
            ("skipped", "expel", "skipped", "skipped"),
        )
        for outcome, node, what, state in lost:
            at_ms = self._first(outcome, node)
            if at_ms is not None and what not in found and not (what == "handed_over" and "due" in found):
                text = f"reported as {outcome}; the record was not found"
                moment = Moment(at=format_time(at_ms), what="reported", text=text)
                yield DatedMoment(at_ms, 0, moment, state, text, None)

    def _filtered(self) -> Iterator[DatedMoment]:
        """The event is in other outputs of the transform than the destination's."""
        if (at_ms := self._first("filtered", "expel")) is not None:
            text = f"not for this destination: {self._outputs_text()}"
            yield DatedMoment(
                at_ms, 0, Moment(at=format_time(at_ms), what="filtered", text=text), "filtered", text, None
            )

    def _outputs_text(self) -> str:
        values = [value for found in self._inputs() if (value := found.record.header(OUTPUTS)) is not None]
        outputs = sorted({name for value in values for name in value.decode(errors="replace").split(",") if name})
        if not outputs:
            return "the transform did not give it to its output"
        return f"the transform gave it to {', '.join(outputs)}"

    def _progress(self, found: Found, since: str) -> tuple[bool, str]:
        """Whether the lane's group has this record still before it, and where the event is."""
        before = self._before(found.position)
        if before is None:
            return True, f"{since}; expel has not read it yet"
        if before < 0:
            return False, f"{since}; expel has read it, and its outcome was not found in the reports"
        return True, f"{since}; {self._behind(before, found.position.topic)}"

    def _behind(self, before: int, topic: str) -> str:
        return _behind(before, topic, contiguous=self._facts.contiguous(topic))

    def _before(self, position: Position) -> int | None:
        """The records before it that the lane's group has not settled; negative: it has settled this one; None: unknown."""
        group = delivery_group(self._name, self._destination)
        committed = self._facts.committed.get((group, position.topic), {}).get(position.partition)
        return None if committed is None else position.offset - committed - 1

    def _upstream(self) -> tuple[State, str, str | None]:
        """Where an event is of which the lane has left no trace."""
        passage = self._passage
        if passage is not None and passage.outcome != "passed":
            if passage.outcome == "filtered" and self._facts.joins_events(self._name):
                return "not_passed", "gets the results, which name no event", None
            return "not_passed", _WHY_NOTHING.get(passage.outcome or "", "has not passed the transform yet"), None
        read = self._inputs()
        if not read:
            return "unknown", "nothing is stored about it", None
        before = self._before(read[0].position)
        position = str(read[0].position)
        if before is None:
            late = "; the destination begins at the newest event" if self._starts_late() else ""
            return "not_read", f"not read yet: its group has settled nothing in this partition{late}", position
        if before >= 0:
            behind = self._behind(before, read[0].position.topic)
            return "not_read", f"not delivered yet; {behind}{self._attempts_later()}", position
        return "unknown", self._why_unknown(), None

    def _attempts_later(self) -> str:
        """Of a destination whose events wait in their stream: nothing is written about an attempt before the outcome."""
        if self._declared is None or self._declared.webhook is None or is_retried(self._declared):
            return ""
        return (
            "; this destination's attempts are recorded with the outcome: until then, penstock status counts them "
            "(retried), and penstock doctor says why they fail"
        )

    def _why_unknown(self) -> str:
        """Of an event that the lane's group has settled."""
        if not self._facts.has_all:
            return "read; the search ended before it found more"
        if self._event.run is None and self._event.made_by is not None:
            return (
                "settled, and neither waiting nor dead: it was delivered, or skipped by an operator. No report names it, "
                "because it is a result of several events"
            )
        if not self._facts.reports.complete:
            return "read, and neither waiting nor dead; reports of deliveries are kept for a day"
        if self._event.run is None:
            return "read, and neither waiting nor dead; without an origin no report can name it"
        if self._first("unknown", "expel") is not None:
            return (
                "settled: a newer Penstock reported an outcome that this one does not know. Try: penstock event there"
            )
        if ("expel", self._name, self._destination) not in self._facts.reports.heard:
            return f"read, and neither waiting nor dead; {SILENT.format('destination')}"
        if self._starts_late() and self._is_before_start():
            return "before this destination's start (start: latest), so it is not sent to it"
        return "its group is past it, and no report has an outcome: it is missing. Try: penstock loss explain"

    def _is_before_start(self) -> bool:
        """Whether the destination made its first report after the event was stored. One that runs reports all the time."""
        first_ms = self._facts.reports.first_ms["expel", self._name, self._destination]
        return any(first_ms >= time_of(found.record) for found in self._inputs())

    def _starts_late(self) -> bool:
        return self._declared is not None and self._declared.start == "latest"


def _behind(before: int, topic: str, *, contiguous: bool) -> str:
    if not contiguous:
        return f"its group has not reached it in {topic}"
    if not before:
        return f"it is the first event of {topic} that is not settled: it is tried now, or waits for its next attempt"
    return f"1 event of {topic} is before it" if before == 1 else f"{before} events of {topic} are before it"


def _rank(topic: str) -> int:
    return _ORDER.index(topic) if topic in _ORDER else len(_ORDER)


def _describe_attempts(state: RetryState, before: int) -> str:
    """The attempts of one round, before the reason of the last failure. before: of the rounds before it, if they are known."""
    if not state.attempts:
        return "no attempt:"
    if state.reason == BREAKER_OPEN:
        tried = state.attempts - before if before or state.rounds == 1 else 0
        if tried > 0:
            return f"{count_attempts(tried)} failed in this round ({state.attempts} in all), and then"
        return f"no attempt in this round ({state.attempts} failed before):"
    if not 0 < before < state.attempts:
        return f"{count_attempts(state.attempts)} failed, the last with"
    return f"{state.attempts - before} more failed ({count_attempts(state.attempts)} in all), the last with"
