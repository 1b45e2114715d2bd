"""Small objects in S3 that are created once and never changed.

Needs a store that knows `If-None-Match` of PutObject, as S3 does. Every call blocks, and may be made from any thread. The SDK
repeats requests that failed, so a lost answer is no error: the object is found as it was stored.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.aws import AWS_ERRORS, classify, code_of

_ATTEMPTS, _TIMEOUT_S = 5, 10.0
_REMOVED = 1_000
"""The most objects of one DeleteObjects request."""
_NOT_FOUND = frozenset({"NoSuchKey", "404"})
_EXISTS = frozenset({"PreconditionFailed", "412"})
_AT_ONCE = "ConditionalRequestConflict"
"""Another writer of the same object was at work. Nothing was stored."""

P = ParamSpec("P")
T = TypeVar("T")


class Store(NamedTuple):
    """region: empty: as the SDK finds it. endpoint: empty: AWS. path_style: the bucket is in the path of requests."""

    region: str = ""
    endpoint: str = ""
    path_style: bool = False


@cache
def _client(store: Store) -> Any:
    """One per process: making one takes half a second."""
    style = "path" if store.path_style else "auto"
    retries: Any = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
    config = Config(
        connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries=retries, s3={"addressing_style": style}
    )
    session = botocore.session.get_session()
    return session.create_client(
        "s3", region_name=store.region or None, endpoint_url=store.endpoint or None, config=config
    )


def _translated(call: Callable[P, T]) -> Callable[P, T]:
    """The SDK's errors as ours."""

    @wraps(call)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except AWS_ERRORS as error:
            raise classify(error, f"{call.__name__} an object in S3") from error

    return translated


class Bucket:
    """The objects below a prefix. Methods raise BrokerError kinds."""

    def __init__(self, store: Store, name: str, prefix: str) -> None:
        self._client, self._name, self._prefix = _client(store), name, prefix.strip("/") + "/"

    @_translated
    def create(self, key: str, content: bytes) -> bytes:
        """Store the object, unless it is there. Returns what is stored."""
        for _ in range(_ATTEMPTS):
            try:
                self._client.put_object(Bucket=self._name, Key=self._prefix + key, Body=content, IfNoneMatch="*")
            except ClientError as error:
                if code_of(error) not in _EXISTS | {_AT_ONCE}:
                    raise
                if (stored := self._get(key)) is not None:
                    return stored
            else:
                return content
        raise Unavailable(
            f"s3://{self._name}/{self._prefix}{key} could not be created: other processes create and remove it"
        )

    @_translated
    def get(self, key: str) -> bytes | None:
        """None when there is no such object."""
        return self._get(key)

    def _get(self, key: str) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._name, Key=self._prefix + key)
        except ClientError as error:
            if code_of(error) in _NOT_FOUND:
                return None
            raise
        content: bytes = answer["Body"].read()
        return content

    @_translated
    def list(self) -> list[str]:
        """The keys of all objects, without the prefix."""
        return list(self._list())

    def _list(self) -> Iterator[str]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=self._prefix):
            yield from (found["Key"].removeprefix(self._prefix) for found in page.get("Contents", ()))

    @_translated
    def remove(self, keys: Iterable[str]) -> None:
        """Those that are there."""
        every = list(keys)
        for start in range(0, len(every), _REMOVED):
            objects = [{"Key": self._prefix + key} for key in every[start : start + _REMOVED]]
            self._client.delete_objects(Bucket=self._name, Delete={"Objects": objects, "Quiet": True})
