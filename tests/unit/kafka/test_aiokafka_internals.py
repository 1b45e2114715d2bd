"""aiokafka's private parts that we use, as they were when they were read last."""

import asyncio
import gc
import hashlib
import inspect
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer.fetcher import Fetcher, FetchResult, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.metadata import MetadataRequest

from services.core.broker.kafka.aiokafka_client import _bootstrap, _create_connection, _write_request

_READ = {
    AIOKafkaConsumer.start: "2f1ba7044332",
    AIOKafkaClient._metadata_update: "06dc51ed3e0d",
    AIOKafkaClient.send: "246b277687d7",
    _bootstrap: "198943b004e5",
    AIOKafkaClient._get_conn: "68ce5d839171",
    _create_connection: "673276cbddb4",
    AIOKafkaConnection._do_sasl_handshake: "d4f7b5acbbec",
    AIOKafkaClient._md_synchronizer: "e0421bffa9a7",
    AIOKafkaConnection.close: "28f164aa1e4f",
    _write_request: "5909ea32f4ef",
    Fetcher.__init__: "bf21ecb7e0f2",
    Fetcher._fetch_requests_routine: "2a8ec5932644",
    Fetcher._set_error: "d29810f3f509",
    Fetcher._create_fetch_waiter: "61d840568746",
    Fetcher._get_actions_per_node: "1dab2cf937d1",
    Fetcher._proc_fetch_request: "59bf948fff47",
    Fetcher.fetched_records: "be4348896b9b",
    FetchResult.getall: "3e717e30de50",
    PartitionRecords._unpack_records: "b803e6d46480",
    GroupCoordinator._do_heartbeat: "dc1d6632aaa6",
    GroupCoordinator._send_req: "fa4b12e914ce",
    GroupCoordinator.ensure_coordinator_known: "4dfb9ccd877a",
    GroupCoordinator.request_rejoin: "f70a261c91c3",
    GroupCoordinator.reset_generation: "537aa37c531b",
}


@pytest.mark.parametrize("part", _READ, ids=lambda part: part.__qualname__)
def test_a_part_of_aiokafka_is_the_one_that_was_read(part: Callable[..., Any]) -> None:
    """If it fails, aiokafka changed a part that our code uses: read it, then write its new digest here."""
    digest = hashlib.sha256(inspect.getsource(part).encode()).hexdigest()[:12]
    assert digest == _READ[part], f"{part.__qualname__} of aiokafka {version('aiokafka')}: {digest}"


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, int]]:
    """Accepts connections and answers nothing."""
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for writer in accepted:
            writer.close()


async def test_a_request_on_a_closed_connection_is_an_error_of_kafka() -> None:
    """If it fails, a broker that restarts leaves expel without a coordinator for ever: aiokafka's metadata task has ended."""
    async with silent_server() as address:
        connection = AIOKafkaConnection(*address, request_timeout_ms=600_000)
        connecting = asyncio.create_task(connection.connect())
        closed: list[object] = []
        try:
            while not connection._requests:
                await asyncio.sleep(0.01)
            connection._on_close_cb = lambda _, reason: closed.append(reason)
            connection._read_task.cancel()  # it would notice, a moment too late
            transport = connection._writer.transport
            transport.abort()
            while "closed=True" not in repr(transport):
                await asyncio.sleep(0.01)
            with pytest.raises(kafka.KafkaConnectionError):
                await connection.send(ApiVersionRequest())
        finally:
            connection.close()
            await asyncio.wait([connecting])
        assert isinstance(connecting.exception(), kafka.KafkaConnectionError)
        assert closed == [CloseReason.CONNECTION_BROKEN], "the client does not look for new leaders"


async def _answer_versions_only(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ended: asyncio.Event
) -> None:
    """As a slow broker: it says which versions it knows of the request for metadata, and answers no other request."""
    size = int.from_bytes(await reader.readexactly(4))
    request = await reader.readexactly(size)
    answer = request[4:8] + struct.pack(">hihhh", 0, 1, MetadataRequest(None).API_KEY, 0, 5)
    writer.write(len(answer).to_bytes(4) + answer)
    while await reader.read(1000):
        pass
    ended.set()
    writer.close()


async def test_a_client_that_is_cancelled_while_it_begins_leaves_no_connection() -> None:
    """If it fails, a service whose members come and go holds more and more connections to Kafka."""
    ended = asyncio.Event()
    server = await asyncio.start_server(partial(_answer_versions_only, ended=ended), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = AIOKafkaClient(bootstrap_servers=f"{host}:{port}")
    beginning = asyncio.create_task(client.bootstrap())
    connections: list[Any] = []
    try:
        async with asyncio.timeout(600):
            while not any(one._versions and one._requests for one in connections):
                connections = [
                    one for one in gc.get_objects() if isinstance(one, AIOKafkaConnection) and one.port == port
                ]
                await asyncio.sleep(0.01)
            beginning.cancel()
            await asyncio.wait([beginning])
            assert not connections[0].connected()
            await ended.wait()
    finally:
        for connection in connections:
            connection.close()
        server.close()
