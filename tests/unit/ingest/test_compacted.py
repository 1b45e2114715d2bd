"""Compacted streams: every event has a key, a key can be deleted, and the answer says where the events are."""

import orjson

from services.core.offset_token import mark_of, parse_token
from services.core.pipe_file.stream import Stream
from tests.support.raw_http import make_request
from tests.unit.ingest.service import running

STREAMS = {"accounts": Stream(compact=True, key="id", id="id"), "plain": Stream()}
BATCH = "application/cloudevents-batch+json"


def cloud(key: str | None, **more: object) -> dict[str, object]:
    event = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "partitionkey": key, **more}
    return {name: value for name, value in event.items() if value is not None or name == "data"}


async def test_an_event_without_a_key_is_refused() -> None:
    """Broken: Kafka refuses the whole batch, or the log keeps for ever what nothing can replace."""
    async with running(streams=STREAMS) as service:
        reply = await service.post(b'[{"id":"a"},{"x":1},{"id":""}]', "accounts")
        assert reply.status == 207
        assert [(one["index"], one["reason"]) for one in reply.json()["refused"]] == [(1, "no-key"), (2, "bad-id")]
        reply = await service.post(orjson.dumps([cloud(None, data={}), cloud("")]), "accounts", media=BATCH)
        assert reply.status == 422
        assert [one["reason"] for one in reply.json()["refused"]] == ["no-key", "no-key"]
        assert "every event" not in reply.json()["refused"][0]["detail"]
        assert [record.key for record in service.stored("accounts")] == [b"a"]


async def test_a_tombstone_is_an_event_without_data() -> None:
    """Broken: nobody can delete a key; or an event without data deletes one in a stream that is no table."""
    events = [cloud("a", data=None), cloud("b"), cloud("c", data={"x": None}), cloud("d", data=0)]
    async with running(streams=STREAMS) as service:
        for stream in STREAMS:
            assert (await service.post(orjson.dumps(events), stream, media=BATCH)).status == 200
        found = {record.key: record.value for record in service.stored("accounts")}
        assert found == {b"a": None, b"b": None, b"c": b'{"x":null}', b"d": b"0"}
        assert set(service.values("plain")) == {b"null", b'{"x":null}', b"0"}


async def test_the_text_null_is_data() -> None:
    """Broken: a customer whose name is `null` deletes a row."""
    texts = [
        cloud("a", data="null", datacontenttype="text/plain"),
        cloud("b", data_base64="bnVsbA==", datacontenttype="text/plain"),
        cloud("c", data="null"),
    ]
    async with running(streams=STREAMS) as service:
        assert (await service.post(orjson.dumps(texts), "accounts", media=BATCH)).status == 200
        for key, media, body in (
            ("d", "text/plain", b"null"),
            ("e", "application/json", b" null"),
            ("f", "text/plain", b""),
        ):
            headers = {f"ce-{name}": str(value) for name, value in cloud(key).items()}
            reply = await service.send(make_request("/v1/streams/accounts/events", body, media=media, **headers))
            assert reply.status == 200, reply.body
        found = {record.key: record.value for record in service.stored("accounts")}
        expected = {b"a": b"null", b"b": b"null", b"c": b'"null"', b"d": b"null", b"e": None, b"f": None}
        assert found == expected


async def test_deleting_a_key() -> None:
    """Broken: a client deletes another key than it named, or gets an answer before the tombstone is durable."""
    async with running(streams=STREAMS) as service:
        reply = await service.send(make_request("/v1/streams/accounts/keys/a%2Fb%20%C3%A4", method="DELETE"))
        assert (reply.status, reply.json()) == (200, {"accepted": 1})
        (record,) = service.stored("accounts")
        assert (record.key, record.value) == ("a/b ä".encode(), None)
        assert record.header("ce_id")
        refused = {
            "/v1/streams/plain/keys/a": "not-compacted",
            "/v1/streams/none/keys/a": "stream-not-found",
            "/v1/streams/accounts/keys/%ff": "bad-key",
            "/v1/streams/accounts/keys/" + "k" * 1025: "nothing-accepted",
        }
        for path, problem in refused.items():
            reply = await service.send(make_request(path, method="DELETE"))
            assert reply.json()["type"].endswith(f":{problem}"), path
        reply = await service.send(make_request("/v1/streams/accounts/keys/a", b"{}"))
        assert (reply.status, reply.headers["allow"]) == (405, "DELETE")
        assert len(service.stored("accounts")) == 1


async def test_the_answer_has_a_token() -> None:
    """Broken: a client cannot wait for its own write, or each answer of every stream carries a header that nobody asked for."""
    async with running(streams=STREAMS) as service:
        reply = await service.post(orjson.dumps([{"id": f"k{number}"} for number in range(50)]), "accounts")
        token = parse_token(reply.headers["penstock-token"])
        assert token is not None
        assert token.topic == mark_of("accounts")
        ends = token.ends
        stored = {p: len(service.appender.topics["accounts"][p]) for p in ends}
        assert ends == {partition: count - 1 for partition, count in stored.items()}
        assert sum(stored.values()) == 50
        assert "penstock-token" not in (await service.post(b"{}")).headers
