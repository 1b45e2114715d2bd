"""What becomes of an accepted event: id, key, time, partition, headers, origin."""

import asyncio
import re
import time

import orjson
import pytest
from prometheus_client import REGISTRY

from services.core import event
from services.core.broker.partitioner import choose_partition
from services.core.broker.record import Record
from services.fleet.sending.sender import wrap
from services.ingest.event_fields import IdMaker
from services.ingest.intake import KEYLESS_MS
from tests.unit.ingest.service import Service, running

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DAY_MS = 86_400_000


def origins(records: list[Record]) -> list[event.Origin]:
    """The origin of each record."""
    return [event.Origin.unpack(record.header(event.ORIGIN) or b"") for record in records]


async def test_headers_of_a_plain_event(service: Service) -> None:
    """Every consumer relies on these three; nothing else is added uninvited."""
    before = time.time_ns() // 1_000_000
    await service.post(b'{"a":1}')
    after = time.time_ns() // 1_000_000
    (record,) = service.stored()
    assert [name for name, _ in record.headers] == [event.ID, event.ARRIVAL, event.ORIGIN]
    assert before <= (event.read_arrival(record) or 0) <= after
    assert record.timestamp == event.read_arrival(record)
    assert UUID7.fullmatch(event.read_id(record) or "")
    assert record.key is None


async def test_id_key_and_time_come_from_the_named_fields(service: Service) -> None:
    """`orders` names id, customer.id and at."""
    rows = [
        {"id": "o-1", "customer": {"id": "c-1"}, "at": "2025-01-02T03:04:05.678+01:00"},
        {"id": 17, "customer": {"id": 42}, "at": 1735787045},
    ]
    assert (await service.post(orjson.dumps(rows), "orders")).json() == {"accepted": 2}
    by_id = {event.read_id(record): record for record in service.stored("orders")}
    assert by_id["o-1"].key == b"c-1"
    assert by_id["o-1"].timestamp == 1735783445678
    assert by_id["17"].key == b"42"
    assert by_id["17"].timestamp == 1735787045000


async def test_absent_and_null_fields_are_filled_in(service: Service) -> None:
    """A missing id is a new one, a missing time the arrival, a missing key none; null means missing."""
    rows: list[dict[str, object]] = [{}, {"id": None, "customer": None, "at": None}, {"customer": "text"}, {"id": "x"}]
    assert (await service.post(orjson.dumps(rows), "orders")).json() == {"accepted": 4}
    records = service.stored("orders")
    assert sum(bool(UUID7.fullmatch(event.read_id(record) or "")) for record in records) == 3
    assert {record.key for record in records} == {None}
    assert all(record.timestamp == event.read_arrival(record) for record in records)


