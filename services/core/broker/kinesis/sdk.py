"""The AWS SDK's clients, opened without blocking the loop. Credentials come by the SDK's own chain, never from us."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import botocore.session
import httpx
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.fan_out import FanOut
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.put_records import PutRecords
from services.core.broker.kinesis.signed_post import SignedPost
from services.core.broker.kinesis_url import Address

_CONNECTIONS = 50
_PREPARE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Clients:
    """Open clients; the SDK types them at run time only. They try once: retrying is the portable part's."""

    kinesis: Any
    dynamodb: Any
    put_records: PutRecords
    fan_out: FanOut | None


@asynccontextmanager
async def open_clients(address: Address, request_seconds: float) -> AsyncIterator[Clients]:
    """Both clients. Raises Unavailable when there are no credentials."""
    config = AioConfig(
        connect_timeout=request_seconds,
        read_timeout=request_seconds,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=_CONNECTIONS,
        parameter_validation=False,
        tcp_keepalive=True,
    )
    async with AsyncExitStack() as closing:
        async with bounded(f"AWS in {address.region}", _PREPARE_SECONDS):
            session = await asyncio.to_thread(_prepare, address)
            credentials = await session.get_credentials()
            if credentials is None:
                raise Unavailable("no AWS credentials. Try: AWS_PROFILE, AWS_ACCESS_KEY_ID, or an instance role")
            opened = [
                await closing.enter_async_context(
                    session.create_client(service, region_name=address.region, endpoint_url=endpoint, config=config)
                )
                for service, endpoint in (("kinesis", address.endpoint), ("dynamodb", address.dynamodb))
            ]
        kinesis, dynamodb = opened
        post = SignedPost(kinesis, credentials, address.region)
        fan_out = None
        if address.fan_out:
            fan_out = FanOut(await asyncio.to_thread(httpx.create_ssl_context), post, kinesis)
        yield Clients(kinesis, dynamodb, PutRecords(kinesis, post), fan_out)


def _prepare(address: Address) -> AioSession:
    """A session that has read its files already. Blocks."""
    session = AioSession()
    session.register_component("data_loader", _loader(address.region))
    session.get_scoped_config()
    return session


@cache
def _loader(region: str) -> Any:
    """The service models, megabytes of JSON, read by making a client of each once a process. Blocks."""
    reading = botocore.session.get_session()
    for service in ("kinesis", "dynamodb"):
        reading.create_client(service, region_name=region)
    return reading.get_component("data_loader")
