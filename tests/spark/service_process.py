"""The transform service as a process of its own, for tests that kill it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import create_topic
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.ledger.report import TELEMETRY, Report, decode_report
from services.core.pipe_file.topic_names import CONTROL
from tests.spark.log_pipeline import read_topic

_QUICK_CLAIMS = "import spark.jobs.claims as c; c.BEAT_S, c.EXPIRY_S = 1.0, 6.0; "
"""A standby takes over sooner: the tests freeze its predecessor, and wait for it."""
_MAIN = (
    "import runpy, spark.service; spark.service.SETTLE_S = 0.5; import spark.jobs.query; spark.jobs.query.WARM_UP_RUNS = 1; "
    "import spark.health; spark.health.MAX_FAILURES = 100; "
    "runpy.run_module('spark', run_name='__main__')"
)
"""As `-m spark`, but pipes of one process hardly wait for each other, and a transform runs once before its first batch: the tests
have no other work to protect. A pipe that fails again and again does not end the process while a test looks at it."""


_PATIENT = ("--drain", "300s", "--batch-timeout", "60m")
"""A busy machine needs longer than people want to wait: a batch ends before its service does, and none is given up."""


class TooLateError(Exception):
    """It was killed when all was done, so nothing was tested: the test gets its second try."""

    @classmethod
    def check(cls, done: int, total: int) -> None:
        """Raise it when all are done."""
        if done >= total:
            raise cls(f"all {total} were done before the kill")


class ServiceProcess:
    """Runs in `folder`, with its pipes.yaml. Ends with the block, Java and all. `output`: a file of all that it printed."""

    def __init__(self, folder: Path, broker: str, *arguments: str, quick_claims: bool = True) -> None:
        """arguments: of every start. quick_claims: as a standby it does not wait as long as in a fleet."""
        self.folder, self.output = folder, folder / "output.log"
        self._output_from = 0
        main = _QUICK_CLAIMS + _MAIN if quick_claims else _MAIN
        self._command = [sys.executable, "-c", main, "--broker", broker, "--data", str(folder)]
        self._command += ["--pipes", str(folder / "pipes.yaml"), *_PATIENT, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """In a session of its own."""
        self.starts += 1
        with self.output.open("ab") as file:
            self._output_from = file.tell()
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return self._process

    def kill(self) -> None:
        """SIGKILL the service, Java and all; waits until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # ended by itself, and so did its children
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(600)

    def terminate(self) -> None:
        """SIGTERM, and wait until it has ended in good order."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(600)

    @property
    def pid(self) -> int | None:
        """Of its process, or of the last one."""
        return None if self._process is None else self._process.pid

    def said(self) -> str:
        """What it printed since its last start."""
        return self.output.read_bytes()[self._output_from :].decode(errors="replace")

    def signal(self, number: int) -> None:
        """To the service and all that it started."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep_running(self, most: int) -> None:
        """Start it again when it has ended with status 1, as a supervisor does; at most so many times."""
        if not self.is_running:
            assert self.starts < most, self.output.read_text()[-3000:]
            assert self._process is None or self._process.returncode == 1
            self.kill()
            self.start()


class LogService(ServiceProcess):
    """On a log of its own, with the stream `s` and these pipes."""

    def __init__(self, folder: Path, pipes: str, names: Iterable[str], *arguments: str) -> None:
        self.log = folder / "log"
        super().__init__(folder, f"log://{self.log}", *arguments)
        for topic in ("s", *(f"{name}.{end}" for name in names for end in ("out", "dead"))):
            create_topic(DataFolder.prepare(self.log), TopicSpec(topic, 2))
        for topic in (TELEMETRY, CONTROL):
            create_topic(DataFolder.prepare(self.log), TopicSpec(topic, 1))
        (folder / "pipes.yaml").write_text(pipes)

    def send(self, records: list[Record]) -> None:
        """Store events. Once for each first timestamp."""
        assert blocking.append_once(self.log, "s", "test", records[0].timestamp, split_by_key(records, 2))

    def records(self, topic: str) -> list[Record]:
        return read_topic(self.log, topic)

    def ids(self, topic: str) -> list[str | None]:
        return [read_id(record) for record in self.records(topic)]

    def reports(self) -> list[Report]:
        return [decode_report(record.value) for record in self.records(TELEMETRY)]
