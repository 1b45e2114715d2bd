"""Transforms on a Kafka that wants TLS and a login."""

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from pyspark.sql import SparkSession

from services.core.broker.errors import Unavailable
from services.core.event import read_id
from services.core.yaml_source import BadConfiguration
from spark.brokers.kafka import KafkaSparkBroker
from spark.brokers.kafka_login import ClientLogin
from spark.records import OffsetRange
from spark.service import check_place
from spark.settings import TransformSettings
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.test_kafka import COLUMNS, flight
from tests.support.authority import Authority
from tests.support.secured_kafka import OPERATOR, SecuredKafka

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
    """Its URL, and who asked it for tokens. It knows the client `us` by this secret."""
    asked: list[str] = []
    expected = "Basic " + base64.b64encode(f"us:{quote_plus(secret)}".encode()).decode()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers["Authorization"] == expected
            asked.append(self.headers["User-Agent"])
            said = {"access_token": kafka.sign_token(), "expires_in": 600} if known else {"error": "invalid_client"}
            body = json.dumps(said | {"token_type": "Bearer"}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/token", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_transform_by_tokens(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, no transform runs on a Kafka that wants OAuth's tokens; or Spark's pages show the client's secret."""
    secret = 'cli"ent=hunter2'
    with token_server(kafka, secret) as (url, asked):
        oauth = {"token_url": url, "client_id": "us", "client_secret": {"file": "password"}}
        path = kafka.write(tmp_path / "own", sasl={"mechanism": "OAUTHBEARER", "oauth": oauth})
        (path.parent / "password").write_text(secret)
        with BrokerPipeline(spark, kafka.url("signed", path), tmp_path, partitions=1) as pipeline:
            pipeline.send([flight(n) for n in range(1, 6)])
            pipeline.start(pipeline.chosen(columns=COLUMNS, sql="SELECT event, 100 / delay AS share FROM {s}"))
            assert {read_id(record) for record in pipeline.records("out", 5)} == {f"id-{n}" for n in range(1, 6)}
            pipeline.stop()
        assert pipeline.problem is None
        assert any("Java" in agent for agent in asked), "Java's own client asks for its tokens"
        shown = plans_of(spark)
        assert secret not in shown
        assert json.dumps(secret)[1:-1] not in shown


def test_what_java_gets(spark: Any, tmp_path: Path) -> None:
    """If this fails, a password with a quote is cut off or says something else, or Java gets a key that it cannot read."""
    (tmp_path / "password").write_text('a"b\\c; x="y')
    (tmp_path / "password").chmod(0o600)
    path = tmp_path / "kafka.yaml"
    path.write_text("sasl: {mechanism: SCRAM-SHA-256, user: ann, password: {file: password}}")
    login = ClientLogin(path)
    found = login.properties()
    assert found["security.protocol"] == "SASL_PLAINTEXT"
    _, file, name = found["sasl.jaas.config"].strip("${}").split(":")
    assert (name, Path(file).stat().st_mode & 0o777) == ("sasl.jaas.config", 0o600)
    jaas = spark._jvm.java.util.Properties()
    jaas.load(spark._jvm.java.io.FileReader(file))
    assert jaas.getProperty(name).endswith('required username="ann" password="a\\"b\\\\c; x=\\"y";')
    (tmp_path / "password").chmod(0o644)
    assert login.properties() == found, "a rotation takes a moment"
    login.close()
    assert not Path(file).parent.exists()
    own = Authority(tmp_path / "own").sign("client")
    old = subprocess.run(["openssl", "ec", "-in", own], check=True, capture_output=True).stdout
    own.write_bytes(own.read_bytes()[own.read_bytes().index(b"-----BEGIN CERT") :] + old)
    path.write_text(f"tls: {{certificate: {own}}}")
    with pytest.raises(Unavailable, match="openssl pkcs8") as caught:
        ClientLogin(path).properties()
    assert "BEGIN EC" not in str(caught.value)


def test_tasks_elsewhere_are_refused(tmp_path: Path) -> None:
    """If this fails, executors on other machines get no login, and each batch fails with a file that is not there."""
    broker = KafkaSparkBroker("h:1", security=tmp_path / "kafka.yaml")
    check_place(broker, TransformSettings())
    with pytest.raises(BadConfiguration, match="local master"):
        check_place(broker, TransformSettings(master="spark://h:7077"))
    check_place(KafkaSparkBroker("h:1"), TransformSettings(master="spark://h:7077"))


def test_by_certificate_and_not_without(spark: SparkSession, kafka: SecuredKafka, tmp_path: Path) -> None:
    """If this fails, client certificates do not reach Java; or a wrong one is a time-out, or a secret in an error."""
    tls = {"ca": str(kafka.ours.ca), "certificate": str(kafka.client)}
    trusted = f"openssl x509 -in {kafka.ours.ca} -trustout -addtrust serverAuth -out {tmp_path / 'ca'}"
    subprocess.run(trusted.split(), check=True)
    assert "BEGIN TRUSTED" in (tmp_path / "ca").read_text()
    path = kafka.write(tmp_path / "own", tls=tls | {"ca": str(tmp_path / "ca")}, sasl=None)
    with BrokerPipeline(spark, kafka.url("tls", path), tmp_path, partitions=2) as pipeline:
        assert [part.end for part in pipeline.broker.stored_ranges(spark, [pipeline.stream])] == [0, 0]
        stream = pipeline.stream
    wrong = kafka.write(tmp_path / "wrong")
    (wrong.parent / "password").write_text("wrong-hunter2")
    with pytest.raises(Unavailable, match="Authentication failed") as caught:
        KafkaSparkBroker(kafka.address("scram"), security=wrong).stored_ranges(spark, [stream])
    assert "wrong-hunter2" not in f"{caught.value!r}{caught.value.__cause__!r}{caught.value.__cause__}"
    (wrong.parent / "password").chmod(0o644)
    with pytest.raises(Unavailable, match="chmod 600"):
        KafkaSparkBroker(kafka.address("scram"), security=wrong).stored_ranges(spark, [stream])
