"""The whole path under random kills, for minutes: python -m tests.faults.soak --minutes 10 --rate 2000

`penstock up` runs two ingest, two expel and Spark; one pipe goes straight to a receiver, one through a transform. Every few
seconds one process is killed or frozen for a moment; on Kafka brokers are killed, too, one at a time. Then the faults end,
everything must arrive, and the table is printed. Exit status 1 when anything was lost, altered or should not have come.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import psutil

from services.core.broker.connect import open_broker
from services.core.jvm.child import start_child, stop_child
from services.core.jvm.kafka import KafkaCluster
from services.fleet.folder import ProcessState, read_state
from tests.faults import (
    registry_storm,
    soak_cluster,
    soak_doubt,
    soak_fidelity,
    soak_incidents,
    soak_migration,
    soak_outage,
)
from tests.faults.fleet import wait_until
from tests.faults.sender import Sender
from tests.faults.sink import Sink, open_sink
from tests.faults.soak_strikes import run_strikes
from tests.faults.trial import BACKENDS, RSS_LIMIT, read_dead_letters
from tests.fuzz import schemas
from tests.support.fault_table import HEAD, Row
from tests.support.oracle import Fate, Ledger
from tests.support.ports import free_port
from tests.upgrade import rolling

STREAM = "events"
COLUMNS = "id STRING, key STRING, time BIGINT, fill STRING"
SQL = f"SELECT event, id, key, time, fill FROM {STREAM}"
GAP = (3.0, 9.0)
"""Seconds between two faults."""
TRANSFORM_WEIGHT = 0.3
"""How often Spark is struck for each time that another process is: it needs 10 to 40 s to start, and would never get there."""
LONG_FREEZES = ((0.25, 30.0), (0.5, 120.0))
"""(when, as a share of the run; seconds): one expel hangs for so long. Meanwhile the others are frozen for moments, and
brokers are killed."""
MOST_TWICE = 0.01
"""Duplicates, as a share of what was acknowledged, that a run may have."""
SETTLE_S = 300.0
TELL_S = 30.0


@dataclass
class Soak:
    """What one run knows. `peaks`: highest RSS by process name, in bytes; Spark's with its Java and its workers."""

    folder: Path
    chance: random.Random
    straight: Sink
    through: Sink
    sender: Sender
    cluster: KafkaCluster | None
    faults: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    supervised: bool = True

    @property
    def ledger(self) -> Ledger:
        """Of the pipe without a transform."""
        return self.straight.ledger

    async def strike(self) -> None:
        """One fault: kill -9 (mostly), or a freeze of up to three seconds. Without its supervisor only the latter."""
        if self.cluster is not None and self.chance.random() < 0.15:
            await self._kill_broker(self.cluster)
            return
        running = [one for one in await self._running() if one.pid not in self.frozen]
        if not running:
            return
        weights = [TRANSFORM_WEIGHT if one.service == "transform" else 1.0 for one in running]
        (victim,) = self.chance.choices(running, weights)
        assert victim.pid is not None
        with suppress(ProcessLookupError):  # it ended just now
            if self.chance.random() < 0.2 or not self.supervised:
                self.frozen.add(victim.pid)
                try:
                    os.kill(victim.pid, signal.SIGSTOP)
                    await asyncio.sleep(self.chance.uniform(0.5, 3))
                    os.kill(victim.pid, signal.SIGCONT)
                finally:
                    self.frozen.discard(victim.pid)
                self.faults[f"freeze {victim.service}"] += 1
            else:
                os.kill(victim.pid, signal.SIGKILL)
                self.faults[f"kill {victim.service}"] += 1

    async def _running(self) -> list[ProcessState]:
        state = await asyncio.to_thread(read_state, self.folder / "data")
        return [one for one in state.processes if one.pid] if state is not None else []

    async def freeze_long(self, wait: float, seconds: float) -> None:
        """After `wait` seconds, stop one expel for so long, and its supervisor, which would end it. It counts as a fault when it
        was still stopped at the end."""
        await asyncio.sleep(wait)
        while not await self._freeze_one(seconds):
            await asyncio.sleep(0.5)

    async def _freeze_one(self, seconds: float) -> bool:
        """Whether there was an expel to freeze."""
        expels = [one.pid for one in await self._running() if one.service == "expel" and one.pid not in self.frozen]
        try:
            victim = psutil.Process(expels[0])
            supervisor = psutil.Process(victim.ppid())
        except (IndexError, psutil.NoSuchProcess):  # it is being started again
            return False
        self.frozen.add(victim.pid)
        self.supervised = False
        try:
            for each in (supervisor, victim):
                each.suspend()
            await asyncio.sleep(seconds)
            if victim.status() == psutil.STATUS_STOPPED:
                self.faults[f"freeze expel {seconds:.0f} s"] += 1
        finally:
            self.supervised = True
            self.frozen.discard(victim.pid)
            for each in (supervisor, victim):
                with suppress(psutil.NoSuchProcess):
                    each.resume()
        return True

    async def _kill_broker(self, cluster: KafkaCluster) -> None:
        node = self.chance.choice(list(cluster.brokers))
        await asyncio.to_thread(cluster.kill, node)
        self.faults["kill broker"] += 1
        await asyncio.sleep(self.chance.uniform(0, 3))
        await asyncio.to_thread(cluster.restart)

    async def strike_until(self, end: float) -> None:
        """Faults until this moment (monotonic); each third is followed until a fresh event got through both pipes."""
        while time.monotonic() < end:
            await asyncio.sleep(self.chance.uniform(*GAP))
            struck = time.monotonic()
            await self.strike()
            if self.chance.random() < 0.33:
                number = await self.sender.insist_on_one()
                await wait_until(lambda n=number: self.straight.ledger.arrived(n), SETTLE_S)
                self.recoveries.append(time.monotonic() - struck)

    async def watch(self) -> None:
        """Sample memory and tell how it goes, until cancelled."""
        told = time.monotonic()
        while True:
            await asyncio.to_thread(self._sample)
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                print(self.text(), flush=True)
            await asyncio.sleep(0.5)

    def _sample(self) -> None:
        state = read_state(self.folder / "data")
        for one in state.processes if state is not None else ():
            with suppress(psutil.Error):
                process = psutil.Process(one.pid) if one.pid else None
                family = [process, *process.children(recursive=True)] if process is not None else []
                rss = sum(member.memory_info().rss for member in family)
                self.peaks[one.name] = max(self.peaks[one.name], rss)

    def text(self) -> str:
        """How it goes, on one line."""
        acknowledged = self.ledger.count(Fate.OBLIGED)
        waiting = len(self.ledger.lost()), len(self.through.ledger.lost())
        return f"{acknowledged} acknowledged, {waiting} on their way, faults {dict(self.faults)}"

    def row(self, name: str, sink: Sink, broker: str, seed: int) -> Row:
        """The table's row of one pipe."""
        own, again = sink.ledger.duplicates()
        return Row(
            fault=name,
            broker=broker,
            acknowledged=sink.ledger.count(Fate.OBLIGED),
            delivered=sum(1 for count in sink.ledger.arrivals if count),
            dead=len(sink.ledger.dead),
            duplicates=own,
            sent_again=again,
            lost=len(sink.ledger.lost()),
            recovery=max(self.recoveries, default=None),
            gap=self.sender.longest_gap(self.sender.acks[0][0], self.sender.acks[-1][0]) if self.sender.acks else None,
            peak_rss={name: round(peak / 1e6) for name, peak in self.peaks.items()},
            seed=seed,
            answers={str(status): count for status, count in sorted(self.sender.answers.items())},
        )


