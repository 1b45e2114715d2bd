"""The rules by which a record of a topic of others becomes an event."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.existing import target_name
from services.core.broker.record import Batch, Damage, Headers, Record
from services.core.event import (
    ARRIVAL,
    CONTENT_TYPE,
    FAULT,
    ID,
    MAX_MILLIS_DIGITS,
    ORIGIN,
    TOPIC_NUMBERS,
    Origin,
    is_of_topic,
)
from services.core.ledger.accumulator import _ORIGIN
from services.core.ledger.report import MAX_NUMBER
from services.core.pipe_file.existing_topics import (
    DAY_MS,
    LATEST_MS,
    MOMENT,
    NUMBER,
    OWN_PREFIX,
    SECONDS_BELOW,
    TIME,
    TYPE,
    Translation,
    existing_topics,
    target_homes,
)
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.references import find_broken_references
from services.core.pipe_file.stream import Stream
from tests.support.existing_cases import NUMBERS, ONLY_HEADERS, PARSED_HERE, PAYLOADS, TIMES

PAGE = Path(__file__).parents[3] / "docs/existing-topics.md"
TOPIC_ID = "3d9c2b1e-0f4a-4c55-8f7e-3a5b6c7d8e9f"
RUN = "topic3d9c2b1e0f4a4c558f7e3a5b6c7d8e9fe0"
NOW = 1_790_000_000_000


def translate(record: Record, offset: int = 7, **rules: Any) -> Record:
    stream = Stream.model_validate({"topic": "billing.invoices", **rules})
    batch = Batch("billing.invoices", 3, [offset], [record])
    (made,) = Translation(stream)(batch, TOPIC_ID).records
    return made


def plain(value: bytes | None = b'{"n": 1}', headers: Headers = (), key: bytes | None = None) -> Record:
    return Record(key, value, NOW, headers)


def test_by_default_the_place_is_the_id_and_the_timestamp_the_time() -> None:
    """Broken: a re-read event has another id or origin, so receivers and the ledger take it for another event."""
    made = translate(plain(key=b"k"))
    assert made == Record(
        b"k",
        b'{"n": 1}',
        NOW,
        (
            (ID, b"billing.invoices-3-7"),
            (ARRIVAL, b"%d" % NOW),
            (ORIGIN, f"{RUN}:3:7".encode()),
        ),
    )
    assert is_of_topic(RUN)
    assert _ORIGIN.fullmatch(made.headers[2][1])  # the ledger reads it


_DROPPED: Headers = ((f"{OWN_PREFIX}x", b"1"),)
"""A header that is dropped. A batch with one is translated record by record."""


def test_a_record_with_headers_gives_the_same_event_as_one_without() -> None:
    """Broken: the fast way and the slow way differ."""
    assert translate(plain(headers=(("h", b"1"),))).headers == (*translate(plain()).headers, ("h", b"1"))
    assert translate(plain(headers=_DROPPED)) == translate(plain())


_NAMES = ("h", "traceparent", TYPE, TIME, ID, CONTENT_TYPE, f"{OWN_PREFIX}x")


@given(
    st.lists(st.lists(st.tuples(st.sampled_from(_NAMES), st.just(b"1")), max_size=3), min_size=1, max_size=3),
    st.fixed_dictionaries({}, optional={"id": st.just("n"), "key": st.just("n"), "time": st.just("at")}),
)
def test_a_batch_with_headers_gives_the_same_events(
    headers: list[list[tuple[str, bytes]]], rules: dict[str, str]
) -> None:
    """Broken: the way for whole batches keeps a header that a rule replaces, or one of another fleet."""
    records = [plain(b'{"n": "1", "at": "2026-01-02T03:04:05Z"}', tuple(some)) for some in headers]
    one_by_one = [*records, plain(headers=_DROPPED)]
    translation = Translation(Stream.model_validate({"topic": "billing.invoices", **rules}))
    found = translation(Batch("billing.invoices", 3, range(len(records)), records), TOPIC_ID).records
    each = translation(Batch("billing.invoices", 3, range(len(one_by_one)), one_by_one), TOPIC_ID).records
    assert found == each[:-1]


@pytest.mark.parametrize(
    "last", [b"{}", b'{"id": 7, "meta": 1}', b'{"id": ["x"]}', b"no json", b'{"at": "noon"}', b'{"meta": {"k": 5}}']
)
def test_a_batch_of_usual_records_gives_the_same_events(last: bytes) -> None:
    """Broken: the way for whole batches reads other fields, or takes a record that does not fit for one that does."""
    rules = {"id": "id", "key": "meta.k", "time": "at"}
    usual = [
        plain(b'{"x": {"id": 1}, "id": "a-%d", "meta": {"k": "c", "z": 1}, "at": "2026-01-02T03:04:05Z"}' % number)
        for number in range(3)
    ]
    for records in (usual, [*usual, plain(last)]):
        batch = Batch("billing.invoices", 3, range(len(records)), records)
        found = Translation(Stream.model_validate({"topic": "billing.invoices", **rules}))(batch, TOPIC_ID).records
        each = [translate(record, number, **rules) for number, record in enumerate(records)]
        assert found == each
        assert found == [translate(plain(one.value, _DROPPED), number, **rules) for number, one in enumerate(records)]


_EDGES = (-1, 0, SECONDS_BELOW - 1, SECONDS_BELOW, NOW, NOW + DAY_MS, NOW + DAY_MS + 1, LATEST_MS + 1, 1.5, True, None)


@given(st.lists(st.sampled_from(_EDGES), min_size=1, max_size=3), st.sampled_from((0, NOW)))
def test_a_batch_with_numbers_as_times_gives_the_same_events(times: list[Any], timestamp: int) -> None:
    """Broken: a batch takes seconds for milliseconds, or a time from next week that alone makes a dead letter."""
    records = [Record(None, orjson.dumps({"at": time}), timestamp, ()) for time in times]
    batch = Batch("billing.invoices", 3, range(len(records)), records)
    found = Translation(Stream.model_validate({"topic": "billing.invoices", "time": "at"}))(batch, TOPIC_ID).records
    one_by_one = [Record(None, record.value, timestamp, _DROPPED) for record in records]
    each = [translate(record, number, time="at") for number, record in enumerate(one_by_one)]
    assert [one.timestamp for one in found] == [one.timestamp for one in each]
    assert [one.header(FAULT) for one in found] == [one.header(FAULT) for one in each]


def test_offsets_of_64_bits_fit_into_the_ledger() -> None:
    """Broken: events behind offset 2^31 are outside of the loss table, or count for others."""
    batch = Batch("t", 0, [TOPIC_NUMBERS - 1, TOPIC_NUMBERS, (1 << 62) + 5], [plain()] * 3)
    made = Translation(Stream(topic="t"))(batch, TOPIC_ID).records
    origins = [Origin.unpack(record.header(ORIGIN) or b"") for record in made]
    assert [origin.sequence for origin in origins] == [TOPIC_NUMBERS - 1, 0, 5]
    assert [origin.incarnation[-3:] for origin in origins[:2]] == ["fe0", "fe1"]
    assert len({origin[:2] for origin in origins}) == 3
    assert all(_ORIGIN.fullmatch(origin.pack()) and origin.sequence < MAX_NUMBER for origin in origins)


@pytest.mark.parametrize(
    ("rules", "record", "expected"),
    [
        ({"id": "meta.id"}, plain(b'{"meta": {"id": "a-1"}}'), b"a-1"),
        ({"id": "meta.id"}, plain(b'{"meta": {"id": 12}}'), b"12"),
        ({"id": "meta.id"}, plain(b'{"meta": 1}'), b"billing.invoices-3-7"),
        ({"id": "id"}, plain(b'["id"]'), b"billing.invoices-3-7"),
        ({"id": {"header": "x"}}, plain(headers=(("x", b"one"), ("x", b"two"))), b"one"),
        ({"id": {"header": "x"}}, plain(), b"billing.invoices-3-7"),
        ({"id": {"header": "x"}}, plain(headers=(("x", b""),)), b"billing.invoices-3-7"),
        ({"id": {"header": "ce_id"}}, plain(headers=(("ce_id", b"cloud"),)), b"cloud"),
    ],
)
def test_id(rules: dict[str, Any], record: Record, expected: bytes) -> None:
    """Broken: events have ids that their owner did not choose."""
    made = translate(record, **rules)
    assert [value for name, value in made.headers if name == ID] == [expected]
    assert made.header(FAULT) is None


@pytest.mark.parametrize(
    ("rules", "record", "key", "time"),
    [
        ({"key": "customer"}, plain(b'{"customer": "c"}', key=b"k"), b"c", NOW),
        ({"key": "customer"}, plain(key=b"k"), b"k", NOW),
        ({"key": {"header": "h"}}, plain(headers=(("h", b"\xff"),)), b"\xff", NOW),
        ({"time": "at"}, plain(b'{"at": "2026-01-02T03:04:05.678Z"}'), None, 1_767_323_045_678),
        ({"time": "at"}, plain(b'{"at": 1767323045}'), None, 1_767_323_045_000),
        ({"time": {"header": "at"}}, plain(headers=(("at", b"1767323045678"),)), None, 1_767_323_045_678),
        ({"time": {"header": "at"}}, plain(headers=(("at", b"2026-01-02T04:04:05+01:00"),)), None, 1_767_323_045_000),
    ],
)
def test_key_and_time(rules: dict[str, Any], record: Record, key: bytes | None, time: int) -> None:
    """Broken: events are ordered by another key, or have another time."""
    made = translate(record, **rules)
    assert (made.key, made.timestamp, made.header(FAULT)) == (key, time, None)
    assert made.header(ARRIVAL) == b"%d" % NOW


@pytest.mark.parametrize("text", TIMES | NUMBERS | ONLY_HEADERS)
def test_the_table_of_times(text: str) -> None:
    """Broken: an event has another time here than in a transform, which has the same table (`tests/spark`)."""
    expected = (TIMES | NUMBERS | ONLY_HEADERS)[text]
    payload = f'{{"at": {text}}}' if text in NUMBERS else json.dumps({"at": text})
    stored: list[tuple[Any, Record]] = [({"header": "at"}, plain(headers=(("at", text.encode()),)))]
    if text not in ONLY_HEADERS:
        stored += [("at", plain(payload.encode(), headers)) for headers in ((), _DROPPED)]
    for place, record in stored:
        made = translate(record, time=place)
        assert (None if made.header(FAULT) else made.timestamp) == expected


@pytest.mark.parametrize("payload", PAYLOADS | PARSED_HERE)
def test_the_table_of_payloads(payload: bytes) -> None:
    """Broken: a value is an event here and a dead letter in a transform, or it stops its partition for ever."""
    expected = (PAYLOADS | PARSED_HERE)[payload]
    expected = b"billing.invoices-3-7" if expected == b"" else expected
    for headers in ((), _DROPPED):
        made = translate(plain(payload, headers), id="id")
        assert (None if made.header(FAULT) else made.header(ID)) == expected


@settings(max_examples=200)
@given(
    micros=st.integers(172_800 * 1_000_000, NOW * 1000),
    digits=st.integers(0, 9),
    offset=st.integers(-18 * 60, 18 * 60),
    colon=st.sampled_from([":", ""]),
    between=st.sampled_from("Tt "),
)
def test_every_time_with_an_offset_is_read(micros: int, digits: int, offset: int, colon: str, between: str) -> None:
    """Broken: RFC 3339 that a producer writes is a fault, or another time."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    fraction = f".{moment.microsecond:06d}000"[: digits + 1] if digits else ""
    zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02d}{colon}{abs(offset) % 60:02d}"
    text = f"{moment:%Y-%m-%d}{between}{moment:%H:%M:%S}{fraction}{zone}"
    millis = int(f"{fraction[1:]}000"[:3])
    made = translate(plain(json.dumps({"at": text}).encode()), time="at")
    assert (made.header(FAULT), made.timestamp) == (None, (micros // 1_000_000 - offset * 60) * 1000 + millis)


@settings(max_examples=100)
@given(text=st.from_regex(re.compile(rf"\A{MOMENT}\Z")) | st.from_regex(re.compile(rf"\A{NUMBER}\Z")) | st.text())
def test_a_time_is_read_or_a_fault(text: str) -> None:
    """Broken: a text that looks like a time stops its partition for ever."""
    made = translate(plain(b"{}", (("at", text.encode(errors="replace")),)), time={"header": "at"})
    assert made.timestamp >= 0
    assert made.header(FAULT) is None or made.timestamp == NOW


@pytest.mark.parametrize(
    ("rules", "record", "fault"),
    [
        ({"id": "id"}, plain(b'{"id": {}}'), "the id is neither a string nor an integer"),
        ({"id": "id"}, plain(b'{"id": ""}'), "the id has 0 bytes. It may have 1 to 256"),
        ({"id": "id"}, plain(b'{"id": "a\\u0007"}'), "the id has control characters"),
        ({"id": "id"}, plain(b"{not json"), "the value is not JSON, and a rule of its stream needs a field of it"),
        ({"id": {"header": "x"}}, plain(headers=(("x", b"\xff"),)), "the id is not text in UTF-8"),
        ({"key": "key"}, plain(b'{"key": true}'), "the key is neither a string nor an integer"),
        ({"time": "at"}, plain(b'{"at": "yesterday"}'), "the time is a string, but not RFC 3339 with an offset"),
        ({"time": "at"}, plain(b'{"at": "2026-01-02"}'), "the time is a string, but not RFC 3339 with an offset"),
        (
            {"time": "at"},
            plain(b'{"at": 1e300}'),
            "the time is before 1970, or more than a day after the timestamp of the record",
        ),
        (
            {"time": "at"},
            plain(b'{"at": -1}'),
            "the time is before 1970, or more than a day after the timestamp of the record",
        ),
        ({"time": "at"}, plain(b'{"at": []}'), "the time is neither RFC 3339 text nor a number"),
        ({"format": "text"}, plain(b"\xff"), "the value is not text in UTF-8"),
    ],
)
def test_a_rule_that_does_not_fit_is_a_fault(rules: dict[str, Any], record: Record, fault: str) -> None:
    """Broken: the lane stops at such a record, or delivers it with a wrong id, key or time."""
    made = translate(record, **rules)
    assert made.headers[-1] == (FAULT, fault.encode())
    assert made.header(ID) == b"billing.invoices-3-7"
    assert (made.value, made.timestamp) == (record.value, NOW)


def test_formats_set_the_media_type() -> None:
    """Broken: receivers get text or bytes as if they were JSON."""
    own = (CONTENT_TYPE, b"application/avro")
    assert translate(plain(headers=(own,))).header(CONTENT_TYPE) is None
    assert translate(plain(b"x", (own,)), format="text").header(CONTENT_TYPE) == b"text/plain; charset=utf-8"
    assert translate(plain(b"\xff", (own,)), format="bytes").header(CONTENT_TYPE) == b"application/octet-stream"


def test_tombstones_are_skipped_or_delivered_as_null() -> None:
    """Broken: the tombstone behind a delete becomes a dead letter, or one that is wanted never comes."""
    assert translate(plain(None)).value is None
    made = translate(plain(None, key=b"k"), tombstones="deliver", id="id")
    assert (made.key, made.value, made.header(FAULT)) == (b"k", b"null", None)


def test_headers_of_another_fleet_mean_nothing() -> None:
    """Broken: the output of another Penstock confuses retries, dead letters and the ledger of this one."""
    theirs = (("penstock_origin", b"a:0:1"), ("penstock_dead_reason", b"x"), ("ce_id", b"theirs"), ("ce_type", b"t"))
    made = translate(plain(headers=theirs))
    assert [name for name, _ in made.headers] == [ID, ARRIVAL, ORIGIN, "ce_type"]
    assert made.header(ORIGIN) == f"{RUN}:3:7".encode()


def test_the_type_comes_from_its_place() -> None:
    """Broken: events have the type of an attribute that the rule replaces, or two types."""
    made = translate(plain(b'{"kind": "paid"}', (("ce_type", b"old"),)), type="kind")
    assert [value for name, value in made.headers if name == "ce_type"] == [b"paid"]


def test_damage_stays_as_it_is() -> None:
    """Broken: the stored bytes of damaged records become an event."""
    damaged = Batch("t", 0, [9], [plain(b"raw")], Damage(3, 9, "checksum"))
    assert Translation(Stream(topic="t"))(damaged, TOPIC_ID) is damaged


_PLACES = st.sampled_from([None, "f", "f.g", {"header": "h"}])
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.dictionaries(st.sampled_from("fgx"), inner),
)
_VALUES = (
    st.none()
    | st.binary()
    | _JSON.map(lambda value: repr(value).encode(errors="replace"))
    | _JSON.map(lambda value: __import__("json").dumps(value).encode())
)
_HEADERS = st.lists(st.tuples(st.sampled_from(["h", "ce_id", "penstock_x", "content-type"]), st.binary()), max_size=3)
_TEXTS = st.sampled_from([b"2026-01-02T03:04:05Z", b"0001-01-01T00:00:00+23:59", b"9" * 15, b"1.5", b"99999999999"])


@settings(max_examples=60)
@given(
    id=_PLACES,
    key=_PLACES,
    time=_PLACES,
    type=_PLACES,
    value=_VALUES,
    headers=_HEADERS,
    text=_TEXTS,
    timestamp=st.integers(-(1 << 63), (1 << 63) - 1),
    offset=st.integers(0, (1 << 63) - 1),
)
def test_rules_never_raise(
    id: Any,  # noqa: A002
    key: Any,
    time: Any,
    type: Any,  # noqa: A002
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    text: bytes,
    timestamp: int,
    offset: int,
) -> None:
    """Broken: one strange record stops its partition for ever."""
    places = {name: place for name, place in (("id", id), ("key", key), ("time", time), ("type", type)) if place}
    record = Record(None, value, timestamp, (*headers, ("h", text)))
    made = translate(record, offset, **places)
    (first, second, third), own_id = made.headers[:3], made.header(ID)
    assert (first[0], second[0], third[0]) == (ID, ARRIVAL, ORIGIN)
    assert own_id
    assert len(own_id) <= 256
    assert _ORIGIN.fullmatch(third[1])
    assert second[1].isdigit()
    assert made.timestamp >= 0
    assert made.value == value


def test_the_latest_time_of_kafka_has_room_in_its_header() -> None:
    """Broken: a producer with a broken clock makes a header that no reader accepts."""
    made = translate(Record(None, b"{}", (1 << 63) - 1))
    assert len(made.header(ARRIVAL) or b"") <= MAX_MILLIS_DIGITS


def test_the_names_of_the_topics_of_others() -> None:
    """Broken: a topic is read under the wrong name, or a topic of ours is taken for one of others."""
    file = PipeFile.model_validate(
        {
            "streams": {"invoices": {"topic": "billing.invoices"}, "orders": {}},
            "pipes": {
                "p": {
                    "sources": ["invoices"],
                    "destinations": [
                        {"name": "d", "topic": {"name": "erp.invoices"}},
                        {"name": "s", "stream": "orders"},
                    ],
                }
            },
        }
    )
    found = existing_topics(file)
    assert found.names == {"invoices": "billing.invoices", target_name("erp.invoices"): "erp.invoices"}
    assert found.translate.keys() == {"billing.invoices"}
    on_msk = {"sources": ["orders"], "destinations": [{"name": "d", "topic": {"name": "erp.invoices", "on": "msk"}}]}
    file = PipeFile.model_validate(
        {"brokers": {"msk": "kafka://h:1"}, "streams": {"orders": {}}, "pipes": {"q": on_msk}}
    )
    name = target_name("erp.invoices", "msk")
    assert target_homes(file) == {name: "msk"}
    assert existing_topics(file, "msk").names == {name: "erp.invoices"}
    assert not existing_topics(file, "default")
    assert not existing_topics(PipeFile.model_validate({"streams": {"orders": {}}}))


def test_the_pipe_file_of_the_page() -> None:
    """Broken: docs/existing-topics.md shows a pipe file that is refused, or does something else than it says."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    file = PipeFile.model_validate(yaml.safe_load(text))
    assert set(existing_topics(file).names.values()) == {"billing.invoices", "erp.invoices"}
    value = b'{"kind": "paid", "customer": {"id": 12}}'
    record = plain(value, (("invoice-id", b"i-1"), ("issued-at", b"2026-01-02T03:04:05Z")), b"k")
    stream = file.streams["invoices"]
    (made,) = Translation(stream)(Batch("billing.invoices", 0, [0], [record]), TOPIC_ID).records
    assert (made.key, made.value, made.timestamp) == (b"12", value, 1_767_323_045_000)
    assert (made.header(ID), made.header("ce_type"), made.header(FAULT)) == (b"i-1", b"paid", None)


@pytest.mark.parametrize(
    ("stream", "mistake"),
    [
        ({"topic": "a/b"}, "string_pattern_mismatch"),
        ({"topic": ".."}, "no name that Kafka allows"),
        ({"topic": "t", "partitions": 3}, "partitions and topic exclude each other"),
        ({"topic": "t", "format": "text", "id": "id"}, "a payload of format text has no fields"),
        ({"id": {"header": "x"}}, "only a topic of others has headers"),
        ({"tombstones": "deliver"}, "only for a topic of others"),
    ],
)
def test_mistakes_in_the_pipe_file(stream: dict[str, Any], mistake: str) -> None:
    """Broken: a key that does nothing is taken for one that works."""
    with pytest.raises(ValidationError) as caught:
        Stream.model_validate(stream)
    assert mistake in str(caught.value) + str(caught.value.errors()[0]["type"])


def test_broken_references_to_topics_of_others() -> None:
    """Broken: a pipe writes to a topic that is only read, or into its own source for ever."""
    found = find_broken_references(
        {
            "brokers": {"msk": "kafka://h:1"},
            "streams": {
                "a": {"topic": "t"},
                "b": {"topic": "u"},
                "b2": {"topic": "u"},
                "c": {},
                "m": {"topic": "t", "on": "msk"},
            },
            "pipes": {
                "other": {"sources": ["m"], "destinations": [{"name": "d", "topic": {"name": "t"}}]},
                "same": {"sources": ["m"], "destinations": [{"name": "d", "topic": {"name": "t", "on": "msk"}}]},
                "p": {"sources": ["c"], "destinations": [{"name": "d", "stream": "a"}]},
                "q": {"sources": ["a"], "destinations": [{"name": "d", "topic": {"name": "t"}}]},
            },
        }
    )
    texts = [text for path, text in found if "same" not in path]
    assert texts[0].startswith("'u' is the topic of stream 'b' already")
    assert texts[1].startswith("'a' is the topic t of others, which is only read")
    assert "leads back to the pipe's own source: a loop" in texts[2]
    assert [text for path, text in found if "same" in path] == ["'m' leads back to the pipe's own source: a loop"]
    assert not [path for path, _ in found if "other" in path], "a topic of this name on another broker"


@pytest.mark.parametrize(
    ("tombstones", "transforms", "refused"), [("skip", 0, 0), ("deliver", 0, 1), ("deliver", 1, 0)]
)
def test_a_compacted_stream_gets_deletes_as_deletes(tombstones: str, transforms: int, refused: int) -> None:
    """Broken: a deleted key of a topic of others stays in our table for ever, with the payload null."""
    pipe = {"sources": ["a"], "destinations": [{"name": "d", "stream": "b"}]} | (
        {"transform": {}} if transforms else {}
    )
    streams = {"a": {"topic": "t", "tombstones": tombstones}, "b": {"compact": True}}
    found = find_broken_references({"streams": streams, "pipes": {"p": pipe}})
    assert len(found) == refused
    for path, text in found:
        assert path == ("pipes", "p", "destinations", 0, "stream")
        assert text.endswith("A compacted stream then gets the deletes as deletes")


@pytest.mark.parametrize(
    ("stream", "target", "prefix", "ours"),
    [
        ("t", "orders", "", "orders"),
        ("t", "acme.p.out", "acme.", "acme.p.out"),
        ("acme.p.dead", "u", "acme.", "acme.p.dead"),
        ("penstock.telemetry", "u", "", "penstock.telemetry"),
        ("acme.invoices", "orders", "acme.", ""),
        ("orders", "acme.erp", "acme.", ""),
    ],
)
def test_a_topic_of_ours_is_no_topic_of_others(stream: str, target: str, prefix: str, ours: str) -> None:
    """Broken: a pipe writes into its own source for ever, and the fleet's records in that topic have no time any more."""
    file = PipeFile.model_validate(
        {
            "streams": {"invoices": {"topic": stream}, "orders": {}},
            "pipes": {
                "p": {"sources": ["orders", "invoices"], "destinations": [{"name": "d", "topic": {"name": target}}]}
            },
        }
    )
    url = f"kafka://127.0.0.1:9092?prefix={prefix}" if prefix else "kafka://127.0.0.1:9092"
    if not ours:
        open_broker(url, existing_topics(file))
        return
    with pytest.raises(BadBrokerUrl, match=f"^{re.escape(ours)}: .* it is the fleet's own"):
        open_broker(url, existing_topics(file))
