"""Emulators of Kinesis (kinesis-mock on Node) and DynamoDB (moto's server) on this machine, for tests and the demo.

They store nothing durably, never throttle, and accept any credentials. moto is a package of the extra `emulator`. npm installs
kinesis-mock when it is first needed, into ~/.cache/penstock, from the lock in `emulator/`.
"""

import hashlib
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
from services.core.temporary import temporary_folder

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
_NPM_FOLDER = Path(__file__).with_name("emulator")
_INSTALL_SECONDS = 300.0
_NPM_REMEDY = "Try: again with access to the npm registry, or to your mirror of it (npm config set registry URL)."


class EmulatorNotReady(RuntimeError):
    """An emulator is not installed, ended, or was not ready in time. The message has a remedy, or quotes its log."""


class AwsEmulator:
    """Both servers on free loopback ports, their logs in `folder`. Blocks; use asyncio.to_thread. A context manager.

    The processes die with this one. Their data is lost when they stop. Raises EmulatorNotReady, and may install kinesis-mock,
    which takes seconds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        plain, tls, dynamodb = free_ports(3)
        self.endpoint, self.dynamodb = f"http://127.0.0.1:{plain}", f"http://127.0.0.1:{dynamodb}"
        self._commands = {"dynamodb": _dynamodb(dynamodb), "kinesis": _kinesis(plain, tls)}
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
    package, node, env = install_kinesis(), _find_program("node"), _find_program("env")
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


def install_kinesis() -> Path:
    """The folder of kinesis-mock. Installs it if it is missing. As `install_npm`."""
    return install_npm(_NPM_FOLDER, "emulator", "the Kinesis emulator") / "node_modules" / "kinesis-local"


def install_npm(source: Path, name: str, what: str) -> Path:
    """A folder with the npm packages of the lock in `source`, in ~/.cache/penstock. Blocks up to 300 s; safe in several
    processes.

    npm compares each package with the hash in the lock. Raises EmulatorNotReady.
    """
    digest = hashlib.sha256((source / "package-lock.json").read_bytes()).hexdigest()
    folder = Path.home() / ".cache" / "penstock" / f"{name}-{digest[:12]}"
    if (folder / "node_modules").is_dir():
        return folder
    npm = _find_program("npm")
    print(f"Installing {what}, once, into {folder} ...", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("install", folder.parent) as scratch:
        installed = scratch / name
        shutil.copytree(source, installed)
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
        _run_npm([npm, "ci", "--prefix", str(installed), *options], what)
        try:
            installed.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def _run_npm(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise EmulatorNotReady(f"npm did not finish within {_INSTALL_SECONDS:.0f} s. {_NPM_REMEDY}") from error
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise EmulatorNotReady(f"npm could not install {what}. {_NPM_REMEDY} Its output:\n{end}")


def _find_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise EmulatorNotReady(
            f"The Kinesis emulator needs Node.js and npm, and there is no {name}. "
            "Try: sudo apt-get install nodejs npm, or the installer of nodejs.org"
        )
    return found


def _dynamodb(port: int) -> Sequence[str]:
    if find_spec("moto") is None:
        raise EmulatorNotReady(
            "The DynamoDB emulator (moto) is not installed. Try: pip install flask flask-cors moto py-partiql-parser, "
            "or in a clone make setup"
        )
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


def main() -> int:
    """Install kinesis-mock if it is missing. `make setup` calls this."""
    try:
        install_kinesis()
    except EmulatorNotReady as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
