"""The story of an event from its id: written as the services write it, found by search."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from services.core.audit import (
    DISCARD,
    DROP,
    REDRIVE,
    RESET,
    SKIP,
    ActedUpon,
    MovedGroup,
    digest_of,
    write_entries,
    write_moves,
)
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import Pause, write_pause
from services.core.event import ARRIVAL, ID, ORIGIN, OUTPUTS, REDRIVEN, Origin
from services.core.ledger.report import TELEMETRY, FailureSet, OriginSet, Report, pack_numbers
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import delay_topic
from services.core.provision import ensure_topics
from services.core.story.find import Scope, find_story, make_scope, time_of_id
from services.core.story.model import EventStory, Lane, Story
from services.core.story.search import Limits, TimeRange
from services.core.times import format_time
from services.core.undelivered.dead_letter import Position, make_dead_letter
from services.core.undelivered.failed_attempts import FailedAttempt, pack_attempts
from services.core.undelivered.retry_state import RetryState, wrap
from services.fleet.verbs.event import print_events

NOW = int(time.time() * 1000) - 10_000  # before the acts of operators, also when a test runs alone
HOOK = {"url": "https://example.org/hook"}
PIPES = PipeFile.model_validate(
    {
        "streams": {"orders": {"partitions": 1}, "archive": {"partitions": 1}},
        "pipes": {
            "shop": {"sources": ["orders"], "destinations": [{"name": "billing", "webhook": HOOK}]},
            "keep": {"sources": ["orders"], "destinations": [{"name": "archive", "stream": "archive"}]},
            "large": {
                "sources": ["orders"],
                "transform": {"sql": "SELECT * FROM orders"},
                "destinations": [{"name": "big", "webhook": HOOK}],
            },
        },
    }
)
LIMITS = Limits(seconds=30, records=1_000_000, bytes=100_000_000, linger=30)
SCOPE = Scope(("orders", "archive"), ("shop", "keep", "large"), TimeRange(NOW - 3_600_000, NOW + 60_000))


class History:
    """Writes records as ingest, Spark, expel, the retrier and operators do. Each event has the next number."""

    def __init__(self, broker: Broker, producer: Producer) -> None:
        self.broker, self.producer = broker, producer
        self.count = 0

    async def write(self, topic: str, record: Record) -> int:
        """The offset of the record."""
        result = await self.producer.send_to(topic, {0: [record]})
        result.raise_first()
        return (await self.broker.reader.describe(topic))[0].end - 1

    async def accept(self, event_id: str) -> Record:
        record = Record(
            b"k",
            b'{"card": "4111"}',
            NOW + self.count,
            (
                (ID, event_id.encode()),
                (ARRIVAL, b"%d" % (NOW + self.count)),
                (ORIGIN, Origin("a", 0, self.count).pack()),
            ),
        )
        assert await self.write("orders", record) == self.count
        self.count += 1
        return record

    async def report(
        self,
        node: str,
        pipe: str,
        outcome: str,
        number: int,
        destination: str | None = None,
        at_ms: int = NOW + 1000,
        failures: str | None = None,
    ) -> None:
        told = OriginSet(outcome, "a", 0, None, pack_numbers(BitMap([number])))  # type: ignore[arg-type]
        report = Report(node=node, instance="i", pipe=pipe, destination=destination, at_ms=at_ms, sets=(told,))  # type: ignore[arg-type]
        if failures is not None:
            failed = (FailureSet(failures, "a", 0, told.numbers),) if failures else ()
            report = msgspec.structs.replace(report, failures=failed)
        await self.write(TELEMETRY, Record(f"{node}/{pipe}/i".encode(), report.encode(), at_ms))

    def wait(
        self, record: Record, written: int, *, rounds: int = 1, attempts: int = 4, failures: bytes = b""
    ) -> Record:
        number = int((record.header(ORIGIN) or b"").rpartition(b":")[2])
        due, why, source = NOW + 5000 * rounds, "whsec_abc is busy", f"orders:0:{number}"
        state = RetryState(
            "shop", "billing", attempts, rounds, NOW + 10, due, "http_503", why, source, record.timestamp
        )
        return wrap(record, state, NOW + written, failures)

    async def bury(self, record: Record, written: int, **said: object) -> ActedUpon:
        usual: dict[str, object] = {
            "reason": "http_404",
            "detail": "no psk_abcdef",
            "node": "expel",
            "pipe": "shop",
            "destination": "billing",
            "attempts": 1,
            "first_failure": NOW,
            "source": TopicPartition("orders", 0),
            "offset": 0,
            "now_ms": NOW + written,
        }
        letter = make_dead_letter(record, **(usual | said))  # type: ignore[arg-type]
        topic = f"{said.get('pipe', 'shop')}.dead"
        return ActedUpon(topic, 0, await self.write(topic, letter), digest_of(letter))

    async def act(self, action: str, what: ActedUpon) -> None:
        await write_entries(self.producer, action, "ada@desk", {"because": "they moved"}, [what])


@pytest.fixture
async def history(tmp_path: Path) -> AsyncIterator[History]:
    async with open_broker(f"log://{tmp_path}/log") as broker, Producer(broker.appender) as producer:
        await ensure_topics(broker.admin, PIPES)
        yield History(broker, producer)


async def story_of(history: History, event_id: str, scope: Scope = SCOPE, limits: Limits = LIMITS) -> Story:
    return await find_story(history.broker, PIPES, event_id, scope, limits)


def lane(event: EventStory, pipe: str, destination: str) -> Lane:
    (found,) = [one for one in event.pipes if one.pipe == pipe]
    return next(one for one in found.destinations if one.destination == destination)


async def billing_of(history: History, event_id: str) -> Lane:
    (event,) = (await story_of(history, event_id)).events
    return lane(event, "shop", "billing")


async def test_each_outcome_is_told(history: History) -> None:
    """Broken: support tells a customer that an event is lost, delivered or waiting, and it is not."""
    delivered = await history.accept("delivered")
    await history.report("expel", "shop", "delivered", 0, "billing")
    retried = await history.accept("retried")
    await history.write("penstock.retry-in", history.wait(retried, 100))
    await history.write(delay_topic(4), history.wait(retried, 200))
    await history.write("shop.retry", history.wait(retried, 300))
    await history.report("expel", "shop", "retrying", 1, "billing")
    await history.report("expel", "shop", "delivered", 1, "billing")
    waiting = await history.accept("waiting")
    await history.write("penstock.retry-in", history.wait(waiting, 100))
    await history.write("shop.retry", history.wait(waiting, 200))
    await history.write("penstock.retry-in", history.wait(waiting, 400, rounds=2, attempts=8))
    await history.write(delay_topic(1024), history.wait(waiting, 500, rounds=2, attempts=8))
    parked = await history.accept("parked")
    await history.write("shop.parked", history.wait(parked, 100, rounds=0, attempts=0))
    await write_pause(history.producer, "shop/billing", Pause("paused", "operator", "ada", NOW))
    dead = await history.accept("dead")
    await history.bury(dead, 100)
    redriven = await history.accept("redriven")
    letter = await history.bury(redriven, 100, offset=5)
    await history.write("shop.retry", history.wait(redriven, 200, rounds=0, attempts=0))
    await history.act(REDRIVE, letter)
    discarded = await history.accept("discarded")
    await history.act(DISCARD, await history.bury(discarded, 100))
    dropped = await history.accept("dropped")
    offset = await history.write("shop.parked", history.wait(dropped, 100))
    await history.act(DROP, ActedUpon("shop.parked", 0, offset))
    await history.accept("skipped")
    filters = {"destination": "shop/billing", "because": "a test"}
    await write_moves(history.producer, SKIP, "ada@desk", filters, [MovedGroup("orders", 0, 8, 9, 1, 8, 8)])
    await history.accept("lost")
    await history.accept("unread")
    await history.accept("last")
    await history.broker.admin.set_committed("shop.billing", "orders", {0: 9})

    assert delivered.header(ID) == b"delivered"
    assert (await billing_of(history, "delivered")).state == "delivered"
    told = await billing_of(history, "retried")
    assert (told.state, [moment.what for moment in told.history]) == ("delivered", ["handed_over", "due", "delivered"])
    assert "after 4 attempts that failed" in told.now
    told = await billing_of(history, "waiting")
    assert (told.state, told.position) == ("waiting", "penstock.delay-1024s:0:0")
    assert [moment.attempts for moment in told.history] == [4, None, 8]
    assert told.history[0].text.startswith("4 attempts failed, the last with http_503")
    assert told.history[2].text.startswith("4 more failed (8 attempts in all), the last with http_503")
    assert "http_503" in told.now
    assert "abc" not in str(told.history), "the answer of a receiver may quote a secret"
    assert (await billing_of(history, "parked")).state == "parked"
    told = await billing_of(history, "dead")
    assert (told.state, told.position) == ("dead", "shop.dead:0:0")
    assert "abcdef" not in str(told)
    (event,) = (await story_of(history, "waiting", replace(SCOPE, pipes=("keep",)))).events
    assert [pipe.pipe for pipe in event.pipes] == ["keep"], "the retrier's topics have the events of all pipes"
    told = await billing_of(history, "redriven")
    assert [moment.what for moment in told.history] == ["dead", "redriven", "due"]
    assert (told.state, told.position) == ("waiting", "shop.retry:0:2")
    told = await billing_of(history, "discarded")
    assert (told.state, told.history[-1].by) == ("discarded", "ada@desk")
    told = await billing_of(history, "dropped")
    assert (told.state, told.now) == ("dropped", "dropped by the pipe file: they moved")
    told = await billing_of(history, "skipped")
    assert (told.state, told.now) == ("skipped", "skipped by ada@desk: a test")
    told = await billing_of(history, "lost")
    assert (told.state, "is missing" in told.now) == ("unknown", True)
    told = await billing_of(history, "unread")
    assert (told.state, told.now) == (
        "not_read",
        (
            "not delivered yet; it is the first event of orders that is not settled: it is tried now, or waits for its "
            "next attempt"
        ),
    )
    assert "1 event of orders is before it" in (await billing_of(history, "last")).now


@pytest.mark.parametrize(("webhook", "is_said"), [({"order": "key"}, True), ({"schedule": []}, True), ({}, False)])
async def test_attempts_that_no_record_has_yet(history: History, webhook: dict[str, object], is_said: bool) -> None:
    """Broken: an event that an ordered destination has tried for an hour looks as if nobody had tried it."""
    pipe = {"sources": ["orders"], "destinations": [{"name": "billing", "webhook": HOOK | webhook}]}
    file = PipeFile.model_validate({"streams": {"orders": {"partitions": 1}}, "pipes": {"shop": pipe}})
    await history.accept("done")
    await history.accept("tried")
    await history.broker.admin.set_committed("shop.billing", "orders", {0: 0})
    scope = replace(SCOPE, streams=("orders",), pipes=("shop",))
    (event,) = (await find_story(history.broker, file, "tried", scope, LIMITS)).events
    told = lane(event, "shop", "billing")
    assert (told.state, "attempts are recorded with the outcome" in told.now) == ("not_read", is_said)


@pytest.mark.parametrize("is_running", [False, True])
async def test_outcomes_that_no_report_can_tell(tmp_path: Path, is_running: bool) -> None:
    """Broken: with the ledger off, or before the start of a destination that begins at the newest event, all events are lost."""
    late = {"name": "late", "webhook": HOOK, "start": "latest"}
    plain = PIPES.pipes["shop"].model_dump(mode="json") | {"destinations": [late, {"name": "billing", "webhook": HOOK}]}
    pipes = PipeFile.model_validate(
        {
            "streams": {"orders": {"partitions": 1}},
            "pipes": {"shop": plain, "new": {**plain, "transform": {"sql": "SELECT 1 AS one FROM orders"}}},
        }
    )
    async with open_broker(f"log://{tmp_path}/log") as broker, Producer(broker.appender) as producer:
        await ensure_topics(broker.admin, pipes)
        history = History(broker, producer)
        await history.accept("early")
        for group in ("shop.late", "shop.billing"):
            await broker.admin.set_committed(group, "orders", {0: 5})
        if is_running:
            await history.report("expel", "shop", "delivered", 4, "late", at_ms=NOW - 5000)
        await history.report("expel", "shop", "delivered", 3, "late")
        (event,) = (await find_story(broker, pipes, "early", make_scope(pipes, "early", NOW + 1000), LIMITS)).events
    told = lane(event, "shop", "late")
    assert (told.state, "start: latest" in told.now, "missing" in told.now) == ("unknown", not is_running, is_running)
    told = lane(event, "shop", "billing")
    assert (told.state, "the ledger is off" in told.now, "missing" in told.now) == ("unknown", True, False)
    transform = event.pipes[1].transform
    assert transform is not None
    assert (transform.outcome, "the ledger is off" in transform.now) == (None, True)


async def test_an_act_on_a_deleted_topic(history: History) -> None:
    """Broken: after a stream was created again, new events count as skipped because old ones at their offsets were."""
    filters = {"destination": "shop/billing", "because": "a test"}
    await write_moves(history.producer, SKIP, "ada@desk", filters, [MovedGroup("orders", 0, 0, 1, 1, 0, 0)])
    later = int(time.time() * 1000) + 600_000  # from now: the test may run long after NOW
    record = Record(b"k", b"{}", later, ((ID, b"later"), (ARRIVAL, b"%d" % later), (ORIGIN, b"a:0:0")))
    await history.write("orders", record)
    scope = replace(SCOPE, span=TimeRange(NOW, later))
    (event,) = (await story_of(history, "later", scope)).events
    assert lane(event, "shop", "billing").state == "not_read"


async def test_several_outputs_of_one_event(history: History) -> None:
    """Broken: an output in the dead letters counts as delivered, because another output of the event was."""
    one = await history.accept("one")
    for number in range(2):
        await history.write("large.out", Record(one.key, b"%d" % number, one.timestamp, one.headers))
    await history.report("transform", "large", "passed", 0)
    await history.report("expel", "large", "delivered", 0, "big")

    async def big() -> Lane:
        (event,) = (await story_of(history, "one", replace(SCOPE, pipes=("large",)))).events
        return lane(event, "large", "big")

    told = await big()
    assert (told.state, "one or more of its 2 outputs delivered" in told.now) == ("delivered", True)
    letter = await history.bury(
        one, 100, pipe="large", destination="big", source=TopicPartition("large.out", 0), offset=1
    )
    told = await big()
    assert (told.state, told.position) == ("dead", "large.dead:0:0")
    assert [moment.what for moment in told.history] == ["dead", "delivered"]
    await history.act(DISCARD, letter)
    assert (await big()).state == "discarded"


async def test_a_failure_after_the_delivery_is_no_failed_attempt_of_it(history: History) -> None:
    """Broken: after a reset, the first delivery looks as if it had needed more attempts."""
    event = await history.accept("again")
    await history.report("expel", "shop", "delivered", 0, "billing")
    await history.bury(event, 2000, attempts=7)
    told = await billing_of(history, "again")
    assert (told.state, "failed" in told.now) == ("delivered", False)
    assert [moment.what for moment in told.history] == ["delivered", "dead"]


async def test_each_attempt_is_told(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a customer is told that their server failed, but not when; or an attempt is told twice, or one that never was."""
    await history.accept("first")
    await history.report("expel", "shop", "delivered", 0, "billing", failures="")
    told = await billing_of(history, "first")
    assert (told.history[0].text, len(told.history)) == ("delivered (2xx) at the first attempt", 1)
    await history.accept("second")
    await history.report("expel", "shop", "delivered", 1, "billing", failures=f"{NOW + 900}:http_503")
    told = await billing_of(history, "second")
    assert [(one.what, one.at) for one in told.history] == [
        ("attempt", format_time(NOW + 900)),
        ("delivered", format_time(NOW + 1000)),
    ]
    assert told.now == f"delivered (2xx), after 1 attempt that failed, reported {format_time(NOW + 1000)}"
    third = await history.accept("third")
    once = pack_attempts([FailedAttempt(NOW + 20, "timeout"), FailedAttempt(NOW + 90, "http_503")])
    await history.write("penstock.retry-in", history.wait(third, 100, attempts=2, failures=once))
    await history.write("shop.retry", history.wait(third, 200, attempts=2, failures=once))
    await history.report("expel", "shop", "retrying", 2, "billing")
    seconds = (NOW + 7000) // 1000 * 1000
    await history.report("expel", "shop", "delivered", 2, "billing", NOW + 9000, failures=f"{seconds}:partial")
    told = await billing_of(history, "third")
    whats = ["attempt", "attempt", "handed_over", "due", "attempt", "delivered"]
    assert [one.what for one in told.history] == whats
    assert [one.reason for one in told.history if one.what == "attempt"] == ["timeout", "http_503", "partial"]
    assert "after 3 attempts that failed" in told.now
    assert told.history[4].at == format_time(seconds).replace(".000Z", "Z"), "only the second is known"
    print_events((await story_of(history, "third")).events)
    assert "attempt failed: timeout" in capsys.readouterr().out
    dead = await history.accept("dead")
    await history.bury(dead, 300, attempts=2, failures=once + b",nonsense")
    told = await billing_of(history, "dead")
    assert [one.what for one in told.history] == ["attempt", "attempt", "dead"]


