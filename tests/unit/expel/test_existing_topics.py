"""A lane that reads a topic of others: its events are accepted by their first reader, tombstones and faults are settled."""

import asyncio
import json
import time
from pathlib import Path
from typing import Literal

import pytest
from pyroaring import BitMap

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import RecordRefused
from services.core.broker.existing import target_name
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.dead_letter import DETAIL, REASON
from services.core.event import ARRIVAL, CONTENT_TYPE, ID, ORIGIN, topic_incarnation
from services.core.existing_topics import Translation
from services.core.ledger.accumulator import Sets
from services.core.ledger.first_reader import FirstReader, LateStart
from services.core.ledger.report import TELEMETRY, Report, decode_report, unpack_numbers
from services.core.pipe_topic import TopicTarget
from services.core.pipes import Stream
from services.core.times import format_time
from services.expel.delivery import Delivery, OffsetRun
from services.expel.dispatcher import Dispatcher
from services.expel.lane import Lane
from services.expel.metrics import LaneLedger, LaneMetrics
from services.expel.stream_sender import StreamSender, TopicSender
from services.expel.throttle import SendThrottle
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


async def test_every_record_is_accepted_and_settled() -> None:
    """Broken: a tombstone or a bad record stops the lane, or is in the loss table as missing."""
    now = int(time.time() * 1000)
    broker, telemetry = FakeBroker({"s": 1, "late.dead": 1}), MemoryAppender()
    telemetry.create(TELEMETRY, 1)
    values = [b'{"id": "a"}', None, b'{"id": []}', b"no json", None]
    broker.stored[P0] += read(*(Record(b"k", value, now) for value in values))
    async with Producer(broker.appender) as producer, Producer(telemetry) as telling:
        ledger = LaneLedger.open(telling, broker, "i", "late", "hook", ["s"], others=["s"])  # type: ignore[arg-type]
        meter, shape, sender = (
            LaneMetrics("late", "hook", ledger=ledger),
            make_shape(others=frozenset({"s"})),
            RealRendering(),
        )
        throttle = SendThrottle("late", "hook")
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
            await wait_until(lambda: broker.committed.get(("late.hook", P0), -1) == len(values) - 1)
        finally:
            stopping.set()
            await task
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


async def test_what_is_stored_before_a_late_start_is_skipped(tmp_path: Path) -> None:
    """Broken: a destination with `start: latest` misses all events that another one reads from the beginning."""
    now, found, again = int(time.time() * 1000), Sets(), Sets()

    async def ignore(_leaving: frozenset[TopicPartition]) -> None:
        return

    async with LogBroker.open(str(tmp_path / "log")) as broker:
        await broker.admin.create_topic(TopicSpec("s", 1))
        await broker.appender.append("s", 0, read(*(Record(None, b"{}", now) for _ in range(5))), timeout=10)
        late = LateStart(broker, "late.hook", ["s"])
        await late.find_new()
        async with broker.consumer("late.hook", ["s"], start="latest", on_revoke=ignore) as consumer:
            while not consumer.assignment():
                await consumer.poll(max_records=10, max_wait=0.1)
            await late.skip_earlier(found)
            await late.skip_earlier(again)
        await late.find_new()
        await late.skip_earlier(again)
    (one,) = found.pack()
    assert (one.outcome, unpack_numbers(one.numbers)) == ("skipped", BitMap(range(5)))
    assert one.incarnation == topic_incarnation(ID_OF_TOPIC, 0)
    assert not again


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
