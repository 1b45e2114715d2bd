"""A lane over a broker in memory: bounds, commits, revocation, gaps and outages, each at the moment the test chooses."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from services.core import dead_letter
from services.core.broker.errors import DataDamaged, NotOwner, OffsetOutOfRange, RecordTooLarge, Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, estimate_size
from services.expel import session
from services.expel.delivery import Delivery
from services.expel.dispatch import Dispatcher
from services.expel.disposition import RetryLimits
from services.expel.gate import Gate
from services.expel.lane import Lane
from services.expel.meter import LaneMeter
from services.expel.outcome import Failure, Outcome
from services.expel.pending import CutLimits
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import BUSY, GONE, WRONG, Answer, FakeSender, make_record, make_shape
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, P1, QUICK, names, run_lane


def hold(released: asyncio.Event) -> Answer:
    async def answer(_delivery: Delivery) -> Outcome:
        await released.wait()
        return None

    return answer


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
        assert running.dispatchers[0].unsettled <= 100
        assert running.sender.most_under_way == 2
        released.set()
        await wait_until(lambda: running.committed() == 4999)


async def test_a_lane_is_bounded_in_bytes() -> None:
    """Broken: large events fill memory although they are few."""
    released = asyncio.Event()
    records = [make_record(n, value=b'"' + b"x" * 900 + b'"') for n in range(1000)]
    async with run_lane(
        records, hold(released), max_events=1000, max_bytes=100_000, cut=CutLimits(1, 10_000)
    ) as running:
        await wait_until(lambda: running.dispatchers != [] and running.dispatchers[0].room() == 0)
        await asyncio.sleep(0.05)
        assert running.dispatchers[0].unsettled * 900 <= 200_000
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
        dispatcher.take(Batch("s", 1, range(3), records))
        assert dispatcher._bounds._bytes == 2 * len(b"{}") + estimate_size(records)
        running.broker.append_error = None
        released.set()
        await wait_until(lambda: dispatcher.unsettled == 0)
        assert dispatcher._bounds._bytes == pytest.approx(0)


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

    one = CutLimits(1, 1000)
    retry = RetryLimits(2, 30.0, 30.0)
    async with run_lane(
        [make_record(n) for n in range(50)], answer, retry=retry, drain=0.1, concurrency=1, cut=one
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
        assert len(running.letters()) == 10


async def test_a_letter_that_is_too_large_keeps_its_headers() -> None:
    """Broken: a record at the size limit can neither be delivered nor buried, and blocks its partition for ever."""
    async with run_lane([make_record(0)], lambda _d: WRONG) as running:
        running.broker.append_error = RecordTooLarge("too large")
        await wait_until(lambda: len(running.sender.sent) == 1)
        await asyncio.sleep(0.05)
        running.broker.append_error = None
        await wait_until(lambda: running.committed() == 0)
        (letter,) = running.letters()
        assert letter.value is None
        assert letter.header(dead_letter.SOURCE) == b"s:0:0"


async def test_revoked_partition_is_drained_and_committed_first() -> None:
    """Broken: the next owner delivers again what this one had just delivered; or waits for ever."""
    released = asyncio.Event()
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.stored[P1] += [make_record(n) for n in range(100, 200)]
    async with run_lane(
        [make_record(n) for n in range(100)], hold(released), broker=broker, cut=CutLimits(5, 1000)
    ) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        (dispatcher,) = running.dispatchers
        leaving = asyncio.create_task(dispatcher.give_up(frozenset({P0}), 30.0))
        await asyncio.sleep(0.02)
        assert not leaving.done()
        released.set()
        await leaving
        # What was under way, and nothing more of it; the lane may have committed it meanwhile.
        assert dispatcher.low_water.committable().get(P0, running.committed(P0)) == 9
        dispatcher.low_water.forget([P0])
        await wait_until(lambda: running.committed(P1) == 99)
        assert len(running.sender.taken) == 110


async def test_revocation_commits_before_it_returns() -> None:
    """Broken: at every rebalance the next owner delivers again what was settled since the last commit."""
    async with run_lane([make_record(n) for n in range(10)], commit_interval=600) as running:
        await wait_until(lambda: len(running.sender.taken) == 10)
        assert running.committed() == -1
        await running.broker.consumers[0].revoke(P0)
        assert running.committed() == 9


async def test_failed_events_of_a_revoked_partition_are_left_to_the_next_owner() -> None:
    """Broken: two members deliver the same events, one of them for ever, and its keys stay blocked."""
    released = asyncio.Event()

    async def answer(_delivery: Delivery) -> Outcome:
        if released.is_set():
            return None
        await released.wait()
        return BUSY

    records = [make_record(n, key=b"a") for n in range(5)]
    async with run_lane(records, answer, keyed=True, drain=0.5) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        (dispatcher,) = running.dispatchers
        await dispatcher.give_up(frozenset({P0}), 0.01)
        dispatcher.low_water.forget([P0])
        released.set()
        await wait_until(lambda: dispatcher.unsettled == 0)
        await asyncio.sleep(0.05)
        assert len(running.sender.sent) == 1
        running.broker.stored[P1].append(make_record(9, key=b"a"))
        await wait_until(lambda: running.sender.taken == ["e9"])


async def test_revocation_does_not_wait_for_a_hanging_receiver() -> None:
    """Broken: one hanging receiver makes every rebalance of its group take the rebalance time-out."""
    async with run_lane([make_record(n) for n in range(20)], hold(asyncio.Event()), drain=0.05) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        async with asyncio.timeout(10):
            await running.dispatchers[0].give_up(frozenset({P0}), 0.05)


@pytest.mark.parametrize("outcome", [None, WRONG])
async def test_a_topic_made_anew_is_not_settled_by_what_was_under_way_before(outcome: Outcome) -> None:
    """Broken: a topic is deleted and made again within one request, and the new events at its offsets are lost."""
    first, second = asyncio.Event(), asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        is_old = delivery.ids[0].startswith(b"e0")
        await (first if is_old else second).wait()
        return outcome if is_old else None

    async with run_lane([make_record(0)], answer, commit_interval=600) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        (consumer,), (dispatcher,) = running.broker.consumers, running.dispatchers
        dispatcher.disown([P0])
        running.broker.stored[P0][:] = [make_record(1)]
        consumer.positions[P0] = 0
        await wait_until(lambda: running.sender.under_way == 2)
        first.set()
        await wait_until(lambda: dispatcher.unsettled == 1)
        assert dispatcher.low_water.committable() == {}
        second.set()
        await wait_until(lambda: dispatcher.low_water.committable() == {P0: 0})


async def test_letters_of_a_topic_made_anew_settle_nothing() -> None:
    """Broken: a dead letter that waited for the broker settles the event that has its offset now."""
    second = asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        if delivery.ids[0] == b"e0":
            return WRONG
        await second.wait()
        return None

    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.append_error = Unavailable("down")
    async with run_lane([make_record(0)], answer, broker=broker, commit_interval=600) as running:
        await wait_until(lambda: running.sender.sent != [] and running.sender.under_way == 0)
        (consumer,), (dispatcher,) = broker.consumers, running.dispatchers
        dispatcher.disown([P0])
        broker.stored[P0][:] = [make_record(1)]
        consumer.positions[P0] = 0
        await wait_until(lambda: running.sender.under_way == 1)
        broker.append_error = None
        await wait_until(lambda: dispatcher.unsettled == 1)
        assert len(running.letters()) == 1
        assert dispatcher.low_water.committable() == {}
        second.set()
        await wait_until(lambda: dispatcher.low_water.committable() == {P0: 0})


@pytest.mark.parametrize(("released", "is_drained"), [(True, True), (False, False)])
async def test_a_drain_says_whether_its_time_was_enough(released: bool, is_drained: bool) -> None:
    """Broken: a deployment takes a process that was cut off for one that had finished."""
    event = asyncio.Event()
    async with run_lane([make_record(0)], hold(event), drain=0.05) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        if released:
            event.set()
    assert running.lane.is_drained is is_drained


async def test_refused_commits_are_counted_and_do_no_harm() -> None:
    """Broken: a commit after a lost lease ends the lane."""
    before = REGISTRY.get_sample_value("penstock_broker_commits_refused_total", {"group": "late.hook"}) or 0
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.commit_error = NotOwner(frozenset({P0}))
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.metric("penstock_broker_commits_refused_total", group="late.hook") > before)
        broker.commit_error = None
        broker.stored[P0].append(make_record(1))
        await wait_until(lambda: running.committed() == 1)


async def test_failed_commits_are_tried_again() -> None:
    """Broken: one failed commit leaves everything to be delivered again after the next restart."""
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.commit_error = Unavailable("down")
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.sender.taken == ["e0"])
        await asyncio.sleep(0.05)
        broker.commit_error = None
        await wait_until(lambda: running.committed() == 0)


async def test_a_gap_stops_its_partition_with_the_exact_count() -> None:
    """Broken: records that retention took are passed over silently, or the other partitions stop too."""
    labels = {"group": "late.hook", "topic": "s"}
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.poll_errors = [OffsetOutOfRange("s", 1, wanted=5, start=47, end=60), DataDamaged("s", ((0, 3, 5),), "crc")]
    async with run_lane(broker=broker) as running:
        before = running.metric("penstock_broker_gap_records_total", **labels)
        await wait_until(lambda: running.metric("penstock_broker_gap_records_total", **labels) == before + 42 + 3)
        (consumer,) = broker.consumers
        assert consumer.paused == {P0, P1}
        assert running.metric("penstock_expel_lane_up", pipe="late", destination="hook") == 0
        consumer.resume([P0])
        broker.stored[P0].append(make_record(0))
        await wait_until(lambda: running.sender.taken == ["e0"])


async def test_polling_survives_an_outage() -> None:
    """Broken: a restarted broker needs a restarted expel."""
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.poll_errors = [Unavailable("down")]
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.committed() == 0)
        assert len(broker.consumers) == 1


async def test_a_missing_topic_is_waited_for() -> None:
    """Broken: expel has to be started after everything else."""
    broker = FakeBroker({"late.dead": 1})
    async with Producer(broker.driver, policy=QUICK) as producer:
        meter, sender = LaneMeter("late", "hook"), FakeSender()
        lane = Lane(
            broker,  # type: ignore[arg-type]
            "late",
            "hook",
            ["s"],
            "earliest",
            meter,
            lambda: Dispatcher(make_shape(), sender, producer, meter, Gate(make_shape())),
            0.01,
        )
        stopping = asyncio.Event()
        task = asyncio.create_task(lane.run(stopping, 1.0))
        await wait_until(lambda: "no topic s" in (lane.waits_for or ""))
        broker.stored[P0] = [make_record(0)]
        await wait_until(lambda: sender.taken == ["e0"])
        assert lane.waits_for is None
        stopping.set()
        await task


async def test_gone_stops_everything_and_settles_nothing() -> None:
    """Broken: what a receiver refused with 410 is lost, or it is called again and again."""
    async with run_lane([make_record(n) for n in range(100)], lambda _d: GONE, concurrency=1) as running:
        await wait_until(lambda: bool(running.sender.sent))
        await wait_until(
            lambda: running.metric("penstock_broker_lag_records", group="late.hook", topic="s", partition="0") == 100
        )
        assert running.sender.sent == [names(range(10))]
        assert running.committed() == -1
        assert running.letters() == []
        assert running.lane.waits_for is None


async def test_keyed_lane_holds_only_keys_that_wait() -> None:
    """Broken: one failing key stops all keys, or its later events overtake it."""
    failing = True

    def answer(delivery: Delivery) -> Outcome:
        return {i: BUSY for i, event_id in enumerate(delivery.ids) if event_id == b"e0" and failing} or None

    records = [make_record(n, key=b"a" if n % 2 == 0 else b"b") for n in range(40)]
    retry = RetryLimits(None, 0.01, 0.01)
    async with run_lane(records, answer, keyed=True, retry=retry, cut=CutLimits(4, 1000)) as running:
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
    async with run_lane([make_record(n) for n in range(60)], rate=200, cut=CutLimits(10, 10_000)) as running:
        await wait_until(lambda: running.committed() == 59)
    assert loop.time() - started >= (60 - 20 - 10) / 200


async def test_drain_finishes_retries_but_starts_nothing_new() -> None:
    """Broken: a stop leaves a gap at the front, so that everything behind it is delivered again."""
    attempts: list[int] = []

    def answer(delivery: Delivery) -> Outcome:
        if delivery.ids[0] != b"e0":
            return None
        attempts.append(1)
        return BUSY if len(attempts) < 3 else None

    retry = RetryLimits(10, 0.2, 0.2)
    async with run_lane([make_record(n) for n in range(30)], answer, retry=retry) as running:
        await wait_until(lambda: len(running.sender.taken) == 20)
    assert running.committed() == 29


async def test_events_without_arrival_are_delivered() -> None:
    """Broken: a record that others wrote with an id alone is not delivered, or spoils the lag figures."""
    async with run_lane([make_record(0)]) as running:
        await wait_until(lambda: running.committed() == 0)


def test_waits_are_shorter_than_the_backends_allow() -> None:
    """Broken: the backend gives up on a drain before expel does, and commits are lost."""
    assert session._REVOKE_WAIT < 30


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
        assert [letter.header("ce_id") for letter in running.letters()] == [b"e1"]
        assert running.dispatchers[0].unsettled == 0


async def test_a_lane_full_of_retries_goes_on_after_a_revoke() -> None:
    """Broken: a rebalance during a receiver's outage leaves the lane asleep until restart, its membership alive."""
    is_busy = True

    def answer(_delivery: Delivery) -> Outcome:
        return BUSY if is_busy else None

    records = [make_record(n) for n in range(200)]
    retry = RetryLimits(20, 30.0, 30.0)
    async with run_lane(records, answer, retry=retry, drain=0.1, max_events=100) as running:
        await wait_until(lambda: running.dispatchers != [] and running.dispatchers[0].room() == 0)
        await wait_until(lambda: len(running.sender.sent) == 10 and running.sender.under_way == 0)
        is_busy = False
        running.broker.stored[P1] += [make_record(n) for n in range(1000, 1010)]
        (consumer,) = running.broker.consumers
        await consumer.revoke(P0)
        await wait_until(lambda: set(names(range(1000, 1010))) <= set(running.sender.taken))


async def test_an_unreadable_record_frees_no_key() -> None:
    """Broken: `order: key` delivers a key's later event before the earlier one, which is still being tried."""
    released = asyncio.Event()
    records = [make_record(1, b"k"), make_record(2, b"k", b"not json"), make_record(3, b"k")]
    one = CutLimits(1, 1000)
    async with run_lane(records, hold(released), keyed=True, cut=one) as running:
        await wait_until(lambda: len(running.letters()) == 1)
        await asyncio.sleep(0.05)
        assert running.sender.sent == [["e1"]]
        released.set()
        await wait_until(lambda: running.sender.taken == ["e1", "e3"])
