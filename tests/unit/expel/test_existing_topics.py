"""A lane that reads a topic of others: its events are accepted by their first reader, tombstones and faults are settled."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from pyroaring import BitMap

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import RecordRefused, Unavailable
from services.core.broker.existing import target_name
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.event import ARRIVAL, CONTENT_TYPE, ID, ORIGIN, TOPIC_NUMBERS, Origin, offset_of, topic_incarnation
from services.core.ledger.accumulator import Sets
from services.core.ledger.first_reader import FirstReader, LateStart
from services.core.ledger.report import TELEMETRY, Report, decode_report, unpack_numbers
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_of_others import TopicTarget
from services.core.times import format_time
from services.core.undelivered.dead_letter import DETAIL, REASON
from services.expel.delivery import Delivery, OffsetRun
from services.expel.dispatcher import Dispatcher, LaneConfig
from services.expel.lane import Lane
from services.expel.metrics import LaneLedger, LaneMetrics
from services.expel.stream_sender import StreamSender, TopicSender
from services.expel.throttle import SendThrottle
from tests.contract.traffic import ignore_revoke
from tests.support.memory_appender import MemoryAppender
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import FakeSender, make_shape
from tests.unit.expel.receiver import wait_until

P0 = TopicPartition("s", 0)
ID_OF_TOPIC = "3d9c2b1e-0f4a-4c55-8f7e-3a5b6c7d8e9f"
HOUR_MS = 3_600_000


class RealRendering(FakeSender):
    """Renders as a sender does: unreadable records become dead letters."""

    render = StreamSender(None, None, "t").render  # type: ignore[arg-type]


def read(*records: Record) -> list[Record]:
    """As the backend gives them."""
    batch = Batch("billing.invoices", 0, range(len(records)), records)
    return list(Translation(Stream(topic="billing.invoices", id="id"))(batch, ID_OF_TOPIC).records)


def told(reports: list[Report], node: str, outcome: str) -> BitMap:
    found = BitMap()
    for report in reports:
        for one in report.sets:
            if (report.node, one.outcome) == (node, outcome):
                found |= unpack_numbers(one.numbers)
    return found


async def settle_all(
    broker: FakeBroker, producer: Producer, telling: Producer, shape: LaneConfig, sender: FakeSender | StreamSender
) -> None:
    """A lane runs until it has committed all that is stored. telling: for its reports."""
    ledger = LaneLedger.open(telling, broker, "i", "late", "hook", ["s"], topics_of_others=["s"])  # type: ignore[arg-type]
    meter, throttle = LaneMetrics("late", "hook", ledger=ledger), SendThrottle("late", "hook")
    lane = Lane(
        broker,  # type: ignore[arg-type]
        "late",
        "hook",
        ["s"],
        "earliest",
        meter,
        lambda: Dispatcher(shape, sender, broker, producer, meter, throttle),  # type: ignore[arg-type]
        0.01,
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(lane.run(stopping, 5.0))
    try:
        await wait_until(lambda: broker.committed.get(("late.hook", P0), -1) == len(broker.stored[P0]) - 1)
    finally:
        stopping.set()
        await task


async def test_every_record_is_accepted_and_settled() -> None:
    """Broken: a tombstone or a bad record stops the lane, or is in the loss table as missing."""
    now = int(time.time() * 1000)
    broker, telemetry = FakeBroker({"s": 1, "late.dead": 1}), MemoryAppender()
    telemetry.create(TELEMETRY, 1)
    values = [b'{"id": "a"}', None, b'{"id": []}', b"no json", None]
    broker.stored[P0] += read(*(Record(b"k", value, now) for value in values))
    async with Producer(broker.appender) as producer, Producer(telemetry) as telling:
        shape, sender = make_shape(topics_of_others=frozenset({"s"})), RealRendering()
        await settle_all(broker, producer, telling, shape, sender)
    assert sender.taken == ["a"]
    letters = broker.stored[TopicPartition("late.dead", 0)]
    assert [(letter.header(REASON), letter.header(DETAIL)) for letter in letters] == [
        (b"bad_record", b"the id is neither a string nor an integer"),
        (b"bad_record", b"the value is not JSON, and a rule of its stream needs a field of it"),
    ]
    reports = [decode_report(record.value) for record in telemetry.records(TELEMETRY)]
    assert told(reports, "ingest", "accepted") == BitMap(range(5))
    assert told(reports, "expel", "delivered") == BitMap([0])
    assert told(reports, "expel", "dead") == BitMap([2, 3])
    assert told(reports, "expel", "filtered") == BitMap([1, 4])
    accepting = [report for report in reports if report.node == "ingest"]
    assert {report.pipe for report in accepting} == {"s"}
    assert accepting[-1].closed


async def test_deletes_in_a_topic_of_others_delete_in_our_table() -> None:
    """Broken: a key that its owner has deleted stays in our compacted stream for ever, without a word."""
    stored, telemetry = MemoryAppender(), MemoryAppender()
    stored.create("t", 1)
    telemetry.create(TELEMETRY, 1)
    broker = FakeBroker({"s": 1, "late.dead": 1})
    values = [(b"k", b'{"id": "a"}'), (b"k", None), (None, None), (b"", None)]
    broker.stored[P0] += read(*(Record(key, value, int(time.time() * 1000)) for key, value in values))
    async with Producer(stored) as producer, Producer(telemetry) as telling:
        shape = make_shape(topics_of_others=frozenset({"s"}), takes_tombstones=True)
        sender = StreamSender(producer, None, "t", compact=True)
        await settle_all(broker, producer, telling, shape, sender)
    assert [(record.key, record.value) for record in stored.records("t")] == values[:2]
    reports = [decode_report(record.value) for record in telemetry.records(TELEMETRY)]
    assert told(reports, "expel", "delivered") == BitMap([0, 1])
    assert told(reports, "expel", "filtered") == BitMap([2, 3]), "without a key they delete nothing"


async def test_old_events_are_outside_of_the_loss_table() -> None:
    """Broken: whoever reads the history of a topic makes its events missing at those who read it long ago."""
    now, telemetry = int(time.time() * 1000), MemoryAppender()
    telemetry.create(TELEMETRY, 1)
    times = [now - 48 * HOUR_MS, now - 25 * HOUR_MS, now - 23 * HOUR_MS, -1, now]
    records = read(*(Record(None, b"{}", at) for at in times))
    async with Producer(telemetry) as telling:
        reader = FirstReader(telling, ["s"])
        reader.add(Batch("s", 0, range(5), records))
        reader.add(Batch("other", 0, range(5), records))
        await reader.report()
    reports = [decode_report(record.value) for record in telemetry.records(TELEMETRY)]
    assert told(reports, "ingest", "accepted") == BitMap([2, 3, 4])


async def store(broker: LogBroker, first: int, count: int) -> None:
    """Records as the Kafka backend gives them, at these offsets."""
    values = [Record(None, b"{}", int(time.time() * 1000))] * (first + count)
    await broker.appender.append("s", 0, read(*values)[first:], timeout=10)


async def join_and_read(broker: LogBroker, count: int) -> list[int]:
    """A member of the late group: reads so many records and leaves without a commit. Gives their offsets."""
    found: list[int] = []
    async with broker.consumer("late.hook", ["s"], start="latest", on_revoke=ignore_revoke) as consumer:
        while not consumer.assignment() or len(found) < count:
            for batch in await consumer.poll(max_records=10, max_wait=0.1):
                found += batch.offsets
    return found


def open_late(telling: Producer, broker: LogBroker) -> LaneLedger:
    return LaneLedger.open(telling, broker, "i", "late", "hook", ["s"], topics_of_others=["s"], late=True)


@pytest.mark.parametrize("dies", ["before the report", "before the group begins", "after the join", "never"])
async def test_what_is_stored_before_a_late_start_is_skipped(
    tmp_path: Path, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a destination with `start: latest` misses all events that another one reads from the beginning, or counts those as
    skipped that it delivered, or lost. A crash between any two steps changes nothing."""
    telemetry = MemoryAppender()
    telemetry.create(TELEMETRY, 1)
    stored, skipped = 5, 5
    async with LogBroker.open(str(tmp_path / "log")) as broker, Producer(telemetry) as telling:
        await broker.admin.create_topic(TopicSpec("s", 1))
        await store(broker, 0, 5)
        if dies == "before the group begins":

            async def refuse(_group: str, _topic: str, _processed: Mapping[int, int]) -> None:
                raise Unavailable("the process dies")

            with monkeypatch.context() as patched:
                patched.setattr(broker.admin, "set_committed", refuse)
                with pytest.raises(Unavailable):
                    await open_late(telling, broker).before_join()
        elif dies == "before the report":
            late = LateStart(broker, "late.hook", ["s"])
            await late.find_skipped(Sets())
        elif dies == "after the join":
            await open_late(telling, broker).before_join()
            await store(broker, 5, 2)
            stored = 7
            assert await join_and_read(broker, 2) == [5, 6]
        if dies.startswith("before"):
            await store(broker, 5, 2)
            stored = skipped = 7
        ledger = open_late(telling, broker)
        await ledger.before_join()
        await store(broker, stored, 2)
        assert await join_and_read(broker, 1) == list(range(skipped, stored + 2))
        await ledger.set_lags({})
        await ledger.close()
    reports = [decode_report(record.value) for record in telemetry.records(TELEMETRY)]
    assert told(reports, "expel", "skipped") == BitMap(range(skipped))
    runs = {one.incarnation for report in reports for one in report.sets}
    assert runs == {topic_incarnation(ID_OF_TOPIC, 0)}