def write_pipes(folder: Path, straight: str, through: str) -> Path:
    """The pipe file: one stream, two pipes."""
    batch = {"max_events": 100, "max_wait": "20ms"}
    retry = {"attempts": 20}

    def pipe(url: str, **more: object) -> dict[str, object]:
        hook = {"url": url, "batch": batch, "retry": retry}
        return {"sources": [STREAM], **more, "destinations": [{"name": "hook", "webhook": hook}]}

    stream = {"id": "id", "key": "key", "time": "time", "columns": COLUMNS}
    pipes = {"straight": pipe(straight), "through": pipe(through, transform={"sql": SQL})}
    path = folder / "pipes.yaml"
    path.write_bytes(orjson.dumps({"streams": {STREAM: stream}, "pipes": pipes}))
    return path


@asynccontextmanager
async def run_up(folder: Path, pipes: Path, broker: str, listen: str, observer: str) -> AsyncIterator[None]:
    """`penstock up`, ready; drained and stopped at the end."""
    command = [sys.executable, "-m", "services.fleet", "up", "--broker", broker, "--data", str(folder / "data")]
    command += ["--pipes", str(pipes), "--listen", listen, "--allow-networks", "127.0.0.0/8"]
    command += ["--observer", observer, "--ingest", "2", "--expel", "2"]
    log = folder / "up.log"
    child = await asyncio.to_thread(start_child, command, log=log)
    try:

        def runs() -> bool:
            assert child.poll() is None, log.read_text()[-3000:]
            return "Penstock runs" in log.read_text()

        await wait_until(runs, SETTLE_S)
        yield
    finally:
        await asyncio.to_thread(stop_child, child, grace_s=60.0)


