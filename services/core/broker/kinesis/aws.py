"""The AWS clients, the requests that we sign ourselves, and the meaning of AWS errors.

Only this package imports the AWS SDK, and only this file uses a private attribute of it (`PutRecords`). Credentials
come from the SDK's own chain.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from socket import gaierror
from ssl import SSLContext
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import botocore.session
import httpx
import orjson
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from aiohttp import ClientConnectorError
from botocore import exceptions as aws
from botocore.awsrequest import AWSPreparedRequest
from pybase64 import b64encode

from services.core.broker.connect import KinesisAddress
from services.core.broker.errors import BrokerError, OutcomeUnknown, Throttled, TopicExists, Unavailable, UnknownTopic


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits in seconds. Production uses these defaults; only tests shorten them.

    lease: a member that is silent for this long loses its shards. heartbeat: time between two reads of the lease
    table. sync: time between two listings of a stream's shards. drain: limit of on_revoke. request: limit of one
    request. settle: limit for a stream to be created, deleted or resharded. subscription: length of one
    SubscribeToShard; the service ends it after 300.
    """

    lease: float = 10.0
    heartbeat: float = 1.0
    sync: float = 5.0
    drain: float = 35.0
    request: float = 7.0
    settle: float = 180.0
    subscription: float = 290.0


_THROTTLED = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "KMSThrottlingException",
        "LimitExceededException",
        "RequestLimitExceeded",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
_SERVICE_FAILED = frozenset({"InternalFailure", "InternalFailureException", "InternalServerError"})
_UNAVAILABLE = frozenset({"ResourceInUseException", "ServiceUnavailable", *_SERVICE_FAILED})
_CONNECTION_ERRORS = (
    aws.HTTPClientError,
    aws.ConnectionError,
    aws.MetadataRetrievalError,
    aws.CredentialRetrievalError,
)

AWS_ERRORS = (aws.BotoCoreError, aws.ClientError)


def code_of(error: aws.ClientError) -> str:
    """The service's name of an error, such as ExpiredIteratorException."""
    return str(error.response.get("Error", {}).get("Code", ""))


def classify_entry(code: str, message: str, where: str) -> BrokerError:
    """The error of one entry of PutRecords. InternalFailure means that the service does not know the outcome."""
    text = f"{where}: Kinesis answered {code}: {message}"
    return Throttled(text) if code in _THROTTLED else OutcomeUnknown(text)


def classify_put(error: Exception, where: str) -> BrokerError:
    """The error of a whole PutRecords request: refused before anything was stored, or of unknown outcome."""
    text = f"{where}: {error}"
    if not isinstance(error, aws.ClientError):
        return Unavailable(text) if _never_left(error) else OutcomeUnknown(text)
    code = code_of(error)
    # A proxy's refusal has an HTTP status for a code. The proxy may have passed the request on.
    if _status(error) >= 500 or code.isdecimal() or code in _SERVICE_FAILED:
        return OutcomeUnknown(text)
    return classify(error, where)


def _never_left(error: Exception) -> bool:
    """aiobotocore raises "could not connect" also when an open connection breaks during a request. The cause tells
    them apart."""
    if isinstance(error, aws.EndpointConnectionError):
        return isinstance(error.kwargs.get("error"), ClientConnectorError | gaierror)
    return isinstance(error, aws.ConnectTimeoutError | aws.ProxyConnectionError)


def classify(error: Exception, what: str) -> BrokerError:
    """The error of any request but PutRecords. Such requests can be repeated."""
    text = f"{what}: {error}"
    if not isinstance(error, aws.ClientError):
        return Unavailable(text) if isinstance(error, _CONNECTION_ERRORS) else BrokerError(text)
    code = code_of(error)
    if code in _THROTTLED:
        return Throttled(text)
    if code == "ResourceNotFoundException":
        return UnknownTopic(text)
    if code in _UNAVAILABLE or _status(error) >= 500:
        return Unavailable(text)
    return BrokerError(text)