async def test_a_late_start_beside_members_skips_what_came_meanwhile(tmp_path: Path) -> None:
    """Broken: with a topic that is added to a running group, a lane waits for ever, or misses the events before its join."""
    found = Sets()
    async with LogBroker.open(str(tmp_path / "log")) as broker:
        for topic in ("s", "own"):
            await broker.admin.create_topic(TopicSpec(topic, 1))
        await store(broker, 0, 5)
        late = LateStart(broker, "late.hook", ["s"])
        async with broker.consumer("late.hook", ["s"], start="latest", on_revoke=ignore_revoke) as member:
            while not member.assignment():
                await member.poll(max_records=10, max_wait=0.1)
            late._ends = {"s": {0: 3}}  # it had found the end before two more came and the member joined
            await late.begin()
            await late.skip_rest(found)
            await late.skip_rest(Sets())
    (one,) = found.pack()
    assert unpack_numbers(one.numbers) == BitMap([3, 4])


@pytest.mark.parametrize(
    ("start", "end"), [(TOPIC_NUMBERS - 2, TOPIC_NUMBERS + 3), (3, 5), (TOPIC_NUMBERS, TOPIC_NUMBERS + 1)]
)
async def test_skipped_offsets_are_those_between(start: int, end: int) -> None:
    """Broken: with large offsets the report names other events."""
    record = read(Record(None, b"{}", 1))[0]

    class OneRecord:
        async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch:
            return Batch(topic, partition, [offset], [record])

    found = Sets()
    broker = SimpleNamespace(reader=OneRecord())
    await LateStart(broker, "g", ["s"])._skip(found, "s", 0, start, end)
    offsets = {
        offset_of(Origin(one.incarnation, 0, number)) for one in found.pack() for number in unpack_numbers(one.numbers)
    }
    assert offsets == set(range(start, end))


