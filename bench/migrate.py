"""A live stream moves under its whole fleet: ingest takes events over HTTP, expel delivers them, the observer counts.

python -m bench.migrate [--events N] [--rate N] [--to log|kafka|kinesis]: from the log to another log, to Kafka or to the emulator
of Kinesis, by the real command. The floor is of the same run: the same records, read and appended without anything else.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import orjson

from bench.delivery import make_secret
from bench.events import make_body
from bench.processes import Child, free_port
from bench.setup import send_load, tell
from services.core.aws_emulator import CREDENTIALS, AwsEmulator
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.producer import Producer
from services.core.fleet_broker import open_fleet_broker
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics

PARTITIONS, PAGE = 4, 1000
SIZE = 100
"""Events in a request."""
PATIENCE_S = 600.0
PIPES = """version: 1
brokers: {{b: "{target}"}}
streams: {{s: {{id: id, key: user, time: time, partitions: {partitions}}}}}
pipes:
  p:
    sources: [s]
    destinations:
      - {{name: sink, webhook: {{url: "{sink}", secret: {{file: {secret}}}, body: json}}}}
"""


class Load:
    """Sends events at a rate, whatever the answers take. longest: from the first attempt of a request until it was accepted."""

    def __init__(self, url: str, rate: int) -> None:
        self._url, self._rate = url, rate
        self.sent, self.longest, self.refused = 0, 0.0, 0

    async def run(self, session: aiohttp.ClientSession, until: asyncio.Event) -> None:
        """Until the event is set, and every answer is there."""
        begin, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while not until.is_set():
                group.create_task(self._post(session))
                number += 1
                await asyncio.sleep(max(0.0, begin + number * SIZE / self._rate - time.monotonic()))

    async def _post(self, session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        while True:
            kind = {"Content-Type": "application/json"}
            async with session.post(self._url, data=make_body(SIZE), headers=kind) as answer:
                if answer.status == 200:
                    break
                if answer.status != 503:
                    raise RuntimeError(f"refused: {answer.status} {await answer.text()}")
            self.refused += 1
            await asyncio.sleep(0.02)
        self.sent += SIZE
        self.longest = max(self.longest, time.monotonic() - began)


async def _move(pipes: Path, broker: str, url: str, rate: int) -> tuple[Load, dict[str, Any], float]:
    """Migrate under load. The load, what the command says, and its seconds."""
    load, over = Load(url, rate), asyncio.Event()
    command = [sys.executable, "-m", "services.fleet", "migrate", "s", "--to", "b", "--json"]
    command += ["--pipes", str(pipes), "--broker", broker]
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        group.create_task(load.run(session, over))
        await asyncio.sleep(2)
        began = time.monotonic()
        moving = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await moving.communicate()
        seconds = time.monotonic() - began
        if moving.returncode != 0:
            raise RuntimeError("the migration failed; its reason is above")
        await asyncio.sleep(2)
        over.set()
    return load, orjson.loads(said), seconds


async def _floor(url: str, pipes: Path, own: str) -> float:
    """Seconds to read all partitions and to append them elsewhere, in pages."""
    file = await asyncio.to_thread(load_pipes, pipes)
    async with (
        open_fleet_broker(own, file) as source,
        open_broker(url) as target,
        Producer(target.appender) as producer,
    ):
        await target.admin.create_topic(TopicSpec("s", PARTITIONS))
        began = time.monotonic()
        await asyncio.gather(*(_pump(source, producer, partition) for partition in range(PARTITIONS)))
        return time.monotonic() - began


async def _pump(source: Broker, producer: Producer, partition: int) -> None:
    offset = 0
    read = partial(source.reader.read, "s", partition, max_records=PAGE)
    while (batch := await read(offset)) is not None:
        (await producer.send_to("s", {partition: batch.records})).raise_first()
        offset = batch.offsets[-1] + 1


async def _make_topics(pipes: Path, own: str) -> None:
    file = await asyncio.to_thread(load_pipes, pipes)
    async with open_fleet_broker(own, file) as broker:
        await ensure_topics(broker.admin, file)


@contextmanager
def _fleet(folder: Path, pipes: Path, own: str) -> Iterator[tuple[str, str]]:
    """Ingest, expel and an observer. The URLs to post to and of the loss table."""
    ports = [free_port() for _ in range(5)]
    shared = ("--broker", own, "--pipes", str(pipes), "--management")
    observed = ("--listen", f"127.0.0.1:{ports[4]}")
    with (
        Child(folder, "services.ingest", *shared, f"127.0.0.1:{ports[0]}", "--listen", f"127.0.0.1:{ports[3]}") as one,
        Child(folder, "services.expel", *shared, f"127.0.0.1:{ports[1]}", "--allow-networks", "127.0.0.0/8") as two,
        Child(folder, "services.observer", *shared, f"127.0.0.1:{ports[2]}", *observed) as three,
    ):
        for child, port in zip((one, two, three), ports, strict=False):
            child.wait_ready(port, PATIENCE_S)
        yield f"http://127.0.0.1:{ports[3]}/v1/streams/s/events", f"http://127.0.0.1:{ports[4]}/v1/pipes/p/loss?from=6h"


def _settle(loss: str, sent: int) -> tuple[int, int, int]:
    """Wait until all that was sent is delivered by the loss table: (accepted, delivered, missing)."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with urlopen(loss, timeout=30) as answer:
            minutes = orjson.loads(answer.read())["minutes"]
        accepted, missing = (sum(minute[name] for minute in minutes) for name in ("accepted", "missing"))
        steps = [step for minute in minutes for step in minute["steps"] if step["destination"] == "sink"]
        delivered = sum(step["outcomes"].get("delivered", 0) for step in steps)
        if (accepted, delivered, missing) == (sent, sent, 0) or time.monotonic() > deadline:
            return accepted, delivered, missing
        time.sleep(0.5)


