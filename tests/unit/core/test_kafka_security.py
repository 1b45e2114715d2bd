"""The file that `?security=` names: what it may say, and that nothing shows its secrets."""

import asyncio
import base64
import struct
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import aiohttp
import pytest
from aiokafka import errors as kafka
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from prometheus_client import REGISTRY

from services.core.broker.errors import Unavailable
from services.core.broker.kafka import access as module
from services.core.broker.kafka.access import FIRST_HOLD_S, LONGEST_HOLD_S, Access, RefusedError, access_by
from services.core.broker.kafka.cluster import Cluster, Timing
from services.core.process.management import serve_management
from services.core.security import kafka as kafka_security
from services.core.security.expiry import untils_of_pem
from services.core.security.kafka import UnusableSecurity, load_security, measure_certificates, read_login
from services.core.security.msk_token import sign
from services.core.yaml_source import BadConfiguration

_SCRAM = "sasl: {mechanism: SCRAM-SHA-256, user: ann, password: {file: password}}\n"
_OAUTH = (
    "tls: system\n"
    "sasl: {{mechanism: OAUTHBEARER, oauth: {{token_url: '{}', client_id: a, client_secret: {{file: password}}}}}}"
)


def write(folder: Path, text: str, password: str = "hunter2") -> Path:
    (folder / "password").write_text(f"{password}\n")
    (folder / "password").chmod(0o600)
    (folder / "kafka.yaml").write_text(text)
    return folder / "kafka.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "tls or sasl is needed"),
        (_SCRAM.replace("SCRAM-SHA-256", "PLAIN"), "the network sees the password of PLAIN"),
        (_SCRAM.replace("SCRAM-SHA-256", "AWS_MSK_IAM"), "AWS_MSK_IAM needs region"),
        (
            "sasl: {mechanism: OAUTHBEARER, oauth: {token_url: 'http://t', client_id: a, client_secret: {file: password}}}",
            "the network sees the token of OAUTHBEARER",
        ),
        (_OAUTH.format("https://ann:hunter2@t/token"), "user and password in a URL are refused"),
        (_OAUTH.format("https://t/token?p=a&client_secret=hunter2"), "the query looks as if it had a secret"),
        (_OAUTH.format("https://t/token?hunter2Token"), "the query looks as if it had a secret"),
        (_OAUTH.format("https://t/token#hunter2"), "the query looks as if it had a secret"),
        (_OAUTH.format("https://ann:hunter2@[t/token"), "a URL with https:// or http:// is needed"),
        (_OAUTH.format("ftp://t/token"), "a URL with https:// or http:// is needed"),
        (_SCRAM.replace("{file: password}", "hunter2"), "the secret itself must not be here"),
        (_SCRAM.replace("mechanism: SCRAM-SHA-256", "mechanism: GSSAPI"), "mechanism"),
        ("tls: system\nacks: 1\n", "acks"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    """Broken: somebody believes to be protected, or a secret is in a configuration file or a message."""
    with pytest.raises(BadConfiguration) as caught:
        load_security(write(tmp_path, text))
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_public_query_stays(tmp_path: Path) -> None:
    """Broken: a token server whose address has a query gives no token (RFC 6749, 3.2)."""
    url = "https://t/token?p=B2C_1_policy&grant_type=client_credentials&tenant=4711"
    login = load_security(write(tmp_path, _OAUTH.format(url)))
    assert login.sasl is not None
    assert login.sasl.oauth is not None
    assert login.sasl.oauth.token_url == url


def test_the_files_are_read_as_they_are_now(tmp_path: Path) -> None:
    """Broken: a rotated password is never used, or each connection builds a TLS context of its own."""
    path = write(tmp_path, f"tls: system\n{_SCRAM}")
    first = read_login(path, {})
    assert read_login(path, {}, first) is first
    write(tmp_path, f"tls: system\n{_SCRAM}", "other")
    second = read_login(path, {}, first)
    assert (second.password, second.security.protocol) == ("other", "SASL_SSL")
    assert "other" not in repr(second)
    (tmp_path / "password").chmod(0o644)
    with pytest.raises(UnusableSecurity, match="chmod 600"):
        read_login(path, {}, second)


async def test_the_end_of_its_certificates_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the certificate with which every service reaches Kafka expires, and no alert came before; or the alert stays."""
    monkeypatch.setattr(
        kafka_security, "_shown", set()
    )  # a service has one file; other tests of this process had theirs
    own, labels = tmp_path / "own.pem", {"name": "kafka", "key": "tls.certificate"}
    path = write(tmp_path, "tls: {certificate: own.pem}\n")
    assert access_by(path) is not None
    for days in (30, 2):  # renewed while a connection is open
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", str(days), "-subj", "/CN=a", "-keyout", str(own), "-out", str(own)]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        serving = serve_management("127.0.0.1:0", lambda: None)
        async with serving as address, aiohttp.request("GET", f"http://{address}/metrics") as answer:
            await answer.read()
        until = REGISTRY.get_sample_value("penstock_certificate_expiry_timestamp_seconds", labels)
        assert until == untils_of_pem(own.read_bytes())[0]
    password = tmp_path / "kafka.secret"
    password.write_text("# expires: 2027-01-31\npw\n")
    password.chmod(0o600)
    write(tmp_path, "tls: system\nsasl: {mechanism: PLAIN, user: a, password: {file: kafka.secret}}\n")
    await measure_certificates()
    assert REGISTRY.get_sample_value("penstock_certificate_expiry_timestamp_seconds", labels) is None
    labels = {"name": "kafka", "key": "sasl"}
    assert REGISTRY.get_sample_value("penstock_secret_expiry_timestamp_seconds", labels) == 1801353600
    assert (await asyncio.to_thread(read_login, path, {})).password == "pw"


async def test_a_node_that_refuses_is_asked_more_and_more_seldom(tmp_path: Path) -> None:
    """Broken: a wrong password is sent ten times a second, and the cluster locks the user out; or for ever, after it is right."""
    path, now, asked = write(tmp_path, _SCRAM), 0.0, list[tuple[float, str]]()
    access = Access(path, lambda: now)

    async def connect(**settings: Any) -> str:
        asked.append((now, settings["sasl_plain_password"]))
        if settings["sasl_plain_password"] != "right":
            raise kafka.SaslAuthenticationFailed("no")
        return "connection"

    async def attempt() -> str | None:
        try:
            found: str = await access.open(connect, "h", 1)
        except RefusedError:
            return None
        return found

    for _ in range(1000):
        assert await attempt() is None
        now += 0.1
        await asyncio.sleep(0)
    times = [at for at, _ in asked]
    assert len(times) == 5
    waits = [after - before for before, after in pairwise(times)]
    assert all(wait > 1.7 * before for before, wait in pairwise(waits)), waits
    assert waits[0] == pytest.approx(FIRST_HOLD_S, abs=1.5)
    access._refusals["h", 1].count = 1100
    now += LONGEST_HOLD_S
    assert await attempt() is None, "however often: a float holds no 2 ** 1024"
    write(tmp_path, _SCRAM, "right")
    now += 1.0
    assert await attempt() == "connection"
    assert "right" not in str(vars(access)) + repr(access)


async def test_one_client_tries_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each of a thousand clients sends the wrong password once, and the cluster locks the user out; or all of them wait
    behind one connection that hangs; or behind each other, when the password is right."""
    now, asked, outcome = 0.0, 0, "refused"
    access = Access(write(tmp_path, _SCRAM), lambda: now)
    monkeypatch.setattr(module, "TRIAL_S", 60)
    together, hanging = asyncio.Event(), asyncio.Event()

    async def connect(**_settings: Any) -> str:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if outcome == "refused":
            raise kafka.SaslAuthenticationFailed("no")
        if outcome == "unreachable":
            raise OSError("no route")
        if outcome == "hangs" and asked == 1:
            await hanging.wait()
        if outcome == "accepted" and asked > 1:
            if asked == 1000:
                together.set()
            await together.wait()
        return "connection"

    async def attempt_all() -> list[object]:
        nonlocal asked, now
        asked, now = 0, now + 2 * LONGEST_HOLD_S
        opening = (access.open(connect, "h", 1) for _ in range(1000))
        return list(await asyncio.gather(*opening, return_exceptions=True))

    found = await attempt_all()
    assert asked == 1
    assert all(isinstance(each, RefusedError) for each in found)
    outcome = "unreachable"
    assert [type(each) for each in await attempt_all()] == [OSError] + [kafka.KafkaConnectionError] * 999
    assert asked == 1
    outcome = "accepted"
    async with asyncio.timeout(600):
        assert await attempt_all() == ["connection"] * 1000
    monkeypatch.setattr(module, "TRIAL_S", 0.01)
    outcome = "hangs"
    asked, running = 0, asyncio.create_task(attempt_all())
    async with asyncio.timeout(600):
        while asked < 1000:
            await asyncio.sleep(0.01)
    hanging.set()
    assert await running == ["connection"] * 1000


async def test_a_refusal_explains_only_what_it_caused(tmp_path: Path) -> None:
    """Broken: for a minute after a refusal every time-out, also of another node, is called a wrong password."""
    now = 100.0
    access = Access(write(tmp_path, _SCRAM), lambda: now)
    cluster = Cluster("h:1", "test", Timing(), access)

    async def connect(**_settings: Any) -> str:
        raise kafka.SaslAuthenticationFailed("no")

    began = cluster.now()
    with pytest.raises(RefusedError):
        await access.open(connect, "h", 1)
    silent = Unavailable("no answer within 7 s")
    assert "ann" in str(cluster.explain(silent, began))
    assert access.problem_since(began, ("h", 1)) is not None
    assert access.problem_since(began, ("h", 2)) is None
    now += 1
    assert cluster.explain(silent, cluster.now()) is silent
    with pytest.raises(RefusedError):
        await access.open(connect, "h", 1)
    assert "ann" in str(cluster.explain(silent, now)), "it was refused again, without a connection"


@pytest.mark.parametrize(
    ("failure", "told", "text"),
    [
        (struct.error("short"), RefusedError, "is no Kafka: error"),
        (EOFError(), RefusedError, "is no Kafka: EOFError"),
        (RuntimeError("the handler is closed"), kafka.KafkaConnectionError, "the handler is closed"),
    ],
)
async def test_no_error_of_a_connection_ends_a_task_of_aiokafka(
    tmp_path: Path, failure: Exception, told: type[Exception], text: str
) -> None:
    """If it fails, an answer that no Kafka gives ends the task that renews the metadata, and nobody notices."""

    async def connect(**_settings: Any) -> str:
        raise failure

    with pytest.raises(told, match=text):
        await Access(write(tmp_path, _SCRAM)).open(connect, "h", 1)


def test_an_msk_token_is_a_request_that_aws_accepts() -> None:
    """Broken: MSK refuses each login, or the token has the secret itself in it."""
    credentials = ReadOnlyCredentials("AKIAEXAMPLE", "secret-hunter2", "session", None)
    token = sign("eu-west-1", credentials)
    url = urlsplit(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
    assert f"{url.scheme}://{url.netloc}{url.path}" == "https://kafka.eu-west-1.amazonaws.com/"
    query = dict(parse_qsl(url.query, strict_parsing=True))
    assert query["Action"] == "kafka-cluster:Connect"
    assert query["X-Amz-Expires"] == "900"
    assert query["X-Amz-Credential"].endswith("/eu-west-1/kafka-cluster/aws4_request")
    assert query["X-Amz-Security-Token"] == "session"
    assert "hunter2" not in str(query)
    signed = {name: query[name] for name in query.keys() - {"X-Amz-Signature", "User-Agent"}}
    expected = SigV4QueryAuth(credentials, "kafka-cluster", "eu-west-1", expires=900)
    request = AWSRequest("GET", f"{url.scheme}://{url.netloc}/?{urlencode(sorted(signed.items()), quote_via=quote)}")
    request.headers["host"] = url.netloc
    request.context["timestamp"] = query["X-Amz-Date"]
    text = expected.string_to_sign(request, expected.canonical_request(request))
    assert expected.signature(text, request) == query["X-Amz-Signature"]
