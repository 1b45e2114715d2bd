"""One attempt at a webhook: what is sent, and what each kind of answer means."""

import asyncio
import base64
import errno
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from services.core.broker.record import Batch, Record
from services.core.http import resolver
from services.core.http.client import MAX_RESPONSE, HttpClient
from services.core.http.failure import Failure
from services.core.http.net_guard import NetPolicy, parse_endpoints, parse_networks
from services.core.http.resolver import Resolver
from services.core.pipe_file.webhook import Body
from services.core.security.signing import SigningKey, SigningKeys
from services.expel.delivery import Delivery
from services.expel.retry_policy import Action, Outcome, RetryLimits, RetryPolicy
from services.expel.webhook.body import make_format
from services.expel.webhook.sender import WebhookSender, make_message_id
from tests.unit.expel import receiver as bad
from tests.unit.expel.receiver import Received, open_receiver, open_socket_server

LOCAL = NetPolicy(allow=parse_networks("127.0.0.0/8"))
OLD = "whsec_" + base64.b64encode(b"o" * 24).decode()
NEW = "whsec_" + base64.b64encode(b"n" * 24).decode()


def record(number: int, value: bytes = b'{"n":1}') -> Record:
    headers = (
        ("ce_id", b"e%d" % number),
        ("penstock_arrival", b"1700000000123"),
        ("penstock_origin", b"a:0:%d" % number),
    )
    return Record(b"k", value, 1_700_000_000_000 + number, headers)


@asynccontextmanager
async def open_sender(
    url: str, *, policy: NetPolicy = LOCAL, body: Body = "cloudevents", keys: tuple[str, ...] = (), timeout: float = 5.0
) -> AsyncIterator[WebhookSender]:
    form = make_format(body, "late")
    headers = {"X-Team": "river", "Content-Type": form.content_type}
    with HttpClient(url, policy=policy, resolver=Resolver(), timeout=timeout, headers=headers) as client:
        parsed = tuple(SigningKey.parse(key) for key in keys)
        yield WebhookSender(client, "late", form, SigningKeys(parsed), 1_000_000)


def deliver(sender: WebhookSender, records: list[Record]) -> Delivery:
    return sender.render(Batch("flights", 0, range(len(records)), records)).delivery


async def attempt(url: str, count: int = 3, *, policy: NetPolicy = LOCAL, timeout: float = 5.0) -> Outcome:
    async with open_sender(url, policy=policy, timeout=timeout) as sender:
        return await sender.send(deliver(sender, [record(n) for n in range(count)]))


async def attempt_raw(answer: bytes, count: int = 3) -> Outcome:
    async with open_socket_server(bad.answer_raw(answer)) as url:
        return await attempt(url, count)


def failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure)
    return outcome


async def test_signed_cloudevents_batch() -> None:
    """Broken: standard receivers refuse what we send, or cannot tell events apart."""
    async with open_receiver(secret=OLD) as receiver, open_sender(receiver.url, keys=(NEW, OLD)) as sender:
        assert await sender.send(deliver(sender, [record(1), record(2)])) is None
        (request,) = receiver.requests
        assert request.headers["content-type"] == "application/cloudevents-batch+json"
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["x-team"] == "river"
        assert len(request.headers["webhook-signature"].split(" ")) == 2
        assert request.events[0] == {
            "specversion": "1.0",
            "id": "e1",
            "source": "penstock/late",
            "type": "penstock.flights",
            "time": "2023-11-14T22:13:20.001Z",
            "penstockarrival": "1700000000123",
            "data": {"n": 1},
        }


def traced(number: int, trace: bytes) -> Record:
    one = record(number)
    return Record(one.key, one.value, one.timestamp, (*one.headers, ("traceparent", trace)))


