"""Runs one instance on its own log under an open load: offering events does not wait for their completion."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

from services.core.broker.connect import open_broker
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN, Origin
from services.core.http.address import parse_address
from services.core.http.listening import serve_app
from services.core.pipe_file.pipes import load_pipes
from services.core.process.scrape import Sample, scrape
from services.core.temporary import TemporaryFolder
from services.fleet.pipes.topics import provision
from services.fleet.problem import CommandFailed
from services.fleet.rating.steps import RatingStep, next_rate
from services.fleet.stop import Stop
from services.fleet.up.plan import FleetPlan
from services.fleet.up.ports import free_port
from services.fleet.up.process import ServiceSpec
from services.fleet.up.supervisor import run_fleet

TICK_S = 0.05
READY_WITHIN_S = 240.0
ANSWER_S = 60.0
"""An instance with as much load as it can bear answers late."""
SETTLE_S = 30.0
"""The time limit for working off a backlog before the next step."""
PIPES = """\
version: 1
streams:
  rated: {{partitions: 4, id: id}}
pipes:
  rated:
    sources: [rated]
    destinations:
      - name: receiver
        webhook: {{url: "http://127.0.0.1:{port}/", batch: {{max_events: {batch}}}}}
"""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """size: payload bytes per event. batch: events per request."""

    size: int
    batch: int


@dataclass(frozen=True, slots=True)
class Rig:
    """offer: send so many events now, without waiting for them. made: how many reached the instance's input so far.

    totals: events done and core-seconds used so far. behind: events in the input, or on their way to it, that are not done.
    """

    offer: Callable[[int], None]
    made: Callable[[], int]
    totals: Callable[[], Awaitable[tuple[float, float]]]
    behind: Callable[[], Awaitable[int]]


async def run_step(rig: Rig, rate: float, seconds: float, stop: Stop) -> RatingStep:
    """Offer `rate` events per second for `seconds`, then wait for the backlog. Raises CommandFailed when a stop is requested."""
    began, own = time.monotonic(), time.process_time()
    await asyncio.to_thread(psutil.cpu_percent)  # the next call measures the time since this one
    done_before, cpu_before = await rig.totals()
    offered, made_before = 0, rig.made()
    while (elapsed := time.monotonic() - began) < seconds:
        stop.check()
        due = int(min(elapsed + TICK_S, seconds) * rate)
        rig.offer(due - offered)
        offered = due
        await asyncio.sleep(TICK_S)
    rig.offer(int(seconds * rate) - offered)
    made = (rig.made() - made_before) / seconds
    lag = await rig.behind() / rate  # before `totals`: an event that ends in between counts twice, not never
    done, cpu = await rig.totals()
    took = time.monotonic() - began
    machine = await asyncio.to_thread(psutil.cpu_percent) / 100
    own = (time.process_time() - own) / took
    await _settle(rig, stop)
    return RatingStep(rate, seconds, made, (done - done_before) / seconds, lag, (cpu - cpu_before) / took, own, machine)


async def _settle(rig: Rig, stop: Stop) -> None:
    deadline = time.monotonic() + SETTLE_S
    while await rig.behind() and time.monotonic() < deadline:
        stop.check()
        await asyncio.sleep(TICK_S)


@asynccontextmanager
async def one_instance(
    service: str, module: str, folder: Path, port: int, shape: LoadShape, arguments: tuple[str, ...], stop: Stop
) -> AsyncIterator[tuple[str, str]]:
    """One process of the service on a fresh log in `folder`. Yields (broker URL, management address).

    port: of the receiver in the pipe file. Raises CommandFailed.
    """
    pipes, broker = folder / "pipes.yaml", f"log://{folder / 'log'}"
    await asyncio.to_thread(_write, folder, pipes, PIPES.format(port=port, batch=shape.batch))
    await provision(broker, await asyncio.to_thread(load_pipes, pipes))
    shared = ("--broker", broker, "--pipes", str(pipes), "--ledger", "true", "--log-level", "warning")
    spec = ServiceSpec(f"{service}-1", service, module, (*shared, *arguments))
    nowhere = f"127.0.0.1:{free_port()}"
    plan = FleetPlan(folder, broker, pipes, nowhere, nowhere, (spec,), ready_within=READY_WITHIN_S, drain=5.0)
    async with run_fleet(plan, "127.0.0.1:0", _ignore, lambda _text: None, stop) as fleet:
        yield broker, fleet.processes[0].management


async def read_instance(management: str) -> Sample:
    """The metrics of the instance. Raises CommandFailed when it does not answer."""
    sample = await scrape([management], ANSWER_S)
    if sample.unready.get(management) == "does not answer":
        raise CommandFailed(f"the instance at {parse_address(management)[1]} does not answer", "fewer events a second")
    return sample


def _write(folder: Path, path: Path, text: str) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _ignore(_level: str, _text: str) -> None:
    """Warnings of the instance are in its log only."""


MAX_BATCHES_IN_FLIGHT = 1000
"""Batches that wait for the log. Events offered beyond that are not made."""
_MARK = b'"filler":'
"""Occurs once in each event."""


@asynccontextmanager
async def expel_rig(folder: Path, shape: LoadShape, stop: Stop) -> AsyncIterator[Rig]:
    """As `Rig`, until the context is left."""
    port, receiver = free_port(), _CountingReceiver()
    async with (
        receiver.listen(port),
        one_instance("expel", "services.expel", folder, port, shape, ("--allow-networks", "127.0.0.0/8"), stop) as (
            url,
            management,
        ),
        open_broker(url) as broker,
        Producer(broker.appender) as producer,
        asyncio.TaskGroup() as group,
    ):
        feed = _StreamLoad(producer, shape, group)

        async def totals() -> tuple[float, float]:
            return receiver.events, (await read_instance(management)).total("process_cpu_seconds_total")

        async def behind() -> int:
            return max(0, feed.on_the_way + feed.stored - receiver.events)

        yield Rig(feed.offer, lambda: feed.stored, totals, behind)


class _StreamLoad:
    """Writes events to the stream, for each call one batch per partition. Events that the log refuses do not count as made."""

    def __init__(self, producer: Producer, shape: LoadShape, group: asyncio.TaskGroup) -> None:
        self._producer, self._size, self._group = producer, shape.size, group
        self._batches = self._number = 0
        self.stored = self.on_the_way = 0

    def offer(self, count: int) -> None:
        """As `Rig.offer`."""
        if count < 1 or self._batches >= MAX_BATCHES_IN_FLIGHT:
            return
        now = int(time.time() * 1000)
        arrival = str(now).encode()
        records = [
            Record(f"k{n % 1009}".encode(), payload(n, self._size), now, _headers(n, arrival))
            for n in range(self._number, self._number + count)
        ]
        self._number += count
        self.on_the_way += count
        self._batches += 1
        self._group.create_task(self._send(records))

    async def _send(self, records: list[Record]) -> None:
        try:
            result = await self._producer.send("rated", records)
            self.stored += sum(part.count - len(part.failed) for part in result.parts)
        except BrokerError:
            await asyncio.sleep(0.1)
        finally:
            self._batches -= 1
            self.on_the_way -= len(records)


def payload(number: int, size: int) -> bytes:
    """A JSON object of about `size` bytes."""
    head = f'{{"id":"e{number}",{_MARK.decode()}"'
    return (head + "x" * max(0, size - len(head) - 2) + '"}').encode()


def _headers(number: int, arrival: bytes) -> tuple[tuple[str, bytes], ...]:
    return (ID, f"e{number}".encode()), (ARRIVAL, arrival), (ORIGIN, Origin("rate", 0, number).pack())


class _CountingReceiver:
    """Answers at once and counts events. Expel's own counter is up to a second late."""

    def __init__(self) -> None:
        self.events = 0

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[None]:
        app = web.Application(client_max_size=20_000_000)
        app.router.add_post("/{path:.*}", self._handle)
        async with serve_app(app, f"127.0.0.1:{port}"):
            yield

    async def _handle(self, request: web.Request) -> web.Response:
        self.events += (await request.read()).count(_MARK)
        return web.Response(status=204)


