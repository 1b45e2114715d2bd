"""What an AWS error means in the words of `errors`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import gaierror

from aiohttp import ClientConnectorError
from botocore import exceptions as aws

from services.core.broker.errors import (
    BrokerError,
    OutcomeUnknown,
    Throttled,
    TopicExists,
    Unavailable,
    UnknownTopic,
)

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
_LATER = frozenset({"ResourceInUseException", "ServiceUnavailable", *_SERVICE_FAILED})
_ON_THE_WAY = (aws.HTTPClientError, aws.ConnectionError, aws.MetadataRetrievalError, aws.CredentialRetrievalError)

AWS_ERRORS = (aws.BotoCoreError, aws.ClientError)
"""What the SDK raises."""


def code_of(error: aws.ClientError) -> str:
    """The service's name of an error, such as ExpiredIteratorException."""
    return str(error.response.get("Error", {}).get("Code", ""))


def classify_entry(code: str, message: str, where: str) -> BrokerError:
    """What PutRecords says of one entry. InternalFailure: the service itself does not know."""
    text = f"{where}: Kinesis answered {code}: {message}"
    return Throttled(text) if code in _THROTTLED else OutcomeUnknown(text)


def classify_put(error: Exception, where: str) -> BrokerError:
    """What the failure of a whole PutRecords request says about its entries: refused before anything was stored, or unknown."""
    text = f"{where}: {error}"
    if not isinstance(error, aws.ClientError):
        return Unavailable(text) if _never_left(error) else OutcomeUnknown(text)
    code = code_of(error)
    # A proxy's refusal has its status for a code. It may have passed the request on before.
    if _status(error) >= 500 or code.isdecimal() or code in _SERVICE_FAILED:
        return OutcomeUnknown(text)
    return classify(error, where)


def _never_left(error: Exception) -> bool:
    """aiobotocore says "could not connect" also when an open connection breaks under a request: the cause tells."""
    if isinstance(error, aws.EndpointConnectionError):
        return isinstance(error.kwargs.get("error"), ClientConnectorError | gaierror)
    return isinstance(error, aws.ConnectTimeoutError | aws.ProxyConnectionError)


def classify(error: Exception, what: str) -> BrokerError:
    """For everything but PutRecords: such requests can simply be made again."""
    text = f"{what}: {error}"
    if not isinstance(error, aws.ClientError):
        return Unavailable(text) if isinstance(error, _ON_THE_WAY) else BrokerError(text)
    code = code_of(error)
    if code in _THROTTLED:
        return Throttled(text)
    if code == "ResourceNotFoundException":
        return UnknownTopic(text)
    if code in _LATER or _status(error) >= 500:
        return Unavailable(text)
    return BrokerError(text)


def classify_create(error: Exception, what: str) -> BrokerError:
    """As `classify`, of CreateStream: a stream that is in use is one that exists."""
    if isinstance(error, aws.ClientError) and code_of(error) == "ResourceInUseException":
        return TopicExists(f"{what}: it exists")
    return classify(error, what)


def _status(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@asynccontextmanager
async def bounded(what: str, seconds: float) -> AsyncIterator[None]:
    """Bound the block, and turn what the SDK raises in it into our errors. Not for PutRecords."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer within {seconds:g} s") from error
    except AWS_ERRORS as error:
        raise classify(error, what) from error
