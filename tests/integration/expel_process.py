"""`python -m services.expel` as a real process over a real embedded log, for the tests in this folder."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from services.core.broker.contract import Broker, Lag, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.pauses import OPERATOR, Pause, write_pause
from services.core.ledger.report import TELEMETRY
from services.core.pipe_file.topic_names import CONTROL, parked_topic, retry_topic
from tests.contract.traffic import ignore_revoke
from tests.integration.fleet_process import DRAIN
from tests.support.pacing import Pace
from tests.support.ports import free_port
from tests.unit.expel.receiver import DEADLINE

STREAM = "flights"
PIPE = "late"
DEAD = f"{PIPE}.dead"


def make_record(event_id: str, key: str | None = None, value: bytes | None = b'{"n":1}') -> Record:
    headers = (("ce_id", event_id.encode()), ("penstock_arrival", b"1700000000000"), ("penstock_origin", b"a:0:0"))
    return Record(None if key is None else key.encode(), value, 1_700_000_000_000, headers)


def ids(count: int, start: int = 0) -> list[str]:
    return [f"e{n}" for n in range(start, start + count)]


def hook(name: str, /, url: object, **options: object) -> dict[str, object]:
    """A webhook destination as the pipe file has it, quick to retry, without the global retrier unless `options` say so.

    Its answers may come late, as on a busy machine.
    """
    quick = {"attempts": 4, "base": "50ms", "max_wait": "200ms"}
    usual = {"url": url, "retry": quick, "batch": {"max_wait": "20ms"}, "schedule": [], "timeout": "5m"}
    return {"name": name, "webhook": {**usual, **options}}


@dataclass
class Expel:
    """The process and its surroundings. module: what is run."""

    folder: Path
    broker: Broker
    url: str
    destinations: list[dict[str, object]]
    stream: str = STREAM
    pipe: str = PIPE
    name: str = "expel"
    module: str = "services.expel"
    environ: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    management: str = ""

    @property
    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    def second(self) -> "Expel":
        """Another instance of the same fleet."""
        return replace(self, process=None, name="second")

    def write_pipes(self) -> Path:
        path = self.folder / "pipes.yaml"
        pipes = {self.pipe: {"sources": [self.stream], "destinations": self.destinations}}
        streams: dict[str, object] = {self.stream: {}, "copy": {}}
        path.write_bytes(orjson.dumps({"streams": streams, "pipes": pipes}))
        return path

    async def start(self, *flags: str, wait_ready: bool = True) -> None:
        self.management = f"127.0.0.1:{free_port()}"
        arguments = [
            *("--broker", self.url, "--pipes", str(self.write_pipes())),
            *("--management", self.management, "--allow-networks", "127.0.0.0/8", "--commit-interval", "100ms"),
            *("--drain", DRAIN, *flags),
        ]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.module, *arguments, stderr=log, env={**os.environ, **self.environ}
            )
        if wait_ready:
            await self.wait_ready()

    async def wait_ready(self) -> None:
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while await self.get("/readyz") != 200:
                assert self.process is not None
                assert self.process.returncode is None, self.log
                await pace.rest()

    async def get(self, path: str) -> int:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{self.management}{path}") as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.management}/metrics") as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def wait_metric(self, at_least: float, name: str, **labels: str) -> None:
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while await self.metric(name, **labels) < at_least:
                await pace.rest()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()

    async def send(self, event_ids: Sequence[str]) -> None:
        """Events with a few dozen keys, so that every partition gets some."""
        await self.send_records([make_record(event_id, f"k{crc32(event_id.encode()) % 50}") for event_id in event_ids])

    async def send_records(self, records: Sequence[Record]) -> None:
        async with Producer(self.broker.appender) as producer:
            for start in range(0, len(records), 500):
                (await producer.send(self.stream, records[start : start + 500])).raise_first()

    async def lag(self, destination: str) -> dict[int, Lag]:
        return await self.broker.admin.group_lag(f"{self.pipe}.{destination}", self.stream)

    async def wait_no_lag(self, destination: str) -> None:
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while any(lag.records for lag in (await self.lag(destination)).values()):
                await pace.rest()

    async def read_all(self, topic: str, count: int) -> list[Record]:
        """The first `count` records of a topic, by partition."""
        records: list[Record] = []

        async with (
            asyncio.timeout(DEADLINE),
            self.broker.consumer(
                f"reader-{os.urandom(4).hex()}", [topic], start="earliest", on_revoke=ignore_revoke
            ) as consumer,
        ):
            while len(records) < count:
                batches = await consumer.poll(max_records=1000, max_wait=0.2)
                records += [record for batch in batches for record in batch.records]
        return records


@asynccontextmanager
async def open_expel(
    folder: Path, destinations: Sequence[dict[str, object]] = (), partitions: int = 4
) -> AsyncIterator[Expel]:
    """On an embedded log of its own, with the topics of one pipe; the process is not started yet."""
    async with LogBroker.open(str(folder / "data")) as broker:
        for topic in (STREAM, "copy", DEAD):
            await broker.admin.create_topic(TopicSpec(topic, partitions))
        for topic in (retry_topic(PIPE), parked_topic(PIPE), CONTROL, TELEMETRY):
            await broker.admin.create_topic(TopicSpec(topic, 1))
        async with kill_at_end(Expel(folder, broker, f"log://{folder / 'data'}", list(destinations))) as expel:
            yield expel


@asynccontextmanager
async def kill_at_end(expel: Expel) -> AsyncIterator[Expel]:
    """Whatever still runs of it is killed."""
    try:
        yield expel
    finally:
        if expel.process is not None and expel.process.returncode is None:
            expel.process.kill()
            await expel.process.wait()


async def decide(expel: Expel, state: Literal["paused", "resumed"]) -> None:
    async with Producer(expel.broker.appender) as producer:
        await write_pause(producer, f"{expel.pipe}/hook", Pause(state, OPERATOR, "ann@desk", 1))


async def count_parked(expel: Expel) -> int:
    held = await expel.broker.reader.describe(parked_topic(expel.pipe))
    return sum(found.end - found.start for found in held.values())


async def wait_parked(expel: Expel, count: int) -> None:
    async with asyncio.timeout(DEADLINE):
        pace = Pace()
        while await count_parked(expel) < count:
            await pace.rest()


async def wait_replayed(expel: Expel) -> None:
    async with asyncio.timeout(DEADLINE):
        pace = Pace()
        while any(
            lag.records
            for lag in (await expel.broker.admin.group_lag(f"{expel.pipe}.hook", parked_topic(expel.pipe))).values()
        ):
            await pace.rest()
