"""Opens the broker that a URL names. A new backend is registered here; `contract.py` lists the other places."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from services.core.broker.contract import Broker
from services.core.broker.existing import NO_EXISTING, ExistingTopics
from services.core.broker.prefix import OPTION, check_prefix
from services.core.security.kafka import OPTION as SECURITY
from services.core.security.kafka import parse_security_path

SCHEMES = ("log", "kafka", "kinesis")
_HOST_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]+")
_ENDPOINTS = ("endpoint", "dynamodb")
_FAN_OUT = "fan_out"
_KINESIS_OPTIONS = (*_ENDPOINTS, _FAN_OUT, OPTION)
_EXAMPLE = "Try: kinesis://eu-west-1"

_Open = Callable[[str], AbstractAsyncContextManager[Broker]]


class BadBrokerUrl(ValueError):
    """The broker URL cannot be understood. Try: log:///var/lib/penstock, kafka://host:9092 or kinesis://eu-west-1."""


def open_broker(url: str, existing: ExistingTopics = NO_EXISTING) -> AbstractAsyncContextManager[Broker]:
    """`log:///path`, `kafka://host:port[,host:port…][?prefix=NAME.&security=FILE]` or
    `kinesis://region[?prefix=NAME.&endpoint=URL&dynamodb=URL&fan_out=1]`. The prefix: `prefix`.

    existing: topics of others, which only Kafka has. Raises BadBrokerUrl at once; entering raises BrokerError kinds. Entering
    imports the backend in a thread: a process loads only the client library that it uses, and does not block the loop.
    """
    parts = urlsplit(url)
    _require_kafka(existing, parts.scheme)
    if parts.username or parts.password:
        raise BadBrokerUrl(
            "a broker URL has no user or password. Try, for Kafka: ?security=/etc/penstock/kafka.yaml, as in docs/kafka.md"
        )
    if parts.scheme == "kinesis":
        try:
            parse_kinesis_url(url)
        except ValueError as error:
            raise BadBrokerUrl(str(error)) from None
        return _open(_load_kinesis, url)
    if parts.scheme == "kafka":
        try:
            address = parse_kafka_url(url)
        except ValueError as error:
            raise BadBrokerUrl(str(error)) from None
        _refuse_own(existing, address.prefix)
        return _open(partial(_load_kafka, address, existing), address.bootstrap)
    if parts.scheme == "log":
        if OPTION in dict(parse_qsl(parts.query, keep_blank_values=True)):
            raise BadBrokerUrl(
                "the embedded log has no prefix: no other fleet is in its folder. Try: the URL without ?prefix=, and another "
                "folder for another fleet"
            )
        if parts.query or parts.fragment:
            raise BadBrokerUrl("the URL of the embedded log has no options. Try: the part before the ?")
        if parts.netloc or not parts.path.startswith("/"):
            raise BadBrokerUrl(f"{url!r}: the log's path must be absolute. Try: log:///var/lib/penstock")
        return _open(_load_log, parts.path)
    raise BadBrokerUrl(f"unknown kind of broker {parts.scheme!r}. Try one of: {', '.join(SCHEMES)}")


def _require_kafka(existing: ExistingTopics, scheme: str) -> None:
    if not existing or scheme not in ("log", "kinesis"):
        return
    kind, names = "the embedded log" if scheme == "log" else "Kinesis", ", ".join(sorted(existing.names.values()))
    raise BadBrokerUrl(
        f"the pipe file names topics of others ({names}), and {kind} has none: they are on Kafka only. "
        "Try: --broker kafka://host:9092, or a pipe file without `topic:`"
    )


def _refuse_own(existing: ExistingTopics, prefix: str) -> None:
    if ours := existing.find_own(prefix):
        raise BadBrokerUrl(
            f"{', '.join(ours)}: the pipe file names it as a topic of others, and with this prefix it is the fleet's own. "
            "Try: the name of a stream, without `topic:`; or another prefix"
        )


@asynccontextmanager
async def _open(load: Callable[[], _Open], address: str) -> AsyncIterator[Broker]:
    opening = await asyncio.to_thread(load)
    async with opening(address) as broker:
        yield broker


def _load_log() -> _Open:
    from services.core.broker.log import LogBroker

    return LogBroker.open