async def test_attempts_before_redrives_are_counted(history: History) -> None:
    """Broken: an event that was refused three times and redriven each time was delivered "after 1 attempt that failed"."""
    event = await history.accept("refused")
    for written in (100, 1100, 2100):
        failures = pack_attempts([FailedAttempt(NOW + written - 10, "http_404")])
        letter = await history.bury(event, written, failures=failures)
        redriven = history.wait(event, written + 500, rounds=0, attempts=0)
        await history.write("shop.retry", redriven)
        await history.act(REDRIVE, letter)
    await history.report("expel", "shop", "delivered", 0, "billing", NOW + 3000, failures="")
    told = await billing_of(history, "refused")
    assert [one.what for one in told.history].count("attempt") == 3
    assert told.now.startswith("delivered (2xx), after 3 attempts that failed, reported ")
    assert [one.attempts for one in told.history if one.what == "delivered"] == [3]
    tried = await history.accept("tried")
    await history.write("penstock.retry-in", history.wait(tried, 100, attempts=2))
    await history.write("shop.retry", history.wait(tried, 200, attempts=2))
    await history.bury(tried, 300, attempts=3, offset=1)
    await history.write("shop.retry", history.wait(tried, 400, rounds=0, attempts=0))
    again = history.wait(tried, 500, attempts=5)
    due = [(name, b"%d" % (NOW + 9000) if name.endswith("_due") else value) for name, value in again.headers]
    await history.write("penstock.retry-in", Record(again.key, again.value, again.timestamp, tuple(due)))
    told = await billing_of(history, "tried")
    assert [one.text.split(",")[0] for one in told.history if one.what == "handed_over"] == [
        "2 attempts failed",
        "5 attempts failed",
    ]
    await history.report("expel", "shop", "delivered", 1, "billing", NOW + 3000, failures=f"{NOW + 2000}:http_503")
    assert "after 9 attempts that failed" in (await billing_of(history, "tried")).now