async def test_the_trace_context_goes_on() -> None:
    """Broken: a trace ends at ingest; or a foreign header breaks the request."""
    one, other = (b"00-%032x-%016x-01" % (number, number) for number in (1, 2))
    async with open_receiver() as receiver, open_sender(receiver.url) as sender:
        for records in (
            [traced(1, one), traced(2, one)],
            [traced(1, one), traced(2, other)],
            [traced(1, one), record(2)],
            [traced(1, one[:-2] + b"01\r\nx-evil: 1")],
        ):
            assert await sender.send(deliver(sender, records)) is None
        assert [request.headers.get("traceparent") for request in receiver.requests] == [one.decode(), None, None, None]
        attributes = [[event.get("traceparent") for event in request.events] for request in receiver.requests]
        assert attributes == [[one.decode()] * 2, [one.decode(), other.decode()], [one.decode(), None], [None]]
        assert all("x-evil" not in request.headers for request in receiver.requests)


async def test_message_id_is_stable_and_of_the_content() -> None:
    """Broken: a receiver that drops repeated webhook-ids drops new events, or takes the same ones twice."""
    async with open_receiver() as receiver, open_sender(receiver.url) as sender:
        delivery = deliver(sender, [record(n) for n in range(3)])
        await sender.send(delivery)
        await sender.send(delivery)
        await sender.send(deliver(sender, [record(n) for n in range(3)]))
        await sender.send(delivery.subset([1, 2]))
        await sender.send(delivery.subset([1]))
        ids = [request.message_id for request in receiver.requests]
        assert ids[0] == ids[1] == ids[2]
        assert len(set(ids)) == 3
        assert ids[4] == "late:e1"


@pytest.mark.parametrize("event_id", [b"a.b", b"a b", b"\xc3\xa9", b"x" * 300, b"a\r\nX: y"])
def test_message_ids_fit_a_header(event_id: bytes) -> None:
    """Broken: an event id smuggles a header, or makes a signature ambiguous."""
    found = make_message_id("late", [event_id])
    assert found.isascii()
    assert found.isprintable()
    assert found.startswith("late/")
    assert len(found) == len("late/") + 32


def test_message_ids_of_different_requests_differ() -> None:
    """Broken: a receiver that drops repeated webhook-ids drops an event whose id looks like a batch's, or is like two joined."""
    batch = make_message_id("late", [b"a", b"b"])
    assert make_message_id("late", [batch.removeprefix("late")[1:].encode()]) != batch
    requests = [
        [b"a", b"b"],
        [b"a\nb"],
        [b"1:a1:b"],
        [b"a", b"b", b""],
        [b"", b"a", b"b"],
        [b"b", b"a"],
        [b"a\n", b"b"],
    ]
    assert len({make_message_id("late", ids) for ids in requests}) == len(requests)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
async def test_recoverable_statuses(status: int) -> None:
    """Broken: a short outage of a receiver sends events to the dead letters."""
    found = failure(await attempt_raw(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status))
    assert (found.reason, found.recoverable, found.gone) == (f"http_{status}", True, False)


@pytest.mark.parametrize("status", [300, 304, 400, 401, 403, 404, 405, 409, 413, 415, 422, 451])
async def test_non_recoverable_statuses(status: int) -> None:
    """Broken: what can never succeed is tried for days."""
    found = failure(await attempt_raw(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status))
    assert (found.reason, found.recoverable) == (f"http_{status}", False)


async def test_gone() -> None:
    """Broken: a receiver that asked to be left alone is not."""
    assert failure(await attempt_raw(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")).gone


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(status: int) -> None:
    """Broken: a public receiver leads us to an inside address."""
    async with open_receiver() as inside:
        answer = b"HTTP/1.1 %d X\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % (status, inside.url.encode())
        assert not failure(await attempt_raw(answer)).recoverable
        assert inside.requests == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("1000000000", 86_400),
        ("-5", None),
        ("1e9", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        ("soon", None),
    ],
)
async def test_retry_after(text: str, seconds: float | None) -> None:
    """Broken: a receiver's number stops a lane for years, or crashes it."""
    answer = b"HTTP/1.1 503 X\r\nRetry-After: %b\r\nContent-Length: 0\r\n\r\n" % text.encode()
    assert failure(await attempt_raw(answer)).retry_after == seconds


@pytest.mark.parametrize(
    "body", [b"", b"ok", b"{}", b'{"failed": []}', b'{"failed": 0}', b'<p>"failed"', b'["failed"]']
)
async def test_a_200_with_any_other_body_is_delivered(body: bytes) -> None:
    """Broken: a receiver's harmless answer makes us send everything again."""
    assert await attempt_raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)) is None


