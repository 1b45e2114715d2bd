"""What a Kafka node is told."""

import base64
import socket
import time
from pathlib import Path

import pytest

from services.core.jvm import kafka
from services.core.jvm.java import NO_PERF_FILE, JavaRuntime
from services.core.jvm.kafka import (
    PORTS,
    KafkaNotReady,
    KafkaProcess,
    Node,
    choose_nodes,
    new_cluster_id,
    server_properties,
)

THREE = [Node(1, 20_001, 20_002), Node(2, 20_003, 20_004), Node(3, 20_005, 20_006)]


def properties(nodes: list[Node], settings: dict[str, str] | None = None) -> dict[str, str]:
    text = server_properties(nodes[0], nodes, "/data", settings or {})
    return dict(line.split("=", 1) for line in text.splitlines())


def test_three_brokers_are_durable_by_default() -> None:
    """If this fails, a topic of three brokers lives on fewer disks than acks=all promises."""
    told = properties(THREE)
    assert told["default.replication.factor"] == told["offsets.topic.replication.factor"] == "3"
    assert told["min.insync.replicas"] == told["transaction.state.log.min.isr"] == "2"
    assert told["controller.quorum.voters"] == "1@127.0.0.1:20002,2@127.0.0.1:20004,3@127.0.0.1:20006"
    assert told["auto.create.topics.enable"] == "false"


def test_one_broker_asks_for_no_second() -> None:
    """If this fails, the demo's only broker waits for replicas that never come."""
    told = properties(THREE[:1])
    assert {value for name, value in told.items() if name.endswith(("replication.factor", "min.isr"))} == {"1"}
    assert told["min.insync.replicas"] == "1"


def test_settings_win() -> None:
    """If this fails, a fault test cannot set the time-out that it is about."""
    assert properties(THREE, {"broker.session.timeout.ms": "9000"})["broker.session.timeout.ms"] == "9000"


def test_cluster_ids_are_uuids_that_no_tool_takes_for_an_option() -> None:
    """If this fails, one cluster in 64 does not start, for an id like -1a."""
    for _ in range(500):
        cluster_id = new_cluster_id()
        assert cluster_id[0] != "-"
        assert len(base64.urlsafe_b64decode(cluster_id + "==")) == 16


def test_listens_on_loopback_only() -> None:
    """If this fails, a test broker without any authentication is open to the network."""
    assert properties(THREE)["listeners"] == "BROKER://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"


def test_ports_are_free_and_distinct() -> None:
    """If this fails, two nodes, or a node and something else, fight for a port."""
    nodes = choose_nodes(3)
    ports = [port for node in nodes for port in (node.port, node.controller_port)]
    assert len(set(ports)) == 6
    assert set(ports) <= set(PORTS)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_temporary_files_are_beside_the_data_and_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, each run leaves libraries and counters in /tmp, or those of killed runs fill the data folder."""
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\necho "$@"\n')
    java.chmod(0o755)
    monkeypatch.setattr(kafka, "find_java", lambda: JavaRuntime(java, tmp_path, 21, has_vector_module=False))
    monkeypatch.setattr(kafka, "jar_set", lambda _name: [])
    process = KafkaProcess(THREE[0], tmp_path, [])
    process.scratch.mkdir()
    (process.scratch / "libzstd.so").touch()
    process.launch()
    with pytest.raises(KafkaNotReady, match="ended"):
        process.wait_ready(time.monotonic() + 60)
    assert process.scratch.parent == tmp_path
    assert not list(process.scratch.iterdir())
    assert {NO_PERF_FILE, f"-Djava.io.tmpdir={process.scratch}"} <= set(process.log.read_text().split())
