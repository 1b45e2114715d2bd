"""Sending: what travels together, and what becomes of an append when the service takes only a part of a request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from socket import gaierror
from typing import Any

import pytest
from aiohttp import ClientOSError
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError

from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kinesis.appender import (
    MAX_ENTRIES,
    MAX_REQUEST_BYTES,
    KinesisAppender,
    PendingPut,
    PutBatcher,
)
from services.core.broker.kinesis.aws import Put, Timing, parse_refusal
from services.core.broker.kinesis.record_format import read_entry
from services.core.broker.kinesis.streams import HASH_KEYS, Shard, Streams, Topology
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy

PROVISIONED = "ProvisionedThroughputExceededException"
_QUICK = AppendPolicy(deadline=30, append_timeout=5, base_wait=0.001, max_wait=0.01)


class FakeService(Streams):
    """PutRecords in memory. refuse: asked for the partition and its how manieth entry, gives an error code or none.

    stored: numbers by partition. requests: entries of each. raising: what the next requests fail with. gate: closed, none is
    answered; begun: how many came.
    """

    def __init__(self, partitions: int) -> None:
        step = HASH_KEYS // partitions
        shards = [Shard(n, (), n * step, (n + 1) * step - 1, True) for n in range(partitions)]
        self._topology = Topology(tuple(shards), partitions)
        self.stored: dict[int, list[int]] = {n: [] for n in range(partitions)}
        self.requests: list[list[Put]] = []
        self.refuse: Callable[[int, int], str | None] = lambda _partition, _nth: None
        self.raising: list[Exception] = []
        self.begun = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._tried = Counter[int]()
        self._sequence = 0

    async def find(self, topic: str, *, max_age: float | None = None) -> Topology:
        return self._topology

    async def put(self, _stream: str, puts: Sequence[Put]) -> list[dict[str, Any]]:
        self.begun += 1
        await self.gate.wait()
        self.requests.append(list(puts))
        if self.raising:
            raise self.raising.pop(0)
        return [self._take(put) for put in puts]

    def _take(self, put: Put) -> dict[str, str]:
        partition = int(put.hash_key) * len(self.stored) // HASH_KEYS
        self._tried[partition] += 1
        if code := self.refuse(partition, self._tried[partition]):
            return {"ErrorCode": code, "ErrorMessage": "Rate exceeded"}
        self._sequence += 1
        self.stored[partition] += [one.timestamp for one in read_entry(put.data, put.partition_key, 0)]
        return {"SequenceNumber": str(self._sequence), "ShardId": f"shardId-{partition:012d}"}


@asynccontextmanager
async def _appender(service: FakeService) -> AsyncIterator[KinesisAppender]:
    appender = KinesisAppender(service.put, service, Timing())
    try:
        yield appender
    finally:
        await appender.close()


def numbered(*numbers: int, size: int = 0) -> list[Record]:
    return [Record(b"k", b"x" * size, number) for number in numbers]


async def test_a_refused_part_is_tried_again_in_order_and_the_rest_is_not_repeated() -> None:
    """If it fails, a shard at its limit turns the order of its keys around, or doubles what the other shards took."""
    service = FakeService(2)
    service.refuse = lambda partition, nth: PROVISIONED if partition == 0 and nth % 3 else None
    async with _appender(service) as appender, Producer(appender, policy=_QUICK) as producer:
        sends = [producer.send_to("t", {0: numbered(n), 1: numbered(n)}) for n in range(10)]
        for result in await asyncio.gather(*sends):
            result.raise_first()
        for n in range(10, 14):
            (await producer.send_to("t", {0: numbered(n), 1: numbered(n)})).raise_first()
    assert service.stored == {0: list(range(14)), 1: list(range(14))}


async def test_a_throttled_shard_holds_up_no_other() -> None:
    """If it fails, one hot key slows down the whole stream."""
    service = FakeService(2)
    service.refuse = lambda partition, _nth: PROVISIONED if partition == 0 else None
    async with _appender(service) as appender, Producer(appender, policy=_QUICK) as producer:
        stuck = asyncio.create_task(producer.send_to("t", {0: numbered(1)}))
        for n in range(20):
            (await producer.send_to("t", {1: numbered(n)})).raise_first()
        assert not stuck.done()
        service.refuse = lambda _partition, _nth: None
        (await stuck).raise_first()
    assert service.stored == {0: [1], 1: list(range(20))}


async def test_an_append_that_began_before_a_split_forgets_nothing_of_the_new_shards() -> None:
    """If it fails, what was learned of a throttled shard is forgotten at each append that took long, and it is stormed."""
    service = FakeService(1)
    before = service._topology
    (parent,) = before.shards
    halves = [
        parent._replace(number=1, parents=(0,), last_key=HASH_KEYS // 2 - 1),
        parent._replace(number=2, parents=(0,), first_key=HASH_KEYS // 2),
    ]
    after = Topology((parent._replace(is_open=False), *halves), 1)
    async with _appender(service) as appender:
        for topology in (after, before, after):
            service._topology = topology
            await appender.append("t", 0, numbered(1), timeout=5)
            known = {shard for _, shard in appender._paces}
            assert "2" in known
    assert service.stored == {0: [1, 1, 1]}


async def test_a_full_shard_is_not_stormed() -> None:
    """If it fails, every request that waits for a full shard asks for itself, and the refusals eat the shard's capacity."""
    service = FakeService(2)
    service.refuse = lambda partition, _nth: PROVISIONED if partition == 0 else None
    async with _appender(service) as appender, Producer(appender) as producer:
        stuck = [asyncio.create_task(producer.send_to("t", {0: numbered(n, size=300)})) for n in range(200)]
        for n in range(10):
            (await producer.send_to("t", {1: numbered(n)})).raise_first()
            await asyncio.sleep(0.1)
        tries = sum(put.partition_key == "0" for request in service.requests for put in request)
        assert 1 < tries < 30, "one entry at a time, ever more seldom"
        assert not any(task.done() for task in stuck)
        assert service.stored == {0: [], 1: list(range(10))}
        service.refuse = lambda _partition, _nth: None
        for result in await asyncio.gather(*stuck):
            result.raise_first()
    assert service.stored[0] == list(range(200))