async def soak(minutes: float, rate: float, seed: int, folder: Path, *, kafka: bool, fidelity: bool) -> int:
    """Run it and print the table. The exit status."""
    listen, observer = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    ledger = Ledger(f"soak-{seed}")
    async with AsyncExitStack() as stack:
        cluster = await asyncio.to_thread(KafkaCluster, folder / "kafka") if kafka else None
        if cluster is not None:
            stack.callback(cluster.stop, grace_s=0)
            await asyncio.to_thread(cluster.start)
        broker = f"kafka://{cluster.bootstrap}" if cluster is not None else f"log://{folder / 'data' / 'log'}"
        more = await _lose_some(folder, broker, seed) if fidelity else []
        straight = await stack.enter_async_context(open_sink(ledger, seed))
        through = await stack.enter_async_context(open_sink(ledger.twin(), seed, by_value=True))
        straight.keeps_order = through.keeps_order = False
        sender = Sender(ledger, f"http://{listen}/v1/streams/{STREAM}/events", seed, rate=rate, batch=50, workers=8)
        run = Soak(folder, random.Random(seed), straight, through, sender, cluster)
        pipes = write_pipes(folder, straight.url, through.url)
        await stack.enter_async_context(run_up(folder, pipes, broker, listen, observer))
        watch = asyncio.create_task(run.watch())
        try:
            settled = await _load_and_settle(run, minutes)
        finally:
            watch.cancel()
        if fidelity:
            for name in ("straight", "through"):
                more += await soak_fidelity.judge_quiet(observer, name, run.ledger.count(Fate.OBLIGED))
        backend = await stack.enter_async_context(open_broker(broker))
        for name, sink in (("straight", straight), ("through", through)):
            await read_dead_letters(backend, f"{name}.dead", sink.ledger)
        if not settled:
            more.append(f"not everything arrived within {SETTLE_S:.0f} s after the last fault")
        return _judge(run, minutes, rate, broker.partition(":")[0], seed, more)


async def _lose_some(folder: Path, broker: str, seed: int) -> list[str]:
    """On a log of its own; on the same Kafka, which it leaves some topics."""
    own = folder / "lossy"
    own.mkdir()
    return await soak_fidelity.lose_among_many(own, broker if broker.startswith("kafka") else None, seed)


async def _load_and_settle(run: Soak, minutes: float) -> bool:
    """Send under faults, then wait until everything arrived. Whether it did in time."""
    stopping = asyncio.Event()
    sending = asyncio.create_task(run.sender.run(stopping))
    lasts = 60 * minutes
    freezes = [asyncio.create_task(run.freeze_long(*one)) for one in _long_freezes(lasts)]
    await run.strike_until(time.monotonic() + lasts)
    await asyncio.gather(*freezes)
    stopping.set()
    await sending
    await run.sender.insist_on_one()
    with suppress(AssertionError):
        await wait_until(lambda: not run.ledger.lost() and not run.through.ledger.lost(), SETTLE_S)
        await asyncio.sleep(2)
        return True
    return False


def _long_freezes(lasts: float) -> list[tuple[float, float]]:
    """(when, for how long), in seconds: those that a run of so many seconds has time for."""
    return [(share * lasts, seconds) for share, seconds in LONG_FREEZES if share * lasts + seconds < lasts]


