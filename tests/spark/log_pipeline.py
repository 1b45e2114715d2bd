"""A real log and real jobs on it, for tests: send events, let the pipe run, look at what came out."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import create_topic
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN
from services.core.lag import LagHistogram
from services.core.ledger.report import TELEMETRY, Outcome, Report, decode_report, unpack_numbers
from spark.batch_report import BatchReport
from spark.brokers.contract import Backlog
from spark.brokers.log import LogSparkBroker
from spark.health import QueryState, Watchdog
from spark.jobs.attempts import Attempts
from spark.jobs.checkpoint import open_checkpoint
from spark.jobs.job import Job
from spark.jobs.query import Query
from spark.jobs.restart import find_begins
from spark.jobs.start_checks import adopt_checkpoint
from spark.session import own_session
from spark.settings import SelectedPipes, TransformSettings, load_pipes
from spark.transforms.preparation import Prepared, prepare_pipes
from tests.spark.stored_marks import StoredMarks
from tests.support.pacing import Pace

TOO_SLOW = "Python worker failed to connect back"
"""Spark gives it 10 s and no setting for it."""
DEADLINE_S = 900.0
NOW = 1_700_000_000_000


def event(number: int, value: bytes, *, key: bytes | None = None, **headers: bytes) -> Record:
    """An event as ingest would have stored it."""
    own = ((ID, b"id-%d" % number), (ARRIVAL, b"%d" % (NOW + number)), (ORIGIN, b"run:0:%d" % number))
    return Record(key or b"key-%d" % (number % 7), value, NOW + number, own + tuple(headers.items()))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; fails after a deadline."""
    end = time.monotonic() + DEADLINE_S
    pace = Pace()
    while not condition():
        assert time.monotonic() < end, f"in vain waited for: {what}"
        pace.rest_blocking()


def run_query(writer: DataStreamWriter, is_done: Callable[[], bool], what: str) -> None:
    """Run a query that is none of our jobs until it is done; again when Spark only was too slow, as a job does."""
    for _ in range(30):
        query = writer.start()
        try:
            wait_for(lambda: is_done() or not query.isActive, what)  # noqa: B023 - called before the next one
            query.processAllAvailable()
        except StreamingQueryException as error:
            if TOO_SLOW not in str(error):
                raise
        else:
            return
        finally:
            query.stop()
    raise TimeoutError(f"{TOO_SLOW}, 30 times")


def read_topic(log: Path, topic: str) -> list[Record]:
    """Everything in a topic, partition by partition."""
    return [
        record
        for partition, held in blocking.ends(log, topic).items()
        for batch in blocking.read_range(log, topic, partition, held.start, held.end)
        for record in batch.records
    ]


def numbers(reports: Iterable[Report], outcome: Outcome) -> set[int]:
    """The numbers of all events with this outcome, in whatever incarnation and partition."""
    sets = (reported for report in reports for reported in report.sets if reported.outcome == outcome)
    return {number for reported in sets for number in unpack_numbers(reported.numbers)}


def merged_lags(reports: Iterable[Report], kind: str) -> LagHistogram:
    """All lags of this kind."""
    merged = LagHistogram()
    for lag in (lag for report in reports for lag in report.lags if lag.kind == kind):
        merged.merge(LagHistogram.load({"count": lag.count, "total_ms": lag.total_ms, "buckets": lag.buckets}))
    return merged


def interrupt_queries(session: SparkSession) -> None:
    """End the threads in which Spark runs queries, as no code of ours or Spark's would."""
    jvm: Any = session.sparkContext._jvm
    threads = jvm.java.lang.Thread.getAllStackTraces().keySet().toArray()
    running = [thread for thread in threads if thread.getName().startswith("stream execution thread")]
    assert running
    for thread in running:
        thread.interrupt()


