"""A lane over a broker in memory: its bounds, its commits, its order, and what becomes of each event."""

import asyncio

import pytest

from services.core.broker.errors import RecordTooLarge, Unavailable
from services.core.broker.record import Batch, Record, estimate_size
from services.core.http.failure import Failure
from services.core.undelivered import dead_letter
from services.expel.delivery import Delivery
from services.expel.retry_policy import Outcome, RetryLimits
from services.expel.send_queue import RequestLimits
from tests.unit.expel.fake_sender import BUSY, WRONG, make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, hold, names, run_lane


async def test_commits_stay_below_the_first_unsettled_event() -> None:
    """Broken: an event under way is committed, and the next crash loses it."""
    released = asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        if b"e25" in delivery.ids:
            await released.wait()
        return None

    async with run_lane([make_record(n) for n in range(100)], answer) as running:
        await wait_until(lambda: len(running.sender.taken) == 90)
        await wait_until(lambda: running.committed() == 19)
        await asyncio.sleep(0.05)
        assert running.committed() == 19
        released.set()
        await wait_until(lambda: running.committed() == 99)
    marks = [commit[P0] for commit in running.broker.commits]
    assert marks == sorted(set(marks))


async def test_a_lane_is_bounded_and_stops_polling() -> None:
    """Broken: a receiver that hangs lets memory grow with its backlog."""
    released = asyncio.Event()
    records = [make_record(n) for n in range(5000)]
    async with run_lane(records, hold(released), max_events=100) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        await asyncio.sleep(0.05)
        (consumer,) = running.broker.consumers
        polls = consumer.polls
        await asyncio.sleep(0.05)
        assert consumer.polls == polls
        assert running.dispatchers[0].in_flight <= 100
        assert running.sender.most_under_way == 2
        released.set()
        await wait_until(lambda: running.committed() == 4999)


async def test_no_more_is_delivered_than_may_come_again() -> None:
    """Broken: while commits hang, a lane that catches up delivers thousands of events, and a crash delivers all of them again."""
    records = [make_record(n) for n in range(3000)]
    async with run_lane(max_events=400) as running:
        await wait_until(lambda: running.broker.consumers != [])
        running.broker.commit_error = Unavailable("no coordinator")
        running.broker.stored[P0] += records
        await wait_until(lambda: running.dispatchers[0].tracker.uncommitted() > 300)
        await asyncio.sleep(0.1)
        assert len(running.sender.taken) <= 400
        running.broker.commit_error = None
        await wait_until(lambda: running.committed() == 2999)


async def test_a_commit_does_not_wait_while_events_do() -> None:
    """Broken: a lane that catches up waits for its commit interval, again and again."""
    records = [make_record(n) for n in range(3000)]
    async with run_lane(records, max_events=400, commit_interval=60.0) as running:
        await wait_until(lambda: running.committed() > 2000)


async def test_a_lane_is_bounded_in_bytes() -> None:
    """Broken: large events fill memory although they are few."""
    released = asyncio.Event()
    records = [make_record(n, value=b'"' + b"x" * 900 + b'"') for n in range(1000)]
    async with run_lane(
        records, hold(released), max_events=1000, max_bytes=100_000, request=RequestLimits(1, 10_000)
    ) as running:
        await wait_until(lambda: running.dispatchers != [] and running.dispatchers[0].room() == 0)
        await asyncio.sleep(0.05)
        assert running.dispatchers[0].in_flight * 900 <= 200_000
        released.set()
        await wait_until(lambda: running.committed() == 999)


async def test_what_counts_is_the_whole_record() -> None:
    """Broken: large keys or headers, or records that wait for the dead letters, fill memory although few bytes are counted."""
    released, large = asyncio.Event(), b"x" * 9000
    headers = (("ce_id", b"e1"), ("note", large))
    records = [make_record(0, key=large), Record(large, b"{}", 0, headers), make_record(2, value=large)]
    async with run_lane([], hold(released), max_events=1000) as running:
        await wait_until(lambda: running.dispatchers != [])
        running.broker.append_error = Unavailable("down")
        (dispatcher,) = running.dispatchers
        dispatcher.accept(Batch("s", 1, range(3), records))
        assert dispatcher._limit._bytes == 2 * len(b"{}") + estimate_size(records)
        running.broker.append_error = None
        released.set()
        await wait_until(lambda: dispatcher.in_flight == 0)
        assert dispatcher._limit._bytes == pytest.approx(0)


async def test_one_stuck_event_bounds_what_comes_again_after_a_crash() -> None:
    """Broken: behind one event that waits for retries, everything else of the stream is delivered uncommitted."""
    released = asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        if delivery.ids[0] == b"e0":
            await released.wait()
        return None

    records = [make_record(n) for n in range(5000)]
    async with run_lane(records, answer, max_events=100) as running:
        await wait_until(lambda: len(running.sender.taken) > 500)
        await asyncio.sleep(0.2)
        assert len(running.sender.taken) <= 100 * 10 + 100
        released.set()
        await wait_until(lambda: running.committed() == 4999)


