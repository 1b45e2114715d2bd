"""The floors: the least that any Python service of this kind must do, measured the same way as ours.

    python -m bench.floors http PORT [loads|raw]    a bare aiohttp handler that parses the body with orjson
    python -m bench.floors produce BOOTSTRAP TOPIC BATCHES SIZE     bare aiokafka create_batch/send_batch
    python -m bench.floors deliver BOOTSTRAP TOPIC URL RECORDS SIZE    bare getmany + POST of joined bytes
    python -m bench.floors receive PORT    a receiver that answers 200 and does nothing else

`produce` and `deliver` end by themselves and print their own CPU seconds as JSON.
"""

import asyncio
import sys
import time
from typing import cast

import aiohttp
import orjson
import uvloop
from aiohttp import web
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from bench.events import make_event


async def serve_http(port: int) -> None:
    """Runs until it is ended."""

    async def handle(request: web.Request) -> web.Response:
        orjson.loads(await request.read())
        return web.Response()

    app = web.Application(client_max_size=10 << 20)
    app.router.add_post("/{tail:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class Receiver(asyncio.Protocol):
    """Answers 200 to each complete request, parsing no more than its length."""

    ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            del self._buffer[: end + 4 + length]
            self._transport.write(self.ANSWER)


async def receive(port: int) -> None:
    """Runs until it is ended."""
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def produce(bootstrap: str, topic: str, batches: int, size: int) -> None:
    """`batches` of `size` events with the three headers that we add, one after the other per partition."""
    rows = [make_event(number) for number in range(size)]
    headers = [
        ("ce_id", b"evt-000000000001"),
        ("penstock_arrival", b"1700000000000"),
        ("penstock_origin", b"abcdefgh:0:123456"),
    ]
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0, max_batch_size=1 << 20)
    await producer.start()
    partitions = sorted(await producer.partitions_for(topic))
    used = time.process_time()

    async def lane(partition: int, count: int) -> None:
        for _ in range(count):
            batch = producer.create_batch()
            for row in rows:
                batch.append(key=None, value=row, timestamp=1_700_000_000_000, headers=headers)
            batch.close()
            await (await producer.send_batch(batch, topic, partition=partition))

    await asyncio.gather(*(lane(partition, batches // len(partitions)) for partition in partitions))
    used = time.process_time() - used
    await producer.stop()
    print(orjson.dumps({"cpu_seconds": used, "events": batches // len(partitions) * len(partitions) * size}).decode())


async def deliver(bootstrap: str, topic: str, url: str, records: int, size: int) -> None:
    """Reads `records` records and posts them in bodies of `size` joined values, 64 under way."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    limit = asyncio.Semaphore(64)
    used = time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session, asyncio.TaskGroup() as group:

        async def post(body: bytes) -> None:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                await answer.read()
            limit.release()

        partitions = consumer.partitions_for_topic(topic) or await _partitions(consumer, topic)
        consumer.assign([TopicPartition(topic, partition) for partition in partitions])
        await consumer.seek_to_beginning()
        seen = 0
        while seen < records:
            for rows in (await consumer.getmany(timeout_ms=1000, max_records=2000)).values():
                seen += len(rows)
                for start in range(0, len(rows), size):
                    body = b"[" + b",".join([row.value for row in rows[start : start + size]]) + b"]"
                    await limit.acquire()
                    group.create_task(post(body))
    used = time.process_time() - used
    await consumer.stop()
    print(orjson.dumps({"cpu_seconds": used, "events": seen}).decode())


async def _partitions(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    await consumer._client.add_topic(topic)
    return set(consumer.partitions_for_topic(topic))


def main() -> None:
    """Dispatch on the first argument."""
    kind, *args = sys.argv[1:]
    if kind == "http":
        uvloop.run(serve_http(int(args[0])))
    elif kind == "receive":
        uvloop.run(receive(int(args[0])))
    elif kind == "produce":
        uvloop.run(produce(args[0], args[1], int(args[2]), int(args[3])))
    else:
        uvloop.run(deliver(args[0], args[1], args[2], int(args[3]), int(args[4])))


if __name__ == "__main__":
    main()
