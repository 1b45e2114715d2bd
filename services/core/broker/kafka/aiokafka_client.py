"""Every use of private parts of aiokafka's client: its connections, its metadata requests, and the task that renews its metadata.

`tests/unit/kafka/test_aiokafka_internals.py` fails when a new version of aiokafka changes one of these parts.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import aiokafka.client
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason, OAuthAuthenticator
from aiokafka.protocol.metadata import MetadataRequest

from services.core.broker.kafka.access import Access


def _ask_without_creating(topics: Sequence[str] | None = None) -> MetadataRequest:
    """aiokafka's client asks for metadata with `allow_auto_topic_creation`: a reader of a topic that was just deleted would
    create the topic again, empty. There is no setting for it, so aiokafka's module gets this instead."""
    return MetadataRequest(None if topics is None else list(topics), allow_auto_topic_creation=False)


aiokafka.client.MetadataRequest = _ask_without_creating

_write_request = AIOKafkaConnection.send


def _send_if_open(connection: Any, request: Any, expect_response: bool = True) -> Any:
    """As aiokafka's `AIOKafkaConnection.send`, but a connection that the broker has closed is a KafkaConnectionError.

    asyncio accepts bytes for a closed connection. uvloop raises RuntimeError, which aiokafka expects nowhere
    (aio-libs/aiokafka#1038): it ends the task that renews the client's metadata. Then nothing finds a coordinator or a new
    leader, and the member waits for ever.
    """
    writer = connection._writer
    if writer is not None and writer.transport.is_closing():
        connection.close(reason=CloseReason.CONNECTION_BROKEN)
    return _write_request(connection, request, expect_response)


AIOKafkaConnection.send = _send_if_open

logging.getLogger("aiokafka.conn").setLevel(
    logging.CRITICAL
)  # at DEBUG it logs each request, also those with a password

_create_connection = aiokafka.client.create_conn


async def _connect_with_access(host: str, port: int, *, ssl_context: Any = None, **settings: Any) -> Any:
    """aiokafka passes on to its connections the login of the time when the client was made. Here the `Access` that takes the
    place of the TLS context opens each connection with the login as it is now."""
    connection = await _open(host, port, ssl_context, settings)
    if "on_close" not in settings:  # all others belong to the client, which closes them
        _first_connection.set(connection)
    return connection


async def _open(host: str, port: int, ssl_context: Any, settings: dict[str, Any]) -> Any:
    if not isinstance(ssl_context, Access):
        return await _create_connection(host, port, ssl_context=ssl_context, **settings)

    async def connect(**login: Any) -> Any:
        return await _create_connection(host, port, **(settings | login))

    return await ssl_context.open(connect, host, port)


aiokafka.client.create_conn = _connect_with_access

_first_connection: ContextVar[Any] = ContextVar("first_connection", default=None)
"""The connection on which a client that begins asks for the brokers."""
_bootstrap = AIOKafkaClient.bootstrap


async def _bootstrap_and_close(self: AIOKafkaClient) -> None:
    """As aiokafka's `AIOKafkaClient.bootstrap`, which leaves its first connection open when it is cancelled between the request
    and the answer."""
    _first_connection.set(None)
    try:
        await _bootstrap(self)
    except BaseException:
        if (connection := _first_connection.get()) is not None:
            connection.close()
        raise
    finally:
        _first_connection.set(None)


AIOKafkaClient.bootstrap = _bootstrap_and_close

_log_in_by_token = OAuthAuthenticator.step


async def _step_by_token(self: Any, answer: bytes | None) -> Any:
    """As aiokafka's `OAuthAuthenticator.step`, which takes the first answer for a success. A broker that refuses the token says
    so in this answer, and the error comes after another message (RFC 7628, 3.2.3)."""
    if self._token_sent and answer:
        return b"\x01", True
    return await _log_in_by_token(self, answer)


OAuthAuthenticator.step = _step_by_token


def renewal_of(client: AIOKafkaClient) -> "asyncio.Task[None] | None":
    """The task that renews the client's metadata. When it has ended, nothing finds a new leader any more, and aiokafka tells
    nobody (aio-libs/aiokafka#983)."""
    task: asyncio.Task[None] | None = client._sync_task
    return task


def restart_renewal(client: AIOKafkaClient) -> BaseException | None:
    """Start this task again if an error has ended it, and give that error. Connections stay open, and whoever waits for new
    metadata gets the next."""
    task = renewal_of(client)
    if task is None or not task.done() or task.cancelled():
        return None
    if client._md_update_fut is not None and client._md_update_fut.done():
        client._md_update_fut = None
    client._sync_task = asyncio.create_task(client._md_synchronizer(), name="renew the metadata of Kafka")
    return task.exception() or RuntimeError("it returned")


def forget_renewal(client: AIOKafkaClient) -> None:
    """Forget this task if it has ended. Else its error is raised when the client is closed, and the connections stay open."""
    if (task := renewal_of(client)) is not None and task.done():
        client._sync_task = None
