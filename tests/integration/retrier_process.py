"""`python -m services.global_retrier` as a real process, and what goes into and comes out of it, for the tests in this folder."""

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pipe_file.topic_names import RETRY_IN, retry_topic
from services.core.undelivered.retry_state import RetryState, unwrap, wrap
from tests.contract.traffic import ignore_revoke
from tests.integration.fleet_process import DRAIN
from tests.support.pacing import Pace
from tests.support.ports import free_port

DEADLINE_S = 600.0


@dataclass
class RetrierProcess:
    """Started, killed and started again; its log in one file."""

    folder: Path
    url: str
    process: asyncio.subprocess.Process | None = None
    management: str = ""

    @property
    def log(self) -> str:
        path = self.folder / "retrier.log"
        return path.read_text() if path.exists() else ""

    async def start(self) -> None:
        self.management = f"127.0.0.1:{free_port()}"
        arguments = ["--broker", self.url, "--management", self.management, "--drain", DRAIN]
        with (self.folder / "retrier.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.global_retrier", *arguments, stderr=log
            )

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name with these labels; 0 while it cannot be asked."""
        with suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://{self.management}/metrics") as answer:
                return sum(
                    sample.value
                    for family in text_string_to_metric_families(await answer.text())
                    for sample in family.samples
                    if sample.name == name and labels.items() <= sample.labels.items()
                )
        return 0.0

    async def wait_metric(self, at_least: float, name: str, **labels: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            pace = Pace()
            while await self.metric(name, **labels) < at_least:
                assert self.process is not None
                assert self.process.returncode is None, self.log
                await pace.rest()

    async def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@asynccontextmanager
async def kill_at_end(retrier: RetrierProcess) -> AsyncIterator[RetrierProcess]:
    """Nothing is left running."""
    try:
        yield retrier
    finally:
        if retrier.process is not None and retrier.process.returncode is None:
            await retrier.stop(signal.SIGKILL)


@dataclass
class Waiters:
    """Events that wait: a writer hands them over, a reader notes when each comes out and with what state."""

    broker: Broker
    pipe: str
    chance: random.Random
    states: list[RetryState] = field(default_factory=list)
    came: dict[int, int] = field(default_factory=dict)
    """How often each came out, by number."""
    early: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    late_ms: list[int] = field(default_factory=list)

    async def write(self, goes_on: Callable[[], bool], rate: int, longest_wait_ms: int) -> None:
        """Hand events over for so long, each due within `longest_wait_ms`."""
        async with Producer(self.broker.appender) as producer:
            while goes_on():
                now = int(time.time() * 1000)
                records = [self._make(now, self.chance.randrange(longest_wait_ms)) for _ in range(rate // 10)]
                (await producer.send(RETRY_IN, records)).raise_first()
                await asyncio.sleep(0.1)

    def _make(self, now: int, wait_ms: int) -> Record:
        number = len(self.states)
        attempts, rounds = self.chance.randrange(1, 40), self.chance.randrange(1, 10)
        source = f"flights:0:{number}"
        state = RetryState(
            self.pipe, "ops", attempts, rounds, now - 5, now + wait_ms, "http_503", "away", source, now - 9
        )
        self.states.append(state)
        return wrap(Record(b"%d" % number, b'{"n":%d}' % number, state.time, (("ce_id", source.encode()),)), state, now)

    async def read(self) -> None:
        """Note what comes out, until cancelled."""

        topics = [retry_topic(self.pipe)]
        async with self.broker.consumer(
            f"{self.pipe}.reader", topics, start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            while True:
                for batch in await consumer.poll(max_records=1000, max_wait=1.0):
                    now = int(time.time() * 1000)
                    for record in batch.records:
                        self._note(record, now)

    def _note(self, record: Record, now: int) -> None:
        event, state = unwrap(record)
        number = state.position()[1]
        self.came[number] = self.came.get(number, 0) + 1
        if min(now, record.timestamp) < state.due:
            self.early.append(
                f"{number}: {state.due - record.timestamp} ms early, by the reader's clock {state.due - now}"
            )
        if (state, event.value, event.key) != (self.states[number], b'{"n":%d}' % number, b"%d" % number):
            self.altered.append(f"{number}: {state}")
        self.late_ms.append(record.timestamp - state.due)

    async def wait_all(self) -> None:
        """Until every event came out."""
        async with asyncio.timeout(DEADLINE_S):
            pace = Pace()
            while len(self.came) < len(self.states):
                await pace.rest()

    def duplicates(self) -> int:
        """How often an event came out beyond its first time."""
        return sum(self.came.values()) - len(self.came)
