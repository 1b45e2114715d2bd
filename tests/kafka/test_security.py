"""A Kafka that wants TLS or a login, on a real broker: each way in, and what is said when it refuses."""

import asyncio
import base64
import datetime
import json
import logging
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import AccessRefused, OutcomeUnknown, Unavailable
from services.core.broker.kafka import access
from services.core.broker.kafka.broker import open_kafka
from services.core.broker.kafka.cluster import Timing
from services.core.broker.record import Record, TopicPartition
from services.core.security import msk_token
from services.core.security.kafka import load_security
from tests.faults.fleet import Service
from tests.integration.fleet_process import REPOSITORY, Desk, until
from tests.support.kafka import unique_name
from tests.support.secured_kafka import BRIEF_S, OPERATOR, REGION, ROTATED, START_S, SecuredKafka

pytestmark = pytest.mark.kafka
_HERE = ("--allow-networks", "127.0.0.0/8")
_NO_TIME_OUT = Timing(request=3600.0)
"""Whatever ends soon with these limits was ended by an answer of the cluster."""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """One broker for all tests here."""
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


async def append(broker: Broker, topic: str) -> None:
    """Store an event. A broker that has just started gives no producer id yet, and one ends connections whose token expired."""
    record = Record(None, b"event", 1)
    async with asyncio.timeout(300):
        while True:
            try:
                await broker.appender.append(topic, 0, [record], timeout=30)
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.1)
            else:
                return


async def carry(broker: Broker) -> list[bytes]:
    """A topic is made, an event stored in it, and read as a member of a group, which commits."""
    topic = unique_name("carried")
    await broker.admin.create_topic(TopicSpec(topic, partitions=1))
    await append(broker, topic)

    async def drain(_: object) -> None: ...

    async with broker.consumer("readers", [topic], start="earliest", on_revoke=drain) as consumer:
        async with asyncio.timeout(300):
            while not (batches := await consumer.poll(max_records=10, max_wait=1)):
                pass
        await consumer.commit({TopicPartition(topic, 0): batches[0].offsets[-1]})
    return [record.value for batch in batches for record in batch.records if record.value is not None]


@pytest.mark.parametrize(
    ("listener", "mechanism"),
    [("tls", None), ("plain", "PLAIN"), ("scram", "SCRAM-SHA-256"), ("scram", "SCRAM-SHA-512")],
)
async def test_an_event_is_carried(kafka: SecuredKafka, tmp_path: Path, listener: str, mechanism: str | None) -> None:
    """Broken: nobody whose Kafka is secured can use Penstock: admin, producer, consumer or group."""
    content: dict[str, Any] = {}
    if mechanism is None:
        tls = {"ca": str(kafka.ours.ca), "certificate": str(kafka.client), "key": str(kafka.client)}
        content = {"tls": tls, "sasl": None}
    path = kafka.write(tmp_path / "own", mechanism or "", **content)
    async with open_broker(kafka.url(listener, path)) as broker:
        assert await carry(broker) == [b"event"]


_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "wrong password": ("scram", {}, f"does not accept user {OPERATOR} with this password"),
    "wrong password, sent": ("plain", {"mechanism": "PLAIN"}, f"does not accept user {OPERATOR} with this password"),
    "another mechanism": ("plain", {}, "has no login by SCRAM-SHA-512"),
    "foreign certificate of the broker": ("scram", {"tls": {"ca": "foreign"}}, "is not accepted: .*Try: the authority"),
    "expired certificate of the broker": ("stale", {}, "is not accepted: certificate has expired"),
    "wrong host name": ("scram at localhost", {}, "is not accepted: .*localhost.*advertised.listeners"),
    "foreign client certificate": ("tls", {"tls": {"certificate": "foreign"}, "sasl": None}, "our client certificate"),
    "expired client certificate": (
        "tls",
        {"tls": {"certificate": "expired"}, "sasl": None},
        "our client certificate: it expired at 20.*Try: a new one",
    ),
    "no client certificate": ("tls", {"sasl": None}, "us without a client certificate"),
    "no TLS there": ("none", {}, "closed the connection before TLS"),
}


@pytest.mark.parametrize("case", _REFUSED)
async def test_a_refusal_is_clear_at_once_and_not_stormed(
    kafka: SecuredKafka, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an operator sees a time-out, or a password in the log, or the cluster locks the user out."""
    where, content, said = _REFUSED[case]
    tls = {"ca": str(kafka.ours.ca)}
    if files := content.get("tls"):
        own = {"foreign": kafka.foreign_client, "expired": kafka.expired_client}
        tls = {"ca": str(kafka.foreign.ca)} if "ca" in files else tls | {"certificate": str(own[files["certificate"]])}
    path = kafka.write(tmp_path / "own", **(content | {"tls": tls}))
    secret = kafka.passwords[OPERATOR]
    if case.startswith("wrong password"):
        secret = "wrong-hunter2"
        (path.parent / "password").write_text(secret)
    listener, _, host = where.partition(" at ")
    address = kafka.cluster.bootstrap if listener == "none" else kafka.address(listener, host or "127.0.0.1")
    tried = 0
    connect = access.Access._settings

    async def count(self: access.Access, login: Any) -> dict[str, Any]:
        nonlocal tried
        tried += 1
        return await connect(self, login)

    monkeypatch.setattr(access.Access, "_settings", count)
    for name in ("FIRST_HOLD_S", "LONGEST_HOLD_S"):  # twenty attempts may take a busy machine longer than these last
        monkeypatch.setattr(access, name, 3600.0)
    caplog.set_level(logging.DEBUG)
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(AccessRefused) as caught:
                async with asyncio.timeout(300), open_kafka(address, timing=_NO_TIME_OUT, security=path):
                    pass
            assert re.search(said, str(caught.value))
    assert tried == 1 or case == "no TLS there", "each attempt went to the cluster"
    assert [line["event"] for line in logs if line["event"] == "kafka_access_refused"] == ["kafka_access_refused"]
    for text in (caplog.text, str(logs), repr(caught.value), str(caught.value)):
        assert secret not in text


async def test_a_rotated_password_is_used_without_a_restart(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: who rotates a password must restart the fleet; or a fleet that was refused goes on so for a minute."""
    path = kafka.write(tmp_path / "own")
    (path.parent / "password").write_text("not-yet")
    with pytest.raises(AccessRefused):
        async with open_broker(kafka.url("scram", path)):
            pass
    (path.parent / "password").write_text(kafka.passwords[OPERATOR])
    async with asyncio.timeout(300):
        while await _refusal(kafka.url("scram", path)):
            await asyncio.sleep(0.2)


async def test_services_use_a_rotated_password_without_a_restart(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: who rotates a password must restart each service before its connections end, or no event passes any more."""
    desk, path = Desk(tmp_path), kafka.write(tmp_path / "own", user=ROTATED)
    desk.write_pipes()
    made = await desk.run("apply", "-f", "pipes.yaml", "--broker", kafka.url("scram", path), *_HERE)
    assert made.process.returncode == 0, made.out + made.err
    shared = ("--broker", kafka.url("brief", path), "--pipes", str(tmp_path / "pipes.yaml"))
    ingest = Service("ingest", "services.ingest", (*shared, "--listen", f"127.0.0.1:{desk.ingest_port}"), tmp_path)
    expel = Service("expel", "services.expel", (*shared, *_HERE), tmp_path)
    async with desk.receive(), AsyncExitStack() as running:
        for one in (ingest, expel):
            await one.start()
            running.push_async_callback(one.kill)
        await ingest.wait_ready()
        for count in (10, 20):
            sent = await desk.send(desk.write_events(count))
            assert sent.process.returncode == 0, sent.out + sent.err
            await until(lambda: len(desk.ids) == count, "all events are delivered")  # noqa: B023
            if count == 10:
                await asyncio.to_thread(kafka.rotate, ROTATED)
                (path.parent / "password").write_text(kafka.passwords[ROTATED])
                await asyncio.sleep(BRIEF_S)  # the logins of before end
        assert (ingest.is_running, expel.is_running, ingest.starts, expel.starts) == (True, True, 1, 1)


async def test_credentials_that_expire_in_mid_flight(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: a fleet that gets a new password later than the cluster loses events, or must be restarted."""
    path, topic = kafka.write(tmp_path / "own"), unique_name("expiring")
    read, stored = list[bytes](), list[bytes]()

    async def drain(_: object) -> None: ...

    async with open_broker(kafka.url("scram", path)) as broker:
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))

        async def store_until(expected: type[Exception] | None) -> None:
            """Append events until one is stored, or fails so. Each has a value of its own; the stored ones are noted."""
            async with asyncio.timeout(300):
                while True:
                    value = unique_name("event").encode()
                    try:
                        await broker.appender.append(topic, 0, [Record(None, value, 1)], timeout=10)
                        stored.append(value)
                        if expected is None:
                            return
                    except (Unavailable, OutcomeUnknown) as error:
                        if expected is not None and isinstance(error, expected):
                            return
                    await asyncio.sleep(0.2)

        async with broker.consumer(unique_name("readers"), [topic], start="earliest", on_revoke=drain) as consumer:

            async def read_all() -> None:
                async with asyncio.timeout(300):
                    while not set(stored) <= set(read):
                        with suppress(Unavailable):
                            batches = await consumer.poll(max_records=100, max_wait=1)
                            read.extend(each.value or b"" for batch in batches for each in batch.records)

            await store_until(None)
            await read_all()
            (path.parent / "password").write_text("expired")
            await asyncio.to_thread(kafka.cluster.kill, 1)
            await asyncio.to_thread(kafka.cluster.restart, timeout_s=START_S)
            await store_until(AccessRefused)
            (path.parent / "password").write_text(kafka.passwords[OPERATOR])
            await store_until(None)
            await read_all()


class TokenServer:
    """Gives tokens for the operator that last `lifetime` seconds; asked counts them."""

    def __init__(self, lifetime: int = 3) -> None:
        self.lifetime, self.asked, self.secret = lifetime, 0, "client-hunter2"

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if request.headers["Authorization"] != f"Basic {base64.b64encode(f'us:{self.secret}'.encode()).decode()}":
            return web.json_response(
                {"error": "invalid_client", "error_description": "it is not client-hunter3"}, status=401
            )
        now = int(time.time())
        claims = {"sub": OPERATOR, "iat": now, "exp": now + 1 + self.lifetime}
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()) for part in ({"alg": "none"}, claims)]
        token = b".".join(part.rstrip(b"=") for part in (*parts, b"")).decode()
        return web.json_response({"access_token": token, "token_type": "Bearer", "expires_in": abs(self.lifetime)})


@asynccontextmanager
async def token_server(kafka: SecuredKafka, folder: Path) -> AsyncIterator[tuple[TokenServer, str, Path]]:
    """It, the URL of the broker for a client with an account there, and the file of the client's secret."""
    server = TokenServer()
    app = web.Application()
    app.router.add_post("/token", server.answer)
    async with TestServer(app) as running:
        sasl = {"token_url": str(running.make_url("/token")), "client_id": "us", "client_secret": {"file": "password"}}
        path = kafka.write(folder, sasl={"mechanism": "OAUTHBEARER", "oauth": sasl})
        (path.parent / "password").write_text(server.secret)
        yield server, kafka.url("oauth", path), path.parent / "password"


async def flow(
    kafka: SecuredKafka, broker: Broker, tokens: Callable[[], int], more: int, folder: Path
) -> tuple[int, int]:
    """Events flow through a new topic until this client has taken so many more tokens. Nothing is lost. Gives the tokens and the
    connections of this time."""
    topic, stored, read, connect = unique_name("tokens"), 0, 0, access.Access._connect
    await broker.admin.create_topic(TopicSpec(topic, partitions=1))
    tried = 0

    async def count(*arguments: Any) -> Any:
        nonlocal tried
        tried += 1
        return await connect(*arguments)

    async def drain(_: object) -> None: ...

    began = tokens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access.Access, "_connect", count)
        joining = broker.consumer(unique_name("readers"), [topic], start="earliest", on_revoke=drain)
        async with asyncio.timeout(300), joining as consumer:
            while tokens() < began + more or read < stored:
                if tokens() < began + more:
                    await append(broker, topic)
                    stored += 1
                with suppress(Unavailable):
                    batches = await consumer.poll(max_records=100, max_wait=0.05)
                    read += sum(len(batch.records) for batch in batches)
                    await consumer.commit({TopicPartition(topic, 0): batch.offsets[-1] for batch in batches})
    async with open_broker(kafka.url("scram", kafka.write(folder))) as other:
        held = await other.reader.describe(topic)
    assert held[0].end == stored
    return tokens() - began, tried


async def test_tokens_expire_while_events_flow(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: a fleet with OAuth stops when its first token has expired; or its clients storm the token server or the cluster."""
    async with token_server(kafka, tmp_path / "own") as (server, url, _), open_broker(url) as broker:
        tokens, tried = await flow(kafka, broker, lambda: server.asked, 3, tmp_path / "other")
        assert 0 < tried <= 8 * (tokens + 1), (
            "each token is for one connection of each client to a node and to the first address"
        )


async def test_msk_by_iam(kafka: SecuredKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: nobody whose Kafka is MSK with IAM can use Penstock, or only until the first token expires; or who has wrong
    keys, or a wrong clock, sees a time-out or a secret, and must restart with the right ones."""
    keys = tmp_path / "aws"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))

    def write_keys(secret: str) -> None:
        keys.write_text(
            f"[default]\naws_access_key_id = {kafka.aws_keys['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {secret}\n"
        )

    path = kafka.write(tmp_path / "own", sasl={"mechanism": "AWS_MSK_IAM", "region": REGION})
    url, right = kafka.url("msk", path), kafka.aws_keys["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setattr(access, "LONGEST_HOLD_S", 0.1)
    write_keys("wrong-hunter2")
    said = await _refusal(url)
    assert re.search(r"does not accept our token \(AWS_MSK_IAM\).*Try: .*both clocks", said)
    assert "hunter2" not in said
    write_keys(right)
    with monkeypatch.context() as late:
        an_hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        late.setattr("botocore.auth.get_current_datetime", lambda: an_hour_ago)
        async with asyncio.timeout(300):
            while "it expired" not in await asyncio.to_thread(kafka.cluster.brokers[1].log.read_text):
                assert "does not accept our token" in await _refusal(url)
    async with asyncio.timeout(300):
        while await _refusal(url):
            await asyncio.sleep(0.1)
    monkeypatch.setattr(msk_token, "LIFETIME_S", 2)
    made, make = 0, msk_token.make_token

    def count(region: str) -> str:
        nonlocal made
        made += 1
        return make(region)

    monkeypatch.setattr("services.core.broker.kafka.tokens.make_token", count)
    async with open_broker(url) as broker:
        assert await carry(broker) == [b"event"]
        tokens, tried = await flow(kafka, broker, lambda: made, 12, tmp_path / "other")
        assert tokens <= tried


async def test_no_token_and_a_token_that_is_refused(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: whoever gets no token, or one that Kafka does not accept, sees a time-out or a secret; or must restart."""
    async with token_server(kafka, tmp_path / "own") as (server, url, secret):
        secret.write_text("client-hunter3")
        with pytest.raises(AccessRefused, match=r"no login at Kafka: no token from .* 401 invalid_client") as caught:
            async with open_broker(url):
                pass
        assert "client-hunter3" not in str(caught.value)
        secret.write_text(server.secret)
        server.lifetime = -60
        async with asyncio.timeout(300):
            while "does not accept our token" not in await _refusal(url):
                await asyncio.sleep(0.2)
        server.lifetime = 60
        async with asyncio.timeout(300):
            while await _refusal(url):
                await asyncio.sleep(0.2)


async def _refusal(url: str) -> str:
    try:
        async with open_broker(url) as broker:
            await broker.admin.topics()
    except AccessRefused as error:
        return str(error)
    return ""


async def test_the_page(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: docs/kafka.md shows a file or a command that does not work."""
    page = (REPOSITORY / "docs/kafka.md").read_text()
    files = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for text in files:
        (tmp_path / "example.yaml").write_text(text)
        await asyncio.to_thread(load_security, tmp_path / "example.yaml")
    path = kafka.write(tmp_path / "own")
    path.write_text(
        files[0].replace("company-ca.pem", str(kafka.ours.ca)).replace("user: penstock", f"user: {OPERATOR}")
    )
    (path.parent / "password").rename(path.parent / "kafka.password")
    desk = Desk(tmp_path)
    desk.write_pipes()
    commands = re.findall(r"^```sh\npenstock (.*?)\n```$", page, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command.replace("/etc/penstock/kafka.yaml", str(path)))
        words = [re.sub(r"kafka-1:9093,kafka-2:9093", kafka.address("scram"), word) for word in words]
        running = await desk.penstock(*words, "--allow-networks", "127.0.0.0/8")
        assert await running.finish() == 0, running.out + running.err
    async with open_broker(kafka.url("scram", path)) as broker:
        assert "events" in await broker.admin.topics()
