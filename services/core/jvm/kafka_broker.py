"""One process of a Kafka cluster: a KRaft node that is broker and controller."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from services.core.jvm.child import start_child, stop_child
from services.core.jvm.jars import kafka_server_jars
from services.core.jvm.java import find_java
from services.core.jvm.kafka_config import Node

FORMAT_TIMEOUT_S = 60.0
_STARTED = b"Kafka Server started"  # said once the controller has let the broker in


class KafkaNotReady(RuntimeError):
    """A Kafka process ended, or was not ready in time. The message names its log and quotes the end of it."""


class KafkaBroker:
    """One node: its files, and its process while it runs. Every method blocks; none may run at the same time as another.

    `data` survives any stop. `log` collects what the process says, over all its runs.
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
