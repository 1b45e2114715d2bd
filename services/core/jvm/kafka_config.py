"""The settings of one KRaft node, broker and controller in one, on loopback."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Below the range that Linux gives to outgoing connections, so that a killed broker finds its port free again.
PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class Node:
    """Identity and ports of one node."""

    node_id: int
    port: int
    controller_port: int


def choose_nodes(count: int) -> list[Node]:
    """`count` nodes, ids from 1, each with two ports that were free a moment ago."""
    ports = free_ports(2 * count)
    return [Node(index + 1, ports[2 * index], ports[2 * index + 1]) for index in range(count)]


def server_properties(node: Node, nodes: Sequence[Node], data: str, settings: Mapping[str, str]) -> str:
    """The text of server.properties for `node` of the cluster `nodes`. `settings` win over ours."""
    replicas = str(min(3, len(nodes)))
    min_isr = str(min(2, len(nodes)))
    voters = ",".join(f"{other.node_id}@127.0.0.1:{other.controller_port}" for other in nodes)
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": voters,
        "listeners": f"BROKER://127.0.0.1:{node.port},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": f"BROKER://127.0.0.1:{node.port}",
        "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": data,
        # What acks=all must mean here: on two of three disks.
        "default.replication.factor": replicas,
        "min.insync.replicas": min_isr,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": min_isr,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": min_isr,
        # A mistyped topic is an error, not a new topic.
        "auto.create.topics.enable": "false",
        # Small and quick to start, on one machine.
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "4",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        "log.cleaner.dedupe.buffer.size": "4194304",
        # A group forms at once, a dead member and a dead broker are noticed in seconds.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "broker.session.timeout.ms": "6000",
        "broker.heartbeat.interval.ms": "1000",
        # Retention acts within seconds of being due.
        "log.initial.task.delay.ms": "1000",
        "log.retention.check.interval.ms": "1000",
        **settings,
    }
    return "".join(f"{name}={value}\n" for name, value in properties.items())


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"No {count} free ports between {PORTS.start} and {PORTS.stop}. Try: end what listens there.")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