async def test_absent_fields_are_counted(service: Service) -> None:
    """Broken: the doctor cannot say that no event has the field that the pipe file names."""

    def counted() -> dict[str, float]:
        service.intakes["orders"].tally.flush()
        name = "penstock_ingest_fields_absent_total"
        return {
            use: REGISTRY.get_sample_value(name, {"stream": "orders", "use": use}) or 0.0
            for use in ("id", "key", "time")
        }

    before = counted()
    sent = [wrap(payload, "orders") for payload in (b'{"id": "a"}', b'{"customer": {"id": "c"}}')]
    own = b'{"specversion":"1.0","id":"1","source":"/shop","type":"t","data":{}}'
    batch = b"[" + b",".join([*sent, wrap(own, "orders")]) + b"]"
    await service.post(batch, "orders", media="application/cloudevents-batch+json")
    since = {use: count - before[use] for use, count in counted().items()}
    assert since["id"] == 1.0, "penstock send has made an id; the other client has given one"
    before = counted()
    rows = [{"id": "a", "customer": {"id": "c"}}, {"customer": {"id": "c"}}, {"id": "b", "customer": {}}]
    await service.post(orjson.dumps(rows), "orders")
    assert {use: count - before[use] for use, count in counted().items()} == {"id": 1.0, "key": 1.0, "time": 3.0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2025-01-02T03:04:05Z", 1735787045000),
        ("2025-01-02t03:04:05.1z", 1735787045100),
        ("2025-01-02T03:04:05.678901234+00:00", 1735787045678),
        ("2025-01-02T08:34:05+05:30", 1735787045000),
        (0, 0),
        (1735787045, 1735787045000),
        (1735787045.678, 1735787045678),
        (1735787045678, 1735787045678),
        (1735787045678.4, 1735787045678),
    ],
)
async def test_times_that_are_understood(service: Service, value: object, expected: int) -> None:
    """RFC 3339, seconds, milliseconds: alone, among its like and among others."""
    row = {"at": value}
    for rows in ([row], [row] * 3, [row, {}, {"at": "2025-01-02T03:04:05Z"}, {"at": 1735787045}]):
        assert (await service.post(orjson.dumps(rows), "orders")).status == 200
        assert expected in [record.timestamp for record in service.stored("orders")]
        service.appender.create("orders")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9999-12-31T23:59:59Z", "time-out-of-range"),
        ("1969-12-31T23:59:59.999Z", "time-out-of-range"),
        ("0001-01-01T00:00:00+14:00", "time-out-of-range"),
        (-1, "time-out-of-range"),
        (-0.001, "time-out-of-range"),
        (253402300799000, "time-out-of-range"),
        (99999999999, "time-out-of-range"),
        (1e300, "time-out-of-range"),
        pytest.param(time.time() + 2 * 86_400, "time-out-of-range", id="two days ahead"),
        ("2025-01-02", "bad-time"),
        ("2025-01-02T03:04:05", "bad-time"),
        ("2025-02-30T03:04:05Z", "bad-time"),
        ("2025-01-02T03:04:60Z", "bad-time"),
        ("20250102T030405Z", "bad-time"),
        ("now", "bad-time"),
        ("", "bad-time"),
        ("1735787045", "bad-time"),
        (True, "bad-time"),
        ({}, "bad-time"),
        ([], "bad-time"),
    ],
)
async def test_times_that_are_refused(service: Service, value: object, reason: str) -> None:
    """A wrong time would poison watermarks and lag; it costs its own event alone, whatever stands beside it."""
    for rows in (
        [{"at": value}, {}],
        [{"at": value}, {"at": "2025-01-02T03:04:05Z"}],
        [{"at": value}, {"at": 1735787045678}],
    ):
        reply = await service.post(orjson.dumps(rows), "orders")
        assert reply.status == 207
        assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(0, reason)]


@pytest.mark.parametrize("value", ["", "x" * 257, "é" * 129, 1.5, True, {}, [], 2**64])
async def test_ids_that_are_refused(service: Service, value: object) -> None:
    """An id must fit a header and stay the same text everywhere. (Beyond 64 bits a number's text is not certain.)"""
    reply = await service.post(orjson.dumps([{"id": "fine"}]).replace(b'"fine"', _dump(value)), "orders")
    assert (reply.status, reply.problem) == (422, "nothing-accepted")
    reply = await service.post(b'[{"id":%b},{"id":"fine"}]' % _dump(value), "orders")
    assert reply.status == 207
    assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(0, "bad-id")]


def _dump(value: object) -> bytes:
    return b"%d" % value if type(value) is int else orjson.dumps(value)


@pytest.mark.parametrize("value", ["a\x00b", "a\nb", "\x7f", "\x85"])
async def test_control_characters_in_an_id_are_400(service: Service, value: str) -> None:
    """An id ends up in HTTP headers of webhooks, where a line break forges a header. In NDJSON it is its line's fault."""
    body = orjson.dumps([{"id": "fine"}, {"id": value}])
    reply = await service.post(body, "orders")
    assert (reply.status, reply.problem) == (400, "bad-id-characters")
    assert service.stored("orders") == []
    lines = b"\n".join(map(orjson.dumps, [{"id": "fine"}, {"id": value}]))
    reply = await service.post(lines, "orders", media="application/jsonl")
    assert reply.status == 207
    assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(1, "bad-id-characters")]


@pytest.mark.parametrize("value", ["日本", "a b", "\u00a0x", "x" * 256, "-"])
async def test_ids_that_are_kept(service: Service, value: str) -> None:
    """Any other text is the client's business."""
    assert (await service.post(orjson.dumps([{"id": value}] * 2), "orders")).status == 200
    assert {event.read_id(record) for record in service.stored("orders")} == {value}


@pytest.mark.parametrize("value", [1.5, True, {}, ["a"], "x" * 1025])
async def test_keys_that_are_refused(service: Service, value: object) -> None:
    """A key that has no certain text could send one customer's events to two partitions."""
    for other in ({}, {"customer": {"id": "c"}}):
        reply = await service.post(orjson.dumps([{"customer": {"id": value}}, other]), "orders")
        assert reply.status == 207
        assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(0, "bad-key")]