def classify_create(error: Exception, what: str) -> BrokerError:
    """As `classify`, for CreateStream: a stream in use exists."""
    if isinstance(error, aws.ClientError) and code_of(error) == "ResourceInUseException":
        return TopicExists(f"{what}: it exists")
    return classify(error, what)


def _status(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@asynccontextmanager
async def bounded(what: str, seconds: float) -> AsyncIterator[None]:
    """Limit the time of the block, and translate the SDK's errors into ours. Not for PutRecords."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer within {seconds:g} s") from error
    except AWS_ERRORS as error:
        raise classify(error, what) from error


_ALGORITHM = "AWS4-HMAC-SHA256"


class Keys(NamedTuple):
    """Credentials at this moment. token: of temporary ones."""

    access: str
    secret: str
    token: str | None = None


class Scope(NamedTuple):
    """The region and service that a signature is valid for."""

    region: str
    service: str


def sign(keys: Keys, scope: Scope, when: str, host: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """AWS Signature Version 4 of a POST to `/` of a service that speaks JSON. Returns `headers` and those of the
    signature.

    headers: names in lower case, without host. when: UTC, as 20261121T235959Z. Source: "Create a signed AWS API
    request", IAM user guide. The SDK's signer handles any request, and takes ten times as long.
    """
    signed = {**headers, "x-amz-date": when}
    if keys.token is not None:
        signed["x-amz-security-token"] = keys.token
    rows = sorted({**signed, "host": host}.items())
    names = ";".join([name for name, _ in rows])
    lines = "".join([f"{name}:{value}\n" for name, value in rows])
    request = f"POST\n/\n\n{lines}\n{names}\n{sha256(body).hexdigest()}"
    day = when[:8]
    where = f"{day}/{scope.region}/{scope.service}/aws4_request"
    text = f"{_ALGORITHM}\n{when}\n{where}\n{sha256(request.encode()).hexdigest()}"
    signature = hmac.digest(_signing_key(keys.secret, day, scope), text.encode(), "sha256").hex()
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access}/{where}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


@lru_cache(maxsize=4)
def _signing_key(secret: str, day: str, scope: Scope) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, scope.region, scope.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


_DEFAULT_PORTS = {"https": 443, "http": 80}


class SignedPost:
    """Signs requests to the endpoint of an SDK's Kinesis client, with the session's credentials."""

    def __init__(self, kinesis: Any, credentials: Any, region: str) -> None:
        self._credentials, self._scope = credentials, Scope(region, "kinesis")
        self.url = f"{kinesis.meta.endpoint_url.rstrip('/')}/"
        parts = urlsplit(self.url)
        is_default = parts.port is None or parts.port == _DEFAULT_PORTS[parts.scheme]
        self._host = str(parts.hostname) if is_default else f"{parts.hostname}:{parts.port}"

    async def headers(self, operation: str, body: bytes) -> dict[str, str]:
        """All headers but host. Raises the SDK's errors when credentials cannot be renewed."""
        frozen = await self._credentials.get_frozen_credentials()
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token)
        named = {"content-type": "application/x-amz-json-1.1", "x-amz-target": f"Kinesis_20131202.{operation}"}
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return sign(keys, self._scope, when, self._host, named, body)


def parse_refusal(operation: str, status: int, body: bytes) -> aws.ClientError:
    """A refusal as the SDK would raise it. An answer that is not the service's JSON (a proxy's) is known by its
    status only."""
    try:
        found = orjson.loads(body)
        code = str(found["__type"]).rpartition("#")[2]
        # The message about a bad signature quotes the headers to sign, with the session's token.
        message = str(found.get("message", found.get("Message", ""))).partition("The Canonical String")[0].rstrip()
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        code, message = str(status), body[:200].decode(errors="replace")
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return aws.ClientError(response, operation)


class Put(NamedTuple):
    """One entry to store. hash_key: decimal."""

    data: bytes
    partition_key: str
    hash_key: str


