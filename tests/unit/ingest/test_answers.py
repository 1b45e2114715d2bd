"""Every refusal as the developer of a client reads it: the mistake, the kind of value that was found, and what to send."""

import ast
import gzip
import re
import time
from pathlib import Path

import orjson
import pytest

from services.core.broker import errors
from services.core.security.keys import KeyRing, Scope, make_key
from services.ingest import problems
from services.ingest.access import Access
from services.ingest.answer import explain
from services.ingest.app import OPENAPI
from services.ingest.event_fields import read_times
from services.ingest.json_events import Limits
from services.ingest.json_scan import MAX_CONTAINERS
from tests.support.raw_http import Reply, make_request
from tests.unit.ingest.service import Service, running

EVENTS, ORDERS = "/v1/streams/plain/events", "/v1/streams/orders/events"
BATCH, STRUCTURED = "application/cloudevents-batch+json", "application/cloudevents+json"
CLOUD = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}
DEEP = b'{"a":' * 200 + b"1" + b"}" * 200


def body(content: object, path: str = EVENTS, media: str = "application/json", **headers: str) -> bytes:
    """A request with this content, as JSON unless it is bytes."""
    return make_request(path, content if isinstance(content, bytes) else orjson.dumps(content), media=media, **headers)


def cloud(**changes: object) -> bytes:
    return body({**CLOUD, **changes}, ORDERS, STRUCTURED)


def binary(*lines: bytes) -> bytes:
    head = [b"POST /v1/streams/plain/events HTTP/1.1", b"Host: localhost", b"Content-Length: 0", b"ce-specversion: 1.0"]
    return b"\r\n".join([*head, b"ce-id: 1", b"ce-source: s", b"ce-type: t", *lines, b"", b""])


