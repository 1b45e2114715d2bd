"""CloudEvents 1.0: batch, structured and binary mode, and what of them is stored."""

import base64
from typing import Any

import orjson
import pytest

from services.core import event
from tests.unit.ingest.service import LIMITS, Service

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CE = {"specversion": "1.0", "id": "ce-1", "source": "/shop", "type": "order.placed"}


def ce(**members: Any) -> dict[str, Any]:
    """A CloudEvent with these members more, or without those that are ...."""
    return {name: value for name, value in {**CE, **members}.items() if value is not ...}


@pytest.mark.parametrize("batch", [True, False])
async def test_attributes_become_headers_and_data_the_payload(service: Service, batch: bool) -> None:
    """Any consumer that knows the CloudEvents Kafka binding reads our streams; data keeps its bytes."""
    text = (
        b'{"specversion":"1.0","id":"ce-1","source":"/shop","type":"order.placed","subject":"s 1",'
        b'"time":"2025-01-02T03:04:05.5Z","partitionkey":"c-1","retries":3,"urgent":true,"none":null,'
        b'"datacontenttype":"application/json","data" : {"b" :1.50,"a":[ ]}}'
    )
    reply = await service.post(b"[" + text + b"]" if batch else text, media=BATCH if batch else STRUCTURED)
    assert (reply.status, reply.json()) == (200, {"accepted": 1})
    (record,) = service.stored()
    assert record.value == b'{"b" :1.50,"a":[ ]}'
    assert (record.key, record.timestamp) == (b"c-1", 1735787045500)
    assert event.attributes(record.headers) == {
        "id": "ce-1",
        "specversion": "1.0",
        "source": "/shop",
        "type": "order.placed",
        "subject": "s 1",
        "time": "2025-01-02T03:04:05.5Z",
        "partitionkey": "c-1",
        "retries": "3",
        "urgent": "true",
    }
    assert record.header(event.CONTENT_TYPE) is None
    assert event.read_arrival(record)
    assert record.header(event.ORIGIN)


@pytest.mark.parametrize(
    ("members", "value", "media"),
    [
        ({}, b"null", None),
        ({"data": None}, b"null", None),
        ({"data": "text"}, b'"text"', None),
        ({"data": 5, "datacontenttype": "application/vnd.x+json"}, b"5", b"application/vnd.x+json"),
        ({"data": "text", "datacontenttype": "text/plain"}, b"text", b"text/plain"),
        (
            {"data_base64": base64.b64encode(b"\x00\xff").decode(), "datacontenttype": "image/png"},
            b"\x00\xff",
            b"image/png",
        ),
        ({"data_base64": ""}, b"", None),
    ],
)
async def test_kinds_of_data(service: Service, members: dict[str, Any], value: bytes, media: bytes | None) -> None:
    """The JSON format's rules: JSON stays JSON, text of another type is the text, Base64 is bytes."""
    assert (await service.post(orjson.dumps(ce(**members)), media=STRUCTURED)).status == 200
    (record,) = service.stored()
    assert record.value == value
    assert record.header(event.CONTENT_TYPE) == media


@pytest.mark.parametrize(
    "members",
    [
        {"specversion": ...},
        {"specversion": "0.3"},
        {"id": ...},
        {"id": ""},
        {"id": 5},
        {"source": ...},
        {"type": ...},
        {"type": ""},
        {"Bad": "x"},
        {"bad_name": "x"},
        {"ext": {"a": 1}},
        {"ext": 1.5},
        {"ext": "a\nb"},
        {"subject": 5},
        {"datacontenttype": 0, "data": "x"},
        {"data_base64": "%%%"},
        {"data_base64": 5},
        {"data_base64": "AA==", "data": 1},
        {f"x{n}": "y" for n in range(70)},
    ],
)
async def test_what_is_no_cloudevent_is_refused_alone(service: Service, members: dict[str, Any]) -> None:
    """One bad event costs itself; stored attributes must fit headers everywhere."""
    reply = await service.post(orjson.dumps([ce(id="good"), ce(**members)]), media=BATCH)
    assert reply.status == 207
    assert [(item["index"], item["reason"]) for item in reply.json()["refused"]] == [(1, "bad-cloudevent")]
    reply = await service.post(orjson.dumps(ce(**members)), media=STRUCTURED)
    assert (reply.status, reply.problem) == (422, "nothing-accepted")
    assert len(service.stored()) == 1


async def test_a_nul_in_the_id_is_400_and_a_bad_time_its_own(service: Service) -> None:
    """The same rules as for ids and times in payloads."""
    reply = await service.post(orjson.dumps([ce(id="a\x00")]), media=BATCH)
    assert (reply.status, reply.problem) == (400, "bad-id-characters")
    reply = await service.post(orjson.dumps([ce(), ce(time="9999-01-01T00:00:00Z"), ce(time="soon")]), media=BATCH)
    assert [item["reason"] for item in reply.json()["refused"]] == ["time-out-of-range", "bad-time"]


