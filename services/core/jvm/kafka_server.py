"""A real Apache Kafka (KRaft) on loopback, from its jars: one node for the demo, three for tests and benches."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from services.core.jvm.kafka_broker import KafkaBroker
from services.core.jvm.kafka_config import Node, choose_nodes, server_properties

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
    created by accident. `settings` are server properties that win over ours (see `kafka_config`).

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
