"""A lane and the global retrier: what is handed over and when, what comes back, and what the breaker turns away."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.broker.errors import RecordTooLarge, Unavailable
from services.core.broker.record import Record, TopicPartition
from services.core.http.failure import Failure
from services.core.undelivered import dead_letter
from services.core.undelivered.failed_attempts import FailedAttempt, pack_attempts, parse_attempts
from services.core.undelivered.retry_state import BREAKER_OPEN, FAILURES, RetryState, unwrap, wrap
from services.expel import circuit_breaker, throttle
from services.expel.delivery import Delivery, OffsetRun
from services.expel.retry_policy import JITTER, Outcome, RetryLimits, RetrySchedule
from services.expel.side_topics import RetryWriter
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import BUSY, WRONG, make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import DEAD, P0, names, run_lane

RETRY_IN, BACK = TopicPartition("penstock.retry-in", 0), TopicPartition("late.retry", 0)
TOPICS = ("s", "late.retry")
WITH_RETRY_TOPIC = {
    "retry": RetryLimits(3, 0.001, 0.002, uses_retry_topic=True),
    "schedule": (5.0, 300.0),
    "topics": TOPICS,
}


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker({"s": 1, "late.dead": 1, "late.retry": 1, "penstock.retry-in": 1})


def returned(number: int, destination: str = "hook", failures: bytes = b"", **changes: object) -> Record:
    """An event as the retrier gives it back."""
    state = RetryState("late", destination, 3, 1, 77, 88, "http_503", "busy", f"s:0:{number}", 0)
    return wrap(make_record(number), replace(state, **changes), 99, failures)  # type: ignore[arg-type]


def settled(broker: FakeBroker, source: TopicPartition) -> int:
    return broker.committed.get(("late.hook", source), -1)


def states(records: Sequence[Record]) -> list[RetryState]:
    return [unwrap(record)[1] for record in records]


async def test_what_stays_recoverable_is_handed_over(broker: FakeBroker) -> None:
    """If it fails, an hour's outage ends in dead letters, or an event is committed before anybody else has it."""
    records = [make_record(number) for number in range(5)]
    async with run_lane(records, lambda _d: BUSY, broker=broker, **WITH_RETRY_TOPIC):  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, P0) == 4)
    events, found = zip(*[unwrap(record) for record in broker.stored[RETRY_IN]], strict=True)
    assert sorted(events, key=str) == sorted(records, key=str)
    assert not broker.stored[DEAD]
    for state in found:
        assert (state.pipe, state.destination, state.attempts, state.rounds) == ("late", "hook", 3, 1)
        assert (state.reason, state.detail) == ("http_503", "busy")
        handed_over = next(r.timestamp for r in broker.stored[RETRY_IN] if unwrap(r)[1] == state)
        assert 5000 * (1 - JITTER) - 1 <= state.due - handed_over <= 5000 * (1 + JITTER)
        assert 0 < state.first_failure <= handed_over
    assert sorted(state.source for state in found) == [f"s:0:{n}" for n in range(5)]


async def test_the_receivers_wish_is_the_least_wait(broker: FakeBroker) -> None:
    """If it fails, a receiver that asks for an hour is asked again after five seconds."""
    wish = Failure("http_503", "later", recoverable=True, retry_after=3600.0)
    limits = RetryLimits(1, 0.001, 0.002, uses_retry_topic=True)
    async with run_lane([make_record(0)], lambda _d: wish, broker=broker, **(WITH_RETRY_TOPIC | {"retry": limits})):  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, P0) == 0)
    (record,) = broker.stored[RETRY_IN]
    assert unwrap(record)[1].due - record.timestamp >= 3_600_000


async def test_nothing_is_settled_while_retry_in_is_away(broker: FakeBroker) -> None:
    """If it fails, an outage of the retry streams drops events, or needs a restart (fault 12)."""
    broker.append_error = Unavailable("away")
    async with run_lane([make_record(0)], lambda _d: BUSY, broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: len(running.sender.sent) == 3)
        await asyncio.sleep(0.3)
        assert settled(broker, P0) == -1
        broker.append_error = None
        await wait_until(lambda: settled(broker, P0) == 0)
    assert len(broker.stored[RETRY_IN]) == 1


async def test_what_comes_back_is_delivered_as_it_was(broker: FakeBroker) -> None:
    """If it fails, a retried event arrives altered or never, or one for another destination is sent here."""
    broker.stored[BACK] += [returned(0), returned(1, "other"), returned(2), Record(None, b"{}", 0), returned(3)]
    seen: list[Record] = []

    def answer(delivery: Delivery) -> Outcome:
        seen.extend(delivery.records)
        return None

    async with run_lane([], answer, broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, BACK) == 4)
    assert running.sender.taken == ["e0", "e2", "e3"]
    assert {record.timestamp for record in seen} == {0}
    (letter,) = broker.stored[DEAD]
    assert letter.header(dead_letter.REASON) == b"bad_retry_record"


