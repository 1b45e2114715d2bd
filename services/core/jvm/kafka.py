"""A real Apache Kafka (KRaft) on loopback, from its jars: one node for the demo, three for tests and benches.

A cluster consists of nodes; each node is broker and controller in one, with settings of its own.
"""

from __future__ import annotations

import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.core.jvm.child import start_child, stop_child
from services.core.jvm.jars import KAFKA_SERVER, jar_set
from services.core.jvm.java import NO_PERF_FILE, archive_name, archive_options, find_java

READY_TIMEOUT_S = 300.0
STOP_GRACE_S = 15.0
# A measurement of minutes passes ("-XX:+UseG1GC",) instead.
FAST_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


def class_archive(jars: Sequence[Path]) -> Path:
    """Where an archive of the classes of this Kafka is looked for: beside the folder of its jars. `make classes` writes it."""
    folder = jars[0].parent
    return folder.with_name(archive_name(folder.name))


def new_cluster_id() -> str:
    """16 random bytes in Kafka's encoding. It begins with a letter: for Kafka's tools a leading dash begins an option."""
    return "P" + secrets.token_urlsafe(16)[1:]


class KafkaCluster:
    """`brokers` nodes on free loopback ports. `folder` has their data and logs; it is created, or used again.

    With three brokers topics have three replicas, of which two must have a record (RF 3, min ISR 2). Topics are never
    created by accident. `settings` are server properties; they override those of `server_properties`. `format_options`: of the
    tool that formats a new node, e.g. for its first users. `more_jars`: with classes that the settings name.

    Every method blocks (use asyncio.to_thread); one thread at a time may call one. The processes die with this one, even
    if it is killed. A context manager.
    """

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int = 3,
        heap_mb: int = 256,
        settings: Mapping[str, str] | None = None,
        java_options: Sequence[str] = FAST_START,
        format_options: Sequence[str] = (),
        more_jars: Sequence[Path] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.settings = dict(settings or {})
        nodes = choose_nodes(brokers)
        options = [f"-Xmx{heap_mb}m", *java_options]
        self.brokers = {
            node.node_id: KafkaProcess(node, self.folder, options, format_options, more_jars) for node in nodes
        }

    @property
    def bootstrap(self) -> str:
        """host:port of every broker, comma-separated; the same over restarts."""
        return ",".join(broker.address for broker in self.brokers.values())

    def start(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Format new nodes, start those that do not run, wait until all are ready. Raises KafkaNotReady, after stopping all."""
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
        """Send SIGKILL to one broker. Blocks until its end."""
        self.brokers[node_id].stop(grace_s=0)

    def restart(self, *node_ids: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start these brokers (all, if none is named) on their old ports and data, and wait until they are ready.

        After `kill` that takes up to broker.session.timeout.ms (6 s): the controller must first notice the end of the old one.
        """
        self._launch(node_ids or self.brokers, timeout_s)

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all at once: SIGTERM, then SIGKILL after `grace_s` seconds. Idempotent; data and logs stay."""
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


FORMAT_TIMEOUT_S = 300.0
_STARTED = b"Kafka Server started"  # logged after the controller has admitted the broker


class KafkaNotReady(RuntimeError):
    """A Kafka process ended, or was not ready in time. The message names its log and quotes its last lines."""


class KafkaProcess:
    """One node: its files, and its process while it runs. Methods as in KafkaCluster.

    `data` survives any stop. `log` has the output of all runs of the process. `scratch` is emptied before each run.
    """

    def __init__(
        self,
        node: Node,
        folder: Path,
        java_options: Sequence[str],
        format_options: Sequence[str] = (),
        more_jars: Sequence[Path] = (),
    ) -> None:
        self._format_options = format_options
        self.node = node
        self.data = folder / f"broker-{node.node_id}"
        self.config = folder / f"broker-{node.node_id}.properties"
        self.log = folder / f"broker-{node.node_id}.log"
        self.scratch = folder / f"broker-{node.node_id}.scratch"
        jars = jar_set(KAFKA_SERVER)
        own_files = (NO_PERF_FILE, f"-Djava.io.tmpdir={self.scratch}")  # leaves nothing in /tmp
        archive = archive_options(class_archive(jars)) if jars else []
        java = [str(find_java().executable), *java_options, *archive, *own_files]
        self._java = [*java, "-cp", ":".join(map(str, [*jars, *more_jars]))]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.node.port}"

    @property
    def is_running(self) -> bool:
        """Whether its process exists, also a frozen one."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""
        return self._process.pid if self._process is not None and self.is_running else None

    def format(self, cluster_id: str) -> None:
        """Prepare a new data folder. Blocks for a second. Raises KafkaNotReady."""
        if (self.data / "meta.properties").exists():
            return
        command = [
            *self._java,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster_id,
            "-c",
            str(self.config),
            *self._format_options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)  # noqa: S603
        if done.returncode != 0:
            raise KafkaNotReady(f"Kafka could not format {self.data}: {(done.stdout + done.stderr).strip()}")

    def launch(self) -> None:
        """Start the process, unless it runs, without waiting until it is ready."""
        if self.is_running:
            return
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        command = [*self._java, "-Dlog4j2.level=INFO", "kafka.Kafka", str(self.config)]
        self._process = start_child(command, log=self.log)

    def wait_ready(self, deadline: float) -> None:
        """Block until it is part of the cluster. deadline: of time.monotonic(). Raises KafkaNotReady."""
        while _STARTED not in self._output():
            if not self.is_running:
                raise KafkaNotReady(f"Kafka broker {self.node.node_id} ended. {self._log_end()}")
            if time.monotonic() > deadline:
                raise KafkaNotReady(f"Kafka broker {self.node.node_id} was not ready in time. {self._log_end()}")
            time.sleep(0.05)

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Send SIGTERM, so that it first gives its partitions away, then SIGKILL after `grace_s` seconds (0: at once).

        Blocks until its end.
        """
        if self._process is not None:
            stop_child(self._process, grace_s=grace_s)
            self._process = None

    def terminate(self) -> None:
        """Send SIGTERM without waiting, so that several stop at once."""
        if self._process is not None:
            self._process.terminate()

    def _output(self) -> bytes:
        """Of this run."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read()

    def _log_end(self) -> str:
        lines = self._output().decode(errors="replace").splitlines()
        return f"Its log is {self.log}; the end:\n" + "\n".join(lines[-15:])


# Below Linux's range for outgoing connections, so that the port of a killed broker stays free.
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
    """The text of server.properties for `node` of the cluster `nodes`. `settings` override ours."""
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
        # With acks=all a record is then on two of three disks.
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
        # A group forms at once. Dead members and dead brokers are noticed in seconds.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "broker.session.timeout.ms": "6000",
        "broker.heartbeat.interval.ms": "1000",
        # Kafka recognises a repeated batch whose answer was lost. By default it forgets batches whose newest record is older
        # than a day, by the record's timestamp, which is the client's time here. This is the largest value: 24.8 days.
        "producer.id.expiration.ms": "2147483647",
        # A destination may be away for as long as its events are kept. By default Kafka forgets its offsets after a week.
        "offsets.retention.minutes": "2147483647",
        # Retention is applied every second.
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
        raise OSError(
            f"No {count} free ports between {PORTS.start} and {PORTS.stop}. Try: stop the program that listens there."
        )
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
