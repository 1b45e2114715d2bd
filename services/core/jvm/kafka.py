"""A real Apache Kafka (KRaft) on loopback, from its jars: one node for the demo, three for tests and benches.

A cluster consists of nodes; each node is broker and controller in one, with settings of its own.
"""

from __future__ import annotations

import random
import secrets
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.core.jvm.child import start_child, stop_child
from services.core.jvm.jars import kafka_server_jars
from services.core.jvm.java import find_java

READY_TIMEOUT_S = 120.0
STOP_GRACE_S = 15.0
# A bench that runs for minutes passes ("-XX:+UseG1GC",) instead.
FAST_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


def new_cluster_id() -> str:
    """16 random bytes in Kafka's spelling. It begins with a letter: Kafka's tools take a leading dash for an option."""
    return "P" + secrets.token_urlsafe(16)[1:]


class KafkaCluster:
    """`brokers` nodes on free loopback ports, their data and logs in `folder` (made if missing; used again if not).

    With three brokers topics have three replicas of which two must have a record (RF 3, min ISR 2). Topics are never
    created by accident. `settings` are server properties that win over ours (see `server_properties`).

    Every method blocks (use asyncio.to_thread) and is for one thread at a time. The processes die with this one, even
    if it is killed. A context manager: entering starts, leaving stops.
    """

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int = 3,
        heap_mb: int = 256,
        settings: Mapping[str, str] | None = None,
        java_options: Sequence[str] = FAST_START,
    ) -> None:
        self.folder = folder.absolute()
        self.settings = dict(settings or {})
        nodes = choose_nodes(brokers)
        options = [f"-Xmx{heap_mb}m", *java_options]
        self.brokers = {node.node_id: KafkaBroker(node, self.folder, options) for node in nodes}

    @property
    def bootstrap(self) -> str:
        """host:port of every broker, comma-separated; the same over restarts."""
        return ",".join(broker.address for broker in self.brokers.values())

    def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Format what is new, start what does not run, wait until all take part. Raises KafkaNotReady.

        When it raises, what had started is stopped.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        nodes = [broker.node for broker in self.brokers.values()]
        cluster_id = self._cluster_id()
        try:
            for broker in self.brokers.values():
                broker.config.write_text(self.properties(broker.node, nodes), encoding="utf-8")
                broker.format(cluster_id)
            self._launch(self.brokers, timeout_s)
        except BaseException:
            self.stop(grace_s=0)
            raise

    def properties(self, node: Node, nodes: Sequence[Node]) -> str:
        """The text of this node's server.properties."""
        return server_properties(node, nodes, str(self.brokers[node.node_id].data), self.settings)

    def kill(self, node_id: int) -> None:
        """SIGKILL one broker, as a crash would. Blocks until it is gone."""
        self.brokers[node_id].stop(grace_s=0)

    def stop_broker(self, node_id: int, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop one broker in good order: it hands its partitions over first. SIGKILL after `grace_s` seconds."""
        self.brokers[node_id].stop(grace_s=grace_s)

    def restart(self, *node_ids: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start these brokers (all, if none is named) on their old ports and data, and wait until they take part.

        After `kill` that takes up to broker.session.timeout.ms (6 s): the controller first has to miss the old one.
        """
        self._launch(node_ids or self.brokers, timeout_s)

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all, together: SIGTERM, then SIGKILL after `grace_s` seconds. Idempotent; data and logs stay."""
        deadline = time.monotonic() + grace_s
        if grace_s > 0:
            for broker in self.brokers.values():
                broker.terminate()
        for broker in self.brokers.values():
            broker.stop(grace_s=max(0.0, deadline - time.monotonic()))

    def _launch(self, node_ids: Iterable[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        chosen = [self.brokers[node_id] for node_id in node_ids]
        for broker in chosen:
            broker.launch()
        for broker in chosen:
            broker.wait_ready(deadline)

    def _cluster_id(self) -> str:
        path = self.folder / "cluster-id"
        if not path.exists():
            path.write_text(new_cluster_id(), encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


FORMAT_TIMEOUT_S = 60.0
_STARTED = b"Kafka Server started"  # logged once the controller has let the broker in


class KafkaNotReady(RuntimeError):
    """A Kafka process ended, or was not ready in time. The message names its log and quotes the end of it."""


class KafkaBroker:
    """One node: its files, and its process while it runs. Every method blocks; none may run at the same time as another.

    `data` survives any stop. `log` collects the output of the process over all its runs.
    """

    def __init__(self, node: Node, folder: Path, java_options: Sequence[str]) -> None:
        self.node = node
        self.data = folder / f"broker-{node.node_id}"
        self.config = folder / f"broker-{node.node_id}.properties"
        self.log = folder / f"broker-{node.node_id}.log"
        self._java = [str(find_java()), *java_options, "-cp", ":".join(str(jar) for jar in kafka_server_jars())]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.node.port}"

    @property
    def is_running(self) -> bool:
        """Whether its process exists. A frozen one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id, for signals such as SIGSTOP. None when it does not run."""
        return self._process.pid if self._process is not None and self.is_running else None

    def format(self, cluster_id: str) -> None:
        """Prepare the data folder, unless it is. Blocks for a second. Raises KafkaNotReady."""
        if (self.data / "meta.properties").exists():
            return
        command = [*self._java, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)  # noqa: S603
        if done.returncode != 0:
            raise KafkaNotReady(f"Kafka could not format {self.data}: {(done.stdout + done.stderr).strip()}")

    def launch(self) -> None:
        """Start the process, unless it runs, without waiting until it is ready."""
        if self.is_running:
            return
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        command = [*self._java, "-Dlog4j2.level=INFO", "kafka.Kafka", str(self.config)]
        self._process = start_child(command, log=self.log)

    def wait_ready(self, deadline: float) -> None:
        """Block until it takes part in the cluster. `deadline` is on time.monotonic(). Raises KafkaNotReady."""
        while _STARTED not in self._said():
            if not self.is_running:
                raise KafkaNotReady(f"Kafka broker {self.node.node_id} ended. {self._log_end()}")
            if time.monotonic() > deadline:
                raise KafkaNotReady(f"Kafka broker {self.node.node_id} was not ready in time. {self._log_end()}")
            time.sleep(0.05)

    def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds; with 0 SIGKILL at once. Blocks until it is gone."""
        if self._process is not None:
            stop_child(self._process, grace_s=grace_s)
            self._process = None

    def terminate(self) -> None:
        """SIGTERM without waiting, so that several stop together."""
        if self._process is not None:
            self._process.terminate()

    def _said(self) -> bytes:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read()

    def _log_end(self) -> str:
        lines = self._said().decode(errors="replace").splitlines()
        return f"Its log is {self.log}; the end:\n" + "\n".join(lines[-15:])


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
        # So acks=all means: on two of three disks.
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
        # Kafka knows a batch again whose answer was lost. It counts from the time of the batch's newest record, which is the
        # client's time here, and forgets after a day by default. This is the largest value: 24.8 days.
        "producer.id.expiration.ms": "2147483647",
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