async def test_duplicates_are_sent_once_and_redeliveries_again(broker: FakeBroker) -> None:
    """If it fails, a retrier's crash doubles every later attempt, or a rebalance makes events pass for done."""
    broker.stored[BACK] += [returned(0), returned(0), returned(0, rounds=2)]
    async with run_lane([], broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, BACK) == 2)
        assert running.sender.taken == ["e0", "e0"]
        consumer = broker.consumers[0]
        await consumer.revoke(BACK)
        consumer.positions[BACK] = 0
        consumer.resume([BACK])
        await wait_until(lambda: len(running.sender.taken) == 4)


def test_a_last_round_that_found_an_open_breaker_is_followed_by_one_more() -> None:
    """If it fails, an event becomes a dead letter although its last round tried nothing; or it circles for ever."""
    schedule, untried = RetrySchedule([5.0, 60.0]), Failure(BREAKER_OPEN, "", recoverable=True, retry_after=90.0)
    assert [schedule.next_wait(rounds, untried) for rounds in (0, 1)] == [90.0, 90.0], "not before the next test"
    assert 4.0 <= (schedule.next_wait(0, BUSY) or 0) <= 6.0
    assert schedule.next_wait(2, untried) == 90.0
    assert schedule.next_wait(3, untried) is None
    assert schedule.next_wait(2, BUSY) is None


def _untried(delivery: Delivery, schedule: Sequence[float]) -> tuple[list[RetryState], list[Failure]]:
    """What becomes of an event that was not tried, because the breaker was open."""
    failure = Failure(BREAKER_OPEN, "not tried", recoverable=True, retry_after=90.0)
    records, over = RetryWriter("late", "hook", RetrySchedule(schedule)).make(delivery, {0: failure}, 1000)
    return [unwrap(record.record)[1] for record in records], list(over.values())


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (("http_503", "busy"), (), "http_503: busy"),
        (("breaker_open", "not tried; last failure: timeout: 30 s"), (), "timeout: 30 s"),
        (("http_503", "busy"), (FailedAttempt(70, "connection"),), "connection"),
        (("http_503", "busy"), (FailedAttempt(70, "http_503"),), "http_503: busy"),
    ],
)
def test_an_untried_round_does_not_hide_the_last_failure(
    before: tuple[str, str], now: tuple[FailedAttempt, ...], text: str
) -> None:
    """If it fails, a dead letter of an outage says only that it was not tried, and nobody learns why."""
    event = returned(7, attempts=3, rounds=1, reason=before[0], detail=before[1])
    delivery = Delivery([b""], [b"e"], [1], [event], [OffsetRun(BACK, [0], 0)], attempts=len(now), failures=now)
    [state], [] = _untried(delivery, [5.0, 60.0])
    assert (state.reason, state.detail) == (BREAKER_OPEN, f"not tried; last failure: {text}")
    [], [letter] = _untried(delivery, [])
    assert letter.detail == f"{text}; the last round was not tried, because the circuit breaker was open"


async def test_counts_go_on_and_end_in_dead_letters(broker: FakeBroker) -> None:
    """If it fails, events circle for ever, or their letters tell a wrong story."""
    known = [FailedAttempt(70, "timeout")]
    broker.stored[BACK] += [
        returned(7, attempts=3, rounds=1),
        returned(8, failures=pack_attempts(known), attempts=6, rounds=2),
    ]
    async with run_lane([], lambda _d: BUSY, broker=broker, **WITH_RETRY_TOPIC):  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, BACK) == 1)
    (state,) = states(broker.stored[RETRY_IN])
    assert (state.attempts, state.rounds, state.first_failure, state.source) == (6, 2, 77, "s:0:7")
    (letter,) = broker.stored[DEAD]
    assert letter.header(dead_letter.REASON) == b"window_over"
    assert letter.header(dead_letter.DETAIL) == b"http_503: busy"
    assert letter.header(dead_letter.ATTEMPTS) == b"9"
    assert letter.header(dead_letter.FIRST_FAILURE) == b"77"
    assert letter.header(dead_letter.SOURCE) == b"s:0:8"
    assert dead_letter.strip(letter) == make_record(8)
    failed = parse_attempts(letter.header(dead_letter.FAILURES))
    assert failed[0] == known[0]
    assert [one.reason for one in failed[1:]] == ["http_503"] * 3
    assert failed[1].at_ms <= failed[2].at_ms <= failed[3].at_ms <= letter.timestamp
    (waiting,) = broker.stored[RETRY_IN]
    assert [one.reason for one in parse_attempts(waiting.header(FAILURES))] == ["http_503"] * 3


