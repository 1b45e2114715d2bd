"""What one run of a pipe's query works with."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint
from spark.jobs.culprits import try_transform
from spark.jobs.parts import Attempts
from spark.jobs.pulse import PART, Pulse
from spark.observed import BatchReport
from spark.place import Place
from spark.transforms.preparation import Prepared


class Stopping(Exception):
    """Not begun, or left, because the job is to stop: it comes again."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a pipe. writer: names it to the broker. report: takes what each stored batch did; when it returns, that
    is told durably. ledger: whether reports hold sets of origins. stopping: set once the job is to stop. attempts: of batches
    that may be too much for one go. pulse: shows what is at work, and since when."""

    session: SparkSession
    prepared: Prepared
    endpoint: Endpoint
    checkpoint: Checkpoint
    writer: str
    report: Callable[[BatchReport], None]
    ledger: bool
    stopping: threading.Event
    attempts: Attempts
    pulse: Pulse

    @property
    def pipe(self) -> str:
        """The pipe's name."""
        return self.prepared.pipe

    def beside(self, name: str) -> "Query":
        """Another query of the same pipe, with a checkpoint of its own."""
        return replace(self, checkpoint=self.checkpoint.beside(name), writer=f"{self.writer}:{name}")

    def source(self, *, origins: bool = False) -> DataFrame:
        """All the pipe's sources as one raw stream. origins: as in `Endpoint.read_stream`."""
        most = self.prepared.transform.max_events
        return self.endpoint.read_stream(self.session, list(self.prepared.views), most, origins=origins)

    def trial(self, raw: DataFrame, places: Sequence[Place]) -> str | None:
        """Run the transform on a part of these records and store nothing: None when it passed, else what it raised.

        Raises Stopping.
        """
        self.check_not_stopping()
        self.pulse.begin(self.writer, "a trial of some events", PART)
        problem = try_transform(self.prepared, self.endpoint, raw, places)
        self.pulse.begin(self.writer, "the search for events that fail")
        return problem

    def check_not_stopping(self) -> None:
        """Between two steps of long work. Raises Stopping."""
        if self.stopping.is_set():
            raise Stopping