async def test_a_throttle_says_how_long_to_wait() -> None:
    """If it fails, ingest cannot tell its clients when to come again, and they come at once."""
    service = FakeService(1)
    service.refuse = lambda _partition, _nth: PROVISIONED
    async with _appender(service) as appender:
        with pytest.raises(Throttled) as refused:
            await appender.append("t", 0, numbered(1, size=500_000), timeout=5)
        assert refused.value.retry_after is not None
        assert 0.5 < refused.value.retry_after < 2
        begun = len(service.requests)
        with pytest.raises(Throttled):
            await appender.append("t", 0, numbered(2, size=900_000), timeout=0.1)
        assert len(service.requests) == begun, "what cannot leave in time is not sent: no storm"


async def test_what_waits_for_several_shards_travels_together() -> None:
    """If it fails, each partition pays a request of its own, or a request is larger than the service takes."""
    service = FakeService(40)
    async with _appender(service) as appender:
        await asyncio.gather(*(appender.append("t", p, numbered(p, size=300_000), timeout=30) for p in range(40)))
    assert sum(map(len, service.requests)) == 40
    assert len(service.requests) <= 5
    for request in service.requests:
        assert len(request) <= MAX_ENTRIES
        assert sum(len(put.data) for put in request) <= MAX_REQUEST_BYTES