SCOPES: tuple[Scope, ...] = ("ingest", "manage")
LATE = int(time.time()) + 10 * 86400
REQUESTS: list[tuple[bytes, str, str]] = [
    (b"x\r\n\r\n", "bad-request", "not a valid HTTP/1.1 request"),
    (b"GET / HTTP/1.0\r\n\r\n", "bad-request", "The request is not HTTP/1.1."),
    (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "unsupported-transfer-coding",
        "gzip",
    ),
    (make_request("/", X="a" * 9000), "head-too-large", "Send fewer or shorter headers."),
    (make_request("/nothing"), "not-found", "GET /openapi.json lists the paths."),
    (make_request("/v1/streams/none/events", b"{}"), "stream-not-found", "There are: plain, orders."),
    (
        make_request("/v1/streams/invoices/events", b"{}"),
        "stream-read-only",
        "a topic that others write. Send them there.",
    ),
    (make_request(EVENTS, method="PUT"), "method-not-allowed", "only POST."),
    (make_request("/v1/streams/plain/events?token=1", b"{}"), "key-in-url", "must be revoked"),
    (make_request(EVENTS, b"{}", Expect="200-ok")[:-2], "expectation-failed", "Leave it out"),
    (make_request(EVENTS, b"{}").replace(b"localhost", b"example.org"), "bad-host", "Use http://127.0.0.1"),
    (make_request(EVENTS, b"{}", media=None), "unsupported-media-type", "is missing. Use application/json,"),
    (body({}, media="text/plain"), "unsupported-media-type", "is not supported, or"),
    (body({}, Content_Encoding="br"), "unsupported-encoding", "neither gzip nor zstd"),
    (body(b"x", Content_Encoding="gzip"), "bad-compression", "cut off or altered"),
    (body(gzip.compress(b"") * 1001, Content_Encoding="gzip"), "bad-compression", "more than 1000 members"),
    (body(gzip.compress(b" " * 60_000), Content_Encoding="gzip"), "body-too-large", "after unpacking"),
    (body(b"x" * 60_000), "body-too-large", "more than 50000 bytes"),
    (body(b""), "empty-body", "The body is empty"),
    (body(b"\n\n", media="application/x-ndjson"), "empty-body", "The body is empty"),
    (body(b"\xef\xbb\xbf{}", media="application/x-ndjson"), "bad-json", "byte order mark"),
    (body(b'{"a":}'), "bad-json", "at line 1, column 6: "),
    (body(7), "bad-json", "The body is an integer."),
    (body({}, media=BATCH), "bad-json", "The body is an object. Send a JSON array of CloudEvents."),
    (body([], media=STRUCTURED), "bad-json", "The body is an array. Send one CloudEvent"),
    (body(b"{}\nx", media="application/x-ndjson"), "bad-json", "The JSON of this line is not valid at column 1: "),
    (body(DEEP), "too-deep", "more than 128 levels"),
    (body([{}] * 101), "too-many-events", "more than 100 events"),
    (body({"a": "x" * 3000}), "event-too-large", "The event has 3008 bytes. An event may have at most 2000."),
    (body([{"a": "x" * 3000}]), "event-too-large", "The event has 3008 bytes."),
    (
        binary(b"Content-Type: text/plain").replace(b"Length: 0", b"Length: 3000") + b"x" * 3000,
        "event-too-large",
        "3000",
    ),
    (body([None]), "not-an-object", "The event is null. Send a JSON object."),
    (body(["a"]), "not-an-object", "The event is a string."),
    (body([{"id": 1.5}], ORDERS), "bad-id", "The id (field 'id') is a number with a fraction, or beyond 64 bits."),
    (body([{"id": ""}], ORDERS), "bad-id", "The id (field 'id') is an empty string."),
    (body([{"id": "x" * 300}], ORDERS), "bad-id", "The id (field 'id') has 300 bytes."),
    (
        body([{"id": "a"}, {"id": "a\n"}], ORDERS),
        "bad-id-characters",
        "In event 1, counted from 0: The id (field 'id') has",
    ),
    (body([{"customer": {"id": []}}], ORDERS), "bad-key", "The key (field 'customer.id') is an array."),
    (body([{"customer": {"id": "x" * 1100}}], ORDERS), "bad-key", "has 1100 bytes. It may have at most 1024."),
    (body([{"at": "noon"}], ORDERS), "bad-time", "The time (field 'at') is a string, but not RFC 3339 with an offset."),
    (body([{"at": {}}], ORDERS), "bad-time", "The time (field 'at') is an object."),
    (body([{"at": -1}], ORDERS), "time-out-of-range", "is before 1970."),
    (body([{"at": LATE}], ORDERS), "time-out-of-range", "Check the client's clock"),
    (cloud(time="noon"), "bad-time", "The time (field 'at' or attribute time) is a string"),
    (cloud(specversion=None), "bad-cloudevent", 'The attribute specversion is missing. Send the string "1.0".'),
    (cloud(specversion="0.3"), "bad-cloudevent", "is a string, but another version"),
    (cloud(specversion=1.0), "bad-cloudevent", "The attribute specversion is a number with a fraction"),
    (cloud(id=None), "bad-cloudevent", "The attribute id is missing. Send a string that is not empty."),
    (cloud(source=""), "bad-cloudevent", "The attribute source is an empty string."),
    (cloud(type=True), "bad-cloudevent", "The attribute type is a boolean."),
    (cloud(subject=7), "bad-cloudevent", "The attribute subject is an integer. Send a string."),
    (cloud(trace=[]), "bad-cloudevent", "The attribute trace is an array. Send a string, an integer or a boolean."),
    (cloud(trace="a\n"), "bad-cloudevent", "The attribute trace has control characters."),
    (cloud(Trace="a"), "bad-cloudevent", "The name of an attribute has characters other than a to z and 0 to 9."),
    (cloud(**{"": "a"}), "bad-cloudevent", "The name of an attribute is empty."),
    (cloud(**{"x" * 65: "a"}), "bad-cloudevent", "The name of an attribute has 65 characters"),
    (cloud(**{f"a{number}": 1 for number in range(70)}), "bad-cloudevent", "The event has 74 attributes."),
    (cloud(data_base64=7), "bad-cloudevent", "The member data_base64 is an integer. Send a string."),
    (cloud(data_base64="#"), "bad-cloudevent", "The member data_base64 is a string, but not valid Base64."),
    (cloud(data_base64="YQ==", data={}), "bad-cloudevent", "both data and data_base64"),
    (binary(b"ce-id: 2"), "bad-cloudevent", "The header ce-id is repeated."),
    (binary(b"ce-subject: %ff"), "bad-cloudevent", "The header ce-subject is not percent-encoded UTF-8."),
]
LARGE: list[tuple[bytes, str, str]] = [
    (body({"a": [[]] * MAX_CONTAINERS}), "too-many-containers", "more than 100000 arrays and objects"),
    (body(b'["' + b"x" * 70_000 + b'",]'), "bad-json", "has a comma behind its last element"),
    (body(b"[" + b'{"a":1},' * 9000 + b"{}]x"), "bad-json", "The JSON is not valid within"),
    (body(b"[" + b'{"a":1},' * 9000 + b"x]"), "bad-json", "The JSON is not valid within"),
    (body(b"[" + b" " * 70_000 + b"]x"), "bad-json", "Bytes follow the end of the array."),
    (body([{"a": [[]] * MAX_CONTAINERS}, {}]), "too-many-containers", "Send less in one request."),
    (body(b"[" + b'{"a":' * 200_000), "too-deep", "more than 128 levels"),
    (body(b'["' + b"x" * 80_000), "bad-json", "is not valid from byte 1 on"),
    (body(b'{"a":1}' + b" " * 70_000, media=BATCH), "bad-json", "The body is not an array."),
]
ELSEWHERE = {
    "no-valid-key", "scope-missing", "over-quota", "incomplete-body", "too-slow", "too-old", "nothing-accepted", "internal",
    "broker-unavailable", "no-key", "not-compacted", "outcome-unknown", "overloaded", "storage-full", "stream-full",
    "stream-not-ready",
}  # fmt: skip
"""Problems that the other tests of this file render."""