def _load_kafka(address: "KafkaAddress", existing: ExistingTopics) -> _Open:
    from services.core.broker.kafka import open_kafka

    return partial(open_kafka, prefix=address.prefix, security=address.security, existing=existing)


def _load_kinesis() -> _Open:
    from services.core.broker.kinesis import KinesisBroker

    return KinesisBroker.open


class KafkaAddress(NamedTuple):
    """bootstrap: host:port[,host:port…]. prefix: of every name on the cluster. security: the file with TLS and the login."""

    bootstrap: str
    prefix: str = ""
    security: Path | None = None


def parse_kafka_url(url: str) -> KafkaAddress:
    """`kafka://host:port[,host:port…][?prefix=NAME.&security=FILE]`. Raises ValueError."""
    parts = urlsplit(url)
    if not all(_HOST_PORT.fullmatch(host) for host in parts.netloc.split(",")) or parts.path not in ("", "/"):
        raise ValueError(f"{url!r}: host:port, or several joined by commas, is needed. Try: kafka://127.0.0.1:9092")
    options = parse_qsl(parts.query, keep_blank_values=True)
    if (
        any(name not in (OPTION, SECURITY) for name, _ in options)
        or parts.fragment
        or bool(parts.query) > bool(options)
    ):
        raise ValueError(
            f"a Kafka URL has only the options {OPTION} and {SECURITY}. Settings such as acks=all are fixed. "
            f"Try: kafka://host:9092?{OPTION}=acme."
        )
    found = dict(options)
    if len(options) > len(found):
        raise ValueError("an option is in the Kafka URL twice. Try: remove one of the two")
    security = parse_security_path(found[SECURITY]) if SECURITY in found else None
    return KafkaAddress(parts.netloc, check_prefix(found.get(OPTION, "")), security)


@dataclass(frozen=True, slots=True)
class KinesisAddress:
    """endpoint, dynamodb: http(s)://host:port of Kinesis and of DynamoDB; None: the region's. fan_out: groups read by it. prefix:
    of every name in the account."""

    region: str
    endpoint: str | None = None
    dynamodb: str | None = None
    fan_out: bool = False
    prefix: str = ""


def parse_kinesis_url(url: str) -> KinesisAddress:
    """`kinesis://region[?prefix=NAME.&endpoint=URL&dynamodb=URL&fan_out=1]`. Raises ValueError, which quotes none of it
    (secrets)."""
    parts = _split(url)
    if parts is None or not _REGION.fullmatch(parts.netloc) or parts.path not in ("", "/"):
        raise ValueError(f"a Kinesis URL needs the name of a region, and no more in front of its options. {_EXAMPLE}")
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _KINESIS_OPTIONS:
            options = ", ".join(_KINESIS_OPTIONS)
            raise ValueError(f"a Kinesis URL has only the options {options}. {_EXAMPLE}")
        if name in found:
            raise ValueError(f"{name} is in the Kinesis URL twice. {_EXAMPLE}")
        if name in _ENDPOINTS:
            _check_endpoint(name, value)
        elif name == OPTION:
            check_prefix(value)
        elif value not in ("0", "1"):
            raise ValueError(f"{name} in a Kinesis URL is 0 or 1. {_EXAMPLE}")
        found[name] = value
    return KinesisAddress(
        parts.netloc, found.get("endpoint"), found.get("dynamodb"), found.get(_FAN_OUT) == "1", found.get(OPTION, "")
    )


def is_kinesis(url: str) -> bool:
    """Whether the URL of a broker names Kinesis. It may be unusable for another reason."""
    return url.startswith("kinesis:")


def prefix_of(url: str) -> str:
    """The prefix in the URL of a broker; "" without one, and for a URL that cannot be understood."""
    try:
        match urlsplit(url).scheme:
            case "kafka":
                return parse_kafka_url(url).prefix
            case "kinesis":
                return parse_kinesis_url(url).prefix
    except ValueError:
        pass
    return ""


def _check_endpoint(name: str, value: str) -> None:
    parts = _split(value)
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username
        or parts.path not in ("", "/")
    ):
        raise ValueError(f"{name} in a Kinesis URL is not an endpoint. Try: {name}=http://127.0.0.1:4568")


def _split(url: str) -> SplitResult | None:
    """None when it cannot be parsed: urllib's errors would quote it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts
