"""A Kafka that wants TLS or a login, on a real broker: each way in, and what is said when it refuses."""

import asyncio
import base64
import json
import logging
import re
import shlex
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
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
from services.core.broker.record import Record, TopicPartition
from services.core.kafka_security import load_security
from tests.integration.fleet_process import REPOSITORY, Desk
from tests.support.kafka import unique_name
from tests.support.secured_kafka import OPERATOR, START_S, SecuredKafka

pytestmark = pytest.mark.kafka
_QUICK_S = 200.0
"""Far above a refusal's time on a slow machine, far below the time-outs of a request or a start."""


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
        tls = {"ca": str(kafka.foreign.ca)} if "ca" in files else tls | {"certificate": str(kafka.foreign_client)}
    path = kafka.write(tmp_path / "own", **(content | {"tls": tls}))
    secret = kafka.passwords[OPERATOR]
    if case.startswith("wrong password"):
        secret = "wrong-hunter2"
        (path.parent / "password").write_text(secret)
    listener, _, host = where.partition(" at ")
    url = kafka.url(listener, path, host or "127.0.0.1") if listener != "none" else ""
    url = url or f"kafka://{kafka.cluster.bootstrap}?security={path}"
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
    began = time.monotonic()
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(AccessRefused) as caught:
                async with open_broker(url):
                    pass
            assert re.search(said, str(caught.value))
    assert time.monotonic() - began < _QUICK_S
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


async def test_tokens_expire_while_events_flow(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: a fleet with OAuth stops when its first token has expired; or its clients storm the token server or the cluster."""
    async with token_server(kafka, tmp_path / "own") as (server, url, _), open_broker(url) as broker:
        topic, stored, read, connect = unique_name("tokens"), 0, 0, access.Access._connect
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        tried = 0

        async def count(*arguments: Any) -> Any:
            nonlocal tried
            tried += 1
            return await connect(*arguments)

        async def drain(_: object) -> None: ...

        began = server.asked
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(access.Access, "_connect", count)
            joining = broker.consumer(unique_name("readers"), [topic], start="earliest", on_revoke=drain)
            async with asyncio.timeout(300), joining as consumer:
                while server.asked < began + 3 or read < stored:
                    if server.asked < began + 3:
                        await append(broker, topic)
                        stored += 1
                    with suppress(Unavailable):
                        batches = await consumer.poll(max_records=100, max_wait=0.05)
                        read += sum(len(batch.records) for batch in batches)
                        await consumer.commit({TopicPartition(topic, 0): batch.offsets[-1] for batch in batches})
        tokens = server.asked - began + 1
        assert 0 < tried <= 8 * tokens, (
            "each token is for one connection of each client to a node and to the first address"
        )
    async with open_broker(kafka.url("scram", kafka.write(tmp_path / "other"))) as broker:
        held = await broker.reader.describe(topic)
    assert held[0].end == stored


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
