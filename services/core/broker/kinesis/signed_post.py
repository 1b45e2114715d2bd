"""What a signed request of ours has in common with another: where it goes, its headers, what a refusal is called."""

import time
from typing import Any
from urllib.parse import urlsplit

import orjson
from botocore import exceptions as aws

from services.core.broker.kinesis.signature import Keys, Scope, sign

_DEFAULT_PORTS = {"https": 443, "http": 80}


class SignedPost:
    """Requests to the endpoint of an SDK's Kinesis client, with the session's credentials."""

    def __init__(self, kinesis: Any, credentials: Any, region: str) -> None:
        self._credentials, self._scope = credentials, Scope(region, "kinesis")
        self.url = f"{kinesis.meta.endpoint_url.rstrip('/')}/"
        parts = urlsplit(self.url)
        is_default = parts.port is None or parts.port == _DEFAULT_PORTS[parts.scheme]
        self._host = str(parts.hostname) if is_default else f"{parts.hostname}:{parts.port}"

    async def headers(self, operation: str, body: bytes) -> dict[str, str]:
        """All of a request but its host. Raises what the SDK raises when credentials cannot be renewed."""
        frozen = await self._credentials.get_frozen_credentials()
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token)
        named = {"content-type": "application/x-amz-json-1.1", "x-amz-target": f"Kinesis_20131202.{operation}"}
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return sign(keys, self._scope, when, self._host, named, body)


def to_error(operation: str, status: int, said: bytes) -> aws.ClientError:
    """A refusal as the SDK would raise it. What does not speak the service's language (a proxy) is known by its status only."""
    try:
        found = orjson.loads(said)
        code = str(found["__type"]).rpartition("#")[2]
        # Of a bad signature it quotes what we should have signed: the headers, with the session's token.
        message = str(found.get("message", found.get("Message", ""))).partition("The Canonical String")[0].rstrip()
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        code, message = str(status), said[:200].decode(errors="replace")
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return aws.ClientError(response, operation)
