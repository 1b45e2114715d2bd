"""The global retrier with a million events waiting: its resident memory, how late due events leave, what a move costs.

    .venv/bin/python -m bench.retrier [--broker URL] [--waiting 1000000] [--rate 500] [--seconds 60] [--payload 300]

Without --broker on an embedded log of its own. The waiting events are due within 1 to 75 h and lie in the delay topics
where the retrier itself puts them. Beside them events are handed over at the rate, each due within 10 s.
"""

import argparse
import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from bench.processes import Child, fetch_metric, free_port
from bench.setup import tell
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRY_IN, retry_topic
from services.core.provision import ensure_topics
from services.core.undelivered.retry_state import RetryState, read_state, wrap
from services.global_retrier.delay_queue import choose_delay

HOUR_MS = 3_600_000
LONGEST_WAIT_MS = 10_000
CHUNK = 1000
SAMPLE_S = 0.2
BURST = 50_000
PIPE = "late"
PIPES = PipeFile.model_validate(
    {
        "streams": {"flights": {}},
        "pipes": {
            PIPE: {
                "sources": ["flights"],
                "destinations": [{"name": "ops", "webhook": {"url": "https://example.org/hook"}}],
            }
        },
    }
)


def make_record(number: int, now: int, due: int, value: bytes) -> Record:
    """An event as expel hands it over."""
    detail = "the receiver answered 503: <html><body>Service Unavailable</body></html>"
    state = RetryState(PIPE, "ops", 4, 1, now - 3000, due, "http_503", detail, f"flights:0:{number}", now - 5000)
    marks = (
        ("ce_id", b"evt-%012d" % number),
        ("penstock_arrival", b"%d" % now),
        ("penstock_origin", b"b:0:%d" % number),
    )
    return wrap(Record(b"user-%06d" % (number % 5000), value, now, marks), state, now)


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


async def fill(broker: Broker, count: int, value: bytes) -> None:
    """So many events in the delay topics."""
    chance = random.Random(1)
    async with Producer(broker.appender) as producer:
        for start in range(0, count, CHUNK):
            now = now_ms()
            by_topic: dict[str, list[Record]] = {}
            for number in range(start, min(count, start + CHUNK)):
                wait = chance.randrange(HOUR_MS, 75 * HOUR_MS)
                topic = choose_delay(wait) or RETRY_IN
                by_topic.setdefault(topic, []).append(make_record(number, now, now + wait, value))
            for topic, records in by_topic.items():
                (await producer.send(topic, records)).raise_first()


async def hand_over(broker: Broker, rate: int, seconds: float, value: bytes) -> int:
    """Events at this rate; returns how many."""
    chance, count, began = random.Random(2), 0, time.monotonic()
    async with Producer(broker.appender) as producer:
        while (passed := time.monotonic() - began) < seconds:
            now, wanted = now_ms(), int(passed * rate)
            records = [
                make_record(number, now, now + chance.randrange(LONGEST_WAIT_MS), value)
                for number in range(count, wanted)
            ]
            if records:
                (await producer.send(RETRY_IN, records)).raise_first()
            count = max(count, wanted)
            await asyncio.sleep(0.02)
    return count


async def read_out(broker: Broker, late: list[int]) -> None:
    """Notes how late each event is when it can be read (ms), until cancelled."""

    async def nothing(_lost: frozenset[TopicPartition]) -> None:
        return

    async with broker.consumer("bench", [retry_topic(PIPE)], start="latest", on_revoke=nothing) as consumer:
        while True:
            for batch in await consumer.poll(max_records=1000, max_wait=1.0):
                now = now_ms()
                late += [now - read_state(record).due for record in batch.records]


@contextmanager
def watch_rss(child: Child) -> Iterator[list[int]]:
    """Samples of its resident bytes, several a second."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            samples.append(child.rss())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


async def measure(url: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Everything; prints the figures."""
    value = b'{"id":"evt","pad":"' + b"x" * (arguments.payload - 21) + b'"}'
    async with open_broker(url) as broker:
        await ensure_topics(broker.admin, PIPES)
        tell(f"filling {arguments.waiting} events in")
        await fill(broker, arguments.waiting, value)
        port = free_port()
        with Child(folder, "services.global_retrier", "--broker", url, "--management", f"127.0.0.1:{port}") as child:
            await asyncio.to_thread(child.wait_ready, port)
            with watch_rss(child) as samples:
                await run(broker, child, port, arguments, value)
            print(f"RSS, highest of {len(samples)} samples      {max(samples) / 1e6:8.1f} MB")


async def run(broker: Broker, child: Child, port: int, arguments: argparse.Namespace, value: bytes) -> None:
    """The load beside what waits, then a burst that only has to be put away."""
    late: list[int] = []
    reading = asyncio.create_task(read_out(broker, late))
    await asyncio.sleep(5.0)
    tell(f"{arguments.rate} events a second for {arguments.seconds} s")
    before, cpu = await moves(port), child.cpu_seconds()
    count = await hand_over(broker, arguments.rate, arguments.seconds, value)
    async with asyncio.timeout(300):
        while len(late) < count:
            await asyncio.sleep(0.1)
    moved, cpu = await moves(port) - before, child.cpu_seconds() - cpu
    late.sort()
    print(f"{arguments.waiting} events waiting, {count} handed over at {arguments.rate}/s, due within 10 s")
    print(f"late when read: P50 {late[len(late) // 2]} ms, P99 {late[len(late) * 99 // 100]} ms, most {late[-1]} ms")
    print(f"earliest                             {late[0]:8d} ms (never below 0)")
    print(f"moves per event                      {moved / count:8.1f}")
    print(f"CPU-s per million moves, at the rate {cpu / moved * 1e6:8.1f}")
    reading.cancel()
    await asyncio.wait([reading])
    tell(f"a burst of {BURST}")
    before, cpu, began = await moves(port), child.cpu_seconds(), time.monotonic()
    async with Producer(broker.appender) as producer:
        for start in range(0, BURST, CHUNK):
            now = now_ms()
            records = [make_record(n, now, now + HOUR_MS + n, value) for n in range(start, start + CHUNK)]
            (await producer.send(RETRY_IN, records)).raise_first()
    async with asyncio.timeout(300):
        while await moves(port) - before < BURST:
            await asyncio.sleep(0.05)
    taken = time.monotonic() - began
    print(f"moves a second, out of a burst       {BURST / taken:8.0f}")
    print(f"CPU-s per million moves, in a burst  {(child.cpu_seconds() - cpu) / BURST * 1e6:8.1f}")


async def moves(port: int) -> float:
    """How often the retrier has written an event on."""
    names = ("penstock_retrier_events_moved_total", "penstock_retrier_events_released_total")
    return sum([await asyncio.to_thread(fetch_metric, port, name) for name in names])


async def main(arguments: argparse.Namespace) -> None:
    """On the given broker, or on a log of its own."""
    with tempfile.TemporaryDirectory() as folder:
        await measure(arguments.broker or f"log://{folder}/log", Path(folder), arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--broker", default="")
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--payload", type=int, default=300)
    uvloop.run(main(parser.parse_args()))
