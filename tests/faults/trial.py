"""One trial: a fleet carries events from a sender to a sink, a fault strikes, the oracle judges; its row of the table.

The stream has four partitions, keys and ids from the payload; the pipe has no transform and one webhook, `hook`.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import orjson

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.kafka import KafkaBroker
from services.core.broker.log import LogBroker
from services.core.event import read_id
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.topic_names import dead_letter_topic
from services.core.provision import ensure_topics
from tests.contract.traffic import ignore_revoke
from tests.faults.fleet import DEADLINE, Fleet, Service, open_fleet, wait_until
from tests.faults.sender import Sender
from tests.faults.sink import Sink, open_sink
from tests.support.fault_table import Row
from tests.support.kafka import unique_name
from tests.support.oracle import Fate, Ledger
from tests.support.ports import free_port

PARTITIONS = 4
RSS_LIMIT = 200_000_000
"""Bytes. What the issue allows each service at most."""
LANE_EVENTS = 500
"""What one expel process may have in flight to the receiver: the in-flight window."""
_LINGER_S = 0.3
_QUIET_S = 2.0
BACKENDS = (LogBroker, KafkaBroker)
"""Named here so that they are imported before an event loop runs: importing reads files."""


@dataclass
class Trial:
    """Names, processes and knowledge of one trial. Made by `open_trial`."""

    fault: str
    url: str
    folder: Path
    seed: int
    ledger: Ledger
    sink: Sink
    fleet: Fleet
    broker: Broker
    sender: Sender
    stream: str
    pipe: str
    webhook: dict[str, object]
    listen: str
    chance: random.Random
    connection: AsyncExitStack
    recovery: float | None = None
    gap: float | None = None
    evidence: dict[str, float] = field(default_factory=dict)
    destinations: list[dict[str, object]] = field(default_factory=list)
    brokers: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The consumer group of the webhook."""
        return f"{self.pipe}.hook"

    def write_pipes(self, name: str = "pipes", **more: object) -> Path:
        """A pipe file; `more` goes into the webhook."""
        retry = {"attempts": 20, "base": "50ms", "max_wait": "500ms"}
        hook: dict[str, object] = {"url": self.sink.url, "retry": retry, "schedule": [], "batch": {"max_wait": "20ms"}}
        hook |= {**self.webhook, **more}
        pipes: dict[str, object] = {
            "streams": {self.stream: {"partitions": PARTITIONS, "id": "id", "key": "key", "time": "time"}},
            "pipes": {
                self.pipe: {
                    "sources": [self.stream],
                    "destinations": [*self.destinations, {"name": "hook", "webhook": hook}],
                }
            },
        }
        if self.brokers:
            pipes["brokers"] = self.brokers
        path = self.folder / f"{name}.yaml"
        path.write_bytes(orjson.dumps(pipes))
        return path

    async def start_ingest(self, name: str = "ingest-1", *flags: str) -> Service:
        """A process that takes events; several share the port."""
        shared = ["--broker", self.url, "--pipes", str(self.write_pipes()), "--listen", self.listen]
        return await self.fleet.add(Service(name, "services.ingest", [*shared, *flags], self.folder))

    async def start_expel(
        self, name: str = "expel-1", *flags: str, module: str = "services.expel", ready: bool = True
    ) -> Service:
        """A process that delivers; its requests carry its name."""
        pipes = self.write_pipes(f"pipes-{name}", headers={"x-worker": name})
        shared = ["--broker", self.url, "--pipes", str(pipes), "--allow-networks", "127.0.0.0/8"]
        shared += ["--commit-interval", "100ms", "--lane-events", str(LANE_EVENTS), *flags]
        return await self.fleet.add(Service(name, module, shared, self.folder), ready=ready)

    async def start_retrier(self, name: str = "retrier-1") -> Service:
        """A process that holds back what is to be tried again later."""
        return await self.fleet.add(Service(name, "services.global_retrier", ["--broker", self.url], self.folder))

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Events are sent meanwhile; ends when every answer is there."""
        stopping = asyncio.Event()
        task = asyncio.create_task(self.sender.run(stopping))
        try:
            yield
        finally:
            stopping.set()
            await task

    async def wait_refused(self) -> None:
        """Until a request was refused under a fault that lets nothing be stored, and nothing sent under it was acknowledged.

        What was sent before may be acknowledged late, as far as it was stored before.
        """
        await wait_until(lambda: time.monotonic() - self.sender.acks[-1][0] > _QUIET_S)
        since = time.monotonic()
        refused = self.sender.answers[503]
        await wait_until(lambda: self.sender.answers[503] > refused)
        assert max(self.sender.begun) <= since, "acknowledged although nothing could be stored"

    async def connect(self) -> None:
        """Open the trial's own connection to the broker, again after `disconnect`."""
        self.broker = await self.connection.enter_async_context(open_broker(self.url))

    async def disconnect(self) -> None:
        """Close it, so that the log's files are nobody's."""
        await self.connection.aclose()

    async def recover(self, since: float) -> float:
        """Seconds from `since` (monotonic) until a fresh event got through; the longest of a trial goes into its row."""
        number = await self.sender.insist_on_one()
        await wait_until(lambda: self.ledger.arrived(number))
        took = time.monotonic() - since
        self.recovery = max(self.recovery or 0.0, took)
        return took

    async def committed(self) -> dict[int, int]:
        """The group's last processed offsets; empty when the broker does not say."""
        try:
            return await self.broker.admin.committed(self.group, self.stream)
        except BrokerError:
            return {}

    @asynccontextmanager
    async def watch_commits(self) -> AsyncIterator[list[str]]:
        """The list fills with every commit that went backwards meanwhile."""
        went_back: list[str] = []
        highest: dict[int, int] = {}

        async def watch() -> None:
            while True:
                for partition, offset in (await self.committed()).items():
                    if offset < highest.get(partition, -1):
                        went_back.append(f"partition {partition} from {highest[partition]} to {offset}")
                    highest[partition] = offset
                await asyncio.sleep(0.1)

        task = asyncio.create_task(watch())
        try:
            yield went_back
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def wait_no_lag(self) -> None:
        """Until everything in the stream is settled and committed."""

        async def caught_up() -> bool:
            try:
                lags = await self.broker.admin.group_lag(self.group, self.stream)
            except BrokerError:
                return False
            return not any(lag.records for lag in lags.values())

        await wait_until(caught_up)

    async def settle(self) -> None:
        """Fault-free: one fresh event gets through, everything is delivered, committed; dead letters are read."""
        self.sink.slow = self.sink.fail = 0.0
        self.sink.hold.set()
        await self.recover(time.monotonic()) if self.recovery is None else await self.sender.insist_on_one()
        await self.wait_no_lag()
        await asyncio.sleep(_LINGER_S)
        await read_dead_letters(self.broker, dead_letter_topic(self.pipe), self.ledger)

    async def judge(self, *, strikes: int = 1, removed: int = 0) -> Row:
        """The row of this trial, after the promise was checked. Fails when it is broken, or when the fault never bit.

        strikes: how often expel lost what it had in flight; each time LANE_EVENTS may come again, and no more.
        removed: how many events were taken out of the stream on purpose: exactly these must be missing.
        """
        ledger, fleet = self.ledger, self.fleet
        own, again = ledger.duplicates()
        self.evidence |= {
            "errors": self.sender.errors,
            "restarts": fleet.restarts,
            "duplicates": own + again,
            "retried": await fleet.total("penstock_expel_events_retried_total"),
        }
        row = self.row(removed=removed)
        print(row.text())
        complaints = ledger.complaints(removed=removed)
        assert not complaints, "; ".join(complaints)
        assert own <= strikes * LANE_EVENTS, f"{own} came twice: more than was in flight"
        assert any(self.evidence.values()), "the fault never bit: the trial proves nothing"
        for name, peak in row.peak_rss.items():
            assert peak * 1e6 < RSS_LIMIT, f"{name} took {peak} MB"
        return row

    def row(self, *, removed: int = 0) -> Row:
        """What was measured so far; see `judge`."""
        ledger, fleet = self.ledger, self.fleet
        own, again = ledger.duplicates()
        return Row(
            fault=self.fault,
            broker=self.url.partition(":")[0],
            acknowledged=ledger.count(Fate.OBLIGED),
            delivered=sum(1 for count in ledger.arrivals if count),
            dead=len(ledger.dead),
            duplicates=own,
            sent_again=again,
            lost=len(ledger.lost()) - removed,
            removed=removed,
            recovery=self.recovery,
            gap=self.gap,
            peak_rss={name: round(one.peak_rss / 1e6) for name, one in fleet.services.items()},
            seed=self.seed,
            answers={str(status): count for status, count in sorted(self.sender.answers.items())},
        )