class PutRecords:
    """PutRecords, written and signed by hand. Connections, time-outs, proxies and certificates stay the SDK's.

    The SDK takes 1.3 ms a request and twice the CPU per byte: most of ingest's time on Kinesis (bench/README.md).
    """

    def __init__(self, kinesis: Any, post: SignedPost, prefix: str = "") -> None:
        """prefix: of the stream's name in the account."""
        self._http = kinesis._endpoint.http_session  # the SDK has no public way to its connections
        self.post, self._prefix = post, prefix

    async def __call__(self, stream: str, puts: Sequence[Put]) -> list[dict[str, Any]]:
        """The answer's rows, one per entry. Raises `AWS_ERRORS`."""
        body = _to_json(self._prefix + stream, puts)
        headers = await self.post.headers("PutRecords", body)
        answer = await self._http.send(AWSPreparedRequest("POST", self.post.url, headers, body, stream_output=False))
        body = await answer.content
        if answer.status_code != 200:
            raise parse_refusal("PutRecords", answer.status_code, body)
        try:
            rows: list[dict[str, Any]] = orjson.loads(body)["Records"]
        except (orjson.JSONDecodeError, KeyError) as error:
            raise aws.HTTPClientError(error=error) from error
        if len(rows) != len(puts):
            raise aws.HTTPClientError(error=ValueError(f"{len(rows)} rows for {len(puts)} entries"))
        return rows


def _to_json(stream: str, puts: Sequence[Put]) -> bytes:
    """One join: base64 needs no escapes, and a JSON writer would copy each byte three more times."""
    parts = [b'{"StreamName":', orjson.dumps(stream), b',"Records":[']
    for number, put in enumerate(puts):
        keys = orjson.dumps({"PartitionKey": put.partition_key, "ExplicitHashKey": put.hash_key})
        parts += (b',{"Data":"' if number else b'{"Data":"', b64encode(put.data), b'",', keys[1:])
    return b"".join((*parts, b"]}"))


_CONNECTIONS = 50
_PREPARE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Clients:
    """Open clients. They try once; `Producer` retries. fan_out_tls: for SubscribeToShard; None: shards are polled.

    prefix: of the fleet's names in the account. The clients put it in front of the names of streams in requests; names in
    answers have it.
    """

    kinesis: Any
    dynamodb: Any
    put_records: PutRecords
    fan_out_tls: SSLContext | None
    prefix: str = ""


@asynccontextmanager
async def open_clients(address: KinesisAddress, request_seconds: float) -> AsyncIterator[Clients]:
    """Open the clients without blocking the event loop. Raises Unavailable when there are no credentials."""
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
        if address.prefix:
            kinesis.meta.events.register("provide-client-params.kinesis", _name_in_account(address.prefix))
        post = SignedPost(kinesis, credentials, address.region)
        fan_out_tls = await asyncio.to_thread(httpx.create_ssl_context) if address.fan_out else None
        yield Clients(kinesis, dynamodb, PutRecords(kinesis, post, address.prefix), fan_out_tls, address.prefix)


def _name_in_account(prefix: str) -> Callable[..., dict[str, Any]]:
    """Handles an event of the SDK: the parameters of each request, with the stream's name in the account."""

    def with_prefix(params: dict[str, Any], **_: object) -> dict[str, Any]:
        return {**params, "StreamName": prefix + params["StreamName"]} if "StreamName" in params else params

    return with_prefix


def _prepare(address: KinesisAddress) -> AioSession:
    """A session with its configuration files loaded. Blocks."""
    session = AioSession()
    session.register_component("data_loader", _loader(address.region))
    session.get_scoped_config()
    return session


@cache
def _loader(region: str) -> Any:
    """The service models, megabytes of JSON, loaded once per process by creating a client of each. Blocks."""
    reading = botocore.session.get_session()
    for service in ("kinesis", "dynamodb"):
        reading.create_client(service, region_name=region)
    return reading.get_component("data_loader")