async def test_a_repeated_key_of_an_object_counts_the_last_time(service: Service) -> None:
    """Documented: of duplicate keys the last counts for id, key and time; the payload keeps both."""
    text = b'{"id":"first","id":"last"}'
    await service.post(text, "orders")
    (record,) = service.stored("orders")
    assert (event.read_id(record), record.value) == ("last", text)


async def test_a_keys_events_stay_in_order_in_kafkas_partition(service: Service) -> None:
    """Order per key is a promise, and Spark and Kafka must find the same partition."""
    rows = [{"id": f"{n}", "customer": {"id": f"c-{n % 7}"}} for n in range(70)]
    await service.post(orjson.dumps(rows[:35]), "orders")
    await service.post(orjson.dumps(rows[35:]), "orders")
    for number in range(7):
        key = f"c-{number}".encode()
        partition = service.appender.topics["orders"][choose_partition(key, 4)]
        ids = [int(event.read_id(record) or -1) for record in partition if record.key == key]
        assert ids == list(range(number, 70, 7))


async def test_keyless_events_of_a_request_stay_together_and_requests_spread(service: Service) -> None:
    """One batch per request is what makes this fast; one partition for all of them would not scale."""
    for _ in range(8):
        await service.post(b"[{},{},{},{}]")
        await asyncio.sleep(KEYLESS_MS / 1000 + 0.002)  # requests of one moment share a partition on purpose
    sizes = [len(partition) for partition in service.appender.topics["plain"]]
    assert sum(sizes) == 32
    assert all(size and size % 4 == 0 for size in sizes)


async def test_origins_are_dense_per_partition_and_differ_between_streams(service: Service) -> None:
    """The loss ledger is a set of these: a gap would be a loss, a repetition would hide one."""
    rows = [{"customer": {"id": f"c-{n % 5}"}} for n in range(20)] + [{"at": "refused"}]
    for _ in range(3):
        await service.post(orjson.dumps(rows), "orders")
        await service.post(b"[{},{}]")
    for stream, partitions in service.appender.topics.items():
        for number, records in enumerate(partitions):
            found = origins(records)
            assert (
                found == [event.Origin(found[0].incarnation, number, n) for n in range(len(found))] if found else True
            )
            assert {one.incarnation for one in found} <= {service.intakes[stream].origins.incarnation}
    assert service.intakes["plain"].origins.incarnation != service.intakes["orders"].origins.incarnation


async def test_two_runs_never_share_an_origin() -> None:
    """A restarted process counts from 0 again; its incarnation must be new."""
    async with running() as first, running() as second:
        assert first.intakes["plain"].origins.incarnation != second.intakes["plain"].origins.incarnation


def test_made_ids_are_distinct_ascending_uuids() -> None:
    """RFC 9562 version 7: ids of one request sort in its order, and of later requests behind."""
    now = 1_735_787_045_678
    maker = IdMaker()
    ids = maker.make(10_000, now) + maker.make(10_000, now + 1)
    assert all(UUID7.fullmatch(one.decode()) for one in ids)
    assert ids == sorted(set(ids))
    assert int(ids[0].decode().replace("-", "")[:12], 16) == now
    assert len({made.make(1, now)[0] for made in (maker, IdMaker()) for _ in range(1000)}) == 2000


async def test_ids_are_told_on_request(service: Service) -> None:
    """A client that left the id to us may want to know it; others should not pay for it."""
    reply = await service.post(b'[{"id":"a"},{"at":"refused"},{"id":"b"}]', "orders", Prefer="return=representation")
    assert reply.status == 207
    assert reply.json()["ids"] == ["a", "b"]
    reply = await service.post(b"{}", Prefer="respond-async, return=representation")
    assert reply.json()["ids"] == [event.read_id(record) for record in service.stored()]
    assert "ids" not in (await service.post(b"{}", Prefer="return=minimal")).json()


async def test_a_trace_context_travels_along(service: Service) -> None:
    """The header is for whoever traces across systems; a malformed one is ignored, as W3C says."""
    await service.post(b"{}", traceparent=TRACE)
    await service.post(b"{}", traceparent="not a trace")
    assert sorted(record.header(event.TRACEPARENT) or b"" for record in service.stored()) == [b"", TRACE.encode()]


async def test_times_a_day_ahead_are_accepted(service: Service) -> None:
    """A client's clock may be wrong by hours; its events count all the same."""
    ahead = time.time_ns() // 1_000_000 + DAY_MS - 10_000
    assert (await service.post(orjson.dumps([{"at": ahead}, {"at": ahead}]), "orders")).status == 200