def measure(folder: Path, events: int, rate: int, targets: tuple[str, str]) -> None:
    """Fill a stream, copy it plainly, then migrate it under load. targets: the URLs that it moves to, and of the floor."""
    port, own, pipes = free_port(), f"log://{folder}/own", folder / "pipes.yaml"
    sink = f"http://127.0.0.1:{port}/"
    secret = make_secret(folder)
    pipes.write_text(PIPES.format(target=targets[0], sink=sink, secret=secret, partitions=PARTITIONS))
    asyncio.run(_make_topics(pipes, own))
    with Child(folder, "bench.floors", "receive", str(port)) as receiver:
        receiver.wait_port(port)
        with _fleet(folder, pipes, own) as (url, loss):
            filled = events // SIZE
            send_load(url, SIZE, filled)
            _settle(loss, filled * SIZE)
            tell(f"{filled * SIZE:,} events are stored and delivered")
            floor = asyncio.run(_floor(targets[1], pipes, own))
            tell(f"plain copy: {filled * SIZE / floor:,.0f} events/s")
            load, said, seconds = asyncio.run(_move(pipes, own, url, rate))
            sent = filled * SIZE + load.sent
            accepted, delivered, missing = _settle(loss, sent)
    tell(f"migration: {said['events']:,} events in {seconds:.1f} s, {said['events'] / seconds:,.0f} events/s")
    tell(
        f"the command: {said['missing']} of {said['origins']:,} origins missing; writers held for {said['held_s']:.2f} s"
    )
    tell(f"the loss table: {missing} missing; {accepted:,} accepted and {delivered:,} delivered of {sent:,} sent")
    tell(f"ingest's longest pause, over HTTP: {load.longest:.2f} s; answered 503 meanwhile: {load.refused}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=1000, help="events per second that arrive meanwhile")
    parser.add_argument("--to", choices=["log", "kafka", "kinesis"], default="log")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        base = f"log://{folder}/"
        if args.to == "kafka":
            base = f"kafka://{stack.enter_context(KafkaCluster(folder / 'kafka')).bootstrap}?prefix="
        elif args.to == "kinesis":
            os.environ.update(CREDENTIALS)
            base = f"{stack.enter_context(AwsEmulator(folder / 'aws')).url}&prefix="
        end = "" if args.to == "log" else "."
        measure(folder, args.events, args.rate, (f"{base}b{end}", f"{base}floor{end}"))


if __name__ == "__main__":
    main()