def _judge(run: Soak, minutes: float, rate: float, broker: str, seed: int, complaints: list[str]) -> int:
    print(f"\n{minutes:g} minutes at {rate:g} events/s, faults: {dict(run.faults)}, seed {seed}")
    print(HEAD)
    for name, sink in (("soak, straight", run.straight), ("soak, through Spark", run.through)):
        row = run.row(name, sink, broker, seed)
        print(row.text())
        complaints += [f"{name}: {text}" for text in sink.ledger.complaints()]
        if row.share > MOST_TWICE:
            complaints.append(f"{name}: {row.share:.2%} came twice")
    for name, peak in run.peaks.items():
        if peak > RSS_LIMIT and not name.startswith("transform"):
            complaints.append(f"{name} took {peak / 1e6:.0f} MB")
    if not run.faults:
        complaints.append("no fault struck: the run proves nothing")
    for _, seconds in _long_freezes(minutes * 60):
        if not run.faults[f"freeze expel {seconds:.0f} s"]:
            complaints.append(f"no expel was frozen for {seconds:.0f} s and went on")
    if run.recoveries:
        print(
            f"recovery: median {sorted(run.recoveries)[len(run.recoveries) // 2]:.1f} s, worst {max(run.recoveries):.1f} s"
        )
    for text in complaints:
        print("FAILED:", text)
    return 1 if complaints else 0


def _registry(arguments: argparse.Namespace) -> int:
    if arguments.fuzz_schemas:
        return schemas.run(arguments.fuzz_schemas, arguments.seed)
    return registry_storm.run(arguments.registrations, arguments.store, arguments.seed)


def _whole_path(arguments: argparse.Namespace) -> int:
    print("seed", arguments.seed, flush=True)
    with tempfile.TemporaryDirectory(prefix="penstock-soak-", ignore_cleanup_errors=True) as folder:
        kafka, fidelity = arguments.broker == "kafka", arguments.fidelity
        run = soak(arguments.minutes, arguments.rate, arguments.seed, Path(folder), kafka=kafka, fidelity=fidelity)
        status = asyncio.run(run)
        if status:
            kept = Path(f"{folder}-kept")
            Path(folder).rename(kept)
            print(f"what the services said is in {kept}")
            Path(folder).mkdir()
        return status


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="make soak", description="The whole path under random kills.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=float, default=2000, help="events per second")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--broker", choices=["log", "kafka", "kinesis"], default="log")
    parser.add_argument("--strikes", type=int, help="instead: so many kills, freezes and partitions, one a second")
    parser.add_argument(
        "--fidelity", action="store_true", help="does the observer name what is lost, and nothing else?"
    )
    parser.add_argument(
        "--incidents", help="instead: incidents under Prometheus; all, or parts of names, comma-separated"
    )
    parser.add_argument("--at-once", type=int, default=4, help="incidents at a time, each with a fleet of its own")
    parser.add_argument("--cluster", type=int, help="instead: so many kills on a Spark cluster")
    parser.add_argument("--migrations", type=int, help="instead: so many histories of a stream that moves under kills")
    parser.add_argument("--registrations", type=int, help="instead: so many, at four registries that are killed")
    parser.add_argument("--store", choices=["folder", "s3"], default="folder", help="with --registrations")
    parser.add_argument("--fuzz-schemas", type=float, help="instead: so many seconds of damaged schemas and requests")
    parser.add_argument("--outage", action="store_true", help="instead: a failing receiver, retrier and expel killed")
    parser.add_argument(
        "--doubt", action="store_true", help="instead: brokers frozen and cut off, batches of equal size"
    )
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="instead: services replaced, from the last release to this version and back",
    )
    parser.add_argument("--transform", action="store_true", help="with --upgrade: through Spark, too")
    arguments = parser.parse_args()
    assert BACKENDS
    if arguments.broker == "kinesis" and not (arguments.strikes or arguments.migrations):
        parser.error("--broker kinesis goes with --strikes or --migrations")
    if arguments.upgrade:
        more = {"kafka": arguments.broker == "kafka", "transform": arguments.transform}
        return rolling.main(arguments.minutes, arguments.rate, arguments.seed, **more)
    if arguments.strikes:
        return run_strikes(arguments.broker, arguments.strikes, arguments.rate, arguments.seed)
    if arguments.registrations or arguments.fuzz_schemas:
        return _registry(arguments)
    if arguments.incidents:
        return soak_incidents.run(arguments.incidents, arguments.at_once)
    if arguments.migrations:
        return soak_migration.run(arguments.broker, arguments.migrations, arguments.rate, arguments.seed)
    if arguments.cluster:
        return soak_cluster.run(arguments.cluster, arguments.rate, arguments.seed)
    if arguments.doubt:
        return soak_doubt.run(arguments.minutes, arguments.seed)
    if arguments.outage:
        return soak_outage.run(arguments.minutes, arguments.rate, arguments.seed, kafka=arguments.broker == "kafka")
    return _whole_path(arguments)


if __name__ == "__main__":
    sys.exit(main())
