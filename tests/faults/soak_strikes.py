"""Thousands of kills, freezes and partitions on one fleet: make soak ARGS="--strikes 2000 --broker kinesis"

Two ingest, two expel and a global retrier run on one broker, without a transform. About once a second a process is
killed and started again, or frozen for less or for more than its lease lasts; or the link between expel and the receiver is
reset or refuses, and so is the link to Kinesis; of three Kafka brokers one is killed or frozen. Then the faults end, everything
must arrive, and the table is printed. Exit status 1 when anything was lost, altered, should not have come, or came twice
too often.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import backoff

from services.core.aws_emulator import CREDENTIALS, AwsEmulator, kinesis_url
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.reading import read_topic
from services.core.event import read_id
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.topic_names import retry_topic
from services.core.undelivered.retry_state import PREFIX
from tests.faults.fleet import Service, wait_until
from tests.faults.trial import Trial, open_trial
from tests.support.fault_table import HEAD
from tests.support.oracle import Fate
from tests.support.tcp_proxy import TcpProxy, open_proxy

KILLS, LINKS, BROKERS = 0.14, 0.08, 0.02
"""The share of each kind among the strikes; the others are freezes. A kill costs a start, which costs a second of CPU."""
GAP = (0.1, 1.9)
"""Seconds between two strikes: one a second on average, so that each of the five processes has the 5 s that it may take to be
ready again (FAULTS, row 1). Kills take longer than that on a busy machine, so strikes overlap all the same."""
FREEZE, OUTAGE = (0.02, 1.0), (0.02, 0.8)
"""How long a process is frozen and a link refuses, in seconds."""
LONG_FREEZE, LONG_SHARE = 13.0, 0.004
"""Longer than a silent member keeps its partitions, and how often."""
BROKER_FREEZE = (0.2, 5.0)
MOST_TWICE = 0.01
RETRY: object = {"attempts": 3, "base": "50ms", "max_wait": "500ms"}
SCHEDULE: object = ["1s", "2s", "5s", "5s", "5s", "10s", "10s", "10s", "30s", "30s"]
_COMMIT_INTERVAL = "20ms"
_FAILS = 0.01
ANSWER_S = 1.5
"""An answer takes so long at most, also of a process that is frozen for up to a second."""
SETTLE_S = 300.0
"""For what waits with the global retrier at the end."""
_TELL_S = 30.0


@dataclass
class Strikes:
    """One run. links: by name. count: strikes that are over, by kind. spared: names of those that are struck now.

    struck: (begin in monotonic seconds, whose, kind) of each strike.
    """

    trial: Trial
    cluster: KafkaCluster | None
    links: dict[str, TcpProxy]
    count: Counter[str] = field(default_factory=Counter)
    spared: set[str] = field(default_factory=set)
    struck: list[tuple[float, str, str]] = field(default_factory=list)

    async def run(self, wanted: int) -> None:
        """So many strikes; returns when all are over and every process is ready."""
        told = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while self.count.total() < wanted:
                await asyncio.sleep(self.trial.chance.uniform(*GAP))
                self._strike(group)
                if time.monotonic() - told > _TELL_S:
                    told = time.monotonic()
                    print(self.text(), flush=True)
        for service in self.trial.fleet.services.values():
            await service.wait_ready()

    def _strike(self, group: asyncio.TaskGroup) -> None:
        """One strike of a random kind at somebody whom nothing else strikes now; it goes on in a task."""
        chance = self.trial.chance
        kind = chance.random()
        if kind < LINKS:
            name = chance.choice(sorted(self.links))
            self._begin(group, f"link {name}", self._break_link(self.links[name]))
        elif kind < LINKS + BROKERS and self.cluster is not None:
            self._begin(group, "broker", self._strike_broker(self.cluster))
        else:
            service = chance.choice(list(self.trial.fleet.services.values()))
            killed = kind > 1 - KILLS
            work = self._kill(service) if killed else self._freeze(service)
            self._begin(group, service.name, work)

    def _begin(self, group: asyncio.TaskGroup, name: str, work: Coroutine[None, None, str]) -> None:
        if name in self.spared:
            work.close()
            return
        self.spared.add(name)

        async def strike() -> None:
            begun = time.monotonic()
            kind = await work
            self.spared.discard(name)
            self.count[kind] += 1
            self.struck.append((begun, name, kind))

        group.create_task(strike())

    async def _kill(self, service: Service) -> str:
        await service.kill()
        await service.start()
        await service.wait_ready()
        return f"kill {service.module.rpartition('.')[2]}"

    async def _freeze(self, service: Service) -> str:
        chance = self.trial.chance
        is_long = chance.random() < LONG_SHARE
        with suppress(ProcessLookupError):
            service.send(signal.SIGSTOP)
            await asyncio.sleep(LONG_FREEZE if is_long else chance.uniform(*FREEZE))
            service.send(signal.SIGCONT)
        return f"{'long freeze' if is_long else 'freeze'} {service.module.rpartition('.')[2]}"

    async def _break_link(self, link: TcpProxy) -> str:
        link.refuses = self.trial.chance.random() < 0.5
        link.cut()
        await asyncio.sleep(self.trial.chance.uniform(*OUTAGE))
        link.refuses = False
        return "partition"

    async def _strike_broker(self, cluster: KafkaCluster) -> str:
        """One at a time: two of three must have every record."""
        broker = self.trial.chance.choice(list(cluster.brokers.values()))
        if self.trial.chance.random() < 0.25:
            await asyncio.to_thread(cluster.kill, broker.node.node_id)
            await asyncio.to_thread(cluster.restart, broker.node.node_id)
            return "kill broker"
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGSTOP)
        await asyncio.sleep(self.trial.chance.uniform(*BROKER_FREEZE))
        os.kill(broker.pid, signal.SIGCONT)
        return "freeze broker"

    def cause(self, first: float, worker: str, again: float, other: str) -> str:
        """Why an event came from `worker` at `first`, and at `again` from `other`, although it was stored once."""
        if any(first <= at <= again and name == worker and kind.startswith("kill") for at, name, kind in self.struck):
            return "killed before the commit"
        if any(first - 0.1 <= at <= first + ANSWER_S and name == "link receiver" for at, name, _ in self.struck):
            return "answer lost"
        return "moved" if worker != other else "other"

    def strikes_of(self, causes: Mapping[str, int]) -> list[tuple[str, int]]:
        """The strikes that may have had each of these effects (`cause`). The share of duplicates is the sum, over the causes, of
        strikes a second x the time in which as many events are delivered as one strike repeats."""
        kinds = Counter(kind for _, _, kind in self.struck)
        links = sum(name == "link receiver" for _, name, _ in self.struck)
        found = {"killed before the commit": kinds["kill expel"], "answer lost": links}
        return [(cause, strikes) for cause, strikes in found.items() if causes.get(cause) and strikes]

    def text(self) -> str:
        """How it goes, on one line."""
        ledger = self.trial.ledger
        waiting = f"{len(ledger.lost())} on their way"
        return f"{ledger.count(Fate.OBLIGED)} acknowledged, {waiting}, {self.count.total()} strikes {dict(self.count)}"


async def _run(broker: str, wanted: int, rate: float, seed: int, folder: Path) -> int:
    async with AsyncExitStack() as stack:
        cluster, links, url = None, dict[str, TcpProxy](), f"log://{folder / 'data'}"
        if broker == "kafka":
            cluster = KafkaCluster(folder / "kafka")
            stack.callback(cluster.stop, grace_s=0)
            await asyncio.to_thread(cluster.start)
            url = f"kafka://{cluster.bootstrap}"
        elif broker == "kinesis":
            emulator = AwsEmulator(folder / "aws")
            stack.callback(emulator.stop)
            await asyncio.to_thread(emulator.start)
            os.environ |= CREDENTIALS
            links["kinesis"] = await stack.enter_async_context(open_proxy("127.0.0.1", _port_of(emulator.endpoint)))
            url = kinesis_url(f"http://127.0.0.1:{links['kinesis'].port}", emulator.dynamodb)
        name = f"{wanted} strikes"
        opening = open_trial(name, url, folder, seed=seed, rate=rate, retry=RETRY, schedule=SCHEDULE, timeout="5s")
        trial = await stack.enter_async_context(opening)
        traces: dict[int, list[tuple[float, str]]] = {}
        trial.sink.fail, trial.sink.keeps_order, trial.sink.traces = _FAILS, False, traces
        links["receiver"] = await stack.enter_async_context(open_proxy("127.0.0.1", _port_of(trial.sink.url)))
        trial.webhook["url"] = f"http://127.0.0.1:{links['receiver'].port}/hook"
        starting = [trial.start_ingest(f"ingest-{number}") for number in (1, 2)]
        starting += [trial.start_expel(f"expel-{number}", "--commit-interval", _COMMIT_INTERVAL) for number in (1, 2)]
        await asyncio.gather(*starting)
        await trial.start_retrier()
        run = Strikes(trial, cluster, links)
        began = time.monotonic()
        async with trial.load():
            await run.run(wanted)
        took = time.monotonic() - began
        await trial.settle()
        with suppress(AssertionError):  # the judge says what is missing then
            await wait_until(lambda: not trial.ledger.lost(), SETTLE_S)
        causes, copies = await find_causes(run)
        print(f"of those that came twice: {causes}; {copies} second copies in the topics")
        for cause, strikes in run.strikes_of(causes):
            each = causes[cause] / strikes
            window = 1000 * each * took / len(traces)
            print(f"{cause}: {strikes} strikes, {each:.1f} each, as many as the fleet delivers in {window:.0f} ms")
        return _judge(run, took)


async def find_causes(run: Strikes) -> tuple[dict[str, int], int]:
    """(the deliveries beyond the first, by cause; the second copies that the topics hold), of events that the client sent once.

    stored twice: the topics hold so many more copies: puts whose outcome was unknown, repeated. The others were delivered by a
    process that was killed before it committed; or the receiver's link was cut within ANSWER_S, so that the answer was lost; or
    their partition moved to another process. other: none of these.
    """
    trial = run.trial
    copies: Counter[str] = Counter()
    for topic in (trial.stream, retry_topic(trial.pipe)):
        copies += await _count_copies(trial.broker, topic)
    causes: Counter[str] = Counter()
    extra = 0
    assert trial.sink.traces is not None
    for number, came in trial.sink.traces.items():
        if trial.ledger.sends[number] > 1:
            continue
        stored = copies[trial.ledger.event_id(number)]
        extra += stored
        for (first, worker), (again, other) in pairwise(came):
            if stored > 0:
                stored -= 1
                causes["stored twice"] += 1
            else:
                causes[run.cause(first, worker, again, other)] += 1
    return dict(causes), extra


@backoff.on_exception(backoff.expo, BrokerError, max_value=5, max_time=SETTLE_S)
async def _count_copies(broker: Broker, topic: str) -> Counter[str]:
    """How many copies the topic holds beside the first, by id. Each round of retries is a record of its own."""
    copies: Counter[tuple[str, bytes | None]] = Counter()
    for partition, held in (await broker.reader.describe(topic)).items():
        async for batch in read_topic(broker.reader, topic, partition, held):
            copies.update((read_id(record) or "", record.header(PREFIX + "rounds")) for record in batch.records)
    found: Counter[str] = Counter()
    for (name, _), count in copies.items():
        found[name] += count - 1
    return +found


def _judge(run: Strikes, took: float) -> int:
    trial = run.trial
    row = trial.row()
    complaints = trial.ledger.complaints()
    if row.share > MOST_TWICE:
        complaints.append(f"{row.share:.2%} came twice")
    if not trial.sender.errors:
        complaints.append("no request failed: the strikes never bit")
    print(f"\n{run.count.total()} strikes in {took / 60:.1f} minutes: {dict(run.count)}, seed {trial.seed}")
    print(HEAD)
    print(row.text())
    for text in complaints:
        print("FAILED:", text)
    return 1 if complaints else 0


def _port_of(url: str) -> int:
    return int(url.removeprefix("http://").partition("/")[0].rpartition(":")[2])


def run_strikes(broker: str, wanted: int, rate: float, seed: int) -> int:
    """Run it and print the table. The exit status; what the services said is kept where it is not 0."""
    print("seed", seed, flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-strikes-", ignore_cleanup_errors=True) as folder:
        status = 1
        try:
            status = asyncio.run(_run(broker, wanted, rate, seed, Path(folder)))
        finally:
            if status:
                kept = Path(f"{folder}-kept")
                Path(folder).rename(kept)
                print(f"what the services said is in {kept}", file=sys.stderr)
                Path(folder).mkdir()
        return status
