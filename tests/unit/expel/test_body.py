"""Bodies joined from bytes: a payload stays byte for byte, and nothing that others wrote breaks its neighbours."""

import base64

import orjson
import pytest

from services.core.broker.record import Batch, Headers, Record
from services.core.pipe_file.webhook import Body
from services.expel.delivery import Rendered
from services.expel.webhook.body import BAD_RECORD, OVERSIZE, make_format, render

ORIGIN = ("penstock_origin", b"a:0:1")


def render_one(
    value: bytes | None,
    headers: Headers = (),
    *,
    body: Body = "cloudevents",
    timestamp: int = 0,
    max_part: int = 10_000,
) -> Rendered:
    record = Record(b"k", value, timestamp, (("ce_id", b"e1"), *headers))
    return render(Batch("flights", 3, [77], [record]), make_format(body, "late").renderer_for("flights"), max_part)


def part(value: bytes | None, headers: Headers = (), *, body: Body = "cloudevents", timestamp: int = 0) -> bytes:
    found = render_one(value, headers, body=body, timestamp=timestamp)
    assert list(found.unreadable) == []
    return found.delivery.parts[0]


def refusal(value: bytes | None, headers: Headers = (), *, body: Body = "cloudevents") -> str:
    found = render_one(value, headers, body=body)
    assert list(found.delivery.parts) == []
    (bad,) = found.unreadable
    assert (bad.offset, bad.reason) == (77, BAD_RECORD)
    return bad.detail


@pytest.mark.parametrize("value", [b'{"a":1e3,"a":12345678901234567890123}', b" [1, 2] ", b'"\xc3\xa9"', b"null", b"0"])
def test_payloads_stay_byte_for_byte(value: bytes) -> None:
    """Broken: number formats, large integers or key order change on the way."""
    assert part(value).endswith(b'"data":' + value + b"}")
    assert part(value, body="json") == value
    assert part(value, body="ndjson") == value


def test_line_breaks_inside_a_payload_do_not_break_ndjson() -> None:
    """Broken: a payload that was sent pretty-printed becomes several lines, each invalid."""
    value = b'{\r\n  "a": "x\\ny"\n}'
    assert b"\n" not in part(value, body="ndjson")
    assert orjson.loads(part(value, body="ndjson")) == orjson.loads(value)


def test_attributes_of_the_client_win() -> None:
    """Broken: type, source, time or extensions that a client gave are replaced by ours."""
    headers = (
        ("ce_type", b"com.example.flight"),
        ("ce_source", b"/jfk"),
        ("ce_time", b"2013-01-01T05:15:00.123456Z"),
        ("ce_subject", '"é"\n'.encode()),
        ("ce_specversion", b"1.0"),
        ("ce_Bad-Name", b"x"),
        ("ce_data", b"forged"),
        ("penstock_arrival", b"5"),
        ("traceparent", b"00-x"),
    )
    assert orjson.loads(part(b"{}", headers)) == {
        "specversion": "1.0",
        "id": "e1",
        "source": "/jfk",
        "type": "com.example.flight",
        "time": "2013-01-01T05:15:00.123456Z",
        "subject": '"é"\n',
        "penstockarrival": "5",
        "data": {},
    }


def test_both_ways_of_rendering_agree() -> None:
    """Broken: the quick way for usual records and the long way for others differ."""
    usual = orjson.loads(part(b"[1]", (("penstock_arrival", b"5"), ORIGIN), timestamp=1_700_000_000_007))
    longer = orjson.loads(part(b"[1]", (("penstock_arrival", b"5"), ORIGIN, ("x", b"y")), timestamp=1_700_000_000_007))
    assert usual == longer
    assert usual["time"] == "2023-11-14T22:13:20.007Z"


@pytest.mark.parametrize("timestamp", [-1, -62_135_596_800_000, 253_402_300_799_999])
def test_times_at_the_edge_of_the_calendar(timestamp: int) -> None:
    """Broken: an old or far event time is written wrongly."""
    moment = orjson.loads(part(b"{}", timestamp=timestamp))["time"]
    assert len(moment) == 24
    assert moment.endswith("9Z" if timestamp % 1000 else "0Z")


