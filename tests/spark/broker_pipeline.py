"""A broker that tests share, and real jobs on it. Topics have names of their own."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from pyspark.sql import SparkSession

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import TopicExists, Unavailable
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.ledger.report import TELEMETRY, Report, decode_report
from services.core.pipe_file.topic_names import CONTROL
from spark.brokers.contract import open_spark_broker
from spark.jobs.job import Job
from spark.jobs.modes import choose_modes, prefer_plan
from spark.settings import SelectedPipes, TransformSettings, load_pipes
from spark.transforms.preparation import prepare_pipes
from tests.spark.log_pipeline import RunningJobs, wait_for


class BrokerPipeline(RunningJobs):
    """One stream, one pipe at the broker of this URL. `stream` and `pipe` are their names."""

    def __init__(self, session: SparkSession, url: str, folder: Path, *, partitions: int) -> None:
        super().__init__(session)
        self.url, self.folder = url, folder
        self.broker = open_spark_broker(url)
        self._runner, self._following = asyncio.Runner(), AsyncExitStack()
        self._followed: TopicReading | None = None
        run = uuid4().hex[:8]
        self.stream, self.pipe = f"s{run}", f"p{run}"
        asyncio.run(self.create([self.stream, f"{self.pipe}.out", f"{self.pipe}.dead"], partitions))
        for topic in (TELEMETRY, CONTROL):
            with suppress(TopicExists):
                asyncio.run(self.create([topic], 1))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.broker.close()
        if self._followed is not None:
            self._runner.run(self._following.aclose())
        self._runner.close()

    async def create(self, topics: Iterable[str], partitions: int) -> None:
        """Make topics."""
        async with open_broker(self.url) as broker:
            for topic in topics:
                await broker.admin.create_topic(TopicSpec(topic, partitions))

    def send(self, records: list[Record], partition: int = 0, stream: str = "") -> None:
        """Store records in one partition of the stream, or of this one."""

        async def append() -> None:
            async with asyncio.timeout(600), open_broker(self.url) as broker:
                while True:  # a fresh cluster first finds out who gives producer ids
                    try:
                        await broker.appender.append(stream or self.stream, partition, records, timeout=30.0)
                    except Unavailable:
                        await asyncio.sleep(0.5)
                    else:
                        return

        asyncio.run(append())

    def records(self, end: str, count: int) -> list[Record]:
        """The first `count` records, at least, of the pipe's topic `out` or `dead`; waits for them, and a little longer."""
        return asyncio.run(self._read(f"{self.pipe}.{end}", count))

    async def _read(self, topic: str, count: int) -> list[Record]:
        async with asyncio.timeout(360), open_broker(self.url) as broker:
            reading = TopicReading(broker, topic)
            while len(reading.found) < count:
                await reading.go_on()
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
            await reading.go_on()
        return reading.found

    async def read_now(self, end: str) -> list[Record]:
        """Everything that is in the pipe's topic `out` or `dead` now."""
        async with asyncio.timeout(300), open_broker(self.url) as broker:
            reading = TopicReading(broker, f"{self.pipe}.{end}")
            await reading.go_on()
        return reading.found

    def ids_so_far(self) -> list[str | None]:
        """The ids of all events that are in the pipe's topic `out` now. To ask again reads only what came in the meantime."""

        async def go_on() -> list[str | None]:
            async with asyncio.timeout(300):
                if self._followed is None:
                    broker = await self._following.enter_async_context(open_broker(self.url))
                    self._followed = TopicReading(broker, f"{self.pipe}.out")
                await self._followed.go_on()
            return [read_id(record) for record in self._followed.found]

        return self._runner.run(go_on())

    def reports(self) -> list[Report]:
        """The pipe's reports in the telemetry topic, once the last one is there; waits for it."""
        return asyncio.run(self._read_reports())

    async def _read_reports(self) -> list[Report]:
        async with asyncio.timeout(300), open_broker(self.url) as broker:
            reading = TopicReading(broker, TELEMETRY)
            while True:
                await reading.go_on()
                reports = [decode_report(record.value) for record in reading.found]
                mine = [report for report in reports if report.pipe == self.pipe]
                if mine and mine[-1].closed:
                    return mine
                await asyncio.sleep(0.2)

    def chosen(
        self, *, columns: str | None = None, sources: Sequence[str] = (), known: Any = None, **transform: object
    ) -> SelectedPipes:
        """Write the pipe file; `{s}` in `sql` stands for the stream. sources: other ones than the stream. known: the tables of
        the file by name; the pipe reads all of them."""
        if known:
            transform = {"tables": list(known), **transform}
        if isinstance(sql := transform.get("sql"), str):
            transform["sql"] = sql.format(s=self.stream)
        stream = {} if columns is None else {"columns": columns}
        destinations = [{"name": "d", "webhook": {"url": "https://example.com/"}}]
        sources = list(sources) or [self.stream]
        pipe = {"sources": sources, "transform": transform, "destinations": destinations}
        path = self.folder / "pipes.yaml"
        streams = {one: dict(stream) for one in sources}
        file = {"version": 1, "streams": streams, "tables": dict(known or {}), "pipes": {self.pipe: pipe}}
        path.write_text(yaml.safe_dump(file))
        return load_pipes(TransformSettings(pipes=path))

    def start(self, chosen: SelectedPipes, *, auto: bool = False, per_batch: bool = False) -> Job:
        """Run the pipe's job until `stop`. auto: when the pipe file leaves the mode open, in real-time mode where it may be.
        per_batch: with a plan for each batch, as earlier versions had it."""
        prepared = prepare_pipes(self.session, chosen, max_bytes=self.broker.max_record_bytes)[0]
        checkpoints = str(self.folder / "checkpoints")
        if auto:
            settings = TransformSettings(checkpoints=checkpoints, master="local[2]")
            prepared = choose_modes(self.session, settings, self.broker, chosen, [prepared])[0]
        elif not per_batch:
            prepared = prefer_plan(self.broker, prepared)
        job = Job(
            prepared,
            self.broker,
            self.marks,
            checkpoints=checkpoints,
            ledger=True,
            on_batch=self.batches.append,
            on_state=self.note,
        )
        self.run_job(job)
        return job

    def wait_for_problem(self) -> str:
        """Until the query fails; gives why."""
        wait_for(lambda: self.problem is not None, "the query fails")
        return self.problem or ""


class TopicReading:
    """Everything in a topic, partition by partition, as it comes."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._reader, self._topic = broker.reader, topic
        self._next: dict[int, int] = {}
        self.found: list[Record] = []

    async def go_on(self) -> None:
        """To the present ends."""
        for partition, held in (await self._reader.describe(self._topic)).items():
            at = self._next.get(partition, held.start)
            while (batch := await self._reader.read(self._topic, partition, at, max_records=1000)) is not None:
                self.found += batch.records
                at = self._next[partition] = batch.offsets[-1] + 1
