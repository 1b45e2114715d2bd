"""A real Kafka and real jobs on it, for tests. Topics have names of their own: the cluster is shared."""

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

import yaml
from pyspark.sql import SparkSession

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists, Unavailable
from services.core.broker.kafka import KafkaBroker
from services.core.broker.record import Record, TopicPartition
from services.core.ledger.report import TELEMETRY, Report, decode_report
from spark.brokers.kafka import KafkaEndpoint
from spark.jobs.job import Job, JobState
from spark.observed import BatchReport
from spark.pipe_file import Chosen, read_pipe_file
from spark.settings import TransformSettings
from spark.transforms.preparation import prepare_pipes
from tests.spark.river import TOO_SLOW, wait_for


class KafkaRiver:
    """One stream, one pipe on the cluster. `stream` and `pipe` are their names."""

    def __init__(self, session: SparkSession, bootstrap: str, folder: Path, *, partitions: int) -> None:
        self.session, self.bootstrap, self.folder = session, bootstrap, folder
        run = uuid4().hex[:8]
        self.stream, self.pipe = f"s{run}", f"p{run}"
        self.batches: list[BatchReport] = []
        self.states: list[JobState] = []
        self._jobs: list[tuple[Job, threading.Thread]] = []
        asyncio.run(self.create([self.stream, f"{self.pipe}.out", f"{self.pipe}.dead"], partitions))
        with suppress(TopicExists):
            asyncio.run(self.create([TELEMETRY], 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def create(self, topics: Iterable[str], partitions: int) -> None:
        """Make topics."""
        async with KafkaBroker.open(self.bootstrap) as broker:
            for topic in topics:
                await broker.admin.create_topic(TopicSpec(topic, partitions))

    def send(self, records: list[Record], partition: int = 0) -> None:
        """Store records in one partition of the stream."""

        async def append() -> None:
            async with asyncio.timeout(240), KafkaBroker.open(self.bootstrap) as broker:
                while True:  # a fresh cluster first finds out who gives producer ids
                    try:
                        await broker.driver.append(self.stream, partition, records, timeout=30.0)
                    except Unavailable:
                        await asyncio.sleep(0.5)
                    else:
                        return

        asyncio.run(append())

    def records(self, end: str, count: int) -> list[Record]:
        """The first `count` records, at least, of the pipe's topic `out` or `dead`; waits for them, and a little longer."""
        return asyncio.run(self._read(f"{self.pipe}.{end}", count))

    async def _read(self, topic: str, count: int) -> list[Record]:
        async def let_go(_: frozenset[TopicPartition]) -> None:
            return

        found: list[Record] = []
        async with (
            asyncio.timeout(360),
            KafkaBroker.open(self.bootstrap) as broker,
            broker.consumer(f"g{uuid4().hex[:8]}", [topic], start="earliest", on_revoke=let_go) as consumer,
        ):
            while len(found) < count:
                found += [r for batch in await consumer.poll(max_records=1000, max_wait=0.5) for r in batch.records]
            for batch in await consumer.poll(max_records=1000, max_wait=0.5):
                found += batch.records
        return found

    def reports(self) -> list[Report]:
        """What the pipe told the telemetry topic, once it has said goodbye; waits for that."""
        return asyncio.run(self._read_reports())

    async def _read_reports(self) -> list[Report]:
        async def let_go(_: frozenset[TopicPartition]) -> None:
            return

        found: list[Report] = []
        async with (
            asyncio.timeout(90),
            KafkaBroker.open(self.bootstrap) as broker,
            broker.consumer(f"g{uuid4().hex[:8]}", [TELEMETRY], start="earliest", on_revoke=let_go) as consumer,
        ):
            while not found or not found[-1].closed:
                batches = await consumer.poll(max_records=1000, max_wait=0.5)
                reports = [decode_report(record.value) for batch in batches for record in batch.records]
                found += [report for report in reports if report.pipe == self.pipe]
        return found

    def chosen(self, *, columns: str | None = None, **transform: object) -> Chosen:
        """Write the pipe file; `{s}` in `sql` stands for the stream."""
        if isinstance(sql := transform.get("sql"), str):
            transform["sql"] = sql.format(s=self.stream)
        stream = {} if columns is None else {"columns": columns}
        destinations = [{"name": "d", "webhook": {"url": "https://example.com/"}}]
        pipe = {"sources": [self.stream], "transform": transform, "destinations": destinations}
        path = self.folder / "pipes.yaml"
        path.write_text(yaml.safe_dump({"version": 1, "streams": {self.stream: stream}, "pipes": {self.pipe: pipe}}))
        return read_pipe_file(TransformSettings(pipes=path))

    def start(self, chosen: Chosen) -> None:
        """Run the pipe's job until `stop`."""
        endpoint = KafkaEndpoint(self.bootstrap)
        prepared = prepare_pipes(self.session, chosen, max_bytes=endpoint.max_record_bytes)[0]
        checkpoints = str(self.folder / "checkpoints")
        job = Job(
            prepared,
            endpoint,
            checkpoints=checkpoints,
            ledger=True,
            on_batch=self.batches.append,
            on_state=self._note,
        )
        thread = threading.Thread(target=job.run, args=[self.session], daemon=True)
        thread.start()
        self._jobs.append((job, thread))

    def stop(self) -> None:
        """Stop the jobs in good order."""
        for job, thread in self._jobs:
            job.stop(30.0)
            thread.join(60.0)
            assert not thread.is_alive()
        self._jobs.clear()

    def _note(self, state: JobState) -> None:
        """Keep it, unless Spark only was too slow to start a Python worker: the job begins again by itself."""
        if TOO_SLOW not in (state.problem or ""):
            self.states.append(state)

    @property
    def problem(self) -> str | None:
        """The last failure of the query, if any."""
        problems = [state.problem for state in self.states if state.problem]
        return problems[-1] if problems else None

    def wait_for_problem(self) -> str:
        """Until the query fails; gives why."""
        wait_for(lambda: self.problem is not None, "the query fails")
        return self.problem or ""