async def test_an_open_circuit_breaker_is_no_failed_attempt(history: History) -> None:
    """Broken: attempts that nobody made are told to the owner of a receiver as failures of it."""
    event = await history.accept("held")
    first, second = (history.wait(event, 1000 * rounds, rounds=rounds) for rounds in (1, 2))
    open_breaker = [(name, b"breaker_open" if name.endswith("_reason") else value) for name, value in second.headers]
    await history.write("penstock.retry-in", first)
    await history.write("penstock.retry-in", Record(second.key, second.value, second.timestamp, tuple(open_breaker)))
    told = await billing_of(history, "held")
    assert [moment.text.partition(":")[0] for moment in told.history][1] == "no attempt in this round (4 failed before)"
    assert told.now.endswith("; the circuit breaker was open")
    third = history.wait(event, 3000, rounds=3, attempts=7)
    opened = [(name, b"breaker_open" if name.endswith("_reason") else value) for name, value in third.headers]
    await history.write("penstock.retry-in", Record(third.key, third.value, third.timestamp, tuple(opened)))
    told = await billing_of(history, "held")
    assert told.history[2].text.startswith(
        "3 attempts failed in this round (7 in all), and then the circuit breaker was open"
    )


async def test_a_delivery_after_a_reset(history: History) -> None:
    """Broken: an event that was delivered again reads as still owed; or the first delivery hides that it is owed."""
    await history.accept("again")
    await history.report("expel", "shop", "delivered", 0, "billing")
    await history.report("expel", "keep", "delivered", 0, "archive")
    await history.report("transform", "large", "filtered", 0)
    moved = MovedGroup("orders", 0, 1, 0, 1, 0, 0)
    await write_moves(history.producer, RESET, "ada@desk", {"destination": "shop/billing"}, [moved])
    await history.broker.admin.set_committed("shop.billing", "orders", {0: -1})
    told = await billing_of(history, "again")
    assert (told.state, [one.what for one in told.history]) == ("not_read", ["delivered", "reset"])
    assert told.now.startswith("after the reset: not delivered yet")
    for _ in range(8):
        await history.write(TELEMETRY, Record(b"other", bytes(500_000), NOW + 2000))
    await history.report("expel", "shop", "delivered", 0, "billing", at_ms=int(time.time() * 1000) + 1000)
    await history.broker.admin.set_committed("shop.billing", "orders", {0: 0})
    told = await billing_of(history, "again")
    assert (told.state, [one.what for one in told.history]) == ("delivered", ["delivered", "reset", "delivered"])
    assert told.now.startswith("delivered again (2xx), after the reset, reported ")


