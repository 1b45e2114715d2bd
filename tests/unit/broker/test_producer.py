"""The producer: group commit, order, retry and bounds, against an appender that fails on command."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.broker import errors
from services.core.broker.contract import MAX_APPEND_BYTES, Appended
from services.core.broker.producer import Producer, SendResult
from services.core.broker.record import Record, estimate_size
from services.core.broker.retry import AppendPolicy, append_with_retry
from tests.support.virtual_loop import run_virtually

QUICK = AppendPolicy(deadline=2.0, append_timeout=1.0, base_wait=0.0001, max_wait=0.001)
PATIENT = AppendPolicy(deadline=600.0, append_timeout=600.0, base_wait=0.0001, max_wait=0.001)
"""For tests in which every record is stored in the end, also on a machine that is busy for seconds."""
Fault = Callable[[Sequence[Record]], Sequence[tuple[int, Exception]]]


class FaultyAppender:
    """Stores records in lists; `fault` decides per append which indexes fail (or raises for all)."""

    def __init__(self, fault: Fault | None = None, partitions: int = 4, seconds_per_byte: float = 0.0) -> None:
        self.stored: dict[int, list[Record]] = {}
        self.appends: list[int] = []
        self.busy: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self._fault, self._partitions, self._pace = fault, partitions, seconds_per_byte

    async def partition_count(self, topic: str) -> int:
        return self._partitions

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        assert partition not in self.busy, "two appends to one partition at once"
        assert len(records) == 1 or estimate_size(records) <= MAX_APPEND_BYTES
        self.busy.add(partition)
        try:
            await self.gate.wait()
            self.appends.append(len(records))
            failed = tuple(self._fault(records)) if self._fault else ()
            bad = {index for index, _ in failed}
            log = self.stored.setdefault(partition, [])
            first = len(log)
            log.extend(record for index, record in enumerate(records) if index not in bad)
            return Appended(first, len(log) - 1, failed, self._pace) if len(log) > first else Appended(-1, -1, failed)
        finally:
            self.busy.discard(partition)


def make_records(count: int, key: bytes | None = None, size: int = 10) -> list[Record]:
    return [Record(key, b"%0*d" % (size, number), number) for number in range(count)]


async def test_requests_that_arrive_together_travel_together() -> None:
    """Broken: one fsync or one Kafka request per HTTP request; throughput falls to a hundredth."""
    appender = FaultyAppender()
    async with Producer(appender) as producer:
        answers = await asyncio.gather(*(producer.send_to("t", {0: [record]}) for record in make_records(50)))
    assert appender.appends == [50]
    assert [answer.parts[0].first for answer in answers] == list(range(50))


async def test_what_arrives_during_an_append_is_the_next_batch() -> None:
    """Broken: a slow broker makes ever more, ever smaller appends, out of order."""
    appender = FaultyAppender()
    appender.gate.clear()
    async with Producer(appender) as producer:
        sends = [asyncio.create_task(producer.send_to("t", {0: [record]})) for record in make_records(3)]
        while not appender.busy:
            await asyncio.sleep(0)
        sends += [asyncio.create_task(producer.send_to("t", {0: [record]})) for record in make_records(4)]
        await asyncio.sleep(0)
        appender.gate.set()
        await asyncio.gather(*sends)
    assert appender.appends == [3, 4]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 12), size=st.sampled_from([10, 50_000]))
def test_every_record_is_stored_once_or_reported(seed: int, calls: int, size: int) -> None:
    """Broken: a record vanishes between a partial failure and its retry, is stored twice, or blames another record."""
    chance = random.Random(seed)

    def fault(records: Sequence[Record]) -> list[tuple[int, Exception]]:
        if chance.random() < 0.1:
            raise errors.Unavailable("leader away")
        return [
            (index, errors.RecordTooLarge("poison") if record.timestamp % 7 == 3 else errors.Throttled("slow"))
            for index, record in enumerate(records)
            if record.timestamp % 7 == 3 or chance.random() < 0.2
        ]

    async def run() -> None:
        appender = FaultyAppender(fault)
        sent = [make_records(chance.randint(1, 30), size=size) for _ in range(calls)]
        async with Producer(appender, policy=PATIENT, max_pending_bytes=1 << 40) as producer:
            answers = await asyncio.gather(*(producer.send_to("t", {0: records}) for records in sent))
        expected = []
        for records, answer in zip(sent, answers, strict=True):
            failed = dict(answer.parts[0].failed)
            poison = {index for index, record in enumerate(records) if record.timestamp % 7 == 3}
            assert set(failed) == poison
            assert all(isinstance(error, errors.RecordTooLarge) for error in failed.values())
            expected += [record for index, record in enumerate(records) if index not in poison]
        assert sorted(appender.stored.get(0, []), key=repr) == sorted(expected, key=repr)

    asyncio.run(run())


async def test_order_holds_when_whole_appends_fail() -> None:
    """Broken: during a leader change the events of a key overtake each other."""
    failures = iter([True, True, False, True, False])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        if next(failures, False):
            raise errors.Unavailable("leader away")
        return ()

    appender = FaultyAppender(fault)
    async with Producer(appender, policy=PATIENT) as producer:
        records = make_records(20)
        for record in records:
            task = asyncio.create_task(producer.send_to("t", {0: [record]}))
            await asyncio.sleep(0)
        await task
    assert appender.stored[0] == records


async def _send_two(fault: Fault) -> SendResult:
    policy = AppendPolicy(deadline=0.01, append_timeout=1.0, base_wait=0.001, max_wait=0.002)
    async with Producer(FaultyAppender(fault), policy=policy) as producer:
        return await producer.send_to("t", {0: make_records(2)})


def test_uncertainty_is_not_forgotten_by_a_later_refusal() -> None:
    """Broken: ingest says "not stored" of events that a timed-out attempt may have stored."""
    answers = iter([errors.OutcomeUnknown("no answer")])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        raise next(answers, errors.Unavailable("away"))

    answer = run_virtually(_send_two(fault), seed=1)
    assert [type(error) for _, error in answer.parts[0].failed] == [errors.OutcomeUnknown] * 2


@pytest.mark.parametrize(
    "refusal",
    [
        errors.BrokerError("AccessDenied"),
        errors.UnknownTopic("ResourceNotFound"),
        errors.RecordTooLarge("its limit was lowered"),
        errors.BrokerClosed("stopping"),
        errors.Unavailable("away"),
    ],
)
def test_no_refusal_settles_what_an_earlier_attempt_left_in_doubt(refusal: errors.BrokerError) -> None:
    """If it fails, ingest says "not stored" of stored events because credentials expired before the repeat."""
    answers: list[errors.BrokerError] = [errors.OutcomeUnknown("no answer"), *[refusal] * 100]
    stored: list[Record] = []

    def fault(records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        stored.extend(records if len(answers) == 101 else ())  # stored, and the answer is lost
        raise answers.pop(0)

    answer = run_virtually(_send_two(fault), seed=1)
    assert len(stored) == 2
    assert len(answers) < 100, "it was not tried again"
    assert [type(error) for _, error in answer.parts[0].failed] == [errors.OutcomeUnknown] * 2


async def test_doubt_about_one_record_says_nothing_of_its_neighbours() -> None:
    """If it fails, clients are left in doubt of events that were certainly refused."""
    answers = iter([[(0, errors.OutcomeUnknown("no answer")), (1, errors.Throttled("full"))]])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        for failed in answers:
            return failed
        raise errors.BrokerError("AccessDenied")

    async with Producer(FaultyAppender(fault), policy=QUICK) as producer:
        answer = await producer.send_to("t", {0: make_records(3)})
    kinds: list[tuple[int, type[Exception]]] = [(index, type(error)) for index, error in answer.parts[0].failed]
    assert kinds == [(0, errors.OutcomeUnknown), (1, errors.BrokerError)]


async def test_full_queue_refuses_at_once_and_empties() -> None:
    """Broken: memory grows without bound while the broker is away."""
    appender = FaultyAppender()
    appender.gate.clear()
    async with Producer(appender, max_pending_bytes=1000) as producer:
        first = asyncio.create_task(producer.send_to("t", {0: make_records(5)}))
        await asyncio.sleep(0)
        with pytest.raises(errors.Overloaded):
            await producer.send_to("t", {1: make_records(50)})
        appender.gate.set()
        await first
        assert producer.pending_bytes == 0
        await producer.send_to("t", {1: make_records(5)})


async def test_one_topic_cannot_fill_the_queue_of_all() -> None:
    """Broken: one partition without a leader, and every stream of the process is answered 503."""
    appender = FaultyAppender()
    appender.gate.clear()
    async with Producer(appender, max_pending_bytes=2000) as producer:
        sends = [asyncio.create_task(producer.send_to("stuck", {0: make_records(10)}))]
        await asyncio.sleep(0)
        with pytest.raises(errors.Overloaded, match="stuck"):
            await asyncio.wait_for(producer.send_to("stuck", {1: make_records(10)}), 10)
        sends.append(asyncio.create_task(producer.send_to("other", {2: make_records(10)})))
        while appender.busy != {0, 2}:
            await asyncio.sleep(0)
        appender.gate.set()
        assert [answer.failed for answer in await asyncio.gather(*sends)] == [False, False]
        await producer.send_to("stuck", {0: make_records(10)})


def test_keys_and_headers_count_against_the_bounds() -> None:
    """Broken: small payloads under large headers fill the memory while the bound sees next to nothing."""
    record = Record(b"k" * 1000, b"v" * 100, 0, (("ce_subject", b"s" * 10_000),))
    assert 11_100 <= estimate_size([record]) <= 11_300


async def test_waiting_counts_against_the_deadline() -> None:
    """Broken: behind slow appends a call is answered, and a close ends, much later than promised."""
    appender = FaultyAppender()
    appender.gate.clear()
    async with Producer(appender, policy=AppendPolicy(deadline=0.05)) as producer:
        first = asyncio.create_task(producer.send_to("t", {0: make_records(1)}))
        while not appender.busy:
            await asyncio.sleep(0)
        late = asyncio.create_task(producer.send_to("t", {0: make_records(2)}))
        await asyncio.sleep(0)
        await asyncio.sleep(0.06)
        fresh = asyncio.create_task(producer.send_to("t", {0: make_records(3)}))
        await asyncio.sleep(0)
        appender.gate.set()
        assert not (await first).failed
        assert [type(error) for _, error in (await late).parts[0].failed] == [errors.Unavailable] * 2
        await fresh
        assert producer.pending_bytes == 0
    assert appender.appends in ([1], [1, 3])


async def test_what_a_full_partition_cannot_take_in_time_is_refused_at_once() -> None:
    """Broken: clients of a partition at its limit wait for their time-out, are told nothing, or hold up the other partitions."""
    appender = FaultyAppender(seconds_per_byte=0.001)
    async with Producer(appender, policy=AppendPolicy(patience=1.0)) as producer:
        (await producer.send_to("t", {0: make_records(1)})).raise_first()
        appender.gate.clear()
        waiting = asyncio.create_task(producer.send_to("t", {0: make_records(20, size=100)}))
        await asyncio.sleep(0)
        refused = asyncio.create_task(producer.send_to("t", {0: make_records(2), 1: make_records(3)}))
        await asyncio.sleep(0)
        pending = producer.pending_bytes
        appender.gate.set()
        full, other = (await refused).parts
        assert other.partition == 1
        assert not other.failed
        (_, error), _ = full.failed
        assert isinstance(error, errors.Throttled)
        assert error.retry_after == pytest.approx(0.001 * estimate_size(make_records(20, size=100)))
        assert pending < estimate_size(make_records(20, size=100)) * 2
        assert not (await waiting).failed
        assert not (await producer.send_to("t", {0: make_records(4)})).failed, "there is room again"
        assert producer.pending_bytes == 0


async def test_a_small_append_that_was_refused_says_little_of_what_waits() -> None:
    """If it fails, clients of a full partition are told to come back in days: the seconds for 300 bytes, times megabytes."""

    def fault(records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        return [(index, errors.Throttled("full", retry_after=14.0)) for index in range(len(records))]

    appender = FaultyAppender(fault)
    async with Producer(appender, policy=AppendPolicy(deadline=1.0)) as producer:
        await producer.send_to("t", {0: make_records(1, size=300)})
        appender.gate.clear()
        waiting = [asyncio.create_task(producer.send_to("t", {0: make_records(1, size=700_000)})) for _ in range(5)]
        await asyncio.sleep(0)
        last = asyncio.create_task(producer.send_to("t", {0: make_records(1)}))
        await asyncio.sleep(0)
        appender.gate.set()
        waits = []
        for result in await asyncio.gather(*waiting, last):
            ((_, error),) = result.parts[0].failed
            assert isinstance(error, errors.Throttled)
            waits.append(error.retry_after)
        assert waits[-1] == pytest.approx(14 * 700_000 / MAX_APPEND_BYTES, rel=0.01)


async def test_nobody_is_told_to_stay_away_for_long() -> None:
    """If it fails, clients stay away for hours from a shard that is throttled for seconds."""
    appender = FaultyAppender(seconds_per_byte=1.0)
    async with Producer(appender, policy=AppendPolicy(deadline=1.0)) as producer:
        (await producer.send_to("t", {0: make_records(1)})).raise_first()
        appender.gate.clear()
        waiting = asyncio.create_task(producer.send_to("t", {0: make_records(1, size=3_000)}))
        await asyncio.sleep(0)
        result = await producer.send_to("t", {0: make_records(1)})
        ((_, error),) = result.parts[0].failed
        assert isinstance(error, errors.Throttled)
        assert error.retry_after == 60
        appender.gate.set()
        await waiting


async def test_each_record_is_tried_until_its_own_deadline() -> None:
    """Broken: a request that has just arrived is refused because it shares a batch with one that waited long."""
    failures = iter([errors.Unavailable("leader away")])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        for error in failures:
            raise error
        return ()

    appender = FaultyAppender(fault)
    records = make_records(3)
    now = time.monotonic()
    answer = await append_with_retry(
        appender, "t", 0, records, QUICK, size=estimate_size(records), deadlines=lambda: [now - 1, now + 60, now + 60]
    )
    assert [(index, type(error)) for index, error in answer.failed] == [(0, errors.Unavailable)]
    assert appender.stored[0] == records[1:]


def test_nobody_waits_for_others_of_its_batch_beyond_its_own_deadline() -> None:
    """If it fails, a request is answered after up to twice its time because one that came later shared its batch."""

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        raise errors.Unavailable("leader away")

    async def run() -> None:
        loop, policy = asyncio.get_running_loop(), AppendPolicy()
        appender = FaultyAppender(fault)
        appender.gate.clear()
        ended: list[float] = []
        async with Producer(appender, policy=policy) as producer, asyncio.TaskGroup() as group:

            async def send() -> None:
                began = loop.time()
                answer = await producer.send_to("t", {0: make_records(2)})
                ended.append(loop.time() - began)
                assert [(index, type(error)) for index, error in answer.parts[0].failed] == [
                    (0, errors.Unavailable),
                    (1, errors.Unavailable),
                ]

            group.create_task(send())
            await asyncio.sleep(0.1)
            group.create_task(send())
            await asyncio.sleep(policy.deadline - 0.5)
            group.create_task(send())
            appender.gate.set()
        assert 4 in appender.appends, "the last two did not share a batch"
        assert max(ended) <= policy.deadline + 0.001
        assert producer.pending_bytes == 0

    run_virtually(run(), seed=1)


async def test_cancelled_caller_disturbs_no_other() -> None:
    """Broken: a client that hangs up takes the neighbours of its batch with it."""
    appender = FaultyAppender()
    appender.gate.clear()
    async with Producer(appender) as producer:
        sends = [asyncio.create_task(producer.send_to("t", {0: [record]})) for record in make_records(2)]
        await asyncio.sleep(0)
        sends[0].cancel()
        appender.gate.set()
        assert (await sends[1]).parts[0].first == 1
    with pytest.raises(asyncio.CancelledError):
        await sends[0]


async def test_closed_producer_refuses() -> None:
    """Broken: an event accepted during the drain is never sent."""
    producer = Producer(FaultyAppender())
    await producer.close()
    with pytest.raises(errors.BrokerClosed):
        await producer.send_to("t", {0: make_records(1)})


async def test_leaving_by_an_error_gives_up_at_once() -> None:
    """Broken: a second Ctrl-C still waits for a broker that does not answer; or a caller waits for ever."""
    appender = FaultyAppender()
    appender.gate.clear()
    sends: list[asyncio.Task[SendResult]] = []

    async def fail() -> None:
        async with Producer(appender) as producer:
            sends.append(asyncio.create_task(producer.send_to("t", {0: make_records(1)})))
            while not appender.busy:
                await asyncio.sleep(0)
            # One waits behind it, one in a lane whose task has not begun.
            sends.extend(asyncio.create_task(producer.send_to("t", {lane: make_records(1)})) for lane in (0, 1))
            await asyncio.sleep(0)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    failures = [(await send).parts[0].failed[0][1] for send in sends]
    assert [type(error) for error in failures] == [errors.OutcomeUnknown, errors.BrokerClosed, errors.BrokerClosed]


async def test_a_later_chunk_does_not_overtake_one_that_failed() -> None:
    """Broken: after an outage the events of a key arrive as B, C, A, because the caller sends A again."""
    failures = iter([True])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        if next(failures, False):
            raise errors.Unavailable("leader away")
        return ()

    appender = FaultyAppender(fault)
    policy = AppendPolicy(deadline=0.0, append_timeout=1.0, base_wait=0.001, max_wait=0.002)
    async with Producer(appender, policy=policy) as producer:
        records = make_records(3, size=MAX_APPEND_BYTES - 1000)
        answer = await producer.send_to("t", {0: records})
    assert appender.stored.get(0, []) == []
    assert [index for index, _ in answer.parts[0].failed] == [0, 1, 2]


@pytest.mark.parametrize("refusal", [errors.BrokerError("ExpiredToken"), errors.UnknownTopic("deleted")])
async def test_a_later_chunk_does_not_overtake_one_that_was_refused_for_good(refusal: errors.BrokerError) -> None:
    """If it fails, a client that repeats what was refused while credentials were renewed breaks the order of its keys."""
    failures = iter([refusal])

    def fault(_records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        for error in failures:
            raise error
        return ()

    appender = FaultyAppender(fault)
    async with Producer(appender, policy=QUICK) as producer:
        answer = await producer.send_to("t", {0: make_records(3, size=MAX_APPEND_BYTES - 1000)})
    assert appender.stored.get(0, []) == []
    kinds: list[type[Exception]] = [type(error) for _, error in answer.parts[0].failed]
    assert kinds == [type(refusal), errors.Unavailable, errors.Unavailable]


async def test_a_chunk_goes_out_behind_one_that_can_never_be_stored() -> None:
    """If it fails, one record that is too large keeps its whole request from being stored, however often it is sent."""

    def fault(records: Sequence[Record]) -> Sequence[tuple[int, Exception]]:
        return [(0, errors.RecordTooLarge("poison"))] if records[0].timestamp == 0 else []

    appender = FaultyAppender(fault)
    async with Producer(appender, policy=QUICK) as producer:
        records = make_records(3, size=MAX_APPEND_BYTES - 1000)
        answer = await producer.send_to("t", {0: records})
    assert appender.stored[0] == records[1:]
    assert [index for index, _ in answer.parts[0].failed] == [0]