async def test_the_streams_own_fields_come_first(service: Service) -> None:
    """`orders` names fields of the payload; attributes fill what the payload lacks."""
    events = [
        ce(
            partitionkey="p", time="2025-01-01T00:00:00Z", data={"id": "own", "customer": {"id": "k"}, "at": 1735787045}
        ),
        ce(partitionkey="p", time="2025-01-01T00:00:00Z", data={}),
        ce(partitionkey="p", time="2025-01-01T00:00:00Z", data=[1]),
    ]
    assert (await service.post(orjson.dumps(events), "orders", media=BATCH)).json() == {"accepted": 3}
    found = sorted((event.read_id(record), record.key, record.timestamp) for record in service.stored("orders"))
    attributes = ("ce-1", b"p", 1735689600000)
    assert found == [attributes, attributes, ("own", b"k", 1735787045000)]


async def test_a_batch_must_be_an_array_and_one_event_an_object(service: Service) -> None:
    """The Content-Type says what the body is; nothing is guessed."""
    assert (await service.post(orjson.dumps(ce()), media=BATCH)).problem == "bad-json"
    assert (await service.post(orjson.dumps([ce()]), media=STRUCTURED)).problem == "bad-json"
    assert (await service.post(b"[]", media=BATCH)).json() == {"accepted": 0}
    reply = await service.post(b"[1,2]", media=BATCH)
    assert [item["reason"] for item in reply.json()["refused"]] == ["not-an-object"] * 2


async def test_limits_hold_for_the_whole_event(service: Service) -> None:
    """Attributes are stored, too: an event's size is that of its text."""
    large = orjson.dumps(ce(ext="x" * LIMITS.event_bytes))
    assert (await service.post(large, media=STRUCTURED)).problem == "event-too-large"
    assert (await service.post(b"[" + large + b"]", media=BATCH)).json()["refused"][0]["reason"] == "event-too-large"


HEADERS = {"ce_specversion": "1.0", "ce_id": "b-1", "ce_source": "/shop", "ce_type": "t"}


async def test_binary_mode(service: Service) -> None:
    """Attributes in headers, percent-encoded; the body is the data, whatever it is."""
    reply = await service.post(b'{"a": 1.0}', ce_subject="%E2%82%AC%20x", traceparent=TRACE, **HEADERS)
    assert (reply.status, reply.json()) == (200, {"accepted": 1})
    reply = await service.post(b"\xff\x00", media="image/png", **HEADERS)
    assert reply.status == 200
    reply = await service.post(b"", media=None, **HEADERS)
    assert reply.status == 200
    by_value = {record.value: record for record in service.stored()}
    assert set(by_value) == {b'{"a": 1.0}', b"\xff\x00", b"null"}
    first = by_value[b'{"a": 1.0}']
    assert event.attributes(first.headers)["subject"] == "€ x"
    assert event.read_id(first) == "b-1"
    assert first.header(event.TRACEPARENT) == TRACE.encode()
    assert by_value[b"\xff\x00"].header(event.CONTENT_TYPE) == b"image/png"


async def test_binary_mode_checks_json_and_size(service: Service) -> None:
    """A body that says it is JSON must be."""
    assert (await service.post(b"{oops", **HEADERS)).problem == "bad-json"
    assert (await service.post(b"x" * 3000, media="image/png", **HEADERS)).problem == "event-too-large"
    assert (await service.post(b'"' + b"x" * 3000 + b'"', **HEADERS)).problem == "event-too-large"


@pytest.mark.parametrize(
    "changes",
    [{"ce_id": ""}, {"ce_specversion": "2.0"}, {"ce_subject": "%0d%0aX: y"}, {"ce_subject": "%ff"}, {"CE_ID": "again"}],
)
async def test_bad_binary_headers_are_refused(service: Service, changes: dict[str, str]) -> None:
    """Decoded values become headers of webhooks: no line breaks, no ambiguity."""
    reply = await service.post(b"{}", **{**HEADERS, **changes})
    assert (reply.status, reply.problem) == (422, "nothing-accepted")
    assert reply.json()["refused"][0]["reason"] == "bad-cloudevent"


async def test_an_events_own_trace_wins(service: Service) -> None:
    """CloudEvents' distributed tracing extension names the event's trace; the request's may be that of a batch."""
    other = TRACE.replace("0af7", "ffff")
    await service.post(orjson.dumps([ce(traceparent=other), ce()]), media=BATCH, traceparent=TRACE)
    assert [record.header(event.TRACEPARENT) for record in service.stored()] == [other.encode(), TRACE.encode()]