def send(target: TopicTarget) -> list[Record]:
    headers = (
        (ID, b"e1"),
        (ARRIVAL, b"1"),
        (ORIGIN, b"a:0:0"),
        ("ce_type", b"order.placed"),
        (CONTENT_TYPE, b"text/plain"),
        ("penstock_outputs", b"x"),
    )
    records = [Record(b"k", b"hello", 1_700_000_000_000, headers), Record(None, b"{}", 0, headers[:3])]
    delivery = Delivery(
        [b"", b""], [b"e1", b"e1"], [1, 1], records, [OffsetRun(TopicPartition("orders", 0), [0, 1], 0)]
    )
    return TopicSender(None, target, "shop").prepare(delivery)  # type: ignore[arg-type]


def test_a_topic_of_others_gets_cloud_events() -> None:
    """Broken: other consumers cannot read what we write, or see headers that are ours alone."""
    first, second = send(TopicTarget(name="erp.orders"))
    assert (first.key, first.value, first.timestamp) == (b"k", b"hello", 1_700_000_000_000)
    assert dict(first.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": b"e1",
        "ce_source": b"penstock/shop",
        "ce_type": b"order.placed",
        "ce_time": b"2023-11-14T22:13:20.000Z",
        "content-type": b"text/plain",
    }
    assert dict(second.headers)["ce_type"] == b"penstock.orders"
    assert dict(second.headers)["content-type"] == b"application/json"
    assert json.loads(second.value or b"") == {}


def test_a_topic_of_others_gets_plain_records() -> None:
    """Broken: a consumer that wants only the payload gets headers, too."""
    assert send(TopicTarget(name="t", format="plain"))[0] == Record(b"k", b"hello", 1_700_000_000_000)


async def test_an_event_that_a_topic_of_others_refuses_holds_up_no_other() -> None:
    """Broken: a compacted topic gets an event without a key, refuses it each time, and the lane stands still for ever."""
    appender = MemoryAppender()
    appender.create(target_name("t"), 1)
    appender.errors.append(RecordRefused("t[0]: Kafka answered INVALID_RECORD"))
    delivery = Delivery([b""], [b"e"], [1], [Record(None, b"{}", 1)], [OffsetRun(P0, [0], 0)])
    async with Producer(appender) as producer:
        outcome = await TopicSender(producer, TopicTarget(name="t"), "shop").send(delivery)
        assert isinstance(outcome, dict)
        assert (outcome[0].reason, outcome[0].recoverable) == ("refused", False)
        appender.create("s", 1)
        appender.errors.append(RecordRefused("s[0]: Kafka answered INVALID_RECORD"))
        outcome = await StreamSender(producer, None, "s").send(delivery)
        assert isinstance(outcome, dict)
        assert outcome[0].recoverable, "somebody altered our own topic"


@pytest.mark.parametrize("form", ["cloudevents", "plain"])
def test_a_topic_of_others_gets_no_timestamp_that_is_ahead(form: Literal["cloudevents", "plain"]) -> None:
    """Broken: Kafka 4 refuses a record that is an hour ahead, and a client's clock may be a day ahead."""
    now = int(time.time() * 1000)
    record = Record(b"k", b"{}", now + 20 * HOUR_MS, ((ID, b"e"), (ARRIVAL, b"1"), (ORIGIN, b"a:0:0")))
    delivery = Delivery([b""], [b"e"], [1], [record], [OffsetRun(P0, [0], 0)])
    sender = TopicSender(None, TopicTarget(name="t", format=form), "shop")  # type: ignore[arg-type]
    (made,) = sender.prepare(delivery)
    assert now <= made.timestamp < now + HOUR_MS
    if form == "cloudevents":
        assert made.header("ce_time") == format_time(record.timestamp).encode()