async def test_a_transform_and_a_copy(history: History) -> None:
    """Broken: what a transform filtered looks lost, and an output under another id is found by nobody."""
    passed = await history.accept("passed")
    renamed = Record(passed.key, b"{}", passed.timestamp, ((ID, b"renamed"), *passed.headers[1:]))
    await history.write("large.out", renamed)
    await history.write("archive", passed)
    await history.accept("filtered")
    await history.report("transform", "large", "filtered", 1)
    bad = await history.accept("bad")
    await history.bury(bad, 100, pipe="large", destination="", node="transform", reason="schema_mismatch", attempts=0)
    await history.accept("behind")
    made = Record(b"k", b"{}", NOW, ((ID, b"made"), (ARRIVAL, b"%d" % NOW), (ORIGIN, b"t:0:7")))
    await history.write("large.out", made)
    await history.broker.admin.set_committed("large.big", "large.out", {0: 0})

    event, copy = (await story_of(history, "passed")).events
    assert (event.stream, copy.stream, copy.copied_by) == ("orders", "archive", ("keep/archive",))
    assert copy.pipes == ()
    (large,) = [pipe for pipe in event.pipes if pipe.pipe == "large"]
    assert large.transform is not None
    assert (large.transform.outcome, large.transform.outputs) == ("passed", ("large.out:0:0",))
    assert (await story_of(history, "renamed")).events[0] == event, "a receiver knows only the id that it got"
    for event_id, outcome in (("filtered", "filtered"), ("bad", "dead"), ("behind", None)):
        (event,) = (await story_of(history, event_id)).events
        transform = event.pipes[-1].transform
        assert transform is not None
        assert transform.outcome == outcome
        told = lane(event, "large", "big")
        assert (told.state, told.now.startswith("gets nothing")) == ("not_passed", outcome is not None)
    (event,) = (await story_of(history, "made")).events
    assert (event.made_by, [pipe.pipe for pipe in event.pipes]) == ("large", ["large"])
    assert lane(event, "large", "big").state == "not_read"


