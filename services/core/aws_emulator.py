"""Emulators of Kinesis (kinesis-mock on Node) and DynamoDB (moto's server) on this machine, for tests and the demo.

They store nothing durably, never throttle, and accept any credentials. `make setup` installs both.
"""

import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlsplit

from services.core.jvm.child import start_child, stop_child
from services.core.jvm.kafka import free_ports

REGION = "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "emulator",
    "AWS_SECRET_ACCESS_KEY": "emulator",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Variables that a process needs to use the emulator: the AWS SDK requires some credentials."""

_READY_SECONDS = 300.0
_ANSWER_SECONDS = 10.0
_SETTLING = "20ms"
_SHARDS = 10_000


class EmulatorNotReady(RuntimeError):
    """An emulator is not installed, ended, or was not ready in time. The message has a remedy, or quotes its log."""


class AwsEmulator:
    """Both servers on free loopback ports, their logs in `folder`. Blocks; use asyncio.to_thread. A context manager.

    The processes die with this one. Their data is lost when they stop.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        plain, tls, dynamodb = free_ports(3)
        self.endpoint, self.dynamodb = f"http://127.0.0.1:{plain}", f"http://127.0.0.1:{dynamodb}"
        self._commands = {"kinesis": _kinesis(plain, tls), "dynamodb": _dynamodb(dynamodb)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The broker's URL for `connect.open_broker`."""
        return kinesis_url(self.endpoint, self.dynamodb)

    @property
    def is_running(self) -> bool:
        """Whether both processes run."""
        return len(self._running) == 2 and all(child.poll() is None for child in self._running.values())

    def start(self) -> None:
        """Start both and wait until they answer. Raises EmulatorNotReady, after stopping both."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, command in self._commands.items():
                self._running[name] = start_child(command, log=self._log(name))
            for name, url in (("kinesis", self.endpoint), ("dynamodb", self.dynamodb)):
                self._wait(name, url, time.monotonic() + _READY_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill both. Idempotent."""
        for child in self._running.values():
            stop_child(child, grace_s=0)
        self._running.clear()

    def _wait(self, name: str, url: str, deadline: float) -> None:
        while not _answers(url):
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                end = self._log(name).read_text(errors="replace").splitlines()[-15:]
                raise EmulatorNotReady(f"the {name} emulator does not answer. Its log:\n" + "\n".join(end))
            time.sleep(0.05)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def kinesis_url(endpoint: str, dynamodb: str) -> str:
    """A broker URL for these endpoints."""
    return f"kinesis://{REGION}?endpoint={quote(endpoint)}&dynamodb={quote(dynamodb)}"


def _kinesis(plain: int, tls: int) -> Sequence[str]:
    node, env = shutil.which("node"), shutil.which("env")
    package = Path(sys.prefix) / "emulator" / "node_modules" / "kinesis-local"
    if node is None or env is None or not package.exists():
        raise EmulatorNotReady("the Kinesis emulator is not installed. Try: make setup")
    changes = ("CREATE_STREAM", "DELETE_STREAM", "SPLIT_SHARD", "MERGE_SHARDS", "UPDATE_SHARD_COUNT")
    settings = {
        "KINESIS_MOCK_CERT_PATH": package / "server.json",
        "KINESIS_MOCK_PLAIN_PORT": plain,
        "KINESIS_MOCK_TLS_PORT": tls,
        "SHARD_LIMIT": _SHARDS,
        "LOG_LEVEL": "WARN",
        "CATS_EFFECT_CPU_STARVATION_CHECK_INTERVAL": "1h",  # fewer warnings on a busy machine
        **{f"{change}_DURATION": _SETTLING for change in changes},
    }
    return [env, *(f"{name}={value}" for name, value in settings.items()), node, str(package / "main.js")]


def _dynamodb(port: int) -> Sequence[str]:
    if find_spec("moto") is None:
        raise EmulatorNotReady("the DynamoDB emulator is not installed. Try: make setup")
    return [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]


def _answers(url: str) -> bool:
    """Whether an HTTP server answers there, with any status: moto has no health check."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/healthcheck")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def use_credentials() -> None:
    """Set CREDENTIALS for this process and those that it starts."""
    os.environ.update(CREDENTIALS)