async def test_small_events_do_not_pay_per_record() -> None:
    """If it fails, events of 300 bytes cost an entry each: a thousand fill a shard that could take ten times as many."""
    service = FakeService(4)
    async with _appender(service) as appender, Producer(appender, policy=_QUICK) as producer:
        for wave in range(5):
            sends = [producer.send_to("t", {n % 4: numbered(n, size=300)}) for n in range(wave * 200, (wave + 1) * 200)]
            for result in await asyncio.gather(*sends):
                result.raise_first()
    assert sum(map(len, service.stored.values())) == 1000
    assert sum(map(len, service.requests)) <= 100


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (EndpointConnectionError(endpoint_url="http://x", error=gaierror()), Unavailable),
        (EndpointConnectionError(endpoint_url="http://x", error=ClientOSError("reset by peer")), OutcomeUnknown),
        (ConnectionClosedError(endpoint_url="http://x"), OutcomeUnknown),
        (ClientError({"Error": {"Code": PROVISIONED}}, "PutRecords"), Throttled),
        (
            ClientError({"Error": {"Code": "InternalFailure"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "x"),
            OutcomeUnknown,
        ),
        (
            ClientError({"Error": {"Code": "InternalFailure"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "x"),
            OutcomeUnknown,
        ),
        (parse_refusal("PutRecords", 408, b"<html>"), OutcomeUnknown),
    ],
    ids=["no-host", "reset", "cut", "throttled", "500", "400-internal", "proxy"],
)
async def test_what_a_failed_request_means(failure: Exception, kind: type[BrokerError]) -> None:
    """If it fails, a client is told "not stored" of what may be stored, or the other way round."""
    service = FakeService(1)
    service.raising = [failure]
    async with _appender(service) as appender:
        with pytest.raises(BrokerError) as raised:
            await appender.append("t", 0, numbered(1), timeout=5)
        assert type(raised.value) is kind
        assert raised.value.retriable
        await appender.append("t", 0, numbered(2), timeout=5)
    assert service.stored == {0: [2]}


async def test_of_a_large_append_a_tail_fails() -> None:
    """If it fails, an append above a megabyte leaves a hole: what is tried again comes behind what followed it."""
    service = FakeService(1)
    service.refuse = lambda _partition, nth: "InternalFailure" if nth == 2 else None
    async with _appender(service) as appender:
        appended = await appender.append("t", 0, numbered(1, 2, 3, size=600_000), timeout=30)
    assert service.stored == {0: [1]}
    assert [(index, type(error)) for index, error in appended.failed] == [(1, OutcomeUnknown), (2, Unavailable)]
    assert appended.first == appended.last


async def test_an_append_that_never_left_is_not_sent_later() -> None:
    """If it fails, what was given up and reported as not stored is stored a moment later."""
    service = FakeService(1)
    service.gate.clear()
    async with _appender(service) as appender:
        under_way = []
        for number in range(4):
            under_way.append(asyncio.create_task(appender.append("t", 0, numbered(number), timeout=30)))
            async with asyncio.timeout(600):
                while service.begun <= number:
                    await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await appender.append("t", 0, numbered(99), timeout=0.05)
        service.gate.set()
        await asyncio.gather(*under_way)
        await appender.append("t", 0, numbered(4), timeout=30)
    assert service.stored == {0: [0, 1, 2, 3, 4]}


async def test_a_wait_for_the_shard_leaves_time_for_the_answer() -> None:
    """If it fails, an entry leaves right before its append's time-out, is stored, taken for unknown, and stored again."""
    service = FakeService(1)
    async with _appender(service) as appender:
        await appender.append("t", 0, numbered(1, size=1_000_000), timeout=30)
        service.gate.clear()
        with pytest.raises(Throttled) as refused:
            await appender.append("t", 0, numbered(2, size=700_000), timeout=1.0)
        assert refused.value.retry_after is not None
        assert refused.value.retry_after > 0.5, "later than half of the time"
        service.gate.set()
    assert service.stored == {0: [1]}


async def test_what_waited_too_long_for_a_request_is_not_sent() -> None:
    """If it fails, what stood behind slow requests is sent when nobody can take the answer any more, and doubled."""
    service = FakeService(1)
    lane = PutBatcher(service.put, "t")
    late = PendingPut(Put(b"x", "0", "0"), leave_by=asyncio.get_running_loop().time() - 1)
    lane.add(late)
    with pytest.raises(Unavailable):
        await late.answer
    assert not late.sent
    assert service.begun == 0


@pytest.mark.parametrize("ticks", range(5))
async def test_what_is_given_up_as_not_sent_is_never_sent(ticks: int) -> None:
    """If it fails, an append that ends between two steps of the loop is reported as not stored, and stored a moment later."""
    service = FakeService(1)
    lane = PutBatcher(service.put, "t")
    parcel = PendingPut(Put(b"x", "0", "0"), leave_by=asyncio.get_running_loop().time() + 30)
    lane.add(parcel)
    for _ in range(ticks):
        await asyncio.sleep(0)
    parcel.answer.cancel()
    was_sent = parcel.sent
    for _ in range(10):
        await asyncio.sleep(0)
    assert was_sent == (service.begun == 1)