def details(reply: Reply) -> list[tuple[str, str]]:
    """The problems of an answer with their details; those of single events first."""
    found = reply.json()
    whole = [(found["type"].rpartition(":")[2], found["detail"])] if "type" in found else []
    return [(one["reason"], one["detail"]) for one in found.get("refused", [])] + whole


def check_sentences(detail: str) -> None:
    """Sentences for the developer of a client: each begins with a capital letter and ends with a full stop."""
    assert detail.endswith("."), detail
    for sentence in re.split(r"(?<=\.) (?=\S)", detail):
        assert re.match(r"[A-Z]", sentence), detail
    assert not re.search(r"Try:|must not|penstock|pipe file", detail), detail


@pytest.mark.parametrize(
    ("request_", "problem", "words"), REQUESTS, ids=lambda value: value if type(value) is str else ""
)
async def test_mistakes_of_a_request(service: Service, request_: bytes, problem: str, words: str) -> None:
    """Broken: a developer reads a rule and must guess which value breaks it."""
    name, detail = details(await service.send(request_))[0]
    assert name == problem
    assert words in detail
    check_sentences(detail)


@pytest.mark.parametrize(("request_", "problem", "words"), LARGE, ids=lambda value: value if type(value) is str else "")
async def test_mistakes_in_a_large_body(request_: bytes, problem: str, words: str) -> None:
    """Broken: the text about a body that is read in slices is another one than the developer can use."""
    async with running(limits=Limits(events=10_000, event_bytes=1_000_000, body_bytes=5_000_000)) as service:
        name, detail = details(await service.send(request_))[0]
    assert name == problem
    assert words in detail
    check_sentences(detail)


async def test_keys() -> None:
    """Broken: a client with a wrong key is told about operators' commands, or not told what is wrong."""
    (token, entry), (other, scopeless) = (
        make_key(streams=["plain"], scopes=(scope,), rate=1, created="2026-01-01T00:00:00Z") for scope in SCOPES
    )
    async with running(access=Access(KeyRing([entry, scopeless]))) as service:
        replies = [
            await service.post(b"[{},{},{}]", **({} if key is None else {"Authorization": f"Bearer {key}"}))
            for key in (None, other, token, token)
        ]
    found = [details(reply)[0] for reply in replies if reply.status != 200]
    assert [name for name, _ in found] == ["no-valid-key", "scope-missing", "over-quota"]
    assert "or its key is unknown, revoked or expired" in found[0][1]
    for _, detail in found:
        check_sentences(detail)


FAILURES = [
    errors.RecordTooLarge("x"), errors.OutcomeUnknown("x"), errors.StorageFull("x"), errors.Throttled("x"),
    errors.UnknownTopic("x"), errors.BrokerClosed("x"), errors.Unavailable("x"), ZeroDivisionError(),
]  # fmt: skip


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
async def test_failures_of_the_broker(service: Service, error: Exception) -> None:
    """Broken: a client is not told whether the event is stored, or whether to send it again."""
    detail = explain(error)[1]
    check_sentences(detail)
    assert re.search(r"stored|larger than", detail)
    service.appender.errors = [error] * 1000
    for _, text in details(await service.post(b"[{},{}]")):
        check_sentences(text)


def test_an_event_that_is_too_old() -> None:
    """Broken: a client is told to change a setting of the server."""
    _, faults = read_times([0], 10 * 86_400_000, 9 * 86_400_000, "The time (field 'at')")
    kind, detail = faults[0]
    assert kind is problems.TOO_OLD
    assert detail.startswith("The time (field 'at') is more than 1d before the arrival,")
    check_sentences(detail)


def literals() -> list[str]:
    """The texts of all refusals in the code of ingest; values are 0."""
    found = []
    for path in sorted(Path(problems.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Refused", "_Fault"):
                texts = [one for one in node.args if isinstance(one, ast.Constant | ast.JoinedStr)]
                found += [
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "0." for part in _parts(text))
                    for text in texts
                ]
    return found


def _parts(text: ast.Constant | ast.JoinedStr) -> list[ast.expr]:
    return text.values if isinstance(text, ast.JoinedStr) else [text]


def test_every_text_of_a_refusal_ends_with_a_full_stop() -> None:
    """Broken: a text that no other test provokes, such as that of a time-out, is no sentence."""
    found = literals()
    assert len(found) > 25
    assert [text for text in found if not text.endswith(".") or "Try:" in text] == []


def test_the_published_examples_are_sentences_of_this_kind() -> None:
    """Broken: the description shows a text that no answer has."""
    shown = re.findall(r'"detail": "(.*)"', OPENAPI.read_text(encoding="utf-8"))
    assert len(shown) > 30
    for detail in shown:
        check_sentences(detail)


def test_every_problem_is_rendered_here() -> None:
    """Broken: a new problem has a text that nobody has read as a client's developer does."""
    provoked = {problem for _, problem, _ in [*REQUESTS, *LARGE]}
    assert provoked | ELSEWHERE == {kind.name for kind in problems.ALL}
    assert not provoked & ELSEWHERE