MAX_REQUESTS_IN_FLIGHT = 500
"""Unanswered requests. Requests beyond that are not sent: the instance is too slow."""
TIMEOUT = aiohttp.ClientTimeout(total=30.0)
CONNECTIONS = 64


@asynccontextmanager
async def ingest_rig(folder: Path, shape: LoadShape, stop: Stop) -> AsyncIterator[Rig]:
    """As `Rig`, until the context is left."""
    listen = f"127.0.0.1:{free_port()}"
    async with (
        one_instance("ingest", "services.ingest", folder, free_port(), shape, ("--listen", listen), stop) as (
            _url,
            management,
        ),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS), timeout=TIMEOUT) as session,
        asyncio.TaskGroup() as group,
    ):
        client = _Client(session, f"http://{listen}/v1/streams/rated/events", shape, group)

        async def totals() -> tuple[float, float]:
            sample = await read_instance(management)
            return sample.total("penstock_ingest_events_accepted_total"), sample.total("process_cpu_seconds_total")

        async def behind() -> int:
            return client.under_way * shape.batch

        yield Rig(client.offer, lambda: client.made, totals, behind)


class _Client:
    """Acts as many clients: requests of `batch` events each."""

    def __init__(self, session: aiohttp.ClientSession, url: str, shape: LoadShape, group: asyncio.TaskGroup) -> None:
        self._session, self._url, self._batch, self._group = session, url, shape.batch, group
        self._owed = 0
        self._body = b"[" + b",".join(payload(n, shape.size) for n in range(shape.batch)) + b"]"
        self.under_way = self.made = 0

    def offer(self, count: int) -> None:
        """As `Rig.offer`. A remainder smaller than a request waits for the next call."""
        self._owed += count
        while self._owed >= self._batch:
            self._owed -= self._batch
            self.made += self._batch
            if self.under_way < MAX_REQUESTS_IN_FLIGHT:
                self.under_way += 1
                self._group.create_task(self._post())

    async def _post(self) -> None:
        """Refused and lost requests are not counted here: ingest's own metric counts the accepted events."""
        try:
            async with self._session.post(
                self._url, data=self._body, headers={"Content-Type": "application/json"}
            ) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0.1)
        finally:
            self.under_way -= 1


RIGS: Mapping[str, Callable[[Path, LoadShape, Stop], AbstractAsyncContextManager[Rig]]] = {
    "expel": expel_rig,
    "ingest": ingest_rig,
}
WARM_UP_S = 2.0


async def run_rating(
    service: str, shape: LoadShape, first: float, seconds: float, stop: Stop, show: Callable[[RatingStep], None]
) -> list[RatingStep]:
    """Run all steps in order, calling `show` after each. Removes the temporary log (up to some GB). Raises CommandFailed.

    first: the first rate, events per second. seconds: the length of each step.
    """
    steps: list[RatingStep] = []
    made = await asyncio.to_thread(TemporaryFolder, "rate")
    try:
        async with RIGS[service](made.folder, shape, stop) as rig:
            await run_step(rig, first, WARM_UP_S, stop)  # not measured: it opens connections and compiles code
            while (rate := next_rate(steps, first)) is not None:
                steps.append(await run_step(rig, rate, seconds, stop))
                show(steps[-1])
    finally:
        await asyncio.to_thread(made.remove)
    return steps