async def test_an_event_of_another_output(history: History) -> None:
    """Broken: an event that was never meant for a destination is called missing there."""
    passed = await history.accept("small-one")
    await history.write(
        "large.out", Record(passed.key, b"{}", passed.timestamp, (*passed.headers, (OUTPUTS, b"small")))
    )
    await history.report("transform", "large", "passed", 0)
    await history.report("expel", "large", "filtered", 0, "big")
    await history.broker.admin.set_committed("large.big", "large.out", {0: 0})
    (event,) = (await story_of(history, "small-one")).events
    told = lane(event, "large", "big")
    assert (told.state, told.now) == ("filtered", "not for this destination: the transform gave it to small")
    assert [moment.what for moment in told.history] == ["filtered"]


async def test_an_event_of_a_result_of_several(history: History) -> None:
    """Broken: an event that was counted is called dropped."""
    await history.accept("counted")
    await history.report("transform", "large", "filtered", 0)
    large = PIPES.pipes["large"]
    assert large.transform is not None
    joining = large.model_copy(update={"transform": large.transform.model_copy(update={"watermark": 10.0})})
    pipes = PIPES.model_copy(update={"pipes": {**PIPES.pipes, "large": joining}})
    (event,) = (await find_story(history.broker, pipes, "counted", SCOPE, LIMITS)).events
    transform = event.pipes[-1].transform
    assert transform is not None
    assert "part of a result" in transform.now
    assert lane(event, "large", "big").now == "gets the results, which name no event"