class RunningJobs:
    """Jobs in threads of their own, and what they say: `batches`, `states`."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.marks = StoredMarks()
        self.batches: list[BatchReport] = []
        self.states: list[QueryState] = []
        self._jobs: list[tuple[Job, threading.Thread]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run_job(self, job: Job) -> None:
        """In a thread, until `stop`."""
        thread = threading.Thread(target=job.run, args=[self.session], daemon=True)
        thread.start()
        self._jobs.append((job, thread))

    def stop(self) -> None:
        """Stop the jobs in good order."""
        for job, thread in self._jobs:
            job.stop(DEADLINE_S)
            thread.join(DEADLINE_S + 300)
            assert not thread.is_alive()
        self._jobs.clear()

    def note(self, state: QueryState) -> None:
        """Keep it, unless Spark only was too slow to start a Python worker: the job begins again by itself."""
        if TOO_SLOW not in (state.problem or ""):
            self.states.append(state)

    @property
    def problem(self) -> str | None:
        """The last failure of the query, if any."""
        problems = [state.problem for state in self.states if state.problem]
        return problems[-1] if problems else None


class LogPipeline(RunningJobs):
    """One log with streams `s` and `u`, one pipe `p`."""

    def __init__(self, session: SparkSession, folder: Path, checkpoints: str = "") -> None:
        """checkpoints: elsewhere than in the folder."""
        super().__init__(session)
        self.folder, self.log = folder, folder / "log"
        self.checkpoints = checkpoints or str(folder / "checkpoints")
        self.backlogs: list[Backlog] = []
        self._epochs = itertools.count()
        for topic in ("s", "u", "p.out", "p.dead"):
            create_topic(DataFolder.prepare(self.log), TopicSpec(topic, 3))
        create_topic(DataFolder.prepare(self.log), TopicSpec(TELEMETRY, 1))

    def pipe(
        self,
        *,
        columns: str | None = None,
        sources: Iterable[str] = ("s",),
        outputs_of: Iterable[str | None] = (None,),
        known: Any = None,
        **transform: object,
    ) -> SelectedPipes:
        """Write the pipe file and read it as the service does. outputs_of: the output of each destination, as in `from`.

        known: the tables of the file by name; the pipe reads all of them.
        """
        if known:
            transform = {"tables": list(known), **transform}
        stream = {} if columns is None else {"columns": columns}
        destinations = [
            {"name": f"d{number}", "webhook": {"url": "https://example.com/"}, "from": output}
            for number, output in enumerate(outputs_of)
        ]
        pipe = {"sources": list(sources), "transform": transform, "destinations": destinations}
        path = self.folder / "pipes.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "version": 1,
                    "streams": {"s": stream, "u": dict(stream)},
                    "tables": dict(known or {}),
                    "pipes": {"p": pipe},
                }
            )
        )
        return load_pipes(TransformSettings(pipes=path))

    def send(self, records: Iterable[Record], topic: str = "s") -> None:
        """Store records, keyless ones in partition 0."""
        parts = split_by_key(list(records), 3)
        assert blocking.append_once(self.log, topic, "test", next(self._epochs), parts)

    def prepare(self, chosen: SelectedPipes) -> Prepared:
        """The pipe's transform, checked as the service does."""
        return prepare_pipes(self.session, chosen, max_bytes=LogSparkBroker.max_record_bytes)[0]

    def start(self, chosen: SelectedPipes) -> Job:
        """Run the pipe's job until `stop`."""
        return self.start_prepared(self.prepare(chosen))

    def start_prepared(self, prepared: Prepared) -> Job:
        """As `start`."""
        job = Job(
            prepared,
            LogSparkBroker(str(self.log)),
            self.marks,
            checkpoints=self.checkpoints,
            ledger=True,
            on_batch=self.batches.append,
            on_state=self.note,
            on_backlog=lambda found: self.backlogs.append(found.backlog),
        )
        self.run_job(job)
        return job

    @contextmanager
    def query(self, chosen: SelectedPipes) -> Iterator[Query]:
        """What a run of the pipe would work with; nothing runs."""
        prepared, broker = self.prepare(chosen), LogSparkBroker(str(self.log))
        session = own_session(self.session)  # the claim on the checkpoint is one of its settings
        with open_checkpoint(session, self.checkpoints, "p") as checkpoint:
            topics, begins_of = (
                broker.identify(session, list(prepared.views)),
                partial(find_begins, session, self.checkpoints, broker),
            )
            identity = adopt_checkpoint(checkpoint, prepared, topics, self.marks, begins_of=begins_of)
            yield Query(
                session,
                prepared,
                broker,
                checkpoint,
                f"p:{identity.id}",
                self.batches.append,
                True,
                threading.Event(),
                Attempts(prepared.version),
                Watchdog(DEADLINE_S),
            )

    def run(self, chosen: SelectedPipes, until: int) -> None:
        """Run the pipe until it has read so many events, then stop it."""
        self.start(chosen)
        wait_for(lambda: self.read >= until or bool(self.problem), f"{until} events read")
        self.stop()
        assert self.problem is None, self.problem

    @property
    def read(self) -> int:
        """Events that all batches together took."""
        return sum(report.read for report in self.batches)

    def records(self, topic: str) -> list[Record]:
        return read_topic(self.log, topic)

    @property
    def out(self) -> list[Record]:
        """What the pipe wrote."""
        return self.records("p.out")

    @property
    def reports(self) -> list[Report]:
        """The pipe's reports in the telemetry topic."""
        return [decode_report(record.value) for record in self.records(TELEMETRY)]

    def reported(self, outcome: Outcome) -> set[int]:
        """The numbers of all events that were reported with this outcome."""
        return numbers(self.reports, outcome)

    @property
    def dead(self) -> list[Record]:
        """The pipe's dead letters."""
        return self.records("p.dead")
