"""The kinds of Spark masters, and the settings of Spark that follow from each: where the driver listens, what the executors are.

On a cluster this process is the driver (Spark's client mode): it plans, and supervises itself as ever. Executors on other hosts
read and write the broker. They get our jars and our Python packages from the driver when they start.
"""

import base64
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.core.jvm.java import NO_PERF_FILE

PACKAGES = Path(__file__).parents[2]
"""The folder of our packages."""
_SHIPPED = ("services", "spark")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the namespace and the token of its ServiceAccount."""
_EXECUTOR_JAVA_OPTIONS = (
    "-Xss16m",  # as in the driver
    "-XX:+ExitOnOutOfMemoryError",  # Spark replaces it
    "-Duser.timezone=UTC",
    NO_PERF_FILE,
)
SILENT_S = 60
"""Seconds without a heartbeat after which an executor is replaced, and its tasks run again."""


_FOR_EVER = "1000d"


class MasterKind(Enum):
    """Who gives Spark its executors."""

    LOCAL = "local"
    STANDALONE = "standalone"
    KUBERNETES = "kubernetes"
    YARN = "yarn"


AUTO = "auto"
"""A local master, sized by the pipes before Spark starts."""
AUTO_SLOTS = 2
"""Its task slots for micro-batches."""
_LOCAL = re.compile(r"local(\[(\d+|\*)(,\d+)?\])?")


def kind_of(master: str) -> MasterKind:
    """Raises ValueError when it is none that the transform service can use."""
    if master == AUTO or _LOCAL.fullmatch(master):
        return MasterKind.LOCAL
    if re.fullmatch(r"spark://[^/\s]+:\d+", master):
        return MasterKind.STANDALONE
    if master.startswith("k8s://"):
        return MasterKind.KUBERNETES
    if master == "yarn":
        return MasterKind.YARN
    raise ValueError(f"{master!r} is no Spark master. Try: local[4], spark://host:7077, k8s://https://host:443 or yarn")


@dataclass(frozen=True, slots=True)
class Executors:
    """least, most: their number; where these differ, idle ones are given back. memory: bytes of heap of each one.

    python: the path of Python on their hosts. image: their container image; only on Kubernetes. resized: the autoscaler orders
    their number (`spark.cluster.executors`), and not Spark.
    """

    least: int
    most: int
    cores: int
    memory: int
    python: str
    image: str = ""
    resized: bool = False

    @property
    def slots(self) -> int:
        """The tasks that surely run at once, when they wait."""
        return self.least * self.cores

    @property
    def most_slots(self) -> int:
        return self.most * self.cores


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """Where executors reach the driver. host, bind: empty: as Spark finds it. port: the next one is for blocks; 0: any two."""

    host: str
    bind: str
    port: int


def parse_executors(text: str) -> tuple[int, int]:
    """The least and the most of `4` or `2-10`. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    least, most = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= least <= most:
        raise ValueError(f"{text!r} is no number of executors. Try: 4, or 2-10 for as many as are needed")
    return least, most


def cluster_settings(kind: MasterKind, driver: DriverAddress, executors: Executors) -> dict[str, str]:
    """Spark's settings on a cluster, beside those of every session."""
    settings = {
        "spark.executor.cores": str(executors.cores),
        "spark.executor.memory": f"{executors.memory >> 20}m",
        "spark.executor.extraJavaOptions": " ".join(_EXECUTOR_JAVA_OPTIONS),
        "spark.executor.heartbeatInterval": "5s",
        "spark.storage.blockManagerHeartbeatTimeoutMs": str(SILENT_S * 1000),
        "spark.network.timeoutInterval": "5s",
        # The disk of a worker is not ours: two files of each executor's output, however long it lives.
        "spark.executor.logs.rolling.strategy": "size",
        "spark.executor.logs.rolling.maxSize": str(16 << 20),
        "spark.executor.logs.rolling.maxRetainedFiles": "2",
        **_address_settings(driver),
        **_number_settings(kind, executors),
    }
    if kind in (MasterKind.KUBERNETES, MasterKind.YARN):
        settings["spark.authenticate"] = "true"  # there Spark makes a secret for each application
    if kind is MasterKind.KUBERNETES:
        settings["spark.kubernetes.container.image"] = executors.image
        settings["spark.kubernetes.decommission.script"] = "/bin/true"  # Spark's own is not in our image
        settings |= _pod_settings(os.environ)
    return settings


def _address_settings(driver: DriverAddress) -> dict[str, str]:
    found = {"spark.driver.host": driver.host, "spark.driver.bindAddress": driver.bind or driver.host}
    if driver.port:
        found |= {"spark.driver.port": str(driver.port), "spark.driver.blockManager.port": str(driver.port + 1)}
        found["spark.port.maxRetries"] = "0"  # another port than the one that is open is no help
    return {name: value for name, value in found.items() if value}


def _number_settings(kind: MasterKind, executors: Executors) -> dict[str, str]:
    """A driver that stands by must not hold what the other one needs. So a fixed number begins at 0 and is kept. Of a range it
    holds the least. Where the autoscaler orders, `ExecutorGroup.set_standby` gives all back."""
    # A standalone master has a limit of its own, in cores.
    settings = {"spark.cores.max": str(executors.most_slots)} if kind is MasterKind.STANDALONE else {}
    if executors.resized:
        return settings | {
            "spark.executor.instances": str(executors.least),
            "spark.decommission.enabled": "true",  # an executor that leaves ends its tasks first
            "spark.executor.decommission.forceKillTimeout": "60s",
        }
    fixed = executors.least == executors.most
    least = "0" if fixed else str(executors.least)
    return settings | {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",  # needs no shuffle service on the hosts
        "spark.dynamicAllocation.minExecutors": least,
        "spark.dynamicAllocation.initialExecutors": least,
        "spark.dynamicAllocation.maxExecutors": str(executors.most),
        "spark.dynamicAllocation.executorIdleTimeout": _FOR_EVER if fixed else "120s",
    }


def _pod_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Inside a pod: executors in the same namespace, that end with this pod. They run under its ServiceAccount, to which a cloud
    gives rights on buckets and streams, but without its token (`spark.cluster.executor_pod`)."""
    if not (_ACCOUNT / "namespace").exists():
        return {}
    account = _account_of((_ACCOUNT / "token").read_text(encoding="utf-8"))
    settings = {
        "spark.kubernetes.namespace": (_ACCOUNT / "namespace").read_text(encoding="utf-8").strip(),
        "spark.kubernetes.authenticate.executor.serviceAccountName": account,
    }
    if name := environ.get("HOSTNAME"):
        settings["spark.kubernetes.driver.pod.name"] = name
    return settings


def _account_of(token: str) -> str:
    """The name of the ServiceAccount whose token this is. Its subject is system:serviceaccount:NAMESPACE:NAME."""
    claims = token.split(".")[1]
    subject: str = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sub"]
    return subject.rpartition(":")[2]


def write_code(path: Path) -> None:
    """Write our packages as they are installed here to a zip that Python can import: those of the wheel. Blocking."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in _SHIPPED:
            for file in sorted((PACKAGES / package).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, str(file.relative_to(PACKAGES)))