async def test_a_transform_that_was_added_later(history: History) -> None:
    """Broken: what the pipe delivered before it had its transform is called not transformed for ever."""
    await history.accept("first")
    await history.report("transform", "large", "passed", 7)
    for pipe, destination in (("large", "big"), ("shop", "billing"), ("keep", "archive")):
        await history.report("expel", pipe, "delivered", 0, destination)
    for _ in range(8):
        await history.write(TELEMETRY, Record(b"other", bytes(500_000), NOW + 2000))
    await history.report("transform", "large", "filtered", 0, at_ms=NOW + 3000)
    (event,) = (await story_of(history, "first")).events
    transform = event.pipes[-1].transform
    assert transform is not None
    assert transform.outcome == "filtered"


async def test_a_transform_that_is_past_an_event_without_an_outcome(history: History) -> None:
    """Broken: it is called not transformed yet for ever."""
    await history.accept("lost")
    for behind_ms, text in ((180_000, "not transformed yet"), (0, "is past it, and no report has an outcome")):
        report = Report(node="transform", instance="i", pipe="large", at_ms=NOW + 120_000, behind_ms=behind_ms)
        await history.write(TELEMETRY, Record(b"transform/large/i", report.encode(), NOW + 120_000))
        (event,) = (await story_of(history, "lost")).events
        transform = event.pipes[-1].transform
        assert transform is not None
        assert text in transform.now


async def test_a_result_of_several_events(history: History) -> None:
    """Broken: an event that no report can name looks as if its reports were too old."""
    await history.write("large.out", Record(b"k", b"{}", NOW, ((ID, b"sum"), (ARRIVAL, b"%d" % NOW))))
    await history.broker.admin.set_committed("large.big", "large.out", {0: 0})
    (event,) = (await story_of(history, "sum")).events
    found = lane(event, "large", "big")
    assert (event.made_by, event.origin, found.state) == ("large", None, "unknown")
    assert found.now.startswith("settled, and neither waiting nor dead: it was delivered, or skipped by an operator.")


async def test_a_redrive_to_the_stream_is_a_copy(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: after a redrive to the stream the same story comes twice, as if there were two events."""
    event = await history.accept("again")
    letter = await history.bury(event, 100, pipe="large", destination="", node="transform", reason="late", attempts=0)
    await history.act(REDRIVE, letter)
    for _ in range(2):
        await history.write("orders", event)
    stories = (await story_of(history, "again")).events
    assert [(one.offset, one.copy) for one in stories] == [("0", 1), ("1", 2), ("2", 3)]
    first, second, third = stories
    (large,) = [pipe.transform for pipe in first.pipes if pipe.transform is not None]
    assert [moment.what for moment in large.history] == ["dead", "redriven"]
    assert (first.redriven, second.redriven, third.redriven) == (None, large.history[1].at, None)
    assert lane(first, "large", "big").now == "gets nothing of it: the transform could not transform it"
    print_events(stories)
    whole, *copies = capsys.readouterr().out.split("accepted ")[1:]
    assert whole.count("redriven by ada@desk") == 2  # the outcome, and the moment
    assert f"second copy, redriven at {second.redriven}" in copies[0]
    assert copies[1].split("\n")[0].endswith("orders, partition 0, offset 2, copy 3")
    assert [one.count("as above: reports do not tell copies apart") for one in (whole, *copies)] == [0, 1, 1]
    assert "redriven by" not in copies[0]


async def test_a_dead_letter_after_a_redrive_to_the_stream(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the newest dead letter of a transform is "reported" at the time of the first one, before it was written."""
    event = await history.accept("again")
    said: dict[str, object] = {"pipe": "large", "destination": "", "node": "transform", "reason": "late", "attempts": 0}
    await history.bury(event, 100, **said)
    await history.bury(event, 900, **said)
    (story,) = (await story_of(history, "again")).events
    (large,) = [pipe.transform for pipe in story.pipes if pipe.transform is not None]
    assert (large.now, large.at) == ("in the dead letters: large.dead:0:1", format_time(NOW + 900))
    print_events([story])
    assert "reported" not in capsys.readouterr().out, "it is the time of a record"


async def test_a_redrive_is_told_before_what_it_caused(history: History) -> None:
    """Broken: an event is back before anybody redrove it; or one that died again at once reads as redriven, not as dead."""
    event = await history.accept("again")
    letter = await history.bury(event, 100)
    await history.write("shop.retry", history.wait(event, 200, rounds=0, attempts=0))
    second = await history.bury(event, 300, reason="http_410")
    await history.act(REDRIVE, letter)  # its time is now, which is later than all that
    told = await billing_of(history, "again")
    assert [moment.what for moment in told.history] == ["dead", "redriven", "due", "dead"]
    assert told.history[1].text == "redriven by ada@desk, noted after its batch"
    assert told.history[1].at > told.history[2].at, "the audit's"
    assert (told.state, told.position) == ("dead", "shop.dead:0:1")
    await history.act(REDRIVE, second)
    told = await billing_of(history, "again")
    assert [moment.what for moment in told.history] == ["dead", "redriven", "due", "dead", "redriven"]
    assert (told.state, told.history[-1].text) == ("redriven", "redriven by ada@desk"), "to another destination"


async def test_a_redrive_to_the_stream_is_told_before_what_it_caused(history: History) -> None:
    """Broken: a transform's new dead letter stands before the redrive that led to it, and the event reads as redriven."""
    event = await history.accept("again")
    said: dict[str, object] = {"pipe": "large", "destination": "", "node": "transform", "reason": "late", "attempts": 0}
    letter = await history.bury(event, 100, **said)
    mark = (REDRIVEN, str(Position(*letter[:3])).encode())
    copy = Record(event.key, event.value, event.timestamp, (*event.headers, mark))
    await history.write("orders", copy)
    await history.bury(copy, 200, **said)
    await history.act(REDRIVE, letter)
    for story in (await story_of(history, "again")).events:
        (large,) = [pipe.transform for pipe in story.pipes if pipe.transform is not None]
        assert [moment.what for moment in large.history] == ["dead", "redriven", "dead"]
        assert (large.outcome, large.now) == ("dead", "in the dead letters: large.dead:0:1")


async def test_one_id_several_times(history: History) -> None:
    """Broken: the letter of one event is told of another event with the same id."""
    await history.accept("twice")
    second = await history.accept("twice")
    await history.bury(second, 100)
    first, other = (await story_of(history, "twice")).events
    assert (first.offset, lane(first, "shop", "billing").state) == ("0", "not_read")
    assert (other.offset, lane(other, "shop", "billing").state) == ("1", "dead")


async def test_a_letter_outlives_its_event(history: History) -> None:
    """Broken: after the retention of the stream, nobody finds the dead letter by its id."""
    gone = Record(b"k", b"{}", NOW, ((ID, b"gone"), (ORIGIN, b"a:0:99")))
    await history.bury(gone, 100)
    (event,) = (await story_of(history, "gone")).events
    assert (event.stream, lane(event, "shop", "billing").state) == (None, "dead")


async def test_headers_of_other_programs(history: History) -> None:
    """Broken: a record that another program wrote to a topic ends the search for everybody."""
    hostile = (b"", b"::", b"a:0:-1", b"a:0:99999999999999999999", b"a:x:1", b"\xff:0:1", b"a:0:1:2")
    odd = [Record(None, None, 10**14, ((ID, b"odd"), (ORIGIN, one), (ARRIVAL, b"9" * 15))) for one in hostile]
    (await history.producer.send_to("orders", {0: odd})).raise_first()
    broken = Record(None, b"x", NOW, (("penstock_retry_pipe", b"\xff"), ("penstock_dead_attempts", b"x"), (ID, b"odd")))
    for topic in ("shop.retry", "shop.parked", "shop.dead", "penstock.retry-in", TELEMETRY, "penstock.audit"):
        await history.write(topic, broken)
    everything = replace(SCOPE, span=TimeRange(-(10**15), 10**15))
    story = await story_of(history, "odd", everything)
    assert len(story.events) >= len(hostile)
    assert msgspec.json.encode(story)


async def test_the_search_is_bounded(history: History) -> None:
    """Broken: one question reads all that is stored, or an answer that is not whole looks whole."""
    body, fits = (Record(b"k", b"x", NOW, ((ID, one), (ARRIVAL, b"%d" % (NOW - 1000)))) for one in (b"other", b"fits"))
    old = Record(b"k", b"x", NOW, ((ID, b"old"), (ARRIVAL, b"%d" % (NOW - 1_800_000))))
    late = Record(b"k", b"x", NOW, ((ID, b"late"), (ARRIVAL, b"%d" % NOW)))
    for records in ([old], [body] * 9000, [late]):
        (await history.producer.send_to("orders", {0: records})).raise_first()
    story = await story_of(history, "late", limits=replace(LIMITS, records=8000))
    assert [event.offset for event in story.events] == ["9001"]
    assert not story.searched.complete
    story = await story_of(history, "old", limits=replace(LIMITS, records=8000))
    assert (story.events, story.searched.complete) == ((), False)
    (partly,) = [topic for topic in story.searched.topics if not topic.complete]
    assert (partly.topic, partly.back_to is not None) == ("orders", True)
    narrow = SCOPE.span._replace(last=NOW - 1_700_000)
    story = await story_of(history, "old", replace(SCOPE, span=narrow), replace(LIMITS, records=12_000))
    assert (len(story.events), story.searched.complete) == (1, True)
    assert story.searched.records < 9000, "the range is found by time"
    same = await story_of(history, "other")
    assert (len(same.events), same.searched.complete) == (200, False)
    (await history.producer.send_to("archive", {0: [fits] * 201})).raise_first()
    same = await story_of(history, "fits", replace(SCOPE, streams=("archive",), pipes=()))
    assert (len(same.events), same.searched.complete) == (200, False), "cut off, though everything was read"


async def test_what_is_found_is_bounded(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a client gives the same id to all its large events, and a search for it takes all memory of the observer."""
    monkeypatch.setattr("services.core.story.search.MOST_HELD", 30_000)
    large = Record(b"k", b"x" * 5_000, NOW, ((ID, b"same"), (ARRIVAL, b"%d" % NOW), (ORIGIN, b"o" * 5_000)))
    for _ in range(9):
        (await history.producer.send_to("orders", {0: [large]})).raise_first()
    monkeypatch.setattr("services.core.story.search.READ_RECORDS", 1)
    story = await story_of(history, "same")
    assert (len(story.events), story.searched.complete) == (3, False)
    assert all(len(event.origin or "") == 100 for event in story.events)


@given(st.text(min_size=1, max_size=40))
def test_any_id_has_a_scope(event_id: str) -> None:
    """Broken: an id that a client chose ends the command, or the observer's answer is no JSON."""
    scope = make_scope(PIPES, event_id, NOW)
    assert scope.span.first < scope.span.last
    assert msgspec.json.encode(Story(event_id.encode(errors="replace").decode(), (), None))  # type: ignore[arg-type]


def test_the_time_in_an_id() -> None:
    """Broken: an id that ingest made is searched in the wrong hour."""
    assert time_of_id("0193a1b2-c3d4-7abc-8def-001122334455") == 0x0193A1B2C3D4
    for other in ("0193a1b2-c3d4-4abc-8def-001122334455", "o-1", "x193a1b2-c3d4-7abc-8def-001122334455", "-" * 36):
        assert time_of_id(other) is None
    scope = make_scope(PIPES, "0193a1b2-c3d4-7abc-8def-001122334455", NOW)
    assert scope.span.first < 0x0193A1B2C3D4 < scope.span.last < NOW
    assert make_scope(PIPES, "o-1", NOW, pipe="shop").streams == ("orders",)
    with pytest.raises(KeyError):
        make_scope(PIPES, "o-1", NOW, stream="none")
    assert Position("a", 0, 1) == ("a", 0, 1)