async def test_what_is_refused_for_good_is_not_tried_for_days(broker: FakeBroker) -> None:
    """If it fails, a 404 goes around for 75 hours."""
    broker.stored[BACK] += [returned(0)]
    async with run_lane([make_record(1)], lambda _d: WRONG, broker=broker, **WITH_RETRY_TOPIC):  # type: ignore[arg-type]
        await wait_until(lambda: (settled(broker, BACK), settled(broker, P0)) == (0, 0))
    assert not broker.stored[RETRY_IN]
    assert len(broker.stored[DEAD]) == 2


async def test_too_large_with_its_state_is_a_dead_letter(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an event just below the broker's limit blocks its lane, or loses its payload in retry-in."""
    append = broker.append

    async def refuse(topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> object:
        if topic == RETRY_IN.topic:
            raise RecordTooLarge("larger than a batch may be")
        return await append(topic, partition, records, timeout=timeout)

    monkeypatch.setattr(broker, "append", refuse)
    async with run_lane([make_record(0)], lambda _d: BUSY, broker=broker, **WITH_RETRY_TOPIC):  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, P0) == 0)
    (letter,) = broker.stored[DEAD]
    assert letter.header(dead_letter.REASON) == b"too_large"
    assert letter.header(dead_letter.ATTEMPTS) == b"3"
    assert dead_letter.strip(letter) == make_record(0)


async def test_a_dead_letter_names_the_definition_of_its_pipe(broker: FakeBroker) -> None:
    """Broken: nobody can tell whether a letter is from before or after the pipe was changed."""
    async with run_lane([make_record(0)], lambda _d: WRONG, broker=broker, version="0123456789ab"):
        await wait_until(lambda: settled(broker, P0) == 0)
    (letter,) = broker.stored[DEAD]
    assert letter.header(dead_letter.VERSION) == b"0123456789ab"
    assert dead_letter.strip(letter) == make_record(0)


async def test_an_open_breaker_hands_over_without_an_attempt(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a dead destination is asked for every event, or is never asked again when it is back."""
    monkeypatch.setattr(circuit_breaker, "FIRST_WAIT_S", 0.2)
    monkeypatch.setattr(circuit_breaker, "MAX_WAIT_S", 0.2)
    monkeypatch.setattr(throttle, "SHED_AFTER_S", 0.0)
    is_back = False
    records = [make_record(number) for number in range(500)]
    async with run_lane(records, lambda _d: None if is_back else BUSY, broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, P0) == 499)
        untried = [state for state in states(broker.stored[RETRY_IN]) if state.attempts == 0]
        assert len(running.sender.sent) < 40
        assert len(untried) > 200
        assert {state.reason for state in untried} == {"breaker_open"}
        is_back = True
        number = 500
        while not running.sender.taken:
            broker.stored[P0].append(make_record(number))
            number += 1
            await asyncio.sleep(0.05)
    assert len(broker.stored[RETRY_IN]) + len(running.sender.taken) == number
    assert not broker.stored[DEAD]


async def test_keys_in_order_wait_where_they_are(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an outage changes the order of a key, or an ordered destination loses what it cannot take for a while."""
    monkeypatch.setattr(circuit_breaker, "FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(circuit_breaker, "MAX_WAIT_S", 0.1)
    attempts = 0

    def answer(_delivery: Delivery) -> Outcome:
        nonlocal attempts
        attempts += 1
        return BUSY if attempts < 15 else None

    records = [make_record(number, key=b"one") for number in range(30)]
    limits = RetryLimits(None, 0.001, 0.002, window=3600.0)
    changes = {"retry": limits, "keyed": True, "schedule": (0.5,)}
    async with run_lane(records, answer, broker=broker, **changes) as running:  # type: ignore[arg-type]
        await wait_until(lambda: settled(broker, P0) == 29)
    assert running.sender.taken == names(range(30))
    assert not broker.stored[RETRY_IN]
    assert not broker.stored[DEAD]


async def test_a_key_gives_up_after_its_window(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one event that is never taken blocks its key for ever."""
    monkeypatch.setattr(circuit_breaker, "FIRST_WAIT_S", 0.1)
    records = [make_record(number, key=b"one") for number in range(2)]
    limits = RetryLimits(None, 0.001, 0.002, window=0.05)
    async with run_lane(records, lambda _d: BUSY, broker=broker, retry=limits, keyed=True):
        await wait_until(lambda: settled(broker, P0) == 1)
    assert len(broker.stored[DEAD]) == 2


async def test_events_of_another_destination_hold_nobody_up(broker: FakeBroker) -> None:
    """If it fails, the retries of one destination fill the lanes of the others until their next commit."""
    broker.stored[BACK] += [returned(number, "other") for number in range(1_000)]
    own = [make_record(number) for number in range(3)]
    shape = {**WITH_RETRY_TOPIC, "commit_interval": 600, "max_events": 100}
    async with run_lane(own, broker=broker, **shape) as running:  # type: ignore[arg-type]
        await wait_until(lambda: len(running.sender.taken) == 3 and broker.consumers[0].positions[BACK] == 1_000)