async def test_retries_hold_no_slot() -> None:
    """Broken: a few failing events stop all others of their destination."""

    def answer(delivery: Delivery) -> Outcome:
        return {0: BUSY} if b"e0" in delivery.ids else None

    one = RequestLimits(1, 1000)
    retry = RetryLimits(2, 36_000.0, 36_000.0)
    async with run_lane(
        [make_record(n) for n in range(50)], answer, retry=retry, drain=0.1, concurrency=1, request=one
    ) as running:
        await wait_until(lambda: len(running.sender.taken) == 49)
        assert running.committed() == -1


async def test_dead_letters_are_durable_before_the_commit() -> None:
    """Broken: while dead letters cannot be written, the event is committed all the same, and lost."""
    async with run_lane([make_record(n) for n in range(10)], lambda _d: WRONG) as running:
        running.broker.append_error = Unavailable("down")
        await wait_until(lambda: len(running.sender.sent) == 1)
        await asyncio.sleep(0.1)
        assert running.committed() == -1
        running.broker.append_error = None
        await wait_until(lambda: running.committed() == 9)
        assert len(running.dead_letters()) == 10


async def test_a_dead_letter_that_is_too_large_keeps_its_headers() -> None:
    """Broken: a record at the size limit can neither be delivered nor buried, and blocks its partition for ever."""
    async with run_lane([make_record(0)], lambda _d: WRONG) as running:
        running.broker.append_error = RecordTooLarge("too large")
        await wait_until(lambda: len(running.sender.sent) == 1)
        await asyncio.sleep(0.05)
        running.broker.append_error = None
        await wait_until(lambda: running.committed() == 0)
        (letter,) = running.dead_letters()
        assert letter.value is None
        assert letter.header(dead_letter.SOURCE) == b"s:0:0"


async def test_keyed_lane_holds_only_keys_that_wait() -> None:
    """Broken: one failing key stops all keys, or its later events overtake it."""
    failing = True

    def answer(delivery: Delivery) -> Outcome:
        return {i: BUSY for i, event_id in enumerate(delivery.ids) if event_id == b"e0" and failing} or None

    records = [make_record(n, key=b"a" if n % 2 == 0 else b"b") for n in range(40)]
    retry = RetryLimits(None, 0.01, 0.01)
    async with run_lane(records, answer, keyed=True, retry=retry, request=RequestLimits(4, 1000)) as running:
        await wait_until(lambda: {f"e{n}" for n in range(1, 40, 2)} <= set(running.sender.taken))
        assert not {f"e{n}" for n in range(8, 40, 2)} & set(running.sender.taken)
        failing = False
        await wait_until(lambda: running.committed() == 39)
        evens = [int(name[1:]) for name in running.sender.taken if int(name[1:]) % 2 == 0]
        assert [n for i, n in enumerate(evens) if n not in evens[i + 1 :]] == list(range(0, 40, 2))


async def test_serial_lane_keeps_strict_order() -> None:
    """Broken: forwarding to a stream lets a later batch overtake one that is retried."""
    calls = iter(range(1000))

    def answer(_delivery: Delivery) -> Outcome:
        return BUSY if next(calls) % 2 == 0 else None

    async with run_lane([make_record(n) for n in range(100)], answer, serial=True, concurrency=1) as running:
        await wait_until(lambda: running.committed() == 99)
        assert running.sender.taken == names(range(100))


async def test_rate_is_a_limit() -> None:
    """Broken: a receiver gets more than it said it can take."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with run_lane([make_record(n) for n in range(60)], rate=200, request=RequestLimits(10, 10_000)) as running:
        await wait_until(lambda: running.committed() == 59)
    assert loop.time() - started >= (60 - 20 - 10) / 200


async def test_events_without_arrival_are_delivered() -> None:
    """Broken: a record that others wrote with an id alone is not delivered, or spoils the lag figures."""
    async with run_lane([make_record(0)]) as running:
        await wait_until(lambda: running.committed() == 0)


async def test_mixed_outcome_is_sorted() -> None:
    """Broken: of a partial answer, something is dropped, buried that should be retried, or settled twice."""
    first = True

    def answer(delivery: Delivery) -> Outcome:
        nonlocal first
        if not first:
            return None
        first = False
        slow = Failure("http_429", "slow", recoverable=True)
        return {1: WRONG, 3: BUSY, 4: slow}

    async with run_lane([make_record(n) for n in range(10)], answer) as running:
        await wait_until(lambda: running.committed() == 9)
        assert running.sender.sent[1] == names([3, 4])
        assert sorted(running.sender.taken) == names([0, 2, 3, 4, 5, 6, 7, 8, 9])
        assert [letter.header("ce_id") for letter in running.dead_letters()] == [b"e1"]
        assert running.dispatchers[0].in_flight == 0


async def test_an_unreadable_record_frees_no_key() -> None:
    """Broken: `order: key` delivers a key's later event before the earlier one, which is still being tried."""
    released = asyncio.Event()
    records = [make_record(1, b"k"), make_record(2, b"k", b"not json"), make_record(3, b"k")]
    one = RequestLimits(1, 1000)
    async with run_lane(records, hold(released), keyed=True, request=one) as running:
        await wait_until(lambda: len(running.dead_letters()) == 1)
        await asyncio.sleep(0.05)
        assert running.sender.sent == [["e1"]]
        released.set()
        await wait_until(lambda: running.sender.taken == ["e1", "e3"])