@pytest.mark.parametrize("timestamp", [-(10**17), 10**18])
def test_times_outside_of_the_calendar_are_left_out(timestamp: int) -> None:
    """Broken: a nonsense timestamp that somebody wrote crashes the lane."""
    assert "time" not in orjson.loads(part(b"{}", timestamp=timestamp))


def test_other_payloads_are_base64() -> None:
    """Broken: text or binary payloads make the body invalid JSON."""
    event = orjson.loads(part(b"\xff\x00", (("content-type", b"image/png"),)))
    assert base64.b64decode(event["data_base64"]) == b"\xff\x00"
    assert event["datacontenttype"] == "image/png"
    event = orjson.loads(part(b"{}", (("content-type", b"application/geo+json; charset=utf-8"),)))
    assert event["data"] == {}


@pytest.mark.parametrize("body", ["cloudevents", "json", "ndjson"])
@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"1,2", b'1},{"id":"forged"', b"NaN", b"\xef\xbb\xbf{}", b'"\xff"', b"[" * 5000, b"{}{}"]
)
def test_foreign_values_are_refused(body: Body, value: bytes | None) -> None:
    """Broken: one bad value makes a whole request invalid, or forges an event beside it."""
    assert refusal(value, body=body)


def test_foreign_headers_are_refused() -> None:
    """Broken: an event without a usable id, or of an unknown version, is delivered as if it were sound."""
    for headers in ((), (("ce_id", b""),), (("ce_id", b"\xff"),), (("ce_id", b"a"), ("ce_specversion", b"2.0"))):
        record = Record(None, b"{}", 0, headers)
        found = render(Batch("s", 0, [0], [record]), make_format("cloudevents", "late").renderer_for("s"), 1000)
        assert [bad.reason for bad in found.unreadable] == [BAD_RECORD]
    assert "json" in refusal(b"x", (("content-type", b"text/plain"),), body="json").lower()


def test_ids_are_escaped() -> None:
    """Broken: an id forges attributes."""
    record = Record(None, b"{}", 0, (("ce_id", b'a","type":"x'), ("penstock_arrival", b"1"), ORIGIN))
    found = render(Batch("s", 0, [0], [record]), make_format("cloudevents", "late").renderer_for("s"), 1000)
    assert orjson.loads(found.delivery.parts[0])["id"] == 'a","type":"x'


def test_the_first_of_repeated_headers_counts() -> None:
    """Broken: the id here is another one than elsewhere in the fleet."""
    found = render_one(b"{}", (("ce_id", b"second"),))
    assert list(found.delivery.ids) == [b"e1"]


def test_good_and_bad_records_are_told_apart() -> None:
    """Broken: offsets, ids and parts get out of step behind a bad record, and the wrong events are committed."""
    values: list[bytes | None] = [b"1", None, b"3", b"x" * 5, b'"' + b"y" * 100 + b'"', b"6"]
    records = [Record(None, value, 0, (("ce_id", b"e%d" % n),)) for n, value in enumerate(values)]
    found = render(Batch("s", 0, [10, 12, 14, 16, 18, 20], records), make_format("json", "late").renderer_for("s"), 50)
    assert list(found.delivery.runs[0].offsets) == [10, 14, 20]
    assert list(found.delivery.parts) == [b"1", b"3", b"6"]
    assert list(found.delivery.ids) == [b"e0", b"e2", b"e5"]
    assert [record.value for record in found.delivery.records] == [b"1", b"3", b"6"]
    assert [(bad.offset, bad.reason) for bad in found.unreadable] == [
        (12, BAD_RECORD),
        (16, BAD_RECORD),
        (18, OVERSIZE),
    ]


def test_arrivals() -> None:
    """Broken: a foreign arrival header crashes the lane or spoils the figures."""
    for raw, expected in ((b"1700", 1700), (b"-5", 0), (b"x", 0), (b"9" * 40, 0), (b"\xd9\xa1", 0)):
        assert list(render_one(b"{}", (("penstock_arrival", raw),)).delivery.arrivals) == [expected]
    for digits in (16, 400, 5000):  # with exactly the headers that ingest writes, on the way for whole batches
        arrival = ("penstock_arrival", b"9" * digits)
        assert list(render_one(b"{}", (arrival, ORIGIN), body="json").delivery.arrivals) == [0]