async def partial(status: int, answer: object) -> Outcome:
    body = answer if isinstance(answer, bytes) else orjson.dumps(answer)
    return await attempt_raw(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


@pytest.mark.parametrize("status", [200, 207])
async def test_partial_answers(status: int) -> None:
    """Broken: an event that the receiver refused counts as delivered, or one that it took is sent again."""
    items = [{"id": "e0"}, {"index": 2, "status": 422, "reason": "no\x07pe"}]
    outcome = await partial(status, {"failed": items, "more": 1})
    assert outcome == {
        0: Failure("item_failed", "the receiver refused this event", True),
        2: Failure("http_422", "the receiver refused this event: no pe", False),
    }


@pytest.mark.parametrize(
    ("item", "recoverable"),
    [
        ({"status": 503}, True),
        ({"status": 400}, False),
        ({"status": 400, "retry": True}, True),
        ({"status": 503, "retry": False}, False),
        ({"retry": False}, False),
        ({}, True),
        ({"status": 10**12}, True),
    ],
)
async def test_item_status_and_retry(item: dict[str, object], recoverable: bool) -> None:
    """Broken: the receiver's word on one event is not heard."""
    outcome = await partial(207, {"failed": [{"id": "e1"} | item]})
    assert isinstance(outcome, dict)
    assert outcome[1].recoverable is recoverable


@pytest.mark.parametrize(
    "answer",
    [
        b'{"failed": [{"id": "e1"}',
        {"failed": [{"id": "unknown"}]},
        {"failed": [{"index": 3}]},
        {"failed": [{"index": -1}]},
        {"failed": [{}]},
        {"failed": ["e1"]},
        {"failed": [{"id": 5}]},
        b'{"failed": [{"id": "\\ud800"}]}',
        b'{"failed": ' + b"[" * 2000,
        b'{"failed": [' + b'{"id": "e1"},' * 1000 + b'{"id": "e1"}]}',
    ],
)
async def test_partial_answers_that_cannot_be_understood_deliver_nothing(answer: object) -> None:
    """Broken: a refused event is lost because its name was not understood."""
    found = failure(await partial(207, answer))
    assert (found.reason, found.recoverable) == ("bad_answer", True)


async def test_a_bare_207_delivers_nothing() -> None:
    """Broken: "some failed" without names is taken for success."""
    assert failure(await partial(207, b"")).reason == "bad_answer"


async def test_endless_answers_are_cut() -> None:
    """Broken: a receiver fills our memory or holds a connection for ever."""
    async with open_socket_server(bad.answer_endlessly(200)) as url:
        assert await attempt(url) is None
    async with open_socket_server(bad.answer_endlessly(500)) as url:
        found = failure(await attempt(url))
        assert found.reason == "http_500"
        assert len(found.detail) < 400


async def test_compressed_answers_are_not_unpacked() -> None:
    """Broken: a small answer unpacks to gigabytes."""
    bomb = gzip.compress(b" " * 2_000_000)[:MAX_RESPONSE]
    head = b"HTTP/1.1 %d X\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    assert await attempt_raw(head % (200, len(bomb)) + bomb) is None
    assert failure(await attempt_raw(head % (207, len(bomb)) + bomb)).reason == "bad_answer"
    small = gzip.compress(b'{"failed": [{"id": "e1"}]}')
    assert failure(await attempt_raw(head % (207, len(small)) + small)).reason == "bad_answer"


@pytest.mark.parametrize("serve", [bad.hang, bad.drip, bad.drip_head])
async def test_the_time_out_covers_everything(serve: bad.Connection) -> None:
    """Broken: a receiver that drips holds a slot for ever."""
    async with open_socket_server(serve) as url:
        found = failure(await attempt(url, timeout=0.3))
    assert (found.reason, found.recoverable) == ("timeout", True)


async def test_connection_failures() -> None:
    """Broken: a reset, a refusal or garbage kills the lane."""
    async with open_socket_server(bad.reset) as url:
        assert failure(await attempt(url)).reason == "connection"
    assert failure(await attempt(url)) == Failure(
        "connection", "the connection failed: ConnectionRefusedError", recoverable=True
    )
    for garbage in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000):
        assert failure(await attempt_raw(garbage)).recoverable


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
async def test_our_own_shortage_uses_up_no_attempt(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: when this process runs out of files, sound events of sound receivers go to the dead letters."""

    def refuse(*_arguments: object) -> None:
        raise OSError(number, "short")

    async with open_receiver() as receiver:
        monkeypatch.setattr("services.core.http.client.refuse_address", refuse)
        found = failure(await attempt(receiver.url))
    assert (found.reason, found.ours) == ("own_limits", True)
    assert RetryPolicy(RetryLimits(4, 0.1, 1.0)).choose(found, 99) is Action.RETRY


async def test_untrusted_tls_is_a_failure() -> None:
    """Broken: events go to whoever sits in between."""

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 not TLS\r\n\r\n")

    async with open_socket_server(plain) as url:
        found = failure(await attempt(url.replace("http://", "https://")))
    assert (found.reason, found.recoverable) == ("tls", True)


async def test_addresses_are_refused_at_connect() -> None:
    """Broken: an address written as a number passes the resolver's guard unseen (nothing looks it up)."""
    async with open_receiver() as receiver:
        found = failure(await attempt(receiver.url, policy=NetPolicy()))
        port = int(receiver.url.split(":")[2].split("/")[0])
        own = NetPolicy(allow=LOCAL.allow, own=parse_endpoints(f"127.0.0.1:{port}"))
        looped = failure(await attempt(receiver.url, policy=own))
        assert receiver.requests == []
    assert (found.reason, found.recoverable) == ("address_refused", True)
    assert "loop" in looped.detail


@pytest.mark.parametrize("answers", [["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1"]])
async def test_names_that_lead_inside_are_refused(answers: list[str]) -> None:
    """Broken: DNS rebinding, or one inside answer among public ones, reaches inside services."""

    def lookup(*_arguments: object, **_options: object) -> list[resolver.AddressInfo]:
        return [(10 if ":" in answer else 2, 1, 6, "", (answer, 0)) for answer in answers]

    async with open_receiver() as receiver:
        url = receiver.url.replace("127.0.0.1", "rebind.example.com")
        with HttpClient(url, policy=NetPolicy(), resolver=Resolver(lookup), timeout=5, headers={}) as client:
            sender = WebhookSender(client, "late", make_format("json", "late"), SigningKeys(), 1000)
            found = failure(await sender.send(deliver(sender, [record(1)])))
        assert receiver.requests == []
    assert found.reason == "address_refused"


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an environment variable leads all events elsewhere, past the guard."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with open_receiver() as receiver:
        assert await attempt(receiver.url) is None


@pytest.mark.parametrize(("body", "expected"), [("json", b'[{"n":1},{"n":1}]'), ("ndjson", b'{"n":1}\n{"n":1}\n')])
async def test_plain_bodies(body: Body, expected: bytes) -> None:
    """Broken: receivers of plain JSON or NDJSON get something else."""
    async with open_receiver() as receiver, open_sender(receiver.url, body=body) as sender:
        assert await sender.send(deliver(sender, [record(1), record(2)])) is None
        assert receiver.requests[0].body == expected


async def test_large_bodies_and_kept_connections() -> None:
    """Broken: a body larger than the socket's buffer never arrives whole, or each request connects anew."""
    async with open_receiver() as receiver, open_sender(receiver.url, body="json") as sender:
        large = record(1, b'"' + b"x" * 900_000 + b'"')
        for _ in range(3):
            assert await sender.send(deliver(sender, [large, large])) is None
        assert len(receiver.requests[0].body) > 1_800_000
        assert len(receiver.connections) == 1


async def test_an_error_answer_keeps_the_connection() -> None:
    """Broken: a receiver in trouble also has to accept a new connection for every retry."""

    def refuse(_received: Received) -> web.Response:
        return web.Response(status=503, text="busy")

    async with open_receiver(refuse) as receiver, open_sender(receiver.url) as sender:
        for _ in range(3):
            assert failure(await sender.send(deliver(sender, [record(1)]))).detail == "the receiver answered 503: busy"
        assert len(receiver.connections) == 1
