"""From a broker URL to an open broker. The only place that knows which backends exist."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

from services.core.broker.contract import Broker
from services.core.broker.kinesis_url import parse_address

SCHEMES = ("log", "kafka", "kinesis")
_HOST_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")

_Open = Callable[[str], AbstractAsyncContextManager[Broker]]


class BadBrokerUrl(ValueError):
    """The broker URL cannot be understood. Try: log:///var/lib/penstock, kafka://host:9092 or kinesis://eu-west-1."""


def open_broker(url: str) -> AbstractAsyncContextManager[Broker]:
    """`log:///path`, `kafka://host:port[,host:port…]` or `kinesis://region[?endpoint=URL&dynamodb=URL&fan_out=1]`.

    Raises BadBrokerUrl at once; entering raises BrokerError kinds.

    Entering imports the backend, in a thread: a process loads only the client library it uses, and no loop waits for it.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise BadBrokerUrl("a broker URL carries no user or password. Try: settings files for credentials")
    if parts.scheme == "kinesis":
        return _open_kinesis(url)
    if parts.query or parts.fragment:
        raise BadBrokerUrl(
            "a broker URL carries no options: acks=all and the like are not negotiable. Try: what is before the ?"
        )
    if parts.scheme == "log":
        if parts.netloc or not parts.path.startswith("/"):
            raise BadBrokerUrl(f"{url!r}: the log's path must be absolute. Try: log:///var/lib/penstock")
        return _open(_load_log, parts.path)
    if parts.scheme == "kafka":
        if not all(_HOST_PORT.fullmatch(host) for host in parts.netloc.split(",")) or parts.path not in ("", "/"):
            raise BadBrokerUrl(
                f"{url!r}: host:port, or several joined by commas, is needed. Try: kafka://127.0.0.1:9092"
            )
        return _open(_load_kafka, parts.netloc)
    raise BadBrokerUrl(f"unknown kind of broker {parts.scheme!r}. Try one of: {', '.join(SCHEMES)}")


def _open_kinesis(url: str) -> AbstractAsyncContextManager[Broker]:
    try:
        parse_address(url)
    except ValueError as error:
        raise BadBrokerUrl(str(error)) from None
    return _open(_load_kinesis, url)


@asynccontextmanager
async def _open(load: Callable[[], _Open], address: str) -> AsyncIterator[Broker]:
    opening = await asyncio.to_thread(load)
    async with opening(address) as broker:
        yield broker


def _load_log() -> _Open:
    from services.core.broker.log import LogBroker

    return LogBroker.open


def _load_kafka() -> _Open:
    from services.core.broker.kafka import KafkaBroker

    return KafkaBroker.open


def _load_kinesis() -> _Open:
    from services.core.broker.kinesis import KinesisBroker

    return KinesisBroker.open
