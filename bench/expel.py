"""What a delivery costs: the expel lane beside a bare loop that polls the log and POSTs joined bytes, same receiver, same log.

    .venv/bin/python -m bench.expel [--events 200000] [--batch 100] [--payload 300] [--in-flight 64]

CPU-seconds per million events of the sending process alone; the receiver is a process of its own. Loopback only.
"""

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import uvloop

from services.core.broker.contract import Consumer, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.ledger.report import TELEMETRY
from services.core.net_guard import NetPolicy, parse_networks
from services.core.pauses import Pauses
from services.core.pipes import CONTROL, Batching, Destination, Pipe, Webhook, parked_topic, retry_topic
from services.core.signing import SigningKey, SigningKeys
from services.core.startup import tune_garbage_collector
from services.expel.plan import LaneBuilder, LanePlan
from services.expel.settings import ExpelSettings

RECEIVER = """
import asyncio, sys
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            at = head.lower().index(b"content-length:") + 15
            await reader.readexactly(int(head[at:head.index(b"\\r", at)]))
            writer.write(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
import uvloop
uvloop.run(main())
"""


def cpu() -> float:
    """CPU-seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def fill(broker: LogBroker, topic: str, events: int, payload: int) -> None:
    """Events as ingest stores them."""
    await broker.admin.create_topic(TopicSpec(topic, 4))
    for ours in (retry_topic("bench"), parked_topic("bench"), CONTROL, TELEMETRY):
        await broker.admin.create_topic(TopicSpec(ours, 1))
    value = b'{"carrier":"AA","delay":12,"pad":"' + b"x" * (payload - 36) + b'"}'
    now = int(time.time() * 1000)
    async with Producer(broker.appender) as producer:
        for start in range(0, events, 500):
            records = [
                Record(
                    None,
                    value,
                    now - n % 5000,
                    (
                        ("ce_id", b"0190b7c8-1234-7abc-8def-%012d" % n),
                        ("penstock_arrival", b"%d" % (now - n % 3000)),
                        ("penstock_origin", b"abc123:0:%d" % n),
                    ),
                )
                for n in range(start, min(start + 500, events))
            ]
            (await producer.send(topic, records)).raise_first()


async def ignore(_partitions: frozenset[TopicPartition]) -> None:
    """Nothing to drain."""


async def run_bare(broker: LogBroker, url: str, events: int, batch: int, in_flight: int) -> float:
    """Poll, join, POST, commit at the end: the floor."""
    begun = cpu()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session,
        broker.consumer("bare", ["bench"], start="earliest", on_revoke=ignore) as consumer,
    ):
        queue: asyncio.Queue[bytes] = asyncio.Queue(in_flight * 4)

        async def post() -> None:
            while True:
                body = await queue.get()
                async with session.post(url, data=body) as response:
                    await response.read()
                queue.task_done()

        workers = [asyncio.create_task(post()) for _ in range(in_flight)]
        await _feed(consumer, queue, events, batch)
        await queue.join()
        for worker in workers:
            worker.cancel()
    return (cpu() - begun) / events * 1e6


async def _feed(consumer: Consumer, queue: "asyncio.Queue[bytes]", events: int, batch: int) -> None:
    done = 0
    while done < events:
        for polled in await consumer.poll(max_records=1000, max_wait=1):
            values = [record.value or b"" for record in polled.records]
            for start in range(0, len(values), batch):
                await queue.put(b"[" + b",".join(values[start : start + batch]) + b"]")
            done += len(values)
            await consumer.commit({polled.source: polled.offsets[-1]})


async def run_expel(
    broker: LogBroker, url: str, events: int, batch: int, in_flight: int, body: str, signed: bool
) -> float:
    """The lane, as the service runs it."""
    name = f"{body}-{'signed' if signed else 'plain'}"
    webhook = Webhook.model_validate(
        {"url": url, "body": body, "concurrency": in_flight, "batch": Batching(max_events=batch)}
    )
    pipe = Pipe(sources=["bench"], destinations=[Destination(name=name, webhook=webhook)])
    keys = (SigningKey(os.urandom(32)),) if signed else ()
    settings = ExpelSettings(allow_networks=parse_networks("127.0.0.0/8"))
    assert settings.policy == NetPolicy(parse_networks("127.0.0.0/8"), settings.own_addresses)
    stopping = asyncio.Event()
    begun = cpu()
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(broker.appender))
        pauses = Pauses(broker.reader)
        await pauses.refresh()
        lane = LaneBuilder(settings, broker, producer, pauses, stack, 1).build(
            LanePlan("bench", pipe, pipe.destinations[0], SigningKeys(keys))
        )
        task = asyncio.create_task(lane.run(stopping, 5.0))
        left = events
        while left:
            await asyncio.sleep(0.25)
            left = sum(lag.records for lag in (await broker.admin.group_lag(f"bench.{name}", "bench")).values())
        stopping.set()
        await task
    return (cpu() - begun) / events * 1e6


async def main(arguments: argparse.Namespace) -> None:
    """Everything in turn, twice; prints the lower figure of each."""
    tune_garbage_collector()
    receiver = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert receiver.stdout is not None
    url = f"http://127.0.0.1:{receiver.stdout.readline().strip()}/hook"
    events, batch, in_flight = arguments.events, arguments.batch, arguments.in_flight
    figures: dict[str, list[float]] = {}
    try:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                async with LogBroker.open(str(Path(folder) / "data")) as broker:
                    await fill(broker, "bench", events, arguments.payload)
                    figures.setdefault("bare poll + POST", []).append(
                        await run_bare(broker, url, events, batch, in_flight)
                    )
                    for body, signed in (("json", False), ("cloudevents", False), ("cloudevents", True)):
                        used = await run_expel(broker, url, events, batch, in_flight, body, signed)
                        figures.setdefault(f"expel {body}{', signed' if signed else ''}", []).append(used)
    finally:
        receiver.kill()
        receiver.wait()
    floor = min(figures["bare poll + POST"])
    for name, values in figures.items():
        print(f"{name:28} {min(values):7.2f} CPU-s/M events   {min(values) / floor:5.2f} x the floor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--payload", type=int, default=300)
    parser.add_argument("--in-flight", type=int, default=64)
    uvloop.run(main(parser.parse_args()))
