"""Transforms on a Kafka that wants TLS and a login."""

import asyncio
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from pyspark.sql import SparkSession

from services.core.aws_emulator import CREDENTIALS
from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec
from services.core.broker.errors import Unavailable
from services.core.event import read_id
from services.core.security.kafka import load_security
from spark.brokers.contract import BatchName
from spark.brokers.kafka import KafkaSparkBroker
from spark.brokers.kafka_login import ClientLogin, to_properties
from spark.errors import shorten
from spark.java import JAVA_ERRORS
from spark.records import OffsetRange
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.test_kafka import COLUMNS, flight
from tests.support.authority import Authority
from tests.support.kafka import unique_name
from tests.support.secured_kafka import BRIEF_S, OPERATOR, REGION, ROTATED, SecuredKafka

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """One broker for all tests here."""
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


def plans_of(spark: SparkSession, shown: str = "") -> str:
    """All that Spark's pages show of the queries that have run."""
    store: Any = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList()
    for index in range(executions.size()):
        one = executions.apply(index)
        shown += f"{one.description()}{one.details()}{one.physicalPlanDescription()}{one.modifiedConfigs()}"
    return shown


def test_a_transform_by_password(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, no transform runs on a secured Kafka; or Spark's pages, plans or progress show the password."""
    path = kafka.write(tmp_path / "own")
    with BrokerPipeline(spark, kafka.url("scram", path), tmp_path, partitions=1) as pipeline:
        pipeline.send([flight(n) for n in range(1, 6)] + [flight(7, delay="late")])
        job = pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM {s}"))
        assert {read_id(record) for record in pipeline.records("out", 5)} == {f"id-{n}" for n in range(1, 6)}
        assert len(pipeline.records("dead", 1)) == 1
        broker = pipeline.broker
        assert isinstance(broker, KafkaSparkBroker)
        frame: Any = broker.read_ranges(spark, [OffsetRange(pipeline.stream, 0, 0, 5)])
        assert frame.count() == 5
        execution = frame._jdf.queryExecution()
        shown = plans_of(spark, f"{execution}{execution.logical()}{execution.executedPlan()}{job!r}")
        pipeline.stop()
    assert pipeline.problem is None
    assert "kafka" in shown.lower()
    for secret in (kafka.passwords[OPERATOR], "BEGIN CERTIFICATE"):
        assert secret not in shown


@contextmanager
def token_server(kafka: SecuredKafka, secret: str) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and who asked it for tokens. It has a certificate of our authority. It knows the client `us` by this secret, in
    the body, and gives tokens for the audience `kafka` and the resource `urn:k`."""
    asked: list[str] = []
    expected = {"grant_type": "client_credentials", "client_id": "us", "client_secret": secret}
    expected |= {"audience": "kafka", "resource": "urn:k", "scope": "a b"}

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = dict(parse_qsl(body.decode())) == expected
            if known:
                asked.append(self.headers["User-Agent"])
            said = {"access_token": kafka.sign_token(), "expires_in": 600} if known else {"error": "invalid_client"}
            body = json.dumps(said | {"token_type": "Bearer", "error_description": secret}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(kafka.ours.sign("tokens", place="IP:127.0.0.1"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}/token", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_transform_by_tokens(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, no transform runs on a Kafka that wants OAuth's tokens; or Spark's pages show the client's secret."""
    secret = 'cli"ent=hunter2'
    with token_server(kafka, secret) as (url, asked):
        oauth = {"token_url": url, "client_id": "us", "client_secret": {"file": "password"}, "scope": "a b"}
        oauth |= {"audience": "kafka", "resource": "urn:k", "tls": {"ca": str(kafka.ours.ca)}}
        path = kafka.write(tmp_path / "own", sasl={"mechanism": "OAUTHBEARER", "oauth": oauth})
        (path.parent / "password").write_text(secret)
        with BrokerPipeline(spark, kafka.url("signed", path), tmp_path, partitions=1) as pipeline:
            pipeline.send([flight(n) for n in range(1, 6)])
            pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM {s}"))
            assert {read_id(record) for record in pipeline.records("out", 5)} == {f"id-{n}" for n in range(1, 6)}
            pipeline.stop()
        assert pipeline.problem is None
        assert sum("Java" in agent for agent in asked) == 1, "all clients of a Java share a token"
        (path.parent / "password").write_text("wrong-hunter3")
        with pytest.raises(
            Unavailable, match=r"no token from 127\.0\.0\.1:\d+: it answered 401 invalid_client"
        ) as caught:
            KafkaSparkBroker(kafka.address("signed"), security=path).stored_ranges(spark, [pipeline.stream])
        assert "hunter" not in str(caught.value)
        shown = plans_of(spark)
        assert secret not in shown
        assert json.dumps(secret)[1:-1] not in shown


def ask_login(spark: Any, properties: Mapping[str, str]) -> tuple[str, str]:
    """The user and the password that a new connection of a client with these properties has."""
    java = spark._jvm.javax.security.auth
    context = spark._jvm.org.apache.kafka.common.security.JaasContext
    entries = context.loadClientContext(
        {"sasl.jaas.config": spark._jvm.org.apache.kafka.common.config.types.Password(properties["sasl.jaas.config"])}
    ).configurationEntries()
    handler = spark._jvm.penstock.kafka.Login()
    handler.configure({}, properties["sasl.mechanism"], entries)
    asked = spark.sparkContext._gateway.new_array(java.callback.Callback, 2)
    asked[0], asked[1] = java.callback.NameCallback("user"), java.callback.PasswordCallback("password", False)
    handler.handle(asked)
    return asked[0].getName(), "".join(asked[1].getPassword())


def test_what_java_gets(spark: Any, tmp_path: Path) -> None:
    """If this fails, a password with a quote or a note is cut off or says something else, a rotated one is not used, or Java gets
    a key that it cannot read; or a host without the files says nothing of use."""
    file, path = tmp_path / 'pass"word', tmp_path / "kafka.yaml"
    file.write_text("# expires: 2099-01-31\n" + 'a"b\\c; x="y\n')
    file.chmod(0o600)
    path.write_text("sasl: {mechanism: SCRAM-SHA-256, user: 'ann\\\"', password: {file: 'pass\"word'}}")
    login = ClientLogin(path)
    found = login.properties()
    assert found["security.protocol"] == "SASL_PLAINTEXT"
    assert ask_login(spark, found) == ('ann\\"', 'a"b\\c; x="y')
    file.write_text("other")
    assert ask_login(spark, found) == ('ann\\"', "other")
    file.chmod(0o644)
    assert login.properties() == found, "a rotation takes a moment"
    file.unlink()
    with pytest.raises(JAVA_ERRORS) as caught:
        ask_login(spark, found)
    assert f"{file} is not on {socket.gethostname()}. Try: the same files" in shorten(caught.value)
    path.write_text("sasl: {mechanism: SCRAM-SHA-256, user: ann, password: {env: AWS_ACCESS_KEY_ID}}")
    assert ask_login(spark, to_properties(load_security(path), tmp_path)) == (
        "ann",
        CREDENTIALS["AWS_ACCESS_KEY_ID"],
    )
    own = Authority(tmp_path / "own").sign("client")
    old = subprocess.run(["openssl", "ec", "-in", own], check=True, capture_output=True).stdout
    own.write_bytes(own.read_bytes()[own.read_bytes().index(b"-----BEGIN CERT") :] + old)
    path.write_text(f"tls: {{certificate: {own}}}")
    with pytest.raises(Unavailable, match="openssl pkcs8") as refused:
        ClientLogin(path).properties()
    assert "BEGIN EC" not in str(refused.value)


def test_certificates_are_read_again(spark: Any, tmp_path: Path) -> None:
    """If this fails, a transform goes on with a certificate that has expired, or a file that is half written ends it."""
    authority = Authority(tmp_path / "ours")
    own, option = authority.sign("client"), spark._jvm.scala.Option
    files = spark._jvm.penstock.kafka.TlsFiles(option.apply(str(authority.ca)), option.apply(str(own)), option.empty())
    first = files.context()
    assert files.context().equals(first)
    authority.sign("client")
    second = files.context()
    assert not second.equals(first)
    for damage in (own.read_bytes()[:200], b""):
        own.write_bytes(damage)
        assert files.context().equals(second)
    own.unlink()
    assert files.context().equals(second)
    fresh = spark._jvm.penstock.kafka.TlsFiles(option.empty(), option.apply(str(own)), option.empty())
    with pytest.raises(JAVA_ERRORS, match=re.escape(f"{own} is not on")):
        fresh.context()


def test_a_password_is_rotated_while_a_transform_runs(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, a transform must be restarted before the cluster forgets its old password: the clients that Spark keeps, in
    tasks and in the driver, log in with the one of their start."""
    path = kafka.write(tmp_path / "own", user=ROTATED)
    with BrokerPipeline(spark, kafka.url("scram", path), tmp_path, partitions=1) as pipeline:
        broker = pipeline.broker = KafkaSparkBroker(kafka.address("brief"), security=path)
        pipeline.send([flight(n) for n in range(1, 6)])
        pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM {s}"))
        pipeline.records("out", 5)
        kafka.rotate(ROTATED)  # a login between this moment and the next may be refused: the query begins again
        (path.parent / "password").write_text(kafka.passwords[ROTATED])
        pipeline.send([flight(n) for n in range(10, 15)])
        pipeline.records("out", 10)
        producer, known = broker._producer, len(pipeline.states)
        time.sleep(BRIEF_S)  # the logins end, and the same clients log in again
        pipeline.send([flight(n) for n in range(20, 25)])
        pipeline.records("out", 15)
        assert producer is not None
        assert broker._producer is producer, "it was made anew"
        pipeline.stop()
    assert not [state.problem for state in pipeline.states[known:] if state.problem]


def test_msk_by_iam(spark: Any, kafka: SecuredKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, no transform runs on MSK with IAM: its clients in Java have no token that AWS accepts, or show the key."""
    path = kafka.write(tmp_path / "own", sasl={"mechanism": "AWS_MSK_IAM", "region": REGION})
    broker, topic = KafkaSparkBroker(kafka.address("msk"), security=path), unique_name("msk")
    assert broker.needs_aws_jars
    for name, value in kafka.aws_keys.items():
        monkeypatch.setenv(name, value)

    async def make() -> None:
        async with open_broker(kafka.url("msk", path)) as own:
            await own.admin.create_topic(TopicSpec(topic, 1))

    asyncio.run(make())
    names = {"aws.accessKeyId": kafka.aws_keys["AWS_ACCESS_KEY_ID"], "aws.secretAccessKey": "wrong-hunter2"}
    system = spark._jvm.java.lang.System
    for name, value in names.items():
        system.setProperty(name, value)
    try:
        with pytest.raises(Unavailable, match="does not answer") as caught:
            broker.stored_ranges(spark, [topic])
        assert "hunter2" not in str(caught.value)
        system.setProperty("aws.secretAccessKey", kafka.aws_keys["AWS_SECRET_ACCESS_KEY"])
        assert broker.write_records(spark, [flight(1), flight(2)], topic, BatchName("w", 0))
        broker.append(spark, topic, [flight(3)])
        (stored,) = broker.stored_ranges(spark, [topic])
        assert broker.read_ranges(spark, [stored]).count() == 3
    finally:
        for name in names:
            system.clearProperty(name)
        broker.close()


def test_by_certificate_and_not_without(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, client certificates do not reach Java, it trusts any broker, or a wrong login is a time-out or
    shows a secret."""
    tls = {"ca": str(kafka.ours.ca), "certificate": str(kafka.client)}
    trusted = f"openssl x509 -in {kafka.ours.ca} -trustout -addtrust serverAuth -out {tmp_path / 'ca'}"
    subprocess.run(trusted.split(), check=True)
    assert "BEGIN TRUSTED" in (tmp_path / "ca").read_text()
    path = kafka.write(tmp_path / "own", tls=tls | {"ca": str(tmp_path / "ca")}, sasl=None)
    with BrokerPipeline(spark, kafka.url("tls", path), tmp_path, partitions=2) as pipeline:
        assert [part.end for part in pipeline.broker.stored_ranges(spark, [pipeline.stream])] == [0, 0]
        stream = pipeline.stream
    foreign = kafka.write(tmp_path / "foreign", tls={"ca": str(kafka.foreign.ca)})
    right = kafka.write(tmp_path / "right")
    for address, refused, said in (
        (kafka.address("scram", "localhost"), right, "matching localhost"),
        (kafka.address("scram"), foreign, "valid certification path"),
    ):
        with pytest.raises(Unavailable, match=said):
            KafkaSparkBroker(address, security=refused).stored_ranges(spark, [stream])
    wrong = kafka.write(tmp_path / "wrong")
    (wrong.parent / "password").write_text("wrong-hunter2")
    with pytest.raises(Unavailable, match="Authentication failed") as caught:
        KafkaSparkBroker(kafka.address("scram"), security=wrong).stored_ranges(spark, [stream])
    assert "wrong-hunter2" not in f"{caught.value!r}{caught.value.__cause__!r}{caught.value.__cause__}"
    (wrong.parent / "password").chmod(0o644)
    with pytest.raises(Unavailable, match="chmod 600"):
        KafkaSparkBroker(kafka.address("scram"), security=wrong).stored_ranges(spark, [stream])