async def read_dead_letters(broker: Broker, topic: str, ledger: Ledger) -> None:
    """Tell the ledger what stands in this topic of dead letters."""
    left = sum(held.end - held.start for held in (await broker.reader.describe(topic)).values())

    if not left:
        return
    async with (
        asyncio.timeout(DEADLINE),
        broker.consumer(unique_name("letters"), [topic], start="earliest", on_revoke=ignore_revoke) as consumer,
    ):
        while left > 0:
            for batch in await consumer.poll(max_records=1000, max_wait=0.5):
                left -= len(batch.records)
                for record in batch.records:
                    ledger.bury(read_id(record) or "without an id")


@asynccontextmanager
async def open_trial(
    fault: str,
    url: str,
    folder: Path,
    *,
    seed: int | None = None,
    rate: float = 300,
    batch: int = 20,
    workers: int = 4,
    brokers: Mapping[str, str] = MappingProxyType({}),
    **webhook: object,
) -> AsyncIterator[Trial]:
    """Topics exist, sender and sink are ready, no service runs yet. brokers: others, by name. `webhook`: more options of the
    destination."""
    seed = random.randrange(1 << 30) if seed is None else seed
    stream, listen = unique_name("events"), f"127.0.0.1:{free_port()}"
    ledger = Ledger(unique_name("run"))
    async with AsyncExitStack() as stack:
        sink = await stack.enter_async_context(open_sink(ledger, seed))
        fleet = await stack.enter_async_context(open_fleet())
        connection = await stack.enter_async_context(AsyncExitStack())
        broker = await connection.enter_async_context(open_broker(url))
        sender = Sender(
            ledger, f"http://{listen}/v1/streams/{stream}/events", seed, rate=rate, batch=batch, workers=workers
        )
        trial = Trial(
            *(fault, url, folder, seed, ledger, sink, fleet, broker, sender, stream, unique_name("pipe")),
            webhook=webhook,
            brokers=dict(brokers),
            listen=listen,
            chance=random.Random(seed),
            connection=connection,
        )
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, trial.write_pipes()))
        print("seed", seed)
        yield trial
