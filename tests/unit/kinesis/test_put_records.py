"""PutRecords by hand: signed as the SDK signs, read as the SDK reads."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import orjson
import pytest
from aiohttp import web
from botocore import exceptions as aws
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from services.core.aws_emulator import CREDENTIALS, kinesis_url
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, UnknownTopic
from services.core.broker.kinesis.aws import (
    Keys,
    Put,
    PutRecords,
    Scope,
    classify_put,
    open_clients,
    parse_refusal,
    sign,
)
from tests.support.serving import serve_on_loopback

_WHEN = datetime(2026, 11, 21, 23, 59, 59, tzinfo=UTC)


@pytest.mark.parametrize("token", [None, "a-session-token=="])
@pytest.mark.parametrize("host", ["kinesis.eu-west-1.amazonaws.com", "127.0.0.1:4567"])
def test_the_signature_is_the_sdks(monkeypatch: pytest.MonkeyPatch, token: str | None, host: str) -> None:
    """If it fails, AWS refuses every event; emulators, which check nothing, would not tell."""
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: _WHEN)
    headers = {"content-type": "application/x-amz-json-1.1", "x-amz-target": "Kinesis_20131202.PutRecords"}
    body = b'{"StreamName":"s","Records":[]}'
    request = AWSRequest("POST", f"https://{host}/", headers=dict(headers), data=body)
    SigV4Auth(Credentials("AKID", "secret", token), "kinesis", "eu-west-1").add_auth(request)
    ours = sign(Keys("AKID", "secret", token), Scope("eu-west-1", "kinesis"), "20261121T235959Z", host, headers, body)
    assert ours == {name.lower(): value for name, value in request.headers.items()}


class _Service:
    """Answers every request with `status` and `body`; keeps what came."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.seen: list[tuple[dict[str, str], bytes]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        return web.Response(status=self.status, body=self.body, content_type="application/x-amz-json-1.1")


@asynccontextmanager
async def _serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[_Service, PutRecords, str]]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    service, app = _Service(), web.Application()
    app.router.add_post("/", service.handle)
    async with serve_on_loopback(app) as port:
        endpoint = f"http://127.0.0.1:{port}"
        async with open_clients(parse_kinesis_url(kinesis_url(endpoint, endpoint)), 10.0) as clients:
            yield service, clients.put_records, endpoint.removeprefix("http://")


async def test_what_is_sent_is_what_the_service_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, entries are stored altered or in another shard, or what is signed is not what is sent."""
    async with _serving(monkeypatch) as (service, put_records, host):
        service.body = orjson.dumps({"FailedRecordCount": 0, "Records": [{"SequenceNumber": "7"}] * 2})
        rows = await put_records("s-1", [Put(b"\x00\xff", "0", "12"), Put(b"", "1", str(1 << 127))])
    assert [row["SequenceNumber"] for row in rows] == ["7", "7"]
    ((headers, body),) = service.seen
    said = orjson.loads(body)
    assert said["StreamName"] == "s-1"
    assert [base64.b64decode(one["Data"]) for one in said["Records"]] == [b"\x00\xff", b""]
    assert [(one["PartitionKey"], one["ExplicitHashKey"]) for one in said["Records"]] == [
        ("0", "12"),
        ("1", str(1 << 127)),
    ]
    signed = {name: headers[name] for name in ("content-type", "x-amz-target")}
    keys = Keys(CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    expected = sign(keys, Scope("us-east-1", "kinesis"), headers["x-amz-date"], host, signed, body)
    assert headers["host"] == host
    assert headers["authorization"] == expected["authorization"]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b'{"__type":"ProvisionedThroughputExceededException","message":"slow"}', Throttled),
        (400, b'{"__type":"com.amazonaws.kinesis#ResourceNotFoundException","Message":"gone"}', UnknownTopic),
        (400, b'{"__type":"AccessDeniedException"}', BrokerError),
        (500, b'{"__type":"InternalFailure"}', OutcomeUnknown),
        (502, b"<html>bad gateway</html>", OutcomeUnknown),
        (200, b"{}", OutcomeUnknown),
        (200, b'{"Records":[]}', OutcomeUnknown),
        (200, b"not JSON", OutcomeUnknown),
    ],
)
async def test_what_an_answer_means(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, kind: type[BrokerError]
) -> None:
    """If it fails, a throttle is not obeyed, or a client is told "not stored" of what may be stored."""
    async with _serving(monkeypatch) as (service, put_records, _):
        service.status, service.body = status, body
        with pytest.raises((aws.ClientError, aws.BotoCoreError)) as raised:
            await put_records("s", [Put(b"x", "0", "1")])
    assert type(classify_put(raised.value, "append")) is kind


def test_a_bad_signature_shows_no_token() -> None:
    """If it fails, the log of a process with a wrong key has its session token, which AWS quotes."""
    said = b"The signature does not match.\n\nThe Canonical String for this request should have been\n'x-amz-security-token:T0K'"
    error = parse_refusal(
        "PutRecords", 400, orjson.dumps({"__type": "InvalidSignatureException", "message": said.decode()})
    )
    assert "does not match." in str(error)
    assert "T0K" not in str(error)
